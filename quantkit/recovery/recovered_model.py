"""Writing a recovered model: a copy of the pipeline with new weights in its denoiser."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from quantkit.errors import ModelError, NonFiniteError, OutputError
from quantkit.models.component_layers import list_layers
from quantkit.models.source import Component, Model, of_family, open_model
from quantkit.models.source_tensors import read_source, read_tensor, read_tensors
from quantkit.numerics.packed_2to4 import from_rows
from quantkit.recovery.distill.distillation import Recovered
from quantkit.sparsity.maskfile import LayerMask, MaskSet, save_masks
from quantkit.storage.copying import copy_files, is_pickle, is_weight, list_files
from quantkit.storage.digest import sha256_of
from quantkit.storage.files import staged_directory
from quantkit.storage.places import check_directory, check_file, refuse_overlap

#: What the marker calls the output.
KIND = "16-bit pipeline"


def refuse_outputs(model: Model, output: Path, masks_output: Path | None, *, force: bool) -> None:
    """Refuse outputs that cannot be, before anything long begins.

    Args:
        model: the source.
        output: the directory to make.
        masks_output: the mask file to make; None: there are no masks.
        force: replace existing outputs.

    Raises:
        OutputError: one exists without ``force``, or lies in the other or in the model.
    """
    check_directory(output, kind=KIND, force=force)
    refuse_overlap(output, model.path)
    if masks_output is None:
        return
    check_file(masks_output, force=force)
    refuse_overlap(masks_output, model.path)
    target = output.resolve()
    if target in masks_output.resolve().parents or target == masks_output.resolve():
        raise OutputError(
            f"{masks_output}: inside the pipeline {output}, where masks do not belong; choose "
            "another path"
        )


def write_recovered(
    model: Model,
    masks: MaskSet | None,
    recovered: Recovered,
    output: Path,
    masks_output: Path | None,
    *,
    force: bool,
) -> MaskSet | None:
    """Write the recovered pipeline, and the masks for it.

    Every other component is copied byte for byte; the denoiser keeps its files' names, their
    tensors and dtypes. Other formats of the denoiser's weights are left out.

    Args:
        model: the source.
        masks: which weights are kept; None: all.
        recovered: trained with these masks.
        output: the directory to make.
        masks_output: the mask file to make; None exactly where there are no masks.
        force: replace existing outputs.

    Returns:
        the masks with the digests of the recovered weights, of which they take nothing away; None
        where there were none.

    Raises:
        NonFiniteError: a trained weight does not fit the dtype of the file.
        OutputError: an output exists without ``force``, or cannot be written.
    """
    refuse_outputs(model, output, masks_output, force=force)
    component = recovered.component
    chosen = {} if masks is None else masks.of(component)
    with staged_directory(output, kind=KIND, force=force) as stage:
        copy_files(model.path, stage, _copied(model, component))
        for shard in component.shards:
            _write_shard(shard, stage / component.name / shard.name, recovered)
        written = of_family(open_model(str(stage)), component.family.name).components[0]
        updated = {
            layer.name: replace(
                chosen[layer.name], source_digest=sha256_of(layer.shard, layer.weight), error=0.0
            )
            for layer in list_layers(written)
            if layer.name in chosen
        }
        _check_zeros(written, updated)
    if masks is None or masks_output is None:
        return None
    result = replace(masks, layers={component.name: updated})
    save_masks(result, masks_output, force=force)
    return result


def _copied(model: Model, component: Component) -> list[Path]:
    """Return all files but the denoiser's weights and single-file weights at the root."""
    return [
        file
        for file in list_files(model.path)
        if not is_weight(file)
        or model.path / file == component.index
        or (len(file.parts) > 1 and file.parts[0] != component.name and not is_pickle(file))
    ]


def _write_shard(source: Path, target: Path, recovered: Recovered) -> None:
    tensors = {n: _trained(t, n, recovered) for n, t in read_tensors(source).items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target, metadata=read_source(source).metadata or None)


def _trained(before: Tensor, name: str, recovered: Recovered) -> Tensor:
    """Return the recovered values of a tensor, in its own dtype."""
    if name not in recovered.weights:
        return before
    value = recovered.weights[name]
    if value.shape != before.shape:
        raise ModelError(
            f"{recovered.component.path}: {name} is {tuple(before.shape)} in the file and "
            f"{tuple(value.shape)} in diffusers; save the model again"
        )
    after: Tensor = value.to(before.dtype).contiguous()
    if not bool(after.isfinite().all()):
        raise NonFiniteError(
            f"recovery: {name} does not fit {before.dtype} (up to {float(value.abs().max()):g}); "
            "take a lower rate",
            fields=("rate",),
        )
    return after


def _check_zeros(component: Component, masks: dict[str, LayerMask]) -> None:
    """Check the written file against its masks: every weight that is not kept is zero."""
    for layer in list_layers(component):
        if layer.name not in masks:
            continue
        weight = read_tensor(layer.shard, layer.weight.name)
        keep = from_rows(masks[layer.name].dense(layer.n, layer.k), layer.shape)
        assert not torch.any(weight[~keep]), f"{layer.name}: a weight outside its mask"
