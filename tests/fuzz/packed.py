"""Kinds of damage to packed pipelines."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from . import binary, headers, places, text
from .cases import Kind, Scene

_CONFIG = "quantization_config"
_META = "quantkit"
_WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


def shard(scene: Scene) -> Path:
    """Return a packed weight file."""
    return scene.rng.choice(sorted((scene.folder / "unet").glob("*.safetensors")))


def copied_weights(scene: Scene) -> Path:
    """Return a weight file that was copied."""
    found = (p for n in ("vae", "text_encoder") for p in (scene.folder / n).glob("*.safetensors"))
    return scene.rng.choice(sorted(found))


def copied_config(scene: Scene) -> Path:
    """Return a JSON file of what was copied."""
    return scene.rng.choice(sorted(p for p in files(scene) if p.suffix == ".json" and "unet" not in str(p)))


def files(scene: Scene) -> list[Path]:
    """Return every file."""
    return sorted(p for p in scene.folder.rglob("*") if p.is_file())


def named(name: str) -> Callable[[Scene], Path]:
    """Return what picks one file."""
    return lambda scene: scene.folder / name


def on(pick: Callable[[Scene], Path], damage: Callable[[Scene, Path], None]) -> Callable[[Scene], None]:
    """Return the damage done to the file that ``pick`` picks."""
    return lambda scene: damage(scene, pick(scene))


def table(pick: Callable[[Scene], Path], name: str) -> Callable[[Scene], None]:
    """Return damage of the header's table."""
    return lambda scene: headers.change_table(scene, pick(scene), name)


def in_place(name: str) -> Callable[[Scene], None]:
    """Return what puts something in place of a file, or of a folder now and then."""

    def damage(scene: Scene) -> None:
        found = files(scene)
        if scene.rng.random() < 0.15:
            found = sorted(p for p in scene.folder.rglob("*") if p.is_dir()) or found
        path = scene.rng.choice(found)
        scene.say(f"{path.relative_to(scene.folder)}: {name}")
        places.PLACES[name](scene, path)

    return damage


# The JSON inside headers, and what is said twice.


def metadata(scene: Scene) -> None:
    """Damage the JSON in a header's metadata."""
    path = shard(scene)
    entries, data = headers.load_header(path)
    about = json.loads(entries["__metadata__"][_META])
    raw = scene.rng.choice(text.MEANINGS)(scene, about)
    entries["__metadata__"][_META] = text.dumped(about, raw).decode()
    if scene.rng.random() < 0.15:
        entries["__metadata__"][_META] = scene.rng.choice(text.RAW)
    headers.store_header(path, entries, data)


def scheme(scene: Scene) -> None:
    """Change one value of the schemes."""
    path = scene.folder / "unet" / "config.json"
    config = json.loads(path.read_text())
    raw = scene.rng.choice(text.MEANINGS)(scene, config[_CONFIG])
    binary.replace(path, text.dumped(config, raw))


def _config_value(scene: Scene, component: str, change: Callable[[dict[str, Any]], None]) -> None:
    path = scene.folder / component / "config.json"
    config = json.loads(path.read_text())
    change(config)
    binary.replace(path, json.dumps(config, indent=2).encode())


def norm_eps(scene: Scene) -> None:
    """Change a number that every layer computes with."""
    eps = scene.rng.choice((1e-4, 1e-6, 0.5))
    _config_value(scene, "unet", lambda config: config.update(norm_eps=eps))


def bucket_edge(scene: Scene) -> None:
    """Move a bucket's edge, or let two be equal."""

    def change(config: dict[str, Any]) -> None:
        for entry in config[_CONFIG]["schemes"]:
            if entry.get("buckets"):
                entry["buckets"][0] += scene.rng.choice((1, -1, 0.5, 1e-9, 400))
                if scene.rng.random() < 0.3:
                    entry["buckets"] = [entry["buckets"][0]] * len(entry["buckets"])

    _config_value(scene, "unet", change)


def any_number(scene: Scene) -> None:
    """Change one number of any config to another as plausible."""
    path = scene.rng.choice([p for p in files(scene) if p.name.endswith("config.json")])
    config = json.loads(path.read_text())
    numbers = [
        (c, k) for c, k in text.nodes(config) if isinstance(c[k], int | float) and c[k] not in (0, 1)
    ]
    if numbers:
        container, key = scene.rng.choice(numbers)
        container[key] *= scene.rng.choice((2, -1, 0.5))
        scene.say(f"{path.parent.name}: {key} is now {container[key]}")
    binary.replace(path, json.dumps(config, indent=2).encode())


