"""The planned treatment of each layer, from the recipe, the family and the layer's shape."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from quantkit.errors import RecipeError, ShapeError
from quantkit.models.component_layers import Layer, list_layers
from quantkit.models.family import Family
from quantkit.models.source import Component, StoredBlocks
from quantkit.numerics.formats import NumberFormat, find_format
from quantkit.numerics.granularity import Granularity, PerGroup, parse_granularity
from quantkit.numerics.masks import TWO_OF_FOUR, Pattern, parse_pattern
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.recipe.fields import matches
from quantkit.recipe.layer_recipes import ActivationRecipe, WeightRecipe
from quantkit.recipe.schema import LayerSettings, Recipe

#: K of one dense FP8 matrix instruction, and of one sparse one. Source: RDNA4 ISA (V_WMMA
#: 16x16x16, V_SWMMAC 16x16x32).
DENSE_K, SPARSE_K = 16, 32

#: Why a layer that calibration listened to stays in 16 bit, and gets no mask.
UNSEEN = "no prompt of the calibration calls it"


@dataclass(frozen=True)
class LayerPlan:
    """The planned treatment of one layer."""

    layer: Layer
    #: None: it stays in 16 bit
    scheme: Scheme | None
    #: why it stays in 16 bit, or is dense or in another format though the recipe asks otherwise;
    #: else ""
    reason: str
    #: how its weight becomes codes; of the layers that are packed
    weight: WeightRecipe


def plan_layers(
    component: Component,
    recipe: Recipe,
    *,
    calibrated: bool,
    masked: Collection[str],
    edges: tuple[float, ...] = (),
) -> tuple[LayerPlan, ...]:
    """Return the treatment of every layer, in the order of the files.

    Args:
        component: the denoiser.
        recipe: the recipe to apply.
        calibrated: statistics are at hand.
        masked: module paths that have a mask.
        edges: the timestep edges of the statistics.

    Raises:
        RecipeError: static activations or smoothing without statistics, buckets that the
            statistics do not have, a mask pattern that the packed format does not hold.
        ShapeError: a group size that does not divide a layer's K (or C).
    """
    layers = list_layers(component)
    kept = frozenset(masked)
    context = _Context(component.family, recipe, calibrated, kept, edges, component.blocks)
    return tuple(context.treat(layer) for layer in layers)


def kept_reason(
    layer: Layer,
    family: Family,
    recipe: Recipe,
    stored: Collection[str] = (),
    *,
    calibrated: bool = False,
) -> str | None:
    """Return why the layer stays in 16 bit, or None when it is packed.

    Args:
        layer: of a component of the family.
        family: what it keeps.
        recipe: what it keeps, and packs all the same.
        stored: module paths of layers that a .gguf file holds in blocks, which recipes that ask
            for blocks leave as they are: 16 bit would be larger, and no better.
        calibrated: statistics are at hand, so that the error of doubtful layers decides later.
    """
    if matches(layer.name, recipe.not_layers):
        return "no layer, by the recipe"
    settings = recipe.settings(layer.name)
    if settings.keep is True or _is_excluded(layer, recipe):
        return "kept by the recipe"
    block = find_format(settings.weight.format).block
    if block and layer.name in stored:
        return None
    reason = family.keep_reason(layer.name, layer.shape) if settings.keep is None else None
    # Its error on real inputs says more than its place does; packing measures it.
    judged = calibrated and settings.activation.mode != "none" and _is_doubtful(layer, family)
    if reason is not None and not judged:
        return reason
    return (_block_reason(layer, block) if block else "") or length_reason(layer) or None


def is_packed_alone(layer: Layer, family: Family, recipe: Recipe) -> bool:
    """Return whether the family keeps the layer in 16 bit, but the recipe packs its weight."""
    if recipe.kept is None or recipe.settings(layer.name).keep is not None:
        return False
    if _is_excluded(layer, recipe):
        return False
    block = find_format(recipe.kept.format).block
    if block and _block_reason(layer, block):
        return False
    return family.packs_alone(layer.name, layer.shape) and layer.k % DENSE_K == 0


def _is_excluded(layer: Layer, recipe: Recipe) -> bool:
    """Tell whether the layer is excluded, whatever the recipe says of its name."""
    if matches(layer.name, recipe.not_layers):
        return True
    return layer.kind == "conv2d" and not recipe.convolutions


def is_judged(layer: Layer, family: Family, recipe: Recipe) -> bool:
    """Return whether the layer's error on real inputs decides if it is packed at all."""
    return recipe.settings(layer.name).keep is None and _is_doubtful(layer, family)


