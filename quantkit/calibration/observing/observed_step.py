"""Replaying the steps of a denoiser while it is observed: recorded with what its observers do.

A step's first call with arguments of new shapes is observed as ever, then recorded; later ones
launch its kernels and those of its observers at once. Models are not looked at meanwhile: who
observes one has it for himself. What cannot be recorded is observed as ever.
"""

import inspect
import logging
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantkit.device.log import note_again
from quantkit.pipelines import recorded_step
from quantkit.pipelines.recorded_step import Inputs, Recording, agree, take_apart
from quantkit.pipelines.replay import MOST, why_not, why_not_now, with_timestep
from quantkit.storage.jsonfile import short

_logger = logging.getLogger(__name__)


class Found(Protocol):
    """What was found in one call."""

    def tensors(self) -> list[Tensor]:
        """Return all of it, in one order."""


#: What recorded calls read of the host, and what was found in one.
TapeT = TypeVar("TapeT")
FoundT = TypeVar("FoundT", bound=Found)


class Watch(Protocol[TapeT, FoundT]):
    """Who observes the calls."""

    @property
    def records(self) -> bool:
        """Whether calls like this one may be recorded, and launched."""

    @property
    def pending(self) -> FoundT:
        """What was found in a call that was observed as ever, not yet added."""

    def tape(self) -> TapeT:
        """Return what recordings of calls like the last one read.

        Raises:
            RuntimeError: such a call cannot be recorded.
        """

    def onto(self, tape: TapeT) -> AbstractContextManager[FoundT]:
        """Let what a call finds be returned and not added, within the body."""

    def choose(self, tape: TapeT) -> bool:
        """Decide what the next launch reads; False: it cannot be launched now."""

    def take(self, tape: TapeT, found: FoundT) -> None:
        """Add what a launch has found."""


@contextmanager
def replaying(
    model: nn.Module, watch: Watch[TapeT, FoundT], hooks: AbstractSet[int]
) -> Iterator[None]:
    """Replay a model's steps within the body.

    Args:
        model: a denoiser.
        watch: who observes it.
        hooks: ids of its hooks.
    """
    step = ObservedStep(model, watch, hooks)
    vars(model)["forward"] = step
    try:
        yield
    finally:
        del vars(model)["forward"]
        if step.own is not None:
            vars(model)["forward"] = step.own


@dataclass(frozen=True, eq=False)
class _Recorded(Generic[TapeT, FoundT]):
    inputs: tuple[Tensor, ...]
    step: Recording
    tape: TapeT
    found: FoundT

    def launch(self, tensors: tuple[Tensor, ...]) -> Any:
        """Queue the step; return its answer, in memory of the recording."""
        for mine, given in zip(self.inputs, tensors, strict=True):
            mine.copy_(given, non_blocking=True)
        self.step.launch()
        note_again(self.step.kernels.calls)
        return self.step.output[0]


class ObservedStep(Generic[TapeT, FoundT]):
    """The forward of a model that is observed, whose steps are replayed."""

    def __init__(
        self, model: nn.Module, watch: Watch[TapeT, FoundT], hooks: AbstractSet[int]
    ) -> None:
        self._model, self._watch, self._hooks = model, watch, hooks
        #: the forward that this model has, where it has not its class'
        self.own = vars(model).get("forward")
        # Pipelines ask what a denoiser takes.
        self.__signature__ = inspect.signature(model.forward)
        #: or why there is none
        self._steps: dict[Hashable, _Recorded[TapeT, FoundT] | str] = {}
        self._pool: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's forward returns, in tensors that later steps leave alone."""
        if not self._watch.records or why_not_now(self._model):
            return self._forward(*args, **kwargs)
        device = next(self._model.parameters()).device
        try:
            given = with_timestep(self.__signature__, device, args, kwargs)
            inputs = take_apart(*given, device)
        except TypeError as error:
            self._say(str(error))
            return self._forward(*args, **kwargs)
        step = self._steps.get(inputs.key)
        if step is None and len(self._steps) < MOST:
            return self._record(inputs, device)
        if isinstance(step, _Recorded) and self._watch.choose(step.tape):
            return self._launch(step, inputs)
        return self._forward(*args, **kwargs)

    def _launch(self, step: _Recorded[TapeT, FoundT], inputs: Inputs) -> Any:
        answer = pytree.tree_map_only(Tensor, Tensor.clone, step.launch(inputs.tensors))
        # At once: another recording may use this memory.
        self._watch.take(step.tape, step.found)
        return answer

    def _record(self, inputs: Inputs, device: torch.device) -> Any:
        """Observe a call as ever, then record it; return its answer."""
        with torch.inference_mode(mode=False):
            mine = tuple(tensor.clone() for tensor in inputs.tensors)
        args, kwargs = inputs.rebuild(mine)
        call = partial(self._forward, *args, **kwargs)
        answer = recorded_step.run_aside(call, device)
        try:
            self._steps[inputs.key] = self._recorded(call, mine, device, answer)
        except RuntimeError as error:
            reason = f"cannot be recorded: {short(error, 160)}"
            self._steps[inputs.key] = reason
            self._say(reason)
        return answer

    def _recorded(
        self, call: Callable[[], Any], mine: tuple[Tensor, ...], device: torch.device, answer: Any
    ) -> _Recorded[TapeT, FoundT]:
        """Return the step, recorded.

        Raises:
            RuntimeError: it cannot be, or finds something else when it is launched.
        """
        if reason := why_not(self._model, self._hooks):
            raise RuntimeError(reason)
        tape, found = self._watch.tape(), list[FoundT]()

        def observed() -> tuple[Any, list[Tensor]]:
            with self._watch.onto(tape) as seen:
                output = call()
            found.append(seen)
            return output, seen.tensors()

        step = recorded_step.capture(observed, device, self._pool)
        recorded = _Recorded(mine, step, tape, found[0])
        recorded.launch(mine)
        if not agree(step.output, (answer, self._watch.pending.tensors())):
            raise RuntimeError("it finds something else when it is launched again")
        self._pool = step.pool
        return recorded

    def _say(self, reason: str) -> None:
        _logger.warning("calibrate: %s is not replayed: %s", type(self._model).__name__, reason)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self._model).forward(self._model, *args, **kwargs)