def version(scene: Scene) -> None:
    """Give the schemes another version."""
    new = scene.rng.choice((0, 3, -1, 10**30, 1.5, True, "2", None, [], 2.0))
    _config_value(scene, "unet", lambda config: config[_CONFIG].update(format_version=new))


# Checksums redone, as a tool would that edits a file.


def reseal(path: Path, entries: dict[str, Any], data: bytes) -> None:
    """Write a packed file with the checksums that its tensors have now."""
    about = json.loads(entries["__metadata__"][_META])
    for name in headers.tensors(entries):
        start, stop = entries[name]["data_offsets"]
        about["tensors"][name] = sha256(data[start:stop]).hexdigest()
    entries["__metadata__"][_META] = json.dumps(about, separators=(",", ":"))
    headers.store_header(path, entries, data)


#: dtype -> the bytes of NaN and infinities
_NOT_FINITE = {
    "F32": (b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff"),
    "F16": (b"\0\x7e", b"\0\x7c", b"\0\xfc"),
    "F8_E4M3": (b"\x7f", b"\xff"),
    "F8_E5M2": (b"\x7c", b"\xfe"),
}


def _found(scene: Scene, folder: str, parts: tuple[str, ...]) -> tuple[Path, str]:
    """Return one of the tensors whose names end so, and its file."""
    found = []
    for path in sorted((scene.folder / folder).glob("*.safetensors")):
        entries, _ = headers.load_header(path)
        names = [n for n in headers.tensors(entries) if entries[n]["dtype"] in _NOT_FINITE]
        found += [(path, n) for n in names if not parts or n.endswith(parts)]
    return scene.rng.choice(found)


def not_finite(scene: Scene, path: Path, name: str) -> tuple[dict[str, Any], bytes]:
    """Put NaN or infinity into a tensor of a file; return header and data."""
    entries, data = headers.load_header(path)
    value = scene.rng.choice(_NOT_FINITE[entries[name]["dtype"]])
    start, stop = entries[name]["data_offsets"]
    place = start + len(value) * scene.rng.randrange((stop - start) // len(value))
    scene.say(f"{path.name}: {name}: {value.hex()} at {place}")
    return entries, data[:place] + value + data[place + len(value) :]


def packed_nan(scene: Scene, parts: tuple[str, ...]) -> None:
    """Put NaN into a packed file, checksums redone."""
    path, name = _found(scene, "unet", parts)
    reseal(path, *not_finite(scene, path, name))


def copied_nan(scene: Scene) -> None:
    """Put NaN into weights that were copied."""
    path, name = _found(scene, scene.rng.choice(("vae", "text_encoder")), ())
    headers.store_header(path, *not_finite(scene, path, name))


def bad_scale(scene: Scene) -> None:
    """Write a scale that is zero or negative, checksums redone."""
    path, name = _found(scene, "unet", ("_scale", "input_smooth"))
    entries, data = headers.load_header(path)
    start, _ = entries[name]["data_offsets"]
    value = scene.rng.choice((b"\0\0\0\0", b"\0\0\0\x80", b"\0\0\x80\xbf"))
    reseal(path, entries, data[:start] + value + data[start + 4 :])


def stray_weight(scene: Scene) -> None:
    """Add a matrix that no module has, checksums redone."""
    path = shard(scene)
    entries, data = headers.load_header(path)
    f16 = [n for n in headers.tensors(entries) if entries[n]["dtype"] == "F16"]
    first = min(entries[n]["data_offsets"][0] for n in f16) if f16 else len(data)
    for name in headers.tensors(entries):
        if entries[name]["data_offsets"][0] >= first:
            entries[name]["data_offsets"] = [o + 64 for o in entries[name]["data_offsets"]]
    # Where the format's order of dtypes and names wants it.
    name = "a.stray.weight"
    table_ = {name: {"dtype": "F16", "shape": [4, 8], "data_offsets": [first, first + 64]}}
    reseal(path, {**entries, **table_}, data[:first] + b"\0\x3c" * 32 + data[first:])


# The tree.


def lost_file(scene: Scene) -> None:
    """Delete a file."""
    path = scene.rng.choice(files(scene))
    scene.say(f"{path.relative_to(scene.folder)}: deleted")
    path.unlink()


def lost_component(scene: Scene, name: str) -> None:
    """Delete a component, mentioned or no longer mentioned."""
    shutil.rmtree(scene.folder / name)
    if scene.rng.random() < 0.5:
        path = scene.folder / "model_index.json"
        index = json.loads(path.read_text())
        index[name] = scene.rng.choice(([None, None], None, []))
        binary.replace(path, json.dumps(index).encode())


def cut_vae(scene: Scene) -> None:
    """Cut the VAE's weights as a broken download does."""
    path = next((scene.folder / "vae").glob("*.safetensors"))
    binary.truncated(scene, path)


def empty_index(scene: Scene) -> None:
    """Leave no component in model_index.json, or but one."""
    path = scene.folder / "model_index.json"
    index = json.loads(path.read_text())
    kept = scene.rng.choice(((), ("_class_name",), ("unet",), ("_class_name", "unet")))
    binary.replace(path, json.dumps({k: v for k, v in index.items() if k in kept}).encode())


_EXTRA = (
    "unet/more.safetensors", "unet/diffusion_pytorch_model.fp16.safetensors", "vae/config.json.bak",
    "unet/diffusion_pytorch_model.safetensors.index.json", "extra/config.json", "notes.txt",
    "unet/\x1b[31mred.json", "a\nb.txt", "text_encoder/model.fp16.safetensors", "unet.safetensors",
    "vae/model.safetensors.index.json", "unet/diffusion_pytorch_model-00009-of-00009.safetensors",
    "text_encoder/tf_model.h5", "text_encoder/adapter_config.json", "tokenizer/added_tokens.json",
    "tokenizer/special_tokens_map.json", "text_encoder/generation_config.json",
)  # fmt: skip


def extra_file(scene: Scene) -> None:
    """Add a file whose name means something to a loader, or something to a terminal."""
    path = scene.folder / scene.rng.choice(_EXTRA)
    scene.say(f"{path.relative_to(scene.folder)}: added")
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(scene.rng.choice((b"", b"{}", b"[]", b'{"</w>": 3}', b"text\n")))


def other_variant(scene: Scene) -> None:
    """Exchange a file or a component with that of the same pipeline packed otherwise."""
    others = sorted(path for path in scene.subject.parent.iterdir() if path != scene.subject)
    other = scene.rng.choice(others)
    name = scene.rng.choice(("unet", "unet/config.json", "unet/config.json", _WEIGHTS))
    if not (other / name).exists() or not (scene.folder / name).exists():
        name = "unet/config.json"
    scene.say(f"{name} of {other.name}")
    target = scene.folder / name
    if target.is_dir():
        shutil.rmtree(target)
        shutil.copytree(other / name, target)
    else:
        binary.replace(target, (other / name).read_bytes())


def swapped_shards(scene: Scene) -> None:
    """Let two shards change their names."""
    a, b = scene.rng.sample(sorted((scene.folder / "unet").glob("*.safetensors")), 2)
    between = a.with_name("between")
    a.rename(between)
    b.rename(a)
    between.rename(b)


def hostile_file(scene: Scene) -> None:
    """Rename a file or a folder so that its name harms a terminal."""
    name = scene.rng.choice(text.FILE_NAMES)
    path = scene.rng.choice(sorted(scene.folder.rglob("*")))
    scene.say(f"{path.relative_to(scene.folder)} is now called {name!r}")
    path.rename(path.with_name(name))


def hostile_folder(scene: Scene) -> None:
    """Give the whole directory such a name, and mostly damage a file of it, so that it is told."""
    scene.folder = scene.folder.rename(scene.folder.with_name(scene.rng.choice(text.FILE_NAMES)))
    if scene.rng.random() < 0.8:
        lost_file(scene)


def hostile_component(scene: Scene) -> None:
    """Give a component such a name in folder and index."""
    name = scene.rng.choice(text.FILE_NAMES)
    path = scene.folder / "model_index.json"
    index = json.loads(path.read_text())
    index[name] = index.pop("unet")
    binary.replace(path, json.dumps(index).encode())
    (scene.folder / "unet").rename(scene.folder / name)
    if scene.rng.random() < 0.5:
        next((scene.folder / name).glob("*.safetensors")).unlink()


# Code in a model.


class _Mark:
    """Pickles as a call that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


_PICKLES = (
    "unet/diffusion_pytorch_model.bin", "text_encoder/pytorch_model.bin", "vae/diffusion_pytorch_model.bin",
    "unet/diffusion_pytorch_model.pt", "tokenizer/tokenizer.pkl", "text_encoder/model.ckpt",
)  # fmt: skip


def pickled(scene: Scene) -> None:
    """Put pickles beside the weights, or in their place."""
    instead = scene.rng.random() < 0.5
    for name in _PICKLES:
        path = scene.folder / name
        path.write_bytes(pickle.dumps(_Mark(scene.marker)))
        if instead and path.suffix == ".bin":
            for weights in path.parent.glob("*.safetensors"):
                weights.unlink()
    scene.say("pickles in place of weights" if instead else "pickles beside weights")


def python_code(scene: Scene) -> None:
    """Put Python into the model, and name it where loaders look for classes."""
    code = f"import os\nos.mkdir({str(scene.marker)!r})\nclass Thing: pass\n"
    for name in ("pipeline.py", "unet/thing.py", "unet/unet.py", "vae/vae.py", "thing.py"):
        (scene.folder / name).write_text(code)
    path = scene.folder / "model_index.json"
    index = json.loads(path.read_text())
    component = scene.rng.choice(("unet", "vae", "scheduler"))
    change = scene.rng.choice(({"_class_name": ["pipeline", "Thing"]}, {component: ["thing", "Thing"]},
        {component: ["os", "mkdir"]}, {component: [component, "Thing"]}, {"more": ["thing", "Thing"]},
        {"_class_name": "Thing"}, {"_class_name": "../pipeline"}))  # fmt: skip
    if scene.rng.random() < 0.3:
        config = scene.folder / "text_encoder" / "config.json"
        values = {**json.loads(config.read_text()), "auto_map": {"AutoModel": "thing.Thing"}}
        binary.replace(config, json.dumps(values).encode())
    scene.say(f"model_index.json: {change}")
    binary.replace(path, json.dumps({**index, **change}).encode())


def nothing(scene: Scene) -> None:
    """Damage nothing: it must be ok."""


KINDS = (
    Kind("nothing", nothing),
    *(Kind(f"bytes/{d.__name__}", on(shard, d), 2) for d in dict.fromkeys(binary.ANY_BYTES)),
    Kind("bytes/header", lambda s: _flip_header(s, shard(s)), 6),
    Kind("bytes/copied weights", on(copied_weights, binary.any_bytes), 4),
    Kind("bytes/any file", lambda s: binary.any_bytes(s, s.rng.choice(files(s))), 4),
    *(Kind(f"header/{name}", table(shard, name), 3) for name in headers.MEANINGS),
    *(Kind(f"header/{name}", on(shard, form), 2) for name, form in headers.FORMS.items()),
    *(Kind(f"copied header/{name}", table(copied_weights, name)) for name in headers.MEANINGS),
    *(Kind(f"copied header/{n}", on(copied_weights, form)) for n, form in headers.FORMS.items()),
    Kind("json/config", on(named("unet/config.json"), text.any_json), 4),
    Kind("json/schemes", scheme, 6),
    Kind("json/metadata", metadata, 6),
    Kind("json/model index", on(named("model_index.json"), text.any_json), 4),
    Kind(
        "json/shard index",
        on(named(f"{_WEIGHTS}.index.json"), text.any_json),
        4,
        subjects=("sparse",),
    ),
    Kind("json/copied", on(copied_config, text.any_json), 6),
    *(Kind(f"place/{name}", in_place(name), 2) for name in places.PLACES),
    Kind("meaning/norm eps", norm_eps, refuse=True),
    Kind("meaning/bucket edge", bucket_edge, refuse=True, subjects=("static",)),
    Kind("meaning/any number", any_number, 3),
    Kind("meaning/version", version, refuse=True),
    Kind("meaning/cut vae", cut_vae, refuse=True),
    Kind("meaning/empty index", empty_index, refuse=True),
    Kind("meaning/no text encoder", partial(lost_component, name="text_encoder"), refuse=True),
    Kind("meaning/no vae", partial(lost_component, name="vae"), refuse=True),
    Kind("meaning/no unet", partial(lost_component, name="unet"), refuse=True),
    Kind("nan/bias", partial(packed_nan, parts=(".bias",)), refuse=True),
    Kind("nan/scale", partial(packed_nan, parts=("_scale", "_smooth", "_shift")), refuse=True),
    Kind("nan/any", partial(packed_nan, parts=()), 2, refuse=True),
    Kind("nan/copied", copied_nan, 2, refuse=True),
    Kind("sealed/bad scale", bad_scale, refuse=True),
    Kind("sealed/stray weight", stray_weight),
    Kind("tree/lost file", lost_file, 3),
    Kind("tree/extra file", extra_file, 4),
    Kind("tree/other variant", other_variant, 2, refuse=True),
    Kind("tree/swapped shards", swapped_shards, refuse=True, subjects=("sparse",)),
    Kind("name/file", hostile_file, 3),
    Kind("name/folder", hostile_folder, 3),
    Kind("name/component", hostile_component, 2),
    Kind("code/pickle", pickled, 2),
    Kind("code/python", python_code, 3),
)


def _flip_header(scene: Scene, path: Path) -> None:
    data = path.read_bytes()
    binary.flip(scene, path, data, 0, 8 + int.from_bytes(data[:8], "little"))
