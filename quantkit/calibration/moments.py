"""Second moments of what layers read: E[x x^T] over the rows that the kernels multiply, and E[x].

A row of a convolution is one window of its input, K = kh * kw * C, channels last. A (K, K) matrix
is large, so layers are observed a group at a time; one group's matrices are all that is in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibration.held_out_rows import HeldRows
from quantkit.calibration.hooks import find_modules
from quantkit.calibration.products import (
    add_products,
    first_draw,
    first_rows,
    mirror,
    next_draw,
)
from quantkit.calibration.timestep_weights import step_weights
from quantkit.calibration.windows import kernel_order, read_rows
from quantkit.errors import NonFiniteError, RecipeError
from quantkit.models.layers import Layer
from quantkit.models.timestep import timestep_argument
from quantkit.numerics.obs import output_error
from quantkit.recipe.calibration import CalibrationRecipe

#: Rows of a picture that are looked at whatever the share: where a UNet is narrowest a picture has
#: 16 or 64, and a share of those says less than the layer has columns.
_LEAST_ROWS = 16


@dataclass(frozen=True, eq=False)
class Moments:
    """What one layer read, weighted over the timesteps."""

    #: float32 (K, K), E[x x^T], symmetric
    second: Tensor
    #: float32 (K,), E[x]
    mean: Tensor
    #: rows seen, each counted once whatever it weighed
    rows: int
    #: of other prompts; None: there were too few
    held: HeldRows | None = None

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
                f"wanted at most {memory / 2**30:g}; give more memory",
                fields=("memory",),
            )
        if need > free:
            groups.append([])
            free = memory
        groups[-1].append(layer)
        free -= need
    return tuple(map(tuple, groups))


class _Sum:
    """The running sums of one layer, on the device."""

    def __init__(self, module: nn.Module, where: str, share: float, seed: int) -> None:
        self._module = module
        self._where = where
        self._share = share
        self._draw = first_draw(seed)
        weight = module.get_parameter("weight")
        k = weight[0].numel()
        self._second = torch.zeros(k, k, device=weight.device)
        self._mean = torch.zeros(k, device=weight.device, dtype=torch.float64)
        self._weight = 0.0
        self._rows = 0
        #: rows (R, K) and what each weighs
        self._held: list[tuple[Tensor, float]] = []

    def add(self, values: Tensor, weight: float) -> None:
        """Add what the layer multiplies to the sums."""
        for rows in read_rows(self._module, values.detach(), self._where, self._draw_rows):
            add_products(self._second, rows, weight)
            self._mean.add_(rows.sum(dim=0, dtype=torch.float64), alpha=weight)
            self._weight += weight * len(rows)
            self._rows += len(rows)

    def hold(self, values: Tensor, weight: float, count: int) -> None:
        """Keep so many rows of each picture of what the layer multiplies, out of the sums."""

        def draw(rows: int, samples: int) -> Tensor:
            return self._drawn(rows, count * samples)

        for rows in read_rows(self._module, values.detach(), self._where, draw):
            self._held.append((rows.to("cpu", torch.bfloat16), weight))

    def _draw_rows(self, rows: int, samples: int) -> Tensor | None:
        """Return which rows of so many pictures are looked at, drawn at random; None: all."""
        count = max(1, round(self._share * rows), min(rows, _LEAST_ROWS * samples))
        return None if count == rows else self._drawn(rows, count)

    def _drawn(self, rows: int, count: int) -> Tensor:
        self._draw = next_draw(self._draw, rows)
        return first_rows(self._draw, count, self._second.device)

    def moments(self) -> Moments:
        """Return the means, columns as the kernels have them, on the CPU.

        Raises:
            NonFiniteError: NaN or Inf was read.
        """
        order = kernel_order(self._module).to(self._second.device)
        total = max(self._weight, torch.finfo(torch.float64).tiny)
        mirror(self._second)
        second = (self._second / total)[order][:, order].cpu()
        mean = (self._mean / total)[order].float().cpu()
        held = self._held_rows()
        if not all(bool(x.isfinite().all()) for x in (second, *([held.rows] if held else []))):
            raise NonFiniteError(
                f"{self._where}: NaN or Inf in its input; if the model overflows in float16, "
                "calibrate on the device cpu, which computes in float32",
                fields=("device",),
            )
        return Moments(second, mean, self._rows, held)

    def _held_rows(self) -> HeldRows | None:
        if not self._held:
            return None
        rows = torch.cat([rows for rows, _ in self._held])[:, kernel_order(self._module)]
        weights = [torch.full((len(rows),), weight) for rows, weight in self._held]
        return HeldRows(rows.contiguous(), torch.cat(weights))


class MomentCollector:
    """Observes some layers of a denoiser, or of a text encoder, while its pipeline runs."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        layers: Sequence[Layer],
        settings: CalibrationRecipe,
    ) -> None:
        """Prepare to observe.

        Args:
            name: the component's, for messages.
            model: the module that the pipeline calls.
            layers: those to observe.
            settings: how timesteps are weighed, and what share of the rows is looked at.

        Raises:
            ModelError: a layer of the files is not the module that was built.
        """
        self._model = model
        self._weighting = settings.weighting
        self._modules = find_modules(model, layers, name)
        self._sums = {
            layer: _Sum(module, f"{name}.{layer}", settings.row_share, settings.seed)
            for layer, module in self._modules.items()
        }
        #: by timestep in the unit of the denoiser's calls; empty before the first one
        self._weights: dict[float, float] = {}
        self._weight = 1.0
        #: of a text encoder's call, the rows that are looked at
        self._tokens: TokenRows | None = None
        #: rows of each picture to keep of a call; None: calls are summed
        self._holding: int | None = None
        self.calls = 0

    def hold_out(self, count: int) -> None:
        """Keep so many rows of each picture from now on, and add nothing to the sums."""
        self._holding = count

    @contextmanager
    def attached(self, scheduler: Any | None, report: Callable[[int], None]) -> Iterator[None]:
        """Listen while the body runs the pipeline.

        Args:
            scheduler: its steps are weighed at the first call, when they are set; None: of a text
                encoder, whose calls weigh the same, but for repeated tokens.
            report: called with the number of calls so far, at every call.

        Raises:
            RecipeError: a scheduler whose steps cannot be weighed.
        """

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if scheduler is None:
                ids = kwargs.get("input_ids", args[0] if args else None)
                self._tokens = None if ids is None else token_rows(ids)
            else:
                found = timestep_argument(self._model.forward, args, kwargs)
                self._weigh(float(torch.as_tensor(found).double().reshape(-1)[0]), scheduler)
            self.calls += 1
            report(self.calls)

        handles = [self._model.register_forward_pre_hook(begin, with_kwargs=True)]
        try:
            for layer, module in self._modules.items():
                listen = self._listener(layer)
                handles.append(module.register_forward_pre_hook(listen, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _weigh(self, timestep: float, scheduler: Any) -> None:
        """Find what the call at a timestep weighs."""
        if not self._weights:
            self._weights = _in_calls_unit(step_weights(scheduler, self._weighting), timestep)
        nearest = min(self._weights, key=lambda step: abs(step - timestep))
        self._weight = self._weights[nearest]

    def moments(self, layer: str) -> Moments:
        """Return what a layer read.

        Raises:
            NonFiniteError: NaN or Inf.
        """
        return self._sums[layer].moments()

    def _listener(self, layer: str) -> Callable[..., None]:
        def listen(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            values = args[0] if args else kwargs["input"]
            if self._tokens is not None:
                values = self._tokens.of(values)
            if self._holding is None:
                self._sums[layer].add(values, self._weight)
            else:
                self._sums[layer].hold(values, self._weight, self._holding)

        return listen


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Which rows of what a text encoder's layers read are looked at."""

    #: (batch, tokens)
    shape: torch.Size
    #: into batch * tokens
    chosen: Tensor

    def of(self, values: Tensor) -> Tensor:
        """Return these rows of (batch, tokens, K), as (1, rows, K); other shapes as they are."""
        if values.shape[:-1] != self.shape:
            return values
        return values.flatten(0, 1)[self.chosen.to(values.device)].unsqueeze(0)


def token_rows(ids: Tensor) -> TokenRows:
    """Return the rows of all tokens that do not repeat the one before, and as many of the others.

    Prompts are filled up with one token: 20 of T5's 512 may be of the text, and rounding would be
    fitted to the filling. It is not left out, for denoisers read its embeddings, too.

    Args:
        ids: integers (batch, tokens).
    """
    repeats = torch.zeros_like(ids, dtype=torch.bool)
    repeats[:, 1:] = ids[:, 1:] == ids[:, :-1]
    found = []
    for row, repeated in enumerate(repeats.cpu()):
        own, others = (mask.nonzero().flatten() for mask in (~repeated, repeated))
        places = torch.linspace(0, max(len(others) - 1, 0), min(len(own), len(others)))
        found.append(torch.cat([own, others[places.round().long()]]) + row * ids.shape[1])
    return TokenRows(ids.shape, torch.cat(found))


def _in_calls_unit(weights: Mapping[float, float], first: float) -> dict[float, float]:
    """Return weights by the timesteps that the denoiser is called with, of which this is the first.

    The ratio to the scheduler's first one is the unit: 1 for SD, 1 / 1000 for Flux.
    """
    start = next(iter(weights))
    unit = first / start if start else 1.0
    return {unit * step: weight for step, weight in weights.items()}
