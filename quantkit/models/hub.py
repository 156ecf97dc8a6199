"""Models of the Hugging Face Hub: the cache of huggingface_hub first, then the network."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from quantkit.errors import ModelError
from quantkit.models.pipeline_index import denoiser_names, read_pipeline_index

_INDEX = ["model_index.json", "config.json"]
#: Its metadata has the licence.
_CARD = "README.md"

#: Files of a component that are no weights.
_OTHERS = ("*.json", "*.txt", "*.model")
_STEMS = ("model", "diffusion_pytorch_model")


def cached(repository: str) -> Path | None:
    """Return the newest snapshot in the cache, whole or not, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, local_files_only=True, allow_patterns=_INDEX))
    except LocalEntryNotFoundError:
        return None


def download(repository: str, variant: str | None = None) -> Path:
    """Fetch the files of the pipeline or component that the cache lacks.

    Args:
        repository: the hub id.
        variant: of the weights, where a component has it; None: the plain ones. Where they are
            missing, the other ones are fetched.

    Raises:
        ModelError: no such repository, no access, no network, or not of diffusers.
    """
    return _fetch(repository, partial(_patterns, repository, variant))


def fetch_config(repository: str) -> Path:
    """Fetch a pipeline or a component without the weights of its denoisers.

    Raises:
        ModelError: as ``download``.
    """
    return _fetch(repository, partial(_patterns_of_config, repository))


def fetch_missing(folder: Path, name: str) -> None:
    """Fetch a file that a snapshot in the hub's cache lacks; nothing happens where it cannot be.

    Args:
        folder: any; a snapshot is ``models--OWNER--NAME/snapshots/REVISION``.
        name: of the file.
    """
    repository = repository_of(folder)
    if not repository or (folder / name).is_file():
        return
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    with suppress(OSError, HFValidationError):
        hf_hub_download(
            repository,
            name,
            revision=folder.name,
            cache_dir=folder.parents[2],
        )


def repository_of(folder: Path) -> str:
    """Return the hub id of a snapshot in the hub's cache; empty for other folders."""
    name = folder.parent.parent.name
    if not name.startswith("models--") or folder.parent.name != "snapshots":
        return ""
    return name.removeprefix("models--").replace("--", "/")


def _fetch(repository: str, patterns: Callable[[Path, Sequence[str]], list[str]]) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        root = Path(snapshot_download(repository, allow_patterns=_INDEX))
        files = HfApi().list_repo_files(repository)
        return Path(snapshot_download(repository, allow_patterns=patterns(root, files)))
    except (OSError, HFValidationError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{repository}: cannot be fetched from the hub ({type(error).__name__}: {reason}); "
            "check the name and your access, or pass a directory"
        ) from error


def _patterns(repository: str, variant: str | None, root: Path, files: Sequence[str]) -> list[str]:
    """Return the patterns of the files to fetch: no pickles, no other framework's."""
    if (root / "model_index.json").is_file():
        folders = [f"{name}/" for name in read_pipeline_index(root)]
    elif (root / "config.json").is_file():
        folders = [""]
    else:
        raise ModelError(
            f"{repository}: not a diffusers repository: found neither model_index.json nor "
            "config.json"
        )
    others = [folder + pattern for folder in folders for pattern in _OTHERS]
    weights = [name for folder in folders for name in _weights(folder, variant, files)]
    return [*_INDEX, _CARD, *others, *weights]


def _patterns_of_config(repository: str, root: Path, files: Sequence[str]) -> list[str]:
    if not (root / "model_index.json").is_file():
        return _INDEX
    denoisers = tuple(f"{name}/" for name in denoiser_names(read_pipeline_index(root)))
    found = _patterns(repository, None, root, files)
    return [p for p in found if not (p.startswith(denoisers) and p.endswith(".safetensors"))]


def _weights(folder: str, variant: str | None, files: Sequence[str]) -> list[str]:
    """Return the weights in a folder: of the variant, else the plain ones, else all."""
    stem = re.escape(folder) + f"(?:{'|'.join(_STEMS)})"
    shard = r"(?:-\d+-of-\d+)?\.safetensors"
    wished = [rf"{stem}\.{re.escape(variant)}{shard}"] if variant else []
    for pattern in (*wished, stem + shard, rf"{stem}(?:\.\w+)?{shard}"):
        if found := [name for name in files if re.fullmatch(pattern, name)]:
            return found
    return []
