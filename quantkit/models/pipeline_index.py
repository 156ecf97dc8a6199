"""model_index.json: the components of a pipeline."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import ModelError
from quantkit.models.families import is_denoiser
from quantkit.storage.jsonfile import read_json

#: What pipelines call their denoisers.
_DENOISERS = re.compile(r"(?:prior_)?(?:unet|transformer|prior|decoder)(?:_\d+)?")


def read_pipeline_index(path: Path) -> dict[str, str]:
    """Return the class of each component that a pipeline's model_index.json names.

    Raises:
        ModelError: no JSON, or a name that is no folder's.
    """
    return {name: class_name for name, (_, class_name) in _read_entries(path).items()}


def read_transformers_classes(path: Path) -> dict[str, str]:
    """Return the class of each component of a pipeline that is of transformers.

    Raises:
        ModelError: as ``read_pipeline_index``.
    """
    entries = _read_entries(path)
    return {name: kind for name, (library, kind) in entries.items() if library == "transformers"}


def read_components(path: Path) -> dict[str, tuple[str, str]]:
    """Return library and class of each component that a pipeline's model_index.json names.

    Raises:
        ModelError: as ``read_pipeline_index``.
    """
    return {name: (str(library), kind) for name, (library, kind) in _read_entries(path).items()}


def read_models(path: Path) -> dict[str, tuple[str, str]]:
    """Return library and class of each component of a pipeline that has weights.

    Raises:
        ModelError: as ``read_pipeline_index``.
    """
    components = read_components(path).items()
    return {name: made for name, made in components if (path / name / "config.json").is_file()}


def denoiser_names(classes: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of a pipeline's denoisers, of the classes of its components by name."""
    return tuple(n for n, kind in classes.items() if _DENOISERS.fullmatch(n) and is_denoiser(kind))


def _read_entries(path: Path) -> dict[str, tuple[object, str]]:
    index = read_json(path / "model_index.json")
    entries = {
        name: (entry[0], entry[1])
        for name, entry in index.items()
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)
    }
    for name in entries:
        # It becomes a part of paths: ../x or /etc would lead out of the pipeline.
        if not (name.isidentifier() and name.isascii()):
            raise ModelError(
                f"{path / 'model_index.json'}: component {name!r:.80}, expected the plain name of "
                "a folder; download it again"
            )
    return entries


def scheduler_config(path: Path) -> dict[str, Any]:
    """Return the config of a pipeline's scheduler; empty where there is none.

    Raises:
        ModelError: no JSON.
    """
    config = path / "scheduler" / "scheduler_config.json"
    return read_json(config) if config.is_file() else {}