def _is_doubtful(layer: Layer, family: Family) -> bool:
    return family.is_doubtful(layer.name, layer.shape)


def length_reason(layer: Layer) -> str:
    """Return why the kernels cannot read rows of the layer's length, if they cannot."""
    if layer.k % DENSE_K == 0:
        return ""
    window = f"{layer.channels} channels x {layer.area} taps, " if layer.area > 1 else ""
    return f"{window}K {layer.k} is not a multiple of {DENSE_K}, which the kernels need"


def _block_reason(layer: Layer, block: int) -> str:
    """Return why a weight cannot be cut into blocks along K as GGML cuts it, if it cannot."""
    if layer.area > 1:
        return f"a window of {layer.area} taps: GGML's blocks would run over them"
    if layer.k % block:
        return f"K {layer.k} is not a multiple of {block}, the length of a block"
    return ""


def dense_reason(layer: Layer, pattern: Pattern) -> str | None:
    """Return why the layer cannot be sparse, or None when it can."""
    if layer.channels % pattern.m:
        return f"{layer.channels} channels are not a multiple of {pattern.m}"
    if layer.k % SPARSE_K:
        return f"K {layer.k} is not a multiple of {SPARSE_K}, which sparse kernels need"
    return None


def factor_reason(layer: Layer, fmt: NumberFormat) -> str:
    """Return why factors of a format do not divide the layer's rows; empty when they do."""
    columns = fmt.subscale_group
    if columns and layer.channels % columns:
        return f"{layer.channels} channels are not a multiple of {columns}"
    return ""


def choose_edges(activation: ActivationRecipe, edges: tuple[float, ...]) -> tuple[float, ...]:
    """Return the edges that static scales use: some of those that the statistics have.

    Args:
        activation: how many buckets, or the edges themselves; auto starts from all of them, of
            which the layer's statistics decide, elsewhere.
        edges: ascending, those of the statistics.

    Raises:
        RecipeError: the statistics cannot be pooled into these buckets.
    """
    expected = activation.buckets
    if expected == "auto":
        return edges
    if isinstance(expected, tuple):
        if missing := [edge for edge in expected if edge not in edges]:
            raise RecipeError(
                f"activation.buckets: edge {missing[0]:g} is not one of the calibration's edges "
                f"{_listed(edges)}; choose among them"
            )
        return expected
    stored = len(edges) + 1
    if stored % expected:
        raise RecipeError(
            f"activation.buckets {expected}: the calibration has {stored} buckets, which cannot be "
            f"merged into {expected}; set it to auto or to a divisor of {stored}, or set "
            f"calibration.buckets to {expected} for 'quantkit calibrate model MODEL -o OUTPUT'",
            fields=("calibration.buckets",),
        )
    step = stored // expected
    return edges[step - 1 :: step]


