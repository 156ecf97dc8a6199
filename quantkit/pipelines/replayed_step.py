"""The forward of a denoiser whose steps are replayed; see ``quantkit.pipelines.replay``."""

import inspect
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quantkit.pipelines.model_snapshot import Snapshot
from quantkit.pipelines.observer import Observer, record_observed
from quantkit.pipelines.recorded_step import Inputs, RecordedStep, agree, record, take_apart
from quantkit.pipelines.step_stage import find_stage, in_stage
from quantkit.storage.jsonfile import short

_logger = logging.getLogger(__name__)

#: Recorded steps that a model keeps, the latest used.
MOST = 8
#: torch's types of device with graphs; cards of AMD are cuda, too.
_RECORDING = ("cuda",)
#: The argument that some schedulers give as a number, a new one each step.
_TIMESTEP = "timestep"
#: What accelerate leaves on a module that it moves or watches.
_ACCELERATE = "_hf_hook"


@dataclass(frozen=True)
class Replayed:
    """Statistics of a denoiser's replayed steps."""

    recorded: int
    replayed: int
    #: why steps ran eagerly -> how many
    eager: Mapping[str, int]

    def __str__(self) -> str:
        """Return a line for people."""
        eager = "".join(f"; {count} eager: {why}" for why, count in self.eager.items())
        return f"{self.recorded} recorded, {self.replayed} replayed{eager}"


