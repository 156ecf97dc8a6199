"""Running a pipeline with some layers under a treatment, for its final latents."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantkit.errors import NonFiniteError
from quantkit.models.timestep import first_number, timestep_argument
from quantkit.numerics.packed_2to4 import from_rows
from quantkit.pipelines.batches import split_batches
from quantkit.pipelines.own_inputs import OwnInputs
from quantkit.pipelines.running import run_batch
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.sensitivity.treated_layer import InputCast, round_input


@dataclass(frozen=True, eq=False)
class Substitute:
    """Substitutes of a layer's weight and input."""

    #: float32, shaped as the module's weight
    weight: Tensor
    #: None: inputs stay as they are
    cast: InputCast | None

    @classmethod
    def of(cls, rows: Tensor, shape: tuple[int, ...], cast: InputCast | None) -> "Substitute":
        """Return the substitute whose weight is ``rows`` (N, K)."""
        return cls(from_rows(rows, shape).contiguous(), cast)


@contextmanager
def treated(denoiser: nn.Module, substitutes: Mapping[str, Substitute]) -> Iterator[None]:
    """Let layers compute with their substitutes while the body runs; modules are restored after.

    Products are float32, as the kernels' sums; each layer returns the dtype that it was called in.

    Args:
        denoiser: the module that the pipeline calls.
        substitutes: by module path.
    """
    clock = _TimestepTracker()

    def read_clock(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        clock.timestep = first_number(timestep_argument(module.forward, args, kwargs))

    handle = denoiser.register_forward_pre_hook(read_clock, with_kwargs=True)
    modules = {name: denoiser.get_submodule(name) for name in substitutes}
    try:
        for name, module in modules.items():
            # On the instance, where it hides the method of the class.
            module.forward = _forward_of(module, substitutes[name], clock)
        yield
    finally:
        handle.remove()
        for module in modules.values():
            vars(module).pop("forward", None)


def final_latents(
    pipe: Any, prompts: Sequence[str], settings: CalibrationRecipe, inputs: OwnInputs | None = None
) -> Tensor:
    """Return the pipeline's final latents, float32 on the CPU, one row a prompt.

    Args:
        pipe: a pipeline.
        prompts: texts.
        settings: how.
        inputs: as ``rehearse_prompts`` found.

    Raises:
        NonFiniteError: NaN or Inf in them.
    """
    batches = split_batches(prompts, settings)
    parts = [run_batch(pipe, batch, settings, inputs) for batch in batches]
    latents = torch.cat([part.detach().float().cpu() for part in parts])
    if not bool(latents.isfinite().all()):
        raise NonFiniteError(
            "final latents: NaN or Inf; if the model overflows in float16, run it on the "
            "device cpu, which computes in float32",
            fields=("device",),
        )
    return latents


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the median over prompts of sum (found - expected)^2 / sum expected^2 (NMSE).

    The median, because the same small change turns a few pictures into others and leaves most
    alone: a mean over few prompts says little of the layer.

    Args:
        found: latents, a prompt along the first axis.
        expected: of the same shape; a prompt whose latents are all zero counts as unchanged.
    """
    first, second = found.double().flatten(1), expected.double().flatten(1)
    total = second.square().sum(dim=1)
    lost = (first - second).square().sum(dim=1)
    return float((lost / torch.where(total > 0, total, torch.inf)).quantile(0.5))


@dataclass(eq=False)
class _TimestepTracker:
    """The timestep of the denoiser's present call."""

    timestep: float = 0.0


def _forward_of(
    module: nn.Module, substitute: Substitute, clock: _TimestepTracker
) -> Callable[[Tensor], Tensor]:
    compute = _convolve if isinstance(module, nn.Conv2d) else _multiply

    def forward(x: Tensor) -> Tensor:
        scale = None if substitute.cast is None else substitute.cast.at(clock.timestep)
        return compute(module, x.float(), substitute, scale).to(x.dtype)

    return forward


def _multiply(module: Any, x: Tensor, substitute: Substitute, scale: Tensor | None) -> Tensor:
    if substitute.cast is not None:
        x = round_input(x, substitute.cast.format, scale)
    return functional.linear(x, substitute.weight, _bias(module))


def _convolve(module: Any, x: Tensor, substitute: Substitute, scale: Tensor | None) -> Tensor:
    # The only place where torch resolves padding="same": left, right, top, bottom.
    x = functional.pad(x, module._reversed_padding_repeated_twice)  # noqa: SLF001
    cast = substitute.cast
    if cast is not None and cast.scale is None:
        return _convolve_windows(module, x, substitute, cast)
    if cast is not None:
        x = round_input(x, cast.format, scale)
    return functional.conv2d(x, substitute.weight, _bias(module), module.stride, 0, module.dilation)


def _convolve_windows(module: Any, x: Tensor, substitute: Substitute, cast: InputCast) -> Tensor:
    """Convolve with a scale per window, which is a kernel's row."""
    reach = [d * (k - 1) + 1 for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    height, width = (
        (size - r) // s + 1 for size, r, s in zip(x.shape[-2:], reach, module.stride, strict=True)
    )
    windows = functional.unfold(x, module.kernel_size, module.dilation, 0, module.stride)
    rounded = round_input(windows, cast.format, None, axis=1)
    y = substitute.weight.flatten(1) @ rounded
    bias = _bias(module)
    y = y if bias is None else y + bias.reshape(-1, 1)
    return y.reshape(len(x), -1, height, width)


def _bias(module: Any) -> Tensor | None:
    return None if module.bias is None else module.bias.float()
