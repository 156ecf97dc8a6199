"""The 16-bit model of an export that quantizes on the way."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from quantkit.calibration.moments.moment_files import Hessians
from quantkit.calibration.moments.moments import Moments
from quantkit.interchange.denoiser import Denoiser, dense_denoiser
from quantkit.models.component_layers import Layer, list_layers
from quantkit.models.source import Component
from quantkit.recipe.schema import Recipe


@dataclass(frozen=True, eq=False)
class Reference:
    """A 16-bit component, and what is known of it."""

    component: Component
    #: that it is quantized by
    recipe: Recipe
    #: second moments; None: none were given
    hessians: Hessians | None
    #: rotations that were chosen, by the names of the weights
    rotations: dict[tuple[str, ...], int] = field(default_factory=dict)

    @cached_property
    def denoiser(self) -> Denoiser:
        """Its tensors."""
        return dense_denoiser(self.component)

    def rows(self, name: str) -> Tensor:
        """Return a weight, float32 (N, K).

        Raises:
            NonFiniteError: NaN or infinity.
        """
        return self.denoiser.read(name).float()

    def moments(self, name: str) -> Moments | None:
        """Return the second moments of a layer's input; None: none were given, or it had none.

        Raises:
            ArtefactError: damaged, of another model, or without this layer.
        """
        if self.hessians is None:
            return None
        layer, found = self._layers[name.removesuffix(".weight")], self.hessians
        if layer.name in found.digests_of(self.component) and found.is_unseen(
            self.component, layer
        ):
            return None
        return found.read(self.component, layer)

    def corrects_bias(self, names: Sequence[str]) -> bool:
        """Tell whether biases make up for the rounding of the layers' packed codes."""
        biased = any(self._layers[name.removesuffix(".weight")].bias for name in names)
        return self.recipe.bias_correction and biased

    @cached_property
    def _layers(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in list_layers(self.component)}
