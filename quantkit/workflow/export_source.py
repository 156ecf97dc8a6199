"""Sources of an export: a packed model, a 16-bit one, or one that is packed on the way."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration.moments.moment_files import Hessians
from quantkit.calibration.statistics.layer_statistics import Calibration
from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.reader import open_packed, read_packed
from quantkit.errors import CheckpointError, InputError
from quantkit.interchange.denoiser import (
    Denoiser,
    dense_denoiser,
    packed_denoiser,
    planned_denoiser,
)
from quantkit.interchange.layout_names import layout_of_model, original_tensors
from quantkit.interchange.reference import Reference
from quantkit.models.families import is_denoiser
from quantkit.models.source import Component, Model
from quantkit.numerics.scheme import Scheme
from quantkit.packing.pack_model import pack, plan_pack
from quantkit.progress import Progress
from quantkit.recipe.schema import Recipe
from quantkit.storage.files import scratch_directory
from quantkit.storage.jsonfile import read_json
from quantkit.workflow.arguments import ModelLike, as_model, opened
from quantkit.workflow.pack import usual_threads


@dataclass(frozen=True)
class Part:
    """One component of a model."""

    #: sub-folder of the pipeline; "" when the model is the component itself
    folder: str
    source: Denoiser

    @property
    def is_encoder(self) -> bool:
        """True for a model of transformers."""
        return _is_encoder(self.source.path)


@dataclass(frozen=True)
class Source:
    """A model to export."""

    #: a pipeline, or a component alone
    model: Path
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Quantizing:
    """Settings for packing a 16-bit model on the way."""

    recipe: Recipe
    calibration: Calibration | None = None
    hessians: Hessians | None = None


def is_packed(model: ModelLike) -> bool:
    """Tell whether a model is a directory of which quantkit packed something."""
    if not isinstance(model, str | Path):
        return False
    try:
        return Path(model).is_dir() and bool(read_packed(Path(model)).components)
    except CheckpointError:
        return False


def packed_source(path: Path, *, encoders: bool) -> Source:
    """Return a packed model.

    Args:
        path: its directory.
        encoders: text encoders alone, else denoisers alone.

    Raises:
        InputError: none of it is what is exported.
    """
    found = open_packed(path).components
    components = [c for c in found if _is_exported(c, encoders=encoders)]
    if not components and not encoders and all(_is_encoder(c.path) for c in found):
        raise _encoder_alone(path)
    if not components:
        what = "text encoder" if encoders else "denoiser"
        others = ", ".join(c.name or c.class_name for c in found)
        raise InputError(
            f"{path}: no packed {what}, only {others}; choose another target", fields=("to",)
        )
    return Source(path, tuple(Part(c.name, packed_denoiser(c)) for c in components))


def refuse_encoder(model: Model) -> None:
    """Refuse a 16-bit text encoder as the source of a target for denoisers.

    Args:
        model: opened.

    Returns:
        nothing.

    Raises:
        InputError: it is one.
    """
    if not model.is_pipeline and _is_encoder(model.components[0].path):
        raise _encoder_alone(model.path)


def _encoder_alone(path: Path) -> InputError:
    return InputError(
        f"{path}: a text encoder, and the target takes denoisers; export it to compressed-tensors, "
        "or load its packed pipeline in ComfyUI with quantkit's nodes (docs/guides/comfyui.md)",
        fields=("to",),
    )


def dense_source(model: ModelLike) -> Source:
    """Return a 16-bit model as it is."""
    found = as_model(model)
    return Source(found.path, tuple(Part(c.name, dense_denoiser(c)) for c in found.components))


def planned_source(model: ModelLike, how: Quantizing, progress: Progress) -> Source:
    """Return a 16-bit model as if it were packed, for plans alone.

    Raises:
        RecipeError: of no use for the model, or without statistics that it needs.
    """
    found, recipe = opened(model, how.recipe)
    plan = plan_pack(
        found, recipe, calibration=how.calibration, masks=None, hessians=how.hessians,
        progress=progress,
    )  # fmt: skip
    parts = []
    for planned in plan.components:
        component, layers = planned.component, planned.config.layers
        source = planned_denoiser(component, layers, dict(_stand_ins(recipe, layers)))
        reference = Reference(component, recipe, how.hessians)
        parts.append(Part(component.name, replace(source, reference=reference)))
    return Source(found.path, tuple(parts))


def refuse_rest(source: Source) -> None:
    """Refuse a packed pipeline of which an output would hold other packed components as they are.

    Raises:
        InputError: naming the first of them.
    """
    folders = {part.folder for part in source.parts}
    packed = read_packed(source.model).components if is_packed(source.model) else ()
    for component in packed:
        if component.name not in folders:
            raise InputError(
                f"{component.path}: packed, too, and the target does not hold it; export the "
                f"directory of {' or '.join(sorted(folders))} alone"
            )


@contextmanager
def quantized_source(
    model: ModelLike, how: Quantizing, output: Path, progress: Progress, *, planned: Source
) -> Iterator[Source]:
    """Yield a 16-bit model that is packed next to the output, for as long as the body runs.

    Args:
        model: in 16 bit.
        how: it is packed.
        output: of the export.
        progress: told of tensors done.
        planned: the same model before it was packed, whose reference is kept.

    Raises:
        InputError: as ``pack``.
    """
    found, recipe = opened(model, how.recipe)
    own = replace(how, recipe=recipe)
    # Another name than the output's: that is staged, too, meanwhile.
    with scratch_directory(output.with_name(f"{output.name}.packed")) as scratch:
        known = {part.folder: part.source.reference for part in planned.parts}
        parts = [
            replace(part, source=replace(part.source, reference=known[part.folder]))
            for component in found.components
            for part in [_quantized(component, own, scratch, progress)]
        ]
        yield Source(found.path, tuple(parts))


def _quantized(component: Component, how: Quantizing, scratch: Path, progress: Progress) -> Part:
    folder = scratch / (component.name or "component")
    alone = Model(component.path, is_pipeline=False, components=(replace(component, name=""),))
    pack(
        alone,
        how.recipe,
        folder,
        calibration=how.calibration,
        masks=None,
        hessians=how.hessians,
        threads=usual_threads(),
        force=False,
        progress=progress,
        joined=_joined(component),
    )
    (packed,) = open_packed(folder).components
    return Part(component.name, packed_denoiser(packed))


def _joined(component: Component) -> list[tuple[str, ...]]:
    """Return layers that the original layout joins to one weight; none for unknown layouts."""
    dense = dense_denoiser(component)
    try:
        layout = layout_of_model(component.class_name, dense.shapes)
    except InputError:
        return []
    return [
        tuple(part.removesuffix(".weight") for part in original.parts)
        for original in original_tensors(layout, dense.shapes)
        if len(original.parts) > 1 and original.name.endswith(".weight")
    ]


def _stand_ins(recipe: Recipe, layers: Mapping[str, Scheme]) -> Iterator[tuple[str, Tensor]]:
    """Yield placeholder scales, powers of two where the recipe's will be."""
    for layer in layers:
        settings = recipe.settings(layer)
        for part, scale in (
            ("weight_scale", settings.weight.scale),
            ("input_scale", settings.activation.scale),
        ):
            yield f"{layer}.{part}", torch.tensor(1.0 if scale == "pow2" else 1 / 3)


def _is_exported(component: PackedComponent, *, encoders: bool) -> bool:
    """Tell whether a component is a text encoder, or a denoiser."""
    is_encoder = _is_encoder(component.path)
    return is_encoder if encoders else not is_encoder and is_denoiser(component.class_name)


def _is_encoder(path: Path) -> bool:
    """Tell whether a component is one of transformers, whose configs have no ``_class_name``."""
    return "_class_name" not in read_json(path / "config.json")
