"""Stages of a schedule, which the host has to know before it queues a step.

The bucket of a static scale is found on the device. Kernels are chosen by the host, so where a
model computes some steps by others, the host reads the timestep. Schedulers hand out the elements
of one tensor, which is read once for all of its steps: a reading waits until the device is idle.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from quantkit.models.timestep import bucket_of, first_number

#: The attribute of a model that has stages.
_ATTRIBUTE = "quantkit_stages"

#: The steps of a schedule at most; longer tensors are none.
_LONGEST = 10_000

#: schedule -> its version, and its numbers
_schedules: Any = WeakIdKeyDictionary()

#: The stage of the step that is recorded or launched; None: it is to be read.
_known: ContextVar[float | None] = ContextVar("quantkit_stage", default=None)


@dataclass(frozen=True)
class Stages:
    """The stages of a model: each begins at a timestep, and holds from there upwards."""

    #: ascending
    starts: tuple[float, ...]
    #: (args, kwargs) of the model's forward -> timestep, a number or a tensor
    timestep: Callable[[Sequence[Any], Mapping[str, Any]], Any]

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """Return the start of the stage that a call is in; -inf before the first."""
        stage = bucket_of(_number(self.timestep(args, kwargs)), self.starts)
        return (float("-inf"), *self.starts)[stage]


def give_stages(model: nn.Module, stages: Stages | None) -> None:
    """Let a model have stages; None takes them away."""
    vars(model).pop(_ATTRIBUTE, None)
    if stages is not None:
        setattr(model, _ATTRIBUTE, stages)


def find_stage(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """Return the stage of a call of a model, as ``Stages.find``; None: it has none."""
    stages: Stages | None = getattr(model, _ATTRIBUTE, None)
    return None if stages is None else stages.find(args, kwargs)


@contextmanager
def in_stage(stage: float | None) -> Iterator[None]:
    """Let the body's calls be in a stage that was found; None: they are to be read."""
    token = _known.set(stage)
    try:
        yield
    finally:
        _known.reset(token)


def known_stage() -> float | None:
    """Return the stage of ``in_stage``; None outside of it."""
    return _known.get()


@torch.compiler.disable(reason="the host reads the timestep; compile without fullgraph")  # type: ignore[untyped-decorator, no-untyped-call]
def is_before(start: float, timestep: Tensor | float) -> bool:
    """Tell whether a step is in a stage before the one that begins at ``start``.

    Args:
        start: a timestep.
        timestep: number or tensor; of a batch, the first element counts. It is not read within
            ``in_stage``.
    """
    stage = known_stage()
    return (_number(timestep) if stage is None else stage) < start


def _number(timestep: Tensor | float) -> float:
    if not isinstance(timestep, Tensor):
        return float(timestep)
    whole = timestep._base  # noqa: SLF001  None, or the tensor that this one is a view of
    if whole is None or not _is_schedule(whole) or whole.dtype is not timestep.dtype:
        return first_number(timestep)
    return float(_numbers(whole)[timestep.storage_offset() - whole.storage_offset()])


def _is_schedule(tensor: Tensor) -> bool:
    """Tell whether a tensor may be that of a schedule, whose writes torch counts."""
    is_row = tensor.ndim == 1 and tensor.is_contiguous() and tensor.numel() <= _LONGEST
    return is_row and not tensor.is_inference()


def _numbers(schedule: Tensor) -> list[float]:
    """Return the numbers of a schedule, read again only where it was written to."""
    version = schedule._version  # noqa: SLF001  the only counter
    known: tuple[int, list[float]] | None = _schedules.get(schedule)
    if known is None or known[0] != version:
        known = _schedules[schedule] = (version, schedule.tolist())
    return known[1]
