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
from quantkit.calibration.hooks import _find_module
from quantkit.calibration.timestep_weights import step_weights
from quantkit.calibration.windows import kernel_order, read_columns
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
        self._draw = torch.Generator().manual_seed(seed)
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
        for columns in read_columns(self._module, values.detach(), self._where, self._draw_rows):
            self._second.addmm_(columns, columns.t(), alpha=weight)
            self._mean += weight * columns.sum(dim=1, dtype=torch.float64)
            self._weight += weight * columns.shape[1]
            self._rows += columns.shape[1]

    def hold(self, values: Tensor, weight: float, count: int) -> None:
        """Keep so many rows of each picture of what the layer multiplies, out of the sums."""

        def draw(rows: int, samples: int) -> Tensor:
            return torch.randperm(rows, generator=self._draw)[: count * samples]

        for columns in read_columns(self._module, values.detach(), self._where, draw):
            self._held.append((columns.t().to("cpu", torch.bfloat16), weight))

    def _draw_rows(self, rows: int, samples: int) -> Tensor:
        """Return which rows of so many pictures are looked at, drawn at random."""
        count = max(1, round(self._share * rows), min(rows, _LEAST_ROWS * samples))
        if count == rows:
            return torch.arange(rows)
        return torch.randperm(rows, generator=self._draw)[:count]

    def moments(self) -> Moments:
        """Return the means, columns as the kernels have them, on the CPU.

        Raises:
            NonFiniteError: NaN or Inf was read.
        """
        order = kernel_order(self._module).to(self._second.device)
        total = max(self._weight, torch.finfo(torch.float64).tiny)
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
    """Observes some layers of one denoiser while its pipeline runs."""

    def __init__(
        self,
        name: str,
        denoiser: nn.Module,
        layers: Sequence[Layer],
        settings: CalibrationRecipe,
    ) -> None:
        """Prepare to observe.

        Args:
            name: the component's, for messages.
            denoiser: the module the pipeline calls.
            layers: those to observe.
            settings: how timesteps are weighed, and what share of the rows is looked at.

        Raises:
            ModelError: a layer of the files is not the module that diffusers builds.
        """
        self._denoiser = denoiser
        self._weighting = settings.weighting
        self._modules = {layer.name: _find_module(denoiser, layer, name) for layer in layers}
        self._sums = {
            layer: _Sum(module, f"{name}.{layer}", settings.row_share, settings.seed)
            for layer, module in self._modules.items()
        }
        #: by timestep in the unit of the denoiser's calls; empty before the first one
        self._weights: dict[float, float] = {}
        self._weight = 1.0
        #: rows of each picture to keep of a call; None: calls are summed
        self._holding: int | None = None
        self.calls = 0

    def hold_out(self, count: int) -> None:
        """Keep so many rows of each picture from now on, and add nothing to the sums."""
        self._holding = count

    @contextmanager
    def attached(self, scheduler: Any, report: Callable[[int], None]) -> Iterator[None]:
        """Listen while the body runs the pipeline.

        Args:
            scheduler: its steps are weighed at the first call, when they are set.
            report: called with the number of calls so far, at every call.

        Raises:
            RecipeError: a scheduler whose steps cannot be weighed.
        """

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found = timestep_argument(self._denoiser.forward, args, kwargs)
            timestep = float(torch.as_tensor(found).double().reshape(-1)[0])
            if not self._weights:
                self._weights = _in_calls_unit(step_weights(scheduler, self._weighting), timestep)
            nearest = min(self._weights, key=lambda step: abs(step - timestep))
            self._weight = self._weights[nearest]
            self.calls += 1
            report(self.calls)

        handles = [self._denoiser.register_forward_pre_hook(begin, with_kwargs=True)]
        try:
            for layer, module in self._modules.items():
                listen = self._listener(layer)
                handles.append(module.register_forward_pre_hook(listen, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def moments(self, layer: str) -> Moments:
        """Return what a layer read.

        Raises:
            NonFiniteError: NaN or Inf.
        """
        return self._sums[layer].moments()

    def _listener(self, layer: str) -> Callable[..., None]:
        def listen(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            values = args[0] if args else kwargs["input"]
            if self._holding is None:
                self._sums[layer].add(values, self._weight)
            else:
                self._sums[layer].hold(values, self._weight, self._holding)

        return listen


def _in_calls_unit(weights: Mapping[float, float], first: float) -> dict[float, float]:
    """Return weights by the timesteps that the denoiser is called with, of which this is the first.

    The ratio to the scheduler's first one is the unit: 1 for SD, 1 / 1000 for Flux.
    """
    start = next(iter(weights))
    unit = first / start if start else 1.0
    return {unit * step: weight for step, weight in weights.items()}
