"""Fitting one masked layer to what its teacher answers, from what the student reads."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from quantkit.errors import NonFiniteError
from quantkit.numerics.least_squares import EquationSums, solve_rows

#: Elements of the windows that are unfolded at a time: 64 MiB in float32.
_WINDOW_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Fitting:
    """How layers are fitted."""

    #: pairs of an input row and a target that a layer of K inputs is fitted to: at least so many,
    pairs: int = 8192
    #: and at least so many times K
    pairs_per_input: int = 4
    #: however little time there is
    least: int = 1024
    #: pull towards the start, as a share of the mean power of an input
    ridge: float = 1e-2
    #: of conjugate gradients
    steps: int = 30


#: Of conjugate gradients, however little time there is.
_FEWEST_STEPS = 6


@dataclass(frozen=True)
class Effort:
    """What one layer is fitted with."""

    pairs: int
    #: of conjugate gradients
    steps: int


class Throughput:
    """How fast this machine fits layers, from those that it fitted."""

    def __init__(self, how: Fitting) -> None:
        """Know nothing yet."""
        self._how = how
        self._seconds = self._products = 0.0

    def effort(self, layer: nn.Module, seconds: float | None) -> Effort:
        """Return what a layer can have in the time; None: as much as it wants."""
        n, k = _size(layer)
        full = Effort(max(self._how.pairs, self._how.pairs_per_input * k), self._how.steps)
        if seconds is None or not self._products:
            return full
        share = seconds * self._products / self._seconds / _products(n, k, full)
        if share >= 1:
            return full
        return Effort(
            max(self._how.least, int(share * full.pairs)),
            max(_FEWEST_STEPS, int(share * full.steps)),
        )

    def add(self, layer: nn.Module, effort: Effort, seconds: float) -> None:
        """Count a layer that was fitted."""
        self._products += _products(*_size(layer), effort)
        self._seconds += seconds


def _products(n: int, k: int, effort: Effort) -> float:
    """Return the multiplications of a fit: the moment, then a product with it a step."""
    return float(k**2 * (effort.pairs + effort.steps * n))


def _size(layer: nn.Module) -> tuple[int, int]:
    weight = layer.get_parameter("weight")
    return len(weight), weight[0].numel()


@dataclass(frozen=True, eq=False)
class Examples:
    """What a layer met in one pass, B samples."""

    #: what the student reads, (B, ..., K) or (B, C, H, W)
    x: Tensor
    #: what the teacher answers, (B, ..., N) or (B, N, H', W')
    target: Tensor


@dataclass(frozen=True, eq=False)
class Fit:
    """What a layer became."""

    #: float32, of the layer's weight's shape, zero outside the mask
    weight: Tensor
    #: float32 (N,), or None for a layer without one
    bias: Tensor | None
    #: share of the power of the teacher's answers that the layer missed, with the best bias
    before: float
    after: float


def fit_layer(
    layer: nn.Module,
    examples: Examples,
    mask: Tensor,
    *,
    ridge: float,
    effort: Effort,
    generator: Generator,
) -> Fit:
    """Return the kept weights and the bias that come nearest to the target.

    Args:
        layer: a Linear, or a Conv2d of one group padded with zeros; its weight is where to start.
        examples: what to fit to.
        mask: bool of the weight's shape, which weights are kept.
        ridge: pull towards the start, as a share of the mean power of an input.
        effort: how many of the examples, how exactly.
        generator: on the CPU, so that every device draws the same examples.

    Raises:
        NonFiniteError: NaN or Inf in the input or the target.
    """
    start = layer.get_parameter("weight").detach()
    rows, kept = start.flatten(1).float(), mask.flatten(1)
    sums = EquationSums(rows.shape[1], len(rows), rows.device)
    for columns, targets in _pairs(layer, examples, effort.pairs, generator):
        sums.add(columns, targets)
    equations = sums.equations(bias=getattr(layer, "bias", None) is not None)
    if not bool(equations.moment.isfinite().all() and equations.cross.isfinite().all()):
        raise NonFiniteError("NaN or Inf in what the layer reads, or in what its teacher answers")
    fitted = solve_rows(equations, rows, kept, ridge=ridge, steps=effort.steps)
    return Fit(
        fitted.reshape(start.shape),
        equations.bias(fitted),
        equations.error(rows * kept),
        equations.error(fitted),
    )


def _pairs(
    layer: nn.Module, examples: Examples, wanted: int, generator: Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what the layer multiplies and what it should give, some samples at a time.

    Args:
        layer: the layer.
        examples: of which at least ``wanted`` pairs are drawn, evenly over the samples, or all.
        wanted: how many.
        generator: draws.

    Yields:
        float32 (K, T) inputs and (N, T) targets. Inputs are in the order of the
        flattened weight: a convolution's channels first.
    """
    x, y = examples.x, examples.target
    if isinstance(layer, nn.Conv2d):
        y = y.flatten(2)
    else:
        x = x.reshape(len(x), -1, x.shape[-1]).transpose(1, 2)
        y = y.reshape(len(y), -1, y.shape[-1]).transpose(1, 2)
    places = y.shape[2]
    some = min(places, -(-wanted // len(x)))
    k = layer.get_parameter("weight")[0].numel()
    step = max(1, _WINDOW_ELEMENTS // (k * places))
    for first in range(0, len(x), step):
        part = slice(first, min(first + step, len(x)))
        drawn = torch.rand(part.stop - first, places, generator=generator).argsort(dim=1)[:, :some]
        where = drawn.to(x.device) if some < places else None
        yield _drawn(_windows(layer, x[part]), where), _drawn(y[part], where)


def _windows(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the rows that a layer multiplies, (b, K, places)."""
    if not isinstance(layer, nn.Conv2d):
        return x
    # The pads of each side, which is how torch resolves padding="same".
    padded = functional.pad(x.float(), layer._reversed_padding_repeated_twice)  # noqa: SLF001  named nowhere else
    return functional.unfold(padded, layer.kernel_size, layer.dilation, 0, layer.stride)


def _drawn(rows: Tensor, places: Tensor | None) -> Tensor:
    """Return some places of (b, K, places), all in one row each: float32 (K, b * places)."""
    if places is not None:
        rows = rows.gather(2, places.unsqueeze(1).expand(-1, rows.shape[1], -1))
    return rows.float().transpose(0, 1).flatten(1)
