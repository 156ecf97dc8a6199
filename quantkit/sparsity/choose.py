"""Choosing masks for a model, a block of one weight at a time."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibration.statistics.layer_statistics import (
    Calibration,
    LayerStatistics,
    per_column,
)
from quantkit.errors import ArtefactError, ModelError, NonFiniteError, RecipeError
from quantkit.models.component_layers import Layer, list_layers
from quantkit.models.layer_plan import UNSEEN, dense_reason, kept_reason
from quantkit.models.source import Component, Model
from quantkit.numerics.masks import MASKS, SPARSEGPT, Pattern, choose_mask, parse_pattern
from quantkit.numerics.packed_2to4 import to_rows
from quantkit.numerics.threads import one_torch_thread, surgery_threads
from quantkit.progress import Progress, tracked
from quantkit.recipe.schema import Recipe, SparsityRecipe
from quantkit.sparsity.maskfile import Decision, LayerMask, MaskSet, pack_mask
from quantkit.sparsity.sparsegpt import Surgeon, lost_share, naming, prune_layer, read_rows
from quantkit.storage.digest import sha256_of
from quantkit.storage.system import open_to_read, read_into

#: Weights whose mask is chosen at a time: the comparisons need a dozen bytes for each.
#: They stay in the cache at this size, which is three times as fast as at 16 times the size.
BLOCK = 1 << 18

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def choose_masks(
    model: Model,
    recipe: Recipe,
    calibration: Calibration | None,
    *,
    progress: Progress,
    surgeon: Surgeon | None = None,
    update: bool = False,
) -> MaskSet:
    """Return the masks that the recipe's sparsity section asks for.

    Masks are decided in float32 on the source weights, before any scaling or cast. A layer is
    masked if the patterns want it, if it can be sparse, and if its estimated error is within the
    budget (where one is set).

    Args:
        model: the source.
        recipe: a missing sparsity section means the section's defaults.
        calibration: input statistics; without them every input channel counts the same.
        progress: told of layers done.
        surgeon: second moments; errors are then those of the layer's output on them, and not an
            estimate for independent inputs.
        update: the kept weights will make up for the dropped ones, so errors are those after it.
            They always are with sparsegpt, whose masks count on it.

    Raises:
        RecipeError: a method that needs a calibration or second moments, without them.
        ArtefactError: the calibration or the moments were taken from other weights.
        NonFiniteError: NaN or Inf in a weight.
    """
    rule = recipe.sparsity or SparsityRecipe()
    pattern = parse_pattern(rule.pattern)
    if surgeon is None and (update or rule.method == SPARSEGPT):
        raise RecipeError(
            f"mask method {rule.method!r} {'with updates ' if update else ''}needs second moments; "
            "give those of 'quantkit calibrate hessian'",
            fields=("hessians",),
        )
    recipe = recipe.model_copy(update={"sparsity": rule})
    masks: dict[str, dict[str, LayerMask]] = {}
    decisions = []
    for component in model.components:
        inputs = LayerInputs.of(component, calibration, surgeon, update=update)
        chosen = masks.setdefault(component.name, {})
        title = f"masks of {component.name or component.class_name}"
        for layer in tracked(progress, title, sparse_layers(component, recipe)):
            with surgery_threads(layer.k) if surgeon else one_torch_thread():
                decision, mask = _decide(component, layer, rule, pattern, inputs)
            decisions.append(decision)
            if mask is not None:
                chosen[layer.name] = mask
    return MaskSet(masks, rule.method, pattern, tuple(decisions))


@dataclass(frozen=True)
class LayerInputs:
    """Statistics and second moments of one component's inputs, where there are any."""

    component: Component
    calibrated: bool
    statistics: Mapping[str, LayerStatistics]
    digests: Mapping[str, str]
    surgeon: Surgeon | None
    update: bool

    @classmethod
    def of(
        cls,
        component: Component,
        calibration: Calibration | None,
        surgeon: Surgeon | None,
        *,
        update: bool,
    ) -> "LayerInputs":
        """Return a component's statistics and second moments.

        Args:
            component: the denoiser.
            calibration: None without one.
            surgeon: None without second moments.
            update: the kept weights will make up for the dropped ones.
        """
        return cls(
            component,
            calibrated=calibration is not None,
            statistics={} if calibration is None else calibration.of(component),
            digests={} if calibration is None else calibration.digests_of(component),
            surgeon=surgeon,
            update=update,
        )

    def is_unseen(self, layer: Layer) -> bool:
        """Return whether calibration observed a layer that no prompt called."""
        if self.surgeon is not None:
            return self.surgeon.hessians.is_unseen(self.component, layer)
        return layer.name in self.digests and layer.name not in self.statistics

    def second_moment(self, layer: Layer, digest: str) -> Tensor | None:
        """Return E[x^2] of each column of the layer's rows, (K,), or None without a calibration."""
        if not self.calibrated:
            return None
        if layer.name not in self.statistics:
            raise ArtefactError(
                f"calibration: no statistics of {layer.name}; run 'quantkit calibrate model' again"
            )
        if self.digests.get(layer.name) != digest:
            raise ArtefactError(
                f"calibration: {layer.name} had other weights (checksum {digest[:12]} now, "
                f"{self.digests.get(layer.name, 'none')[:12]} then); calibrate this model"
            )
        pooled = self.statistics[layer.name].pooled()
        return per_column(pooled.second_moment[0], layer.area)