@dataclass(frozen=True)
class _Context:
    family: Family
    recipe: Recipe
    calibrated: bool
    masked: frozenset[str]
    edges: tuple[float, ...]
    #: layers that a .gguf file holds in blocks
    stored: Mapping[str, StoredBlocks]

    def treat(self, layer: Layer) -> LayerPlan:
        settings = self.recipe.settings(layer.name)
        reason = kept_reason(
            layer, self.family, self.recipe, self.stored, calibrated=self.calibrated
        )
        if reason is not None and is_packed_alone(layer, self.family, self.recipe):
            return self._alone(layer)
        if reason is not None:
            return LayerPlan(layer, None, reason, settings.weight)
        sparsity, why_dense = self._sparsity(layer, settings)
        activation = Activation(settings.activation.mode)
        weight, why_wider = _format_of(layer, settings.weight)
        self._refuse_what_cannot_be(layer, weight, settings.activation, sparsity)
        token_below, why_static = self._token_below(settings.activation)
        if weight.block and layer.name in self.stored:
            weight = find_format(self.stored[layer.name].format)
        scheme = Scheme(
            weight=weight,
            granularity=_granularity(layer, settings.weight),
            sparsity=sparsity,
            activation=activation,
            buckets=self._buckets(layer, settings.activation),
            smooth=self._smooth(layer, activation),
            token_below=token_below,
        )
        return LayerPlan(layer, scheme, why_dense or why_wider or why_static, settings.weight)

    def _alone(self, layer: Layer) -> LayerPlan:
        """Return the plan of a layer of the family's that is packed, its input in 16 bit."""
        assert self.recipe.kept is not None
        weight, why_wider = _format_of(layer, self.recipe.kept)
        granularity = _granularity(layer, self.recipe.kept)
        scheme = Scheme(weight, granularity, sparsity=None, activation=Activation.NONE)
        return LayerPlan(layer, scheme, why_wider, self.recipe.kept)

    def _refuse_what_cannot_be(
        self,
        layer: Layer,
        fmt: NumberFormat,
        activation: ActivationRecipe,
        sparsity: Pattern | None,
    ) -> None:
        """Refuse settings that are impossible for the layer, or harmful without a warning."""
        if fmt.block and (sparsity is not None or activation.mode != "none"):
            raise RecipeError(
                f"{layer.name}: weight.format {fmt.name} is for weights alone; set "
                "activation.mode: none, and drop sparsity"
            )
        if not fmt.is_integer or activation.mode == "none":
            return
        if not self.calibrated and not self.recipe.data_free:
            raise RecipeError(
                f"{layer.name}: {fmt.name} without statistics: one channel that is far larger than "
                "the rest takes all steps of an int8 input; give a calibration, take a recipe in "
                "FP8, or set data_free: true",
                fields=("calibration",),
            )

    def _sparsity(self, layer: Layer, settings: LayerSettings) -> tuple[Pattern | None, str]:
        """Return the pattern or None, and why a layer with or without a mask is dense."""
        rule = self.recipe.sparsity
        pattern = parse_pattern(rule.pattern) if rule else TWO_OF_FOUR
        refusal = dense_reason(layer, pattern)
        if layer.name not in self.masked:
            return None, f"dense: {refusal or 'no mask was chosen'}" if settings.sparse else ""
        if refusal:
            return None, f"dense: {refusal}"
        if pattern != TWO_OF_FOUR:
            raise RecipeError(
                f"sparsity.pattern {pattern}: the packed format only has {TWO_OF_FOUR}; set it to "
                "2:4"
            )
        return pattern, ""

    def _buckets(self, layer: Layer, activation: ActivationRecipe) -> tuple[float, ...]:
        if activation.mode != "static":
            return ()
        if not self.calibrated:
            raise RecipeError(
                f"{layer.name}: activation.mode static needs statistics; give a calibration, or "
                "set activation.mode: token",
                fields=("calibration",),
            )
        return choose_edges(activation, self.edges)

    def _token_below(self, activation: ActivationRecipe) -> tuple[float | None, str]:
        """Return from where on rows have scales of their own, and why nowhere if it was asked for.

        Some schedulers (EDM's) call a UNet with the logarithm of the noise: all steps are below.
        """
        start = activation.token_below
        if start is None or not self.edges or start <= self.edges[0]:
            return start, ""
        first = f"the calibration's first bucket ends at timestep {self.edges[0]:g}"
        return None, f"static in all steps: token_below is {start:g}, but {first}"

    def _smooth(self, layer: Layer, activation: Activation) -> bool:
        if self.recipe.smooth is None or activation is Activation.NONE:
            return False
        if not self.calibrated:
            raise RecipeError(
                f"{layer.name}: smooth needs statistics; give a calibration, or drop smooth",
                fields=("calibration",),
            )
        return True


def _format_of(layer: Layer, weight: WeightRecipe) -> tuple[NumberFormat, str]:
    """Return the format of a layer's weight, and why it is int8 though int4 was asked for."""
    fmt = find_format(weight.format)
    reason = factor_reason(layer, fmt)
    return (fmt.byte_format, f"{fmt.byte_format.name}: {reason}") if reason else (fmt, "")


def _granularity(layer: Layer, weight: WeightRecipe) -> Granularity:
    granularity = parse_granularity(weight.granularity)
    if isinstance(granularity, PerGroup) and layer.channels % granularity.size:
        axis = "C" if layer.kind == "conv2d" else "K"
        raise ShapeError(
            f"{layer.name}: {axis} {layer.channels} is not a multiple of group size "
            f"{granularity.size}; use granularity channel, another size, or an override"
        )
    return granularity


def _listed(edges: tuple[float, ...]) -> str:
    return ", ".join(f"{edge:g}" for edge in edges) or "(none)"
