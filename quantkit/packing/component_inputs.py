"""Inputs for packing a component besides its weights: the recipe, statistics, masks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from quantkit.errors import ArtefactError
from quantkit.numerics.masks import MASKS, TWO_OF_FOUR
from quantkit.packing.mask_source import ChosenMask, stored_mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from quantkit.calibration.moments.moment_files import Hessians
    from quantkit.calibration.statistics.layer_statistics import Calibration, LayerStatistics
    from quantkit.models.component_layers import Layer
    from quantkit.models.source import Component
    from quantkit.numerics.scheme import Scheme
    from quantkit.packing.weight_plan import MaskSource
    from quantkit.recipe.layer_recipes import ActivationRecipe
    from quantkit.recipe.schema import Recipe
    from quantkit.sparsity.maskfile import LayerMask, MaskSet


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs for packing one component besides its weights."""

    component: Component
    recipe: Recipe
    #: timestep edges of the statistics
    edges: tuple[float, ...]
    #: None without a calibration
    table: Mapping[str, LayerStatistics] | None
    #: SHA-256 of the weights that the statistics belong to
    digests: Mapping[str, str]
    #: layers that calibration listened to, and no prompt called
    unseen: frozenset[str]
    #: None: masks are chosen while packing
    masks: Mapping[str, LayerMask] | None
    #: None without second moments
    hessians: Hessians | None

    @classmethod
    def of(
        cls,
        component: Component,
        recipe: Recipe,
        *,
        calibration: Calibration | None,
        masks: MaskSet | None,
        hessians: Hessians | None,
    ) -> Inputs:
        """Return the recipe, calibration, masks and second moments of a component.

        Raises:
            ArtefactError: statistics or masks of no such component.
        """
        return cls(
            component,
            recipe,
            () if calibration is None else calibration.edges,
            None if calibration is None else calibration.of(component),
            {} if calibration is None else calibration.digests_of(component),
            frozenset() if calibration is None else calibration.unseen_of(component),
            None if masks is None else masks.of(component),
            hessians,
        )

    def masked(self, layers: tuple[Layer, ...]) -> frozenset[str]:
        """Return the layers that have a mask, or get one while packing.

        Raises:
            ArtefactError: masks of another model, or of a pattern that is not packed.
        """
        if self.masks is None:
            return frozenset(n.name for n in layers if self.recipe.settings(n.name).sparse)
        shapes = {layer.name: layer for layer in layers}
        for name, mask in self.masks.items():
            if name not in shapes:
                raise ArtefactError(
                    f"masks: layer {name}: not in this model; make the masks from this model"
                )
            expected, found = (shapes[name].n, -(-shapes[name].k // 8)), tuple(mask.bits.shape)
            if found != expected:
                raise ArtefactError(
                    f"masks: layer {name}: shape {found}, expected {expected}; "
                    "make the masks from this model"
                )
            if mask.pattern != TWO_OF_FOUR:
                raise ArtefactError(
                    f"masks: pattern {mask.pattern}, the packed format holds {TWO_OF_FOUR}; "
                    "choose masks of pattern 2:4"
                )
        return frozenset(self.masks)

    def expected(self, layer: Layer) -> Iterator[tuple[str, str]]:
        """Yield each artefact's name and the digest that it expects of a layer's source weight."""
        if layer.name in self.digests:
            yield "calibration", self.digests[layer.name]
        if self.masks is not None and layer.name in self.masks:
            yield "masks", self.masks[layer.name].source_digest
        if self.hessians is not None:
            digests = self.hessians.digests_of(self.component)
            if layer.name in digests:
                yield "hessians", digests[layer.name]

    def statistics(self, layer: Layer) -> LayerStatistics:
        """Return the statistics of a layer's input, which ``refuse_unfit`` has checked."""
        assert self.table is not None, "plan_layers refuses what needs a calibration"
        return self.table[layer.name]

    def activation(self, layer: Layer, scheme: Scheme) -> ActivationRecipe:
        """Return the quantization of the layer's input, with the buckets of the scheme.

        The scheme has the edges that were chosen, also where the recipe has a number or auto.
        """
        activation = self.recipe.settings(layer.name).activation
        return activation.model_copy(update={"buckets": scheme.buckets or 1})

    def mask_source(self, layer: Layer) -> MaskSource:
        """Return the source of the layer's mask, block by block of rows.

        Raises:
            InputError: the recipe's method misses its statistics.
        """
        if self.masks is not None:
            return partial(stored_mask, self.masks[layer.name])
        assert self.recipe.sparsity is not None, "plan_layers gives no pattern without the section"
        method, moment = self.recipe.sparsity.method, None
        if self.table is not None:
            from quantkit.calibration.statistics.layer_statistics import per_column

            pooled = self.statistics(layer).pooled()
            moment = per_column(pooled.second_moment[0], layer.area)
        if method != "magnitude":
            import torch

            # A method that misses its statistics says so here, before anything is written.
            MASKS[method](torch.ones(1, layer.k), moment)
        return ChosenMask(method, moment)