def sparse_layers(component: Component, recipe: Recipe) -> list[Layer]:
    """Return the layers that are packed and to be sparse, whether they can be or not."""
    return [
        layer
        for layer in list_layers(component)
        if recipe.settings(layer.name).sparse
        and kept_reason(layer, component.family, recipe) is None
    ]


def _decide(
    component: Component, layer: Layer, rule: SparsityRecipe, pattern: Pattern, inputs: LayerInputs
) -> tuple[Decision, LayerMask | None]:
    refusal = dense_reason(layer, pattern)
    if refusal:
        return Decision(component.name, layer.name, None, chosen=False, reason=refusal), None
    if inputs.is_unseen(layer):
        return Decision(component.name, layer.name, None, chosen=False, reason=UNSEEN), None
    digest = sha256_of(layer.shard, layer.weight)
    if inputs.surgeon is None:
        moment = inputs.second_moment(layer, digest)
        bits, error = choose_mask_of(read_blocks(layer), rule.method, pattern, moment)
    else:
        bits, error = _operate(layer, rule.method, pattern, inputs, digest)
    if rule.error_budget is not None and error > rule.error_budget:
        reason = f"error {error:.3g} is over the budget {rule.error_budget:g}"
        return Decision(component.name, layer.name, error, chosen=False, reason=reason), None
    mask = LayerMask(bits, pattern, digest, error)
    return Decision(component.name, layer.name, error, chosen=True, reason=""), mask


def _operate(
    layer: Layer, method: str, pattern: Pattern, inputs: LayerInputs, digest: str
) -> tuple[Tensor, float]:
    """Return the bits of a layer's mask and its error on the second moments."""
    surgeon = inputs.surgeon
    assert surgeon is not None
    moments = surgeon.moments(inputs.component, layer, digest)
    for _ in read_blocks(layer):  # refuses NaN and Inf, naming the place
        pass
    rows = read_rows(layer).to(surgeon.device)
    mask: Tensor | Pattern = pattern
    if method != SPARSEGPT:
        mask = choose_mask(MASKS[method](rows, moments.second.diagonal()), pattern)
        if not inputs.update:
            error = lost_share(rows, rows * ~mask, moments)
            return pack_mask(mask.cpu()), error
    with naming(layer.name):
        settled = prune_layer(rows, moments, mask, bias=layer.bias)
    surgeon.leave(inputs.component, layer, settled)
    return pack_mask(settled.mask.cpu()), settled.error


def read_blocks(layer: Layer) -> Iterator[Tensor]:
    """Yield a layer's weight in its own dtype, checked, a block of rows (<= N, K) at a time.

    Raises:
        ModelError: the file is shorter than its header says.
        NonFiniteError: NaN or Inf; the text names the tensor and the first place.
    """
    step = max(1, BLOCK // layer.k)
    row_bytes = layer.weight.nbytes // layer.n
    descriptor = open_to_read(layer.shard)
    try:
        for first in range(0, layer.n, step):
            rows = min(step, layer.n - first)
            raw = bytearray(rows * row_bytes)
            if read_into(descriptor, raw, layer.weight.start + first * row_bytes) != len(raw):
                raise ModelError(
                    f"{layer.shard}: {layer.weight.name}: truncated; download it again"
                )
            weight = torch.frombuffer(raw, dtype=_DTYPES[layer.weight.dtype])
            weight = weight.reshape(rows, *layer.shape[1:])
            _refuse_non_finite(layer, weight, first)
            yield to_rows(weight)
    finally:
        os.close(descriptor)


def _refuse_non_finite(layer: Layer, weight: Tensor, first: int) -> None:
    finite = weight.isfinite()
    if bool(finite.all()):
        return
    place = [int(i) for i in (~finite).nonzero()[0]]
    value = float(weight[tuple(place)])
    place[0] += first
    raise NonFiniteError(
        f"{layer.shard}: {layer.weight.name}: {value} at {place}; repair or download the model"
    )


def choose_mask_of(
    blocks: Iterable[Tensor], method: str, pattern: Pattern, second_moment: Tensor | None
) -> tuple[Tensor, float]:
    """Choose the mask of one weight, a block of rows at a time.

    Args:
        blocks: rows (any, K) in order, any float dtype, finite.
        method: a key of MASKS.
        pattern: n:m.
        second_moment: (K,) E[x^2] of each column, or None when it is unknown.

    Returns:
        the mask's bits, uint8 (N, ceil(K / 8)), and the share of the output's power that is lost if
        inputs are independent: sum(E[x^2] dw^2) / sum(E[x^2] w^2), 0 for an all-zero weight.
    """
    lost = total = 0.0
    bits = []
    for rows in blocks:
        block = rows.float()
        mask = choose_mask(MASKS[method](block, second_moment), pattern)
        power = block.square() if second_moment is None else block.square().mul_(second_moment)
        total += float(power.sum(dtype=torch.float64))
        lost += float(power.masked_fill_(mask, 0.0).sum(dtype=torch.float64))
        bits.append(pack_mask(mask))
    return torch.cat(bits), lost / total if total else 0.0
