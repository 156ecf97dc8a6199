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
from torch.nn import functional

from quantkit.calibration.hooks import _find_module
from quantkit.calibration.weighting import step_weights
from quantkit.errors import ModelError, NonFiniteError, RecipeError
from quantkit.models.layers import Layer
from quantkit.models.timestep import timestep_argument
from quantkit.recipe import CalibrationRecipe

#: Elements of the windows that are unfolded at a time: 64 MiB in float32.
_WINDOW_ELEMENTS = 1 << 24
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

    @property
    def covariance(self) -> Tensor:
        """E[x x^T] - E[x] E[x]^T, float32 (K, K)."""
        return self.second.addr(self.mean, self.mean, alpha=-1)

    def smoothed(self, factor: Tensor) -> "Moments":
        """Return the moments of the input multiplied by ``factor`` (K,)."""
        second = self.second * factor * factor.unsqueeze(1)
        return Moments(second, self.mean * factor, self.rows)


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
                f"wanted at most --memory {memory / 2**30:g}; give more"
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

    def add(self, values: Tensor, weight: float) -> None:
        for columns in _columns(self._module, values.detach(), self._where, self._draw_rows):
            self._second.addmm_(columns, columns.t(), alpha=weight)
            self._mean += weight * columns.sum(dim=1, dtype=torch.float64)
            self._weight += weight * columns.shape[1]
            self._rows += columns.shape[1]

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
        order = _kernel_order(self._module).to(self._second.device)
        total = max(self._weight, torch.finfo(torch.float64).tiny)
        second = (self._second / total)[order][:, order].cpu()
        mean = (self._mean / total)[order].float().cpu()
        if not bool(second.isfinite().all()):
            raise NonFiniteError(
                f"{self._where}: NaN or Inf in its input; if the model overflows in float16, "
                "calibrate with --device cpu, which computes in float32"
            )
        return Moments(second, mean, self._rows)


def _columns(
    module: nn.Module, values: Tensor, where: str, draw: Callable[[int, int], Tensor]
) -> Iterator[Tensor]:
    """Yield what the layer multiplies, float32 (K, rows), a convolution's channels first.

    Args:
        module: Linear or Conv2d.
        values: its input.
        where: for messages.
        draw: returns places among so many rows of so many pictures.
    """
    if not isinstance(module, nn.Conv2d):
        rows = values.reshape(-1, values.shape[-1])
        yield rows[draw(len(rows), len(values)).to(rows.device)].float().t()
        return
    if isinstance(module.padding, str) or module.padding_mode != "zeros" or module.groups != 1:
        raise ModelError(
            f"{where}: padding {module.padding!r} in mode {module.padding_mode}, {module.groups} "
            "groups: wanted plain zeros and one group; keep the layer in 16 bit"
        )
    taps = module.weight[0].numel()
    step = max(1, _WINDOW_ELEMENTS // (taps * values.shape[-2] * values.shape[-1]))
    for part in torch.split(values, step):
        windows = _windows(module, part)
        batch, height, width = windows.shape[:3]
        places = draw(batch * height * width, batch).to(part.device)
        # Only what was drawn is copied: unfolding all of it took longer than the product.
        picture, pixel = places // (height * width), places % (height * width)
        yield windows[picture, pixel // width, pixel % width].reshape(-1, taps).float().t()


def _windows(module: nn.Conv2d, values: Tensor) -> Tensor:
    """Return the view (B, OH, OW, C, kh, kw) of what a convolution reads of (B, C, H, W)."""
    (ph, pw), (sh, sw), (dh, dw) = (
        [int(side) for side in pair] for pair in (module.padding, module.stride, module.dilation)
    )
    tall, wide = (d * (k - 1) + 1 for d, k in zip((dh, dw), module.kernel_size, strict=True))
    padded = functional.pad(values, (pw, pw, ph, ph)).permute(0, 2, 3, 1)
    return padded.unfold(1, tall, sh).unfold(2, wide, sw)[..., ::dh, ::dw]


def _kernel_order(module: nn.Module) -> Tensor:
    """Return where each column of the kernels' rows stands among the unfolded ones."""
    weight = module.get_parameter("weight")
    places = torch.arange(weight[0].numel()).reshape(weight.shape[1:])
    return places.permute(1, 2, 0).reshape(-1) if weight.ndim == 4 else places


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
        self.calls = 0

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
                handles.append(module.register_forward_pre_hook(self._listener(layer)))
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
        def listen(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._sums[layer].add(args[0], self._weight)

        return listen


def _in_calls_unit(weights: Mapping[float, float], first: float) -> dict[float, float]:
    """Return weights by the timesteps that the denoiser is called with, of which this is the first.

    The ratio to the scheduler's first one is the unit: 1 for SD, 1 / 1000 for Flux.
    """
    start = next(iter(weights))
    unit = first / start if start else 1.0
    return {unit * step: weight for step, weight in weights.items()}
