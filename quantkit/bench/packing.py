"""Packed copies of a random denoiser, through the files and the loader that users have."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from quantkit import pipeline
from quantkit.calibration.running import quiet_libraries
from quantkit.models.source import open_model
from quantkit.progress import Progress
from quantkit.recipe import Recipe, SparsityRecipe
from quantkit.recipefile import load_recipe

#: diffusers' bound of a file, and so of what is in host memory at once.
_SHARD = "1GB"
#: Class -> bundled recipe; ``fp8`` for others.
_RECIPES = {"UNet2DConditionModel": "sdxl-fp8", "FluxTransformer2DModel": "flux-fp8"}


@dataclass(frozen=True)
class Variant:
    """What is made of a denoiser."""

    #: 2:4 by magnitude in every layer that can be
    sparse: bool
    #: convolutions stay in float16
    linear_only: bool


@dataclass(frozen=True)
class Source:
    """A denoiser's files."""

    folder: Path
    model: nn.Module

    def recipe(self, variant: Variant) -> Recipe:
        """Return the bundled recipe of the model's class, changed to the variant."""
        recipe = load_recipe(_RECIPES.get(type(self.model).__name__, "fp8"))
        changes: dict[str, Any] = {}
        if variant.sparse:
            changes["sparsity"] = SparsityRecipe(method="magnitude")
        if variant.linear_only:
            changes["keep"] = (*recipe.keep, *convolutions(self.model))
        return recipe.model_copy(update=changes)


@contextmanager
def saved(model: nn.Module, scratch: Path | None) -> Iterator[Source]:
    """Yield the files of a model in a temporary folder, which is deleted after.

    Args:
        model: a diffusers model, on any device; at most one shard of it is in host memory.
        scratch: where to make the folder; the system's place for such by default.
    """
    with TemporaryDirectory(prefix="quantkit-bench-", dir=scratch) as folder:
        path = Path(folder) / "float16"
        model.save_pretrained(path, max_shard_size=_SHARD)  # type: ignore[operator]
        yield Source(path, model)


def load_packed(
    source: Source, variant: Variant, device: torch.device, threads: int, progress: Progress
) -> nn.Module:
    """Pack a source, load it onto the device, and delete the packed files.

    Raises:
        InputError: it cannot be packed or loaded.
    """
    output = source.folder.with_name("packed")
    pipeline.pack(
        open_model(str(source.folder)),
        source.recipe(variant),
        output,
        calibration=None,
        masks=None,
        threads=threads,
        force=False,
        progress=progress,
    )
    load: Any = type(source.model).from_pretrained  # type: ignore[attr-defined]
    try:
        with quiet_libraries():
            model: nn.Module = load(output, torch_dtype=torch.float16)
        return model.to(device).eval().requires_grad_(False)
    finally:
        shutil.rmtree(output)


def convolutions(model: nn.Module) -> tuple[str, ...]:
    """Return the module paths of a model's Conv2d layers."""
    return tuple(name for name, m in model.named_modules() if isinstance(m, nn.Conv2d))


def with_shared_weights(model: nn.Module) -> nn.Module:
    """Return a copy whose tensors are those of ``model``: it can be compiled on its own."""
    from copy import deepcopy
    from itertools import chain

    tensors = chain(model.parameters(), model.buffers())
    return deepcopy(model, {id(tensor): tensor for tensor in tensors})
