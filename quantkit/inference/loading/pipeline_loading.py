"""``quantkit.load_pipeline``: a packed pipeline, checked, every component in one compute dtype."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.copied import misfits_of_copies
from quantkit.checkpoint.filelist import FILE_LIST, find_file_list
from quantkit.checkpoint.reader import Packed, open_packed
from quantkit.errors import CheckpointError, ModelError
from quantkit.inference.layers.layer_summary import LayerInfo, iterate_packed, packed_layers
from quantkit.inference.loading.checksums import checksums as checking
from quantkit.inference.loading.checksums import hash_directory
from quantkit.inference.loading.pipeline_dtype import check_dtype
from quantkit.inference.loading.saving import variant_of
from quantkit.models.pipeline_index import denoiser_names, read_pipeline_index
from quantkit.pipelines.compute_dtype import usual_dtype
from quantkit.pipelines.replay import replay as replay_steps
from quantkit.pipelines.running import loading_by_diffusers, refuse_absent
from quantkit.storage.digest import Hashing
from quantkit.storage.jsonfile import short

__all__ = ["LayerInfo", "load_pipeline", "packed_layers"]


def load_pipeline(
    path: str | Path,
    *,
    torch_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    checksums: bool = True,
    replay: bool | None = None,
) -> Any:
    """Load a packed pipeline, every component in one compute dtype.

    Args:
        path: a packed directory, or a hub id of one.
        torch_dtype: float16, bfloat16 or float32; by default float32 on the CPU, elsewhere
            bfloat16 where the denoiser's 16-bit tensors are that, else float16.
        device: where to put it; the CPU by default.
        checksums: hash everything that is read, while it is read.
        replay: record the denoisers' steps and launch them again (``quantkit.replay``); by default
            where ``device`` is a GPU.

    Returns:
        the DiffusionPipeline.

    Raises:
        ModelError: not a pipeline directory, nothing in it is packed, or diffusers cannot load it.
        CheckpointError: a packed component breaks a rule of FORMAT.md, or does not fit its model;
            bytes that are not those that were written.
        InputError: another dtype, or a GPU that is not there.
    """
    import diffusers

    device, named = torch.device(device or "cpu"), str(device)
    refuse_absent(device, named)
    if torch_dtype is not None:
        check_dtype(torch_dtype, "load_pipeline")
    folder = _folder(path)
    packed = _open(folder)
    dtype = torch_dtype or usual_dtype(stored_dtypes(packed), device)
    # The source's file names are kept, so its variant is too; None is the usual name.
    variants = {variant_of(c.headers[0].path) or "" for c in packed.components}
    variant = max(variants) or None
    hashing = hash_directory(packed) if checksums else Hashing(())
    loading = loading_by_diffusers(folder, cure="download it or pack the model again")
    with checking(enabled=checksums), _joined(hashing), loading:
        for misfit in misfits_of_copies(folder, {c.name for c in packed.components}):
            raise CheckpointError(misfit)
        pipe = diffusers.DiffusionPipeline.from_pretrained(
            str(folder), variant=variant, use_safetensors=True, **{_dtype_key(): dtype}
        )
    loaded = {component for component, _, _ in iterate_packed(pipe)}
    assert loaded == {c.name for c in packed.components}, f"only {loaded} loaded as packed"
    # Where it is already: diffusers warns of every float16 pipeline that is sent to the CPU.
    pipe = pipe if device.type == "cpu" else pipe.to(device)
    if replay or (replay is None and device.type == "cuda"):
        replay_steps(pipe)
    return pipe


def stored_dtypes(packed: Packed) -> frozenset[str]:
    """Return the dtypes of a packed pipeline's denoiser, except those of codes and scales.

    Of its text encoders where only they are packed.
    """
    denoisers = denoiser_names(read_pipeline_index(packed.path))
    component = min(packed.components, key=lambda c: c.name not in denoisers)
    return frozenset(
        info.dtype
        for header in component.headers
        for name, info in header.tensors.items()
        if name.endswith(".bias") or name.rpartition(".")[0] not in component.config.layers
    )


def _folder(path: str | Path) -> Path:
    """Return the local directory of a pipeline, downloading a hub id."""
    folder = Path(path)
    if not folder.is_dir() and str(path).count("/") == 1 and not folder.is_absolute():
        folder = _download(str(path))
    if not (folder / "model_index.json").is_file():
        raise ModelError(
            f"{folder}: no model_index.json, expected a pipeline directory; load a component alone "
            "with its class, as UNet2DConditionModel.from_pretrained"
        )
    return folder


@contextmanager
def _joined(hashing: Hashing) -> Iterator[None]:
    """Wait for the digests after the body; a wrong digest replaces the body's error."""
    try:
        try:
            yield
        except Exception:
            hashing.join()
            raise
        hashing.join()
    finally:
        hashing.cancel()


def _open(folder: Path) -> Packed:
    """Return the packed pipeline, after the rules of its components were checked."""
    packed = open_packed(folder)
    if not packed.components:
        raise ModelError(
            f"{folder}: nothing in it is packed; run 'quantkit pack', or load it with diffusers"
        )
    return packed


def _download(repository: str) -> Path:
    """Fetch all files that the repository's list names."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        root = Path(hf_hub_download(repository, FILE_LIST)).parent
        expected = [FILE_LIST, *find_file_list(root).files]
        return Path(snapshot_download(repository, revision=root.name, allow_patterns=expected))
    except (OSError, HFValidationError) as error:
        raise ModelError(
            f"{repository}: no directory, and no {FILE_LIST} of it comes from the hub "
            f"({type(error).__name__}: {short(error)}); check the name and your access, or run "
            f"'quantkit pack {repository} -o DIR'"
        ) from error


def _dtype_key() -> str:
    """Return the name of diffusers' dtype option: a newer one warns of the old name."""
    from diffusers.utils import deprecation_utils

    return "dtype" if hasattr(deprecation_utils, "_resolve_dtype") else "torch_dtype"
