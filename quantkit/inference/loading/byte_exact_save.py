"""Byte-exact saving of a packed pipeline's 16-bit components, if they were not changed.

A packed pipeline computes in one dtype, so its text encoders and VAE may be in another one than on
disk, and diffusers would save them so. These components save as always; where the result is the
original after casts, tensor for tensor, the original files take its place.
"""

import functools
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MethodType
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from quantkit.inference.loading.saving import index_of, same_after_casts

#: Keys that a save writes by itself: the compute dtype, versions, the model's origin.
_VOLATILE = ("dtype", "torch_dtype", "transformers_version", "_diffusers_version", "_name_or_path")


def install(model: Any, folder: Path) -> None:
    """Let ``model.save_pretrained`` restore the files of ``folder``.

    Args:
        model: an unpacked component; untouched when ``folder`` has no safetensors weights, or more
            than one set of them (variants).
        folder: what it was loaded from.
    """
    sources = _weights(folder)
    if not isinstance(model, nn.Module) or not sources:
        return
    original = type(model).save_pretrained  # type: ignore[attr-defined]  # both libraries' models

    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        if Path(save_directory).is_dir() and folder.is_dir() and folder.samefile(save_directory):
            # Over itself: see first whether there is anything to write.
            with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as stage:
                original(self, stage, *args, **kwargs)
                if _same_tensors(sources, _weights(Path(stage))):
                    return
        original(self, save_directory, *args, **kwargs)
        _restore(folder, Path(save_directory))

    model.save_pretrained = MethodType(save_pretrained, model)  # type: ignore[assignment]


def _restore(folder: Path, saved: Path) -> None:
    """Replace saved files by the original ones where they have the same content."""
    if not folder.is_dir() or saved.samefile(folder):
        return
    sources, written = _weights(folder), _weights(saved)
    if not sources or not _same_tensors(sources, written):
        return
    for path in [*written, *index_of(tuple(written))]:
        path.unlink()
    for path in [*sources, *index_of(tuple(sources))]:
        shutil.copyfile(path, saved / path.name)
    _restore_config(folder / "config.json", saved / "config.json")


def _weights(folder: Path) -> list[Path]:
    """Return the weight files of a component; none when they are not one set."""
    files = sorted(folder.glob("*.safetensors"))
    whole = len(files) == 1 or bool(files and index_of(tuple(files)))
    return files if whole else []


def _same_tensors(sources: list[Path], written: list[Path]) -> bool:
    there, here = _locate(sources), _locate(written)
    return there.keys() == here.keys() and all(
        same_after_casts(_read(here[name], name), _read(path, name)) for name, path in there.items()
    )


def _locate(files: list[Path]) -> dict[str, Path]:
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found.update(dict.fromkeys(opened.keys(), file))
    return found


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def _restore_config(source: Path, target: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (source, target)]
    old, new = ({k: v for k, v in json.loads(text).items() if k not in _VOLATILE} for text in texts)
    # Weights in their saved dtype again: a config.json that says the same may say that too.
    if old == new:
        shutil.copyfile(source, target)