class Step:
    """The forward of a model whose steps are replayed."""

    def __init__(
        self,
        model: nn.Module,
        observer: Observer | None = None,
        hooks: AbstractSet[int] = frozenset(),
        *,
        device: torch.device | None = None,
        obstacle: Callable[[], str] = str,
    ) -> None:
        """Record nothing yet.

        Args:
            model: a denoiser.
            observer: takes something of every call; None: nothing does.
            hooks: ids of its hooks that may be recorded.
            device: where it computes; None: where its parameters are.
            obstacle: asked before each recording why there can be none; empty when there can.
        """
        self._model, self._observer, self._hooks = model, observer, hooks
        self._place, self._obstacle = device, obstacle
        #: the forward that this model has, where it has not its class'
        self.own = vars(model).get("forward")
        # Pipelines ask what a denoiser takes.
        self.__signature__ = inspect.signature(model.forward)
        self._graphs = _Graphs()

    @property
    def replayed(self) -> Replayed:
        """Statistics of the model's steps."""
        graphs = self._graphs
        return Replayed(graphs.recorded, graphs.replayed, dict(graphs.eager))

    def forget(self) -> None:
        """Free the recorded steps: what is in them refers to the model, which has this."""
        self._graphs.forget()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's forward returns, in tensors that later steps leave alone."""
        observer = self._observer
        if torch.compiler.is_compiling() or (observer is not None and not observer.records):
            return self._forward(*args, **kwargs)
        if reason := why_not_now(self._model, self._device):
            return self._run(reason, args, kwargs)
        with self._graphs.alone() as alone:
            if not alone:
                return self._run("another thread is in the model", args, kwargs)
            with in_stage(find_stage(self._model, args, kwargs)):
                return self._replay(args, kwargs)

    @property
    def _device(self) -> torch.device:
        return self._place or next(self._model.parameters()).device

    def _replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = self._device
        try:
            inputs = take_apart(*with_timestep(self.__signature__, device, args, kwargs), device)
        except TypeError as error:
            return self._run(str(error), args, kwargs)
        recorded = self._graphs.find(inputs.key)
        if isinstance(recorded, str):
            return self._run(recorded, args, kwargs)
        if recorded is not None:
            if self._observer is not None and not self._observer.choose(recorded.buffers):
                return self._run("layers were called differently often", args, kwargs)
            answer = recorded(inputs.tensors)
            if self._graphs.confirm(recorded):
                if self._observer is not None:
                    # At once: another recording may use this memory.
                    self._observer.take(recorded.buffers, recorded.found)
                return answer
        return self._record(inputs, args, kwargs)

    def _record(self, inputs: Inputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reason = why_not(self._model, self._hooks) or self._obstacle()
        if not reason and self._observer is not None:
            return self._observe(inputs, self._observer)
        if not reason:
            try:
                answer = self._graphs.record(self._model, self._forward, inputs)
            except RuntimeError as error:
                reason = f"cannot be recorded: {short(error, 160)}"
            else:
                return answer
        answer = self._run(reason, args, kwargs)
        self._refuse(inputs, reason)
        return answer

    def _observe(self, inputs: Inputs, observer: Observer) -> Any:
        """Return the answer of a call that is observed, and recorded where it can be."""
        step, answer = record_observed(self._forward, inputs, self._graphs.pool, observer)
        if isinstance(step, str):
            self._refuse(inputs, step)
        else:
            self._graphs.keep(None, inputs.key, step)
        return answer

    def _refuse(self, inputs: Inputs, reason: str) -> None:
        """Let such steps run eagerly until the model changes."""
        _logger.warning("replay: %s: %s", type(self._model).__name__, reason)
        self._graphs.keep(None if self._observer else self._model, inputs.key, reason)

    def _run(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._graphs.eager[reason] += 1
        return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self._model).forward(self._model, *args, **kwargs)


class _Graphs:
    """The recorded steps of one model; a copy of the model starts with none."""

    def __init__(self) -> None:
        #: or why there is none
        self._steps: OrderedDict[Hashable, RecordedStep | str] = OrderedDict()
        self._snapshot: Snapshot | None = None
        #: memory that recordings share
        self.pool: Any = None
        self._busy = threading.Lock()
        self.recorded = self.replayed = 0
        #: why steps ran eagerly -> how many
        self.eager: Counter[str] = Counter()

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Tell whether no other thread is in the body."""
        alone = self._busy.acquire(blocking=False)
        try:
            yield alone
        finally:
            if alone:
                self._busy.release()

    def find(self, key: Hashable) -> RecordedStep | str | None:
        """Return the recorded step, or why there is none; None if that is not known.

        A model that has changed since its last recording has none. A recorded step may be launched,
        and is to be confirmed.
        """
        found = self._steps.get(key)
        if (snapshot := self._snapshot) is not None:
            launched = isinstance(found, RecordedStep)
            if not (snapshot.is_readable() if launched else snapshot.holds()):
                self.forget()
                return None
        if found is not None:
            self._steps.move_to_end(key)
        return found

    def confirm(self, step: RecordedStep) -> bool:
        """Tell whether a step that was launched is still the model's, and count it if so."""
        if self._snapshot is not None and not self._snapshot.holds():
            self.forget()
            return False
        step.note()
        self.replayed += 1
        return True

    def forget(self) -> None:
        """Free the recorded steps."""
        self._steps.clear()
        self._snapshot = self.pool = None

    def record(self, model: nn.Module, forward: Callable[..., Any], inputs: Inputs) -> Any:
        """Run and record a step; return the model's answer.

        Raises:
            RuntimeError: it cannot be recorded, or does something else when it is launched.
        """
        step, answer = record(forward, inputs, self.pool)
        if not agree(step(inputs.tensors), answer):
            raise RuntimeError("its answer is another one when it is launched again")
        self.keep(model, inputs.key, step)
        return answer

    def keep(self, model: nn.Module | None, key: Hashable, step: RecordedStep | str) -> None:
        """Keep a step, or why there is none, until the model changes; None: it does not."""
        if not isinstance(step, str):
            self.pool = step.step.pool
            self.recorded += 1
        while len(self._steps) >= MOST:
            self._steps.popitem(last=False)
        self._steps[key] = step
        # After the call: models fill caches of their own in their first one.
        self._snapshot = None if model is None else Snapshot(model)

    def __deepcopy__(self, memo: object) -> "_Graphs":
        return _Graphs()

    def __reduce__(self) -> tuple[type["_Graphs"], tuple[()]]:
        return _Graphs, ()


def why_not_now(model: nn.Module, device: torch.device) -> str:
    """Return why this call runs eagerly; empty when it need not.

    Args:
        model: the one that is called.
        device: where it computes.
    """
    if device.type not in _RECORDING:
        return f"on {device.type}, which records nothing"
    if model.training:
        return "in training mode"
    if torch.is_grad_enabled():
        return "gradients are enabled; call it under torch.no_grad()"
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return "recorded by somebody else" if capturing else ""


def why_not(model: nn.Module, hooks: AbstractSet[int] = frozenset()) -> str:
    """Return why no step of the model, as it is, can be replayed; empty when they can.

    Args:
        model: the one that is called.
        hooks: ids of those within it that may be recorded.
    """
    for name, module in model.named_modules():
        where = name or "the model"
        if hasattr(module, _ACCELERATE):
            return f"{where} is offloaded, or watched by accelerate"
        # Its own run outside of its forward.
        found = {*module._forward_hooks, *module._forward_pre_hooks}  # noqa: SLF001
        if module is not model and found - hooks:
            return f"{where} has hooks"
    return ""


def with_timestep(
    signature: inspect.Signature,
    device: torch.device,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with a timestep that is a number as the tensor that models make of it.

    As a number, each would be a step to record.
    """
    names = list(signature.parameters)
    at = names.index(_TIMESTEP) if _TIMESTEP in names else len(args)
    if at < len(args):
        args = (*args[:at], _as_tensor(args[at], device), *args[at + 1 :])
    if _TIMESTEP in kwargs:
        kwargs = {**kwargs, _TIMESTEP: _as_tensor(kwargs[_TIMESTEP], device)}
    return args, kwargs


def _as_tensor(timestep: Any, device: torch.device) -> Any:
    if type(timestep) not in (int, float):
        return timestep
    dtype = torch.int64 if type(timestep) is int else torch.float64
    return torch.full((), timestep, dtype=dtype, device=device)
