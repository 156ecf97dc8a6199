"""Damage to what packed pipelines say: schemes, metadata, numbers of configs, checksums redone."""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from . import binary, headers, text
from .cases import Damage, Scene
from .picking import files, shard

_CONFIG = "quantization_config"
_META = "quantkit"


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


#: Of modules, of their sizes, and of both.
_SIZES = (257, 3000, 20_000, 10**6, 10**8, 10**9, 2**31, 2**63)


def sizes(scene: Scene) -> None:
    """Let a whole number of a config, or a list of them, ask for a huge structure."""
    path = scene.rng.choice([p for p in files(scene) if p.name.endswith("config.json")])
    config = json.loads(path.read_text())
    places = [(c, k) for c, k in text.nodes(config) if _is_size(c[k]) or c[k] is None]
    # Those that decide how many modules there are, more often than the others.
    many = [(c, k) for c, k in places if any(w in str(k) for w in ("layers", "channels", "hidden"))]
    if not places:
        return
    container, key = scene.rng.choice(many if many and scene.rng.random() < 0.6 else places)
    size = scene.rng.choice(_SIZES)
    count = scene.rng.choice((1, 2, 4, 100_000))
    container[key] = size if scene.rng.random() < 0.7 else [size] * count
    scene.say(f"{path.parent.name}: {key!r} is {str(container[key])[:40]}")
    binary.replace(path, json.dumps(config, indent=2).encode())


def _is_size(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(item) is int for item in value)
    return type(value) is int


def any_number(scene: Scene) -> None:
    """Change one number of any config to another as plausible."""
    path = scene.rng.choice([p for p in files(scene) if p.name.endswith("config.json")])
    config = json.loads(path.read_text())
    numbers = [
        (c, k)
        for c, k in text.nodes(config)
        if isinstance(c[k], int | float) and c[k] not in (0, 1)
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


def _has_header(path: Path) -> bool:
    """Return whether a file is there and tells a length of its header that it has."""
    if not path.is_file():
        return False
    data = path.read_bytes()
    return int.from_bytes(data[:8], "little") <= len(data)


def relist(folder: Path, subject: Path) -> None:
    """Write the list of files as quantkit would for what is there now.

    Args:
        folder: the damaged copy, whose list may be damaged, too.
        subject: the undamaged one.
    """
    from quantkit.checkpoint.filelist import FILE_LIST, write_file_list

    path = folder / FILE_LIST
    if not path.is_file():
        return
    rows = json.loads((subject / FILE_LIST).read_text())["files"]
    packed = [Path(name) for name in rows if "header_sha256" in rows[name]]
    packed = [name for name in packed if _has_header(folder / name)]
    path.unlink()
    write_file_list(folder, {}, packed)


def forged(damage: Damage) -> Damage:
    """Return the damage with the list of files redone, so that what lies behind it is reached."""

    def both(scene: Scene) -> None:
        damage(scene)
        relist(scene.folder, scene.subject)
        scene.say("the list of files was redone")

    return both


def unlisted(damage: Damage) -> Damage:
    """Return the damage with the list of files deleted, as older versions wrote none."""

    def both(scene: Scene) -> None:
        from quantkit.checkpoint.filelist import FILE_LIST

        damage(scene)
        (scene.folder / FILE_LIST).unlink(missing_ok=True)
        scene.say("the list of files was deleted")

    return both


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
