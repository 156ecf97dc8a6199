"""Models behind a hub id: the cache of huggingface_hub first, then the network."""

from collections.abc import Callable
from pathlib import Path

from quantkit.errors import ModelError
from quantkit.models.pipeline_index import denoiser_names, read_pipeline_index

_INDEX = ["model_index.json", "config.json"]

#: Files of a component that a pipeline needs: no variants, no pickles, no other framework's.
_FILES = (
    "*.json",
    "*.txt",
    "*.model",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model-*-of-*.safetensors",
)


def cached(repository: str) -> Path | None:
    """Return the newest snapshot in the cache, whole or not, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, local_files_only=True, allow_patterns=_INDEX))
    except LocalEntryNotFoundError:
        return None


def download(repository: str) -> Path:
    """Fetch the files of the pipeline or component that the cache lacks.

    Raises:
        ModelError: no such repository, no access, no network, or not of diffusers.
    """
    return _fetch(repository, _patterns)


def fetch_config(repository: str) -> Path:
    """Fetch a pipeline or a component without the weights of its denoisers.

    Raises:
        ModelError: as ``download``.
    """
    return _fetch(repository, _patterns_of_config)


def _fetch(repository: str, patterns: Callable[[str, Path], list[str]]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        root = Path(snapshot_download(repository, allow_patterns=_INDEX))
        return Path(snapshot_download(repository, allow_patterns=patterns(repository, root)))
    except (OSError, HFValidationError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{repository}: cannot be fetched from the hub ({type(error).__name__}: {reason}); "
            "check the name and your access, or pass a directory"
        ) from error


def _patterns_of_config(repository: str, root: Path) -> list[str]:
    if not (root / "model_index.json").is_file():
        return _INDEX
    denoisers = tuple(f"{name}/" for name in denoiser_names(read_pipeline_index(root)))
    kept = [p for p in _patterns(repository, root) if not p.startswith(denoisers)]
    return [*kept, *(f"{folder}*.json" for folder in denoisers)]


def _patterns(repository: str, root: Path) -> list[str]:
    if (root / "model_index.json").is_file():
        folders = [f"{name}/" for name in read_pipeline_index(root)]
        return [*_INDEX, *(folder + file for folder in folders for file in _FILES)]
    if (root / "config.json").is_file():
        return list(_FILES)
    raise ModelError(
        f"{repository}: not a diffusers repository: found neither model_index.json nor config.json"
    )
