"""Error over the denoising steps: how latents drift apart, and what each step adds by itself.

NMSE is ||packed - original||^2 / ||original||^2 throughout. Divergence compares the latents of two
runs from one noise, so it holds every error made before; the local error puts the packed denoiser
on the original's own latents, so it holds that of one step alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: Latents of the original that are kept to be compared with, in bytes of main memory. 64 prompts of
#: 30 steps take 0.25 GB for SDXL and 1 GB for FLUX, at 1024x1024 in 16 bit.
TRAJECTORY_BYTES = 2 * 2**30


@dataclass(frozen=True)
class StepLatents:
    """The latents of one batch after one step."""

    #: position of the batch's first prompt
    first: int
    index: int
    timestep: float
    #: (prompts of the batch, ...), valid during the call only
    latents: Tensor


@dataclass(frozen=True)
class StepErrors:
    """NMSE after every step, over prompts."""

    #: as the scheduler counts them, first step first
    timesteps: tuple[float, ...]
    #: (steps, prompts), or a row of the denoiser's batch in place of a prompt
    values: tuple[tuple[float, ...], ...]

    @property
    def mean(self) -> tuple[float, ...]:
        """The mean of every step."""
        return tuple(float(np.mean(step)) for step in self.values)

    def quantile(self, share: float) -> tuple[float, ...]:
        """Return the quantile of every step, linear between values."""
        return tuple(float(np.quantile(step, share)) for step in self.values)


@dataclass(eq=False)
class Trajectory:
    """The latents of a run, prompt by prompt, in main memory; grows while it listens."""

    steps: int
    limit: int = TRAJECTORY_BYTES
    nbytes: int = 0
    #: prompt -> latents after every step, in the run's dtype
    latents: dict[int, list[Tensor]] = field(default_factory=dict)

    def listen(self, step: StepLatents) -> None:
        """Keep the latents, unless the batch would not fit as a whole."""
        size = step.latents.nbytes
        if step.index == 0 and self.nbytes + size * self.steps > self.limit:
            return
        if step.index and step.first not in self.latents:
            return
        self.nbytes += size
        for offset, row in enumerate(step.latents.detach().to("cpu", copy=True)):
            self.latents.setdefault(step.first + offset, []).append(row)


@dataclass(eq=False)
class Divergence:
    """Compares a run, while it runs, with a trajectory from the same noise."""

    original: Trajectory
    _timesteps: dict[int, float] = field(default_factory=dict)
    _values: dict[int, list[float]] = field(default_factory=dict)

    def listen(self, step: StepLatents) -> None:
        """Add the errors of one step's latents."""
        rows = step.latents.detach().cpu()
        for offset, row in enumerate(rows):
            expected = self.original.latents.get(step.first + offset)
            if expected is not None and step.index < len(expected):
                self._timesteps[step.index] = step.timestep
                error = nmse(row[None], expected[step.index][None])
                self._values.setdefault(step.index, []).extend(error)

    def errors(self) -> StepErrors | None:
        """Return what was compared; None when the pipeline tells nobody of its steps."""
        return _errors(self._timesteps, self._values)


@dataclass(eq=False)
class LocalErrors:
    """The packed denoiser's answers where the original's were given."""

    _pending: list[float] = field(default_factory=list)
    _timesteps: dict[int, float] = field(default_factory=dict)
    _values: dict[int, list[float]] = field(default_factory=dict)

    def add(self, answer: Tensor, expected: Tensor) -> None:
        """Add one call of the denoiser; guidance and two-stage samplers make more than one."""
        self._pending += nmse(answer, expected)

    def listen(self, step: StepLatents) -> None:
        """Book the calls since the last step under the step that they made."""
        self._timesteps[step.index] = step.timestep
        self._values.setdefault(step.index, []).extend(self._pending)
        self._pending.clear()

    def errors(self) -> StepErrors | None:
        """Return what was compared; None when the pipeline tells nobody of its steps."""
        return _errors(self._timesteps, self._values)


@contextmanager
def shadowed(dense: Any, packed: Any, names: tuple[str, ...]) -> Iterator[LocalErrors]:
    """Let the packed denoisers answer every call of the original's while the body runs it.

    Args:
        dense: the pipeline of the original.
        packed: the packed pipeline, on the same device and in the same dtype.
        names: the packed components.

    Yields:
        what to pass as a listener to the run of ``dense``.
    """
    found = LocalErrors()
    handles = []
    for name in names:
        twin: nn.Module = packed.components[name]
        hook = _shadow(twin, found.add)
        handles.append(dense.components[name].register_forward_hook(hook, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def nmse(answer: Tensor, expected: Tensor) -> list[float]:
    """Return ||answer - expected||^2 / ||expected||^2 of every row; infinite where it is undefined.

    Args:
        answer: (rows, ...), any float dtype.
        expected: the same shape.
    """
    first, second = (value.detach().double().flatten(1) for value in (answer, expected))
    errors = (first - second).square().sum(1).tolist()
    norms = second.square().sum(1).tolist()
    return [_ratio(error, norm) for error, norm in zip(errors, norms, strict=True)]


def _ratio(error: float, norm: float) -> float:
    if error == 0.0:
        return 0.0
    ratio = error / norm if norm else inf
    return ratio if ratio == ratio else inf  # noqa: PLR0124  NaN: the latents overflowed


def _shadow(twin: nn.Module, add: Callable[[Tensor, Tensor], None]) -> Callable[..., None]:
    def answer(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        with torch.no_grad():
            add(twin(*args, **kwargs)[0], output[0])

    return answer


def _errors(timesteps: dict[int, float], values: dict[int, list[float]]) -> StepErrors | None:
    if not values:
        return None
    order = sorted(values)
    return StepErrors(
        tuple(timesteps[index] for index in order), tuple(tuple(values[index]) for index in order)
    )
