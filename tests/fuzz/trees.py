"""Damage to a model's files as a whole: lost, added, exchanged, renamed, and code among them."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

from . import binary, text
from .cases import Scene
from .picking import WEIGHTS, files


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
    name = scene.rng.choice(("unet", "unet/config.json", "unet/config.json", WEIGHTS))
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
    "unet/diffusion_pytorch_model.bin",
    "text_encoder/pytorch_model.bin",
    "vae/diffusion_pytorch_model.bin",
    "unet/diffusion_pytorch_model.pt",
    "tokenizer/tokenizer.pkl",
    "text_encoder/model.ckpt",
)


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
    change = scene.rng.choice(
        (
            {"_class_name": ["pipeline", "Thing"]},
            {component: ["thing", "Thing"]},
            {component: ["os", "mkdir"]},
            {component: [component, "Thing"]},
            {"more": ["thing", "Thing"]},
            {"_class_name": "Thing"},
            {"_class_name": "../pipeline"},
        )
    )
    if scene.rng.random() < 0.3:
        config = scene.folder / "text_encoder" / "config.json"
        values = {**json.loads(config.read_text()), "auto_map": {"AutoModel": "thing.Thing"}}
        binary.replace(config, json.dumps(values).encode())
    scene.say(f"model_index.json: {change}")
    binary.replace(path, json.dumps({**index, **change}).encode())
