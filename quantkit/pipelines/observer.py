"""Recording of steps with what observes them: statistics that are taken while a graph runs.

Models are not looked at meanwhile: who observes one has it for himself.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.pipelines import recorded_step
from quantkit.pipelines.kept_results import KeptResults
from quantkit.pipelines.recorded_step import Inputs, RecordedStep, agree
from quantkit.storage.jsonfile import short


class Finding(Protocol):
    """Tensors that were found in one call."""

    def tensors(self) -> list[Tensor]:
        """Return all of them, in one order."""


class Observer(Protocol):
    """Hooks that take something of every call of a model."""

    @property
    def records(self) -> bool:
        """True when calls like this one may be recorded, and launched."""

    @property
    def pending(self) -> Finding:
        """Findings of a call that ran eagerly, not yet added."""

    def make_buffers(self) -> Any:
        """Return what recordings of calls like the last one read of the host.

        Raises:
            RuntimeError: such a call cannot be recorded.
        """

    def onto(self, buffers: Any) -> AbstractContextManager[Finding]:
        """Let what a call finds be returned and not added, within the body."""

    def choose(self, buffers: Any) -> bool:
        """Decide what the next launch reads; False: it cannot be launched now."""

    def take(self, buffers: Any, found: Any) -> None:
        """Add what a launch has found."""


def record_observed(
    call: Callable[..., Any], inputs: Inputs, pool: Any, observer: Observer
) -> tuple[RecordedStep | str, Any]:
    """Observe a call once, then record it with what its observer does.

    Args:
        call: the model's forward.
        inputs: of this call.
        pool: of an earlier step, to share its memory; None: a new one.
        observer: has hooks within the model.

    Returns:
        the recorded step, or why there is none; and what the call returned.
    """
    with torch.inference_mode(mode=False):
        mine = tuple(tensor.clone() for tensor in inputs.tensors)
    args, kwargs = inputs.rebuild(mine)
    run = partial(call, *args, **kwargs)
    answer = recorded_step.run_aside(run, mine[0].device)
    try:
        return _recorded(run, mine, pool, observer, answer), answer
    except RuntimeError as error:
        return f"cannot be recorded: {short(error, 160)}", answer


def _recorded(
    run: Callable[[], Any], mine: tuple[Tensor, ...], pool: Any, observer: Observer, answer: Any
) -> RecordedStep:
    """Return the step, recorded.

    Raises:
        RuntimeError: it cannot be, or finds something else when it is launched.
    """
    buffers, found = observer.make_buffers(), list[Finding]()

    def observed() -> tuple[Any, list[Tensor]]:
        with observer.onto(buffers) as seen:
            output = run()
        found.append(seen)
        return output, seen.tensors()

    step = recorded_step.capture(observed, mine[0].device, pool)
    output, tensors = step.output
    recorded = RecordedStep(
        mine, replace(step, output=output), KeptResults(()), None, (), buffers, found[0]
    )
    if not agree((recorded(mine), tensors), (answer, observer.pending.tensors())):
        raise RuntimeError("it finds something else when it is launched again")
    return recorded
