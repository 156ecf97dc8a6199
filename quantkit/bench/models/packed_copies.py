"""Packed copies of a random denoiser, through the files and the loader that users have."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from quantkit.calibration.observing.collect import layers_to_pack, library_versions, weight_digests
from quantkit.calibration.observing.hooks import Collector
from quantkit.calibration.statistics.layer_statistics import Calibration, CalibrationProvenance
from quantkit.models.recommended import recipe_of_class
from quantkit.models.source import Model, open_model
from quantkit.numerics.formats import find_format
from quantkit.packing import pack_model as pipeline
from quantkit.pipelines.running import quiet_libraries
from quantkit.progress import Progress
from quantkit.recipe.layer_recipes import ActivationRecipe, WeightRecipe
from quantkit.recipe.load import load_recipe
from quantkit.recipe.schema import Recipe, SparsityRecipe

#: diffusers' bound of a file, and so of what is in host memory at once.
_SHARD = "1GB"


@dataclass(frozen=True)
class PackedVariant:
    """A way to pack a denoiser."""

    #: 2:4 by magnitude in every layer that can be
    sparse: bool = False
    #: convolutions stay in float16
    linear_only: bool = False
    #: one calibrated scale per layer instead of one per token
    static: bool = False
    #: format of the weights; inputs are int8 where they are integers
    weights: str = "e4m3fn"


@dataclass(frozen=True)
class Source:
    """A denoiser's files."""

    folder: Path
    model: nn.Module
    #: one denoising step, which static scales are calibrated on
    step: Callable[[], object]
    progress: Progress

    @cached_property
    def opened(self) -> Model:
        """The files, their headers read."""
        return open_model(str(self.folder))

    @cached_property
    def calibration(self) -> Calibration:
        """The statistics of one step, which is all that a scale of amax needs."""
        (component,) = self.opened.components
        recipe = self.recipe(PackedVariant(static=True))
        layers = layers_to_pack(component, recipe)
        collector = Collector(component.name, self.model, layers, buckets=1)
        with collector.attached(SimpleNamespace(timesteps=[1.0]), lambda _: None):
            self.step()
        return Calibration(
            {component.name: collector.statistics()},
            (),
            CalibrationProvenance(
                digests=weight_digests({component.name: layers}, self.progress),
                recipe=recipe.name,
                prompts=0,
                prompts_digest="",
                steps=1,
                guidance=None,
                seed=0,
                calls={component.name: collector.calls},
                versions=library_versions(),
            ),
        )

    def recipe(self, variant: PackedVariant) -> Recipe:
        """Return the bundled recipe for the model, changed to the variant."""
        class_name = type(self.model).__name__
        recipe = load_recipe("fp8-static") if variant.static else recipe_of_class(class_name)
        changes: dict[str, Any] = {}
        if variant.sparse:
            changes["sparsity"] = SparsityRecipe(method="magnitude")
        if variant.linear_only:
            changes["keep"] = (*recipe.keep, *convolutions(self.model))
        if variant.static:
            # One step's amax; weights as the others have them, so that inputs alone differ.
            changes["activation"] = ActivationRecipe(mode="static", observer="amax")
        if variant.static or find_format(variant.weights).is_integer:
            changes["weight"] = WeightRecipe(format=variant.weights)
            # Random weights make no channel that is far larger than the rest.
            changes["data_free"] = True
        return recipe.model_copy(update=changes)


@contextmanager
def saved(
    model: nn.Module, step: Callable[[], object], scratch: Path | None, progress: Progress
) -> Iterator[Source]:
    """Yield the files of a model in a temporary folder, which is deleted after.

    Args:
        model: a diffusers model, on any device; at most one shard of it is in host memory.
        step: one denoising step of it.
        scratch: where to make the folder; the system's place for such by default.
        progress: told of what is hashed and packed.
    """
    with TemporaryDirectory(prefix="quantkit-bench-", dir=scratch) as folder:
        path = Path(folder) / "float16"
        model.save_pretrained(path, max_shard_size=_SHARD)  # type: ignore[operator]
        yield Source(path, model, step, progress)


def load_packed(
    source: Source, variant: PackedVariant, device: torch.device, threads: int
) -> nn.Module:
    """Pack a source, load it onto the device, and delete the packed files.

    Raises:
        InputError: it cannot be packed or loaded.
    """
    output = source.folder.with_name("packed")
    pipeline.pack(
        source.opened,
        source.recipe(variant),
        output,
        calibration=source.calibration if variant.static else None,
        masks=None,
        threads=threads,
        force=False,
        progress=source.progress,
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
