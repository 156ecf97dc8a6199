"""Second moments of what layers read: E[x x^T] over the rows that the kernels multiply, and E[x].

A row of a convolution is one window of its input, K = kh * kw * C, channels last. A (K, K) matrix
is large, so layers are observed a group at a time; one group's matrices are all that is in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibration.moments.held_out_rows import HeldRows
from quantkit.calibration.statistics.fields import Tensors
from quantkit.errors import RecipeError
from quantkit.models.component_layers import Layer
from quantkit.numerics.obs import output_error


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of what one layer read, weighted over the timesteps."""

    #: float32 (K, K), E[x x^T], symmetric
    second: Tensor
    #: float32 (K,), E[x]
    mean: Tensor
    #: rows seen, each counted once whatever it weighed
    rows: int
    #: of other prompts; None: there were too few
    held: HeldRows | None = None

    @classmethod
    def of(cls, tensors: Tensors, rows: int) -> "Moments":
        """Return the moments of tensors by name, of so many rows."""
        held = None
        if "held_rows" in tensors:
            held = HeldRows(tensors["held_rows"], tensors["held_weights"])
        return cls(tensors["second"], tensors["mean"], rows, held)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, those of ``FIELDS``."""
        found = {"second": self.second, "mean": self.mean}
        if self.held is None:
            return found
        return {**found, "held_rows": self.held.rows, "held_weights": self.held.weights}

    def to(self, device: torch.device) -> "Moments":
        """Return them on a device."""
        held = None if self.held is None else self.held.to(device)
        return Moments(self.second.to(device), self.mean.to(device), self.rows, held)

    def power(self, weight: Tensor, bias: Tensor | None = None) -> float:
        """Return the mean of |W x + b|^2: on the rows that were held out, or else on the moments.

        Args:
            weight: float32 (N, K).
            bias: float32 (N,), or None for 0.
        """
        if self.held is not None:
            return self.held.power(weight, bias)
        middle = weight @ self.mean
        if bias is not None:
            middle += bias
        return output_error(weight, self.covariance) + float(middle.square().sum())

    @property
    def covariance(self) -> Tensor:
        """E[x x^T] - E[x] E[x]^T, float32 (K, K)."""
        return self.second.addr(self.mean, self.mean, alpha=-1)

    def smoothed(self, factor: Tensor) -> "Moments":
        """Return the moments of the input multiplied by ``factor`` (K,)."""
        second = self.second * factor * factor.unsqueeze(1)
        held = None if self.held is None else self.held.smoothed(factor)
        return Moments(second, self.mean * factor, self.rows, held)


def moment_bytes(layer: Layer) -> int:
    """Return the memory that observing a layer takes: its matrix in float32."""
    return 4 * layer.k**2


def group_layers(layers: Sequence[Layer], memory: float) -> tuple[tuple[Layer, ...], ...]:
    """Cut the layers, in their order, into groups whose matrices fit.

    Args:
        layers: to observe.
        memory: bytes.

    Raises:
        RecipeError: one layer alone does not fit.
    """
    groups: list[list[Layer]] = []
    free = 0.0
    for layer in layers:
        need = moment_bytes(layer)
        if need > memory:
            raise RecipeError(
                f"{layer.name}: K {layer.k}: its second moment takes {need / 2**30:.3g} GiB, "
                f"expected at most {memory / 2**30:g}; give more memory",
                fields=("memory",),
            )
        if need > free:
            groups.append([])
            free = memory
        groups[-1].append(layer)
        free -= need
    return tuple(map(tuple, groups))
