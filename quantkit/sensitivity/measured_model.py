"""The subject of a sensitivity: a denoiser, its recipe, and statistics of its inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from quantkit.calibration.observing.collect import layers_to_pack
from quantkit.calibration.statistics.attention_statistics import AttentionStatistics
from quantkit.calibration.statistics.layer_statistics import Calibration
from quantkit.errors import ArtefactError, ModelError, RecipeError
from quantkit.models.component_layers import Layer
from quantkit.models.source import Component, Model
from quantkit.numerics.attention_limits import takes_heads
from quantkit.numerics.attention_scales import AttentionScales
from quantkit.packing.attention_plan import static_scales
from quantkit.recipe.attention_recipe import AttentionRecipe
from quantkit.recipe.fields import matches
from quantkit.recipe.schema import Recipe
from quantkit.sensitivity.local_error import StoredInputs, read_weight
from quantkit.sensitivity.sensitivity_file import ATTENTION, Sensitivity
from quantkit.sensitivity.simulate import Substitute
from quantkit.sensitivity.treated_layer import (
    PrunedWeight,
    column_moments,
    on_device,
    treat_input,
    treat_weight,
)
from quantkit.sensitivity.treatments import BY_NAME
from quantkit.sparsity.sparsegpt import Surgeon


@dataclass(frozen=True, eq=False)
class MeasuredModel:
    """One denoiser, its recipe, and the statistics of its inputs."""

    model: Model
    component: Component
    recipe: Recipe
    calibration: Calibration
    #: those that can be packed
    layers: Mapping[str, Layer]
    #: second moments; None: nothing is measured under treatments that need them
    surgeon: Surgeon | None = None

    @classmethod
    def of(
        cls,
        model: Model,
        recipe: Recipe,
        calibration: Calibration,
        surgeon: Surgeon | None = None,
    ) -> "MeasuredModel":
        """Return the model, its weights checked against the calibration's.

        Layers that no prompt called are left out: what they lose, nobody has seen.

        Raises:
            ArtefactError: the calibration is of other weights, or lacks a layer.
            ModelError: more than one denoiser.
            RecipeError: smoothing, which no treatment has.
        """
        if recipe.smooth is not None:
            raise RecipeError("smooth: sensitivity cannot measure it; drop smooth")
        if len(model.components) != 1:
            names = ", ".join(component.name for component in model.components)
            raise ModelError(
                f"{model.path}: found the denoisers {names}, and sensitivity can only measure a "
                "pipeline with one"
            )
        component = model.components[0]
        # No input of what the family keeps is quantized, so there is nothing to choose.
        compared = recipe.model_copy(update={"kept": None})
        unseen = calibration.unseen_of(component)
        layers = {
            layer.name: layer
            for layer in layers_to_pack(component, compared)
            if layer.name not in unseen
            and (surgeon is None or not surgeon.hessians.is_unseen(component, layer))
        }
        stored = calibration.of(component)
        for name in layers:
            if name not in stored:
                raise ArtefactError(
                    f"calibration: no statistics of {name}; run 'quantkit calibrate model' again"
                )
        return cls(model, component, recipe, calibration, layers, surgeon)

    def inputs(self, layer: str) -> StoredInputs:
        """Return the statistics of a layer's input."""
        return StoredInputs(self.calibration.of(self.component)[layer], self.calibration.edges)

    @property
    def attention_settings(self) -> AttentionRecipe:
        """The recipe's attention section, or its defaults."""
        return self.recipe.attention or AttentionRecipe()

    @property
    def attention(self) -> dict[str, AttentionStatistics]:
        """The attention modules that can be on codes, in the order of the model."""
        settings = self.attention_settings
        return {
            name: statistics
            for name, statistics in self.calibration.attention_of(self.component).items()
            if int(statistics.call_keys.max()) >= settings.min_keys
            and takes_heads(statistics.columns)
            and matches(name, settings.layers)
            and not matches(name, settings.exclude)
        }

    def attention_scales(self, device: torch.device) -> dict[str, AttentionScales | None]:
        """Return the static scales of these modules; None where each call measures its own."""
        settings = self.attention_settings
        if settings.scales == "dynamic":
            return dict.fromkeys(self.attention)
        return {
            name: _on_device(static_scales(statistics, settings.margin), device)
            for name, statistics in self.attention.items()
        }

    def refuse_others(self, sensitivity: Sensitivity) -> None:
        """Refuse a sensitivity that was measured on other weights or layers.

        Raises:
            ArtefactError: naming the first layer that differs.
        """
        digests = self.calibration.digests_of(self.component)
        for module in sensitivity.attention:
            if module.name not in self.attention:
                raise ArtefactError(
                    f"sensitivity: no attention statistics of {module.name}; measure it again"
                )
        for layer in sensitivity.layers:
            if layer.kind == ATTENTION:
                continue
            if layer.name not in self.layers or digests.get(layer.name) != layer.digest:
                raise ArtefactError(
                    f"sensitivity: {layer.name} had other weights or is not in this model; "
                    "measure it again"
                )

    def substitute(self, layer: str, treatment: str, device: torch.device) -> Substitute:
        """Return the substitutes of a layer under a treatment.

        Raises:
            RecipeError: it needs second moments, and there are none.
        """
        found, settings, inputs = (
            self.layers[layer],
            self.recipe.settings(layer),
            self.inputs(layer),
        )
        moments = column_moments(inputs.statistics, found.area).to(device)
        chosen = BY_NAME[treatment]
        weight = read_weight(found, device)
        if chosen.updates:
            if self.surgeon is None:
                raise RecipeError(
                    f"{layer}: {treatment} needs second moments; give those of 'quantkit "
                    "calibrate hessian'",
                    fields=("hessians",),
                )
            seen = self.surgeon.moments(self.component, found)
            rows = PrunedWeight.of(weight, seen, bias=found.bias).packed(chosen, settings)
        else:
            rows = treat_weight(weight, chosen, settings, moments)
        cast = treat_input(chosen, settings.activation, inputs.statistics, inputs.edges)
        return Substitute.of(rows, found.shape, on_device(cast, device))


def _on_device(scales: AttentionScales, device: torch.device) -> AttentionScales:
    return AttentionScales(*(getattr(scales, field.name).to(device) for field in fields(scales)))
