"""Artefact files: safetensors with JSON metadata in the header and a checksum of both."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.errors import ArtefactError
from quantkit.storage.files import staged_file
from quantkit.storage.jsonfile import parse_json, parsing
from quantkit.storage.tensorfile import read_header

#: Of every kind.
_VERSION = 1


def write_artefact(
    path: Path,
    kind: str,
    tensors: Mapping[str, Tensor],
    about: Mapping[str, Any],
    *,
    force: bool,
) -> None:
    """Write an artefact, whole or not at all.

    Args:
        path: the file to make.
        kind: the metadata key, as ``quantkit_calibration``.
        tensors: by name.
        about: JSON values that go with them.
        force: replace an existing file.

    Raises:
        OutputError: the file exists without ``force``, or cannot be written.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(about, sort_keys=True)
    entry = {"format_version": _VERSION, "sha256": _digest(plain, text), "about": text}
    with staged_file(path, force=force) as stage:
        save_file(plain, stage, metadata={kind: json.dumps(entry)})


def read_about(path: Path, kind: str) -> dict[str, Any]:
    """Return the metadata; tensors are not read, and no checksum is checked.

    Args:
        path: the file.
        kind: the metadata key.

    Raises:
        ArtefactError: missing, damaged, of another kind or version.
    """
    return _about(path, kind)[1]


def read_artefact(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the metadata.

    Args:
        path: the file.
        kind: the metadata key.

    Raises:
        ArtefactError: missing, damaged, of another kind or version.
    """
    entry, about = _about(path, kind)
    with parsing(path, cure="write it again"):
        tensors = _load(path)
        if _digest(tensors, entry["about"]) != entry["sha256"]:
            raise ArtefactError(f"{path}: damaged: its checksum does not agree; write it again")
        return tensors, about


def _about(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a header's entry, and the metadata of the tensors in it."""
    metadata = read_header(path, error=ArtefactError).metadata
    if kind not in metadata:
        raise ArtefactError(f"{path}: not a {kind} file: its header lacks that key")
    with parsing(path, cure="write it again"):
        entry = parse_json(metadata[kind])
        version = entry["format_version"]
        if type(version) is not int or version != _VERSION:
            raise ArtefactError(
                f"{path}: format_version {version!r:.40}, expected {_VERSION}: made by a "
                "development version or a newer quantkit; write the file again, or upgrade"
            )
        about = parse_json(entry["about"])
        if not isinstance(about, dict):
            raise ValueError(f"about is {type(about).__name__}, expected an object")  # noqa: TRY004
        return entry, about


def _load(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        # The header was in order: a dtype that torch has not, or a file that changed meanwhile.
        raise ValueError(str(error)) from error
    return tensors


def _digest(tensors: Mapping[str, Tensor], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # reshape(-1) first: a scalar has no last axis to view as bytes. A tensor of one element may
        # have any stride and be contiguous all the same.
        flat = tensor.reshape(-1)
        flat = flat.clone(memory_format=torch.contiguous_format) if len(flat) == 1 else flat
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def pack_name(component: str, layer: str, field: str) -> str:
    """Return the name of a layer's tensor in an artefact; opening a model refuses names with /."""
    return f"{component}/{layer}/{field}"


def split_name(name: str) -> tuple[str, str, str]:
    """Undo ``pack_name``: component, layer, field.

    Raises:
        ValueError: it is no such name.
    """
    parts = name.split("/")
    if len(parts) != 3:
        raise ValueError(f"tensor {name!r:.80}: expected COMPONENT/LAYER/FIELD")
    component, layer, field = parts
    return component, layer, field
