"""Kinds of damage to 16-bit models, and arguments that harm a terminal."""

import json
import shutil

from . import binary, contents, headers, places, text, trees
from .cases import Kind, Scene
from .picking import files, in_place, nothing, on, table


def weights(scene: Scene):
    """Return a weight file of the denoiser."""
    found = [p for p in files(scene) if p.suffix == ".safetensors" and "diffusion" in p.name]
    return scene.rng.choice([p for p in found if "vae" not in str(p)])


def config(scene: Scene):
    """Return a JSON file."""
    return scene.rng.choice([p for p in files(scene) if p.suffix == ".json"])


def stray_weight(scene: Scene) -> None:
    """Add a matrix or a vector that no module has."""
    path = weights(scene)
    entries, data = headers.load_header(path)
    name = scene.rng.choice(("stray.weight", "conv_in.extra.weight", "a.b", "conv_in.weight_scale"))
    shape = scene.rng.choice(([4, 8], [32], [2, 2, 2, 4], [1, 32]))
    entries[name] = {"dtype": "F16", "shape": shape, "data_offsets": [len(data), len(data) + 64]}
    headers.store_header(path, entries, data + b"\0\x3c" * 32)


def not_finite(scene: Scene) -> None:
    """Put NaN into a weight."""
    path = weights(scene)
    entries, _ = headers.load_header(path)
    name = scene.rng.choice(headers.tensors(entries))
    headers.store_header(path, *contents.not_finite(scene, path, name))


def many_names(scene: Scene) -> None:
    """Let an index name half a million tensors."""
    path = next(scene.folder.glob("unet/*.index.json"))
    index = json.loads(path.read_text())
    file = next(iter(index["weight_map"].values()))
    names = {f"stray{i}.weight": file for i in range(500_000)}
    index["weight_map"] = names if scene.rng.random() < 0.5 else index["weight_map"] | names
    binary.replace(path, json.dumps(index).encode())


def link_out(scene: Scene) -> None:
    """Link a file or a folder of the model to something outside it."""
    other = scene.outside / "private"
    other.mkdir()
    (other / "id_rsa").write_text("secret")
    name = scene.rng.choice(("notes.txt", "vae/notes.txt", "tokenizer/more", "more"))
    path = scene.folder / name
    path.parent.mkdir(exist_ok=True)
    target = other / "id_rsa" if scene.rng.random() < 0.7 else other
    path.symlink_to(target)
    scene.say(f"{name} -> {target.name}")


def link_round(scene: Scene) -> None:
    """Link a folder of the model to a folder above it."""
    (scene.folder / "again").symlink_to(scene.rng.choice((".", "..")))


def lost(scene: Scene) -> None:
    """Delete a file or a component."""
    path = scene.rng.choice(sorted(scene.folder.rglob("*")))
    scene.say(f"{path.relative_to(scene.folder)}: deleted")
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _hostile_class(scene: Scene) -> None:
    """Give a class or a component such a name."""
    path = scene.rng.choice(
        [p for p in files(scene) if p.name in {"config.json", "model_index.json"}]
    )
    values = json.loads(path.read_text())
    key = scene.rng.choice(
        [k for k in values if k in {"_class_name", "unet", "model_type"}] or ["_class_name"]
    )
    string = scene.rng.choice(text.HOSTILE)
    values[key] = [string, string] if isinstance(values.get(key), list) else string
    scene.say(f"{path.name}: {key} is {string!r:.60}")
    binary.replace(path, json.dumps(values).encode())


KINDS = (
    Kind("nothing", nothing),
    Kind("bytes/weights", on(weights, binary.any_bytes), 2),
    *(Kind(f"header/{name}", table(weights, name)) for name in headers.MEANINGS),
    *(Kind(f"header/{name}", on(weights, form)) for name, form in headers.FORMS.items()),
    Kind("json", on(config, text.any_json), 8),
    Kind("sizes", contents.sizes, 12),
    Kind("many names", many_names, subjects=("sharded",)),
    Kind("pickle", trees.pickled, 3, subjects=("pipeline", "sharded")),
    *(Kind(f"place/{name}", in_place(name)) for name in places.PLACES),
    Kind("stray weight", stray_weight, 2),
    Kind("nan", not_finite, 2, refuse=True),
    Kind("link out", link_out, 2, refuse=True),
    Kind("link round", link_round),
    Kind("lost", lost, 2),
    Kind("name/class", _hostile_class, 2),
    Kind("name/file", trees.hostile_file, 2),
    Kind("name/folder", trees.hostile_folder, 2),
)
