"""Static scales per timestep bucket: the root model finds the bucket, packed layers read it.

The bucket is a tensor on the device, found by the forward of the root model: no value comes back
to the host, nothing in a layer changes, and ``torch.compile`` traces it all. It belongs to one
call: threads may share a model. A buffer that hooks write would be the same for all of them.

Where the last steps have a scale for each row instead, the host reads the timestep: the kernels
are others, see ``quantkit.pipelines.step_stage``.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import CheckpointError, InputError
from quantkit.models.skeleton import without_timestep
from quantkit.numerics.scheme import Schedule
from quantkit.pipelines.step_stage import Stages, give_stages, is_before

#: The root model's child that holds its buckets; without persistent state, so never in a file.
CHILD = "quantkit_buckets"


class _Threads:
    """The thread-local state of a shared model; a copy of the model starts with its own."""

    def __init__(self) -> None:
        self.own = threading.local()
        #: held while a thread is inside of the model
        self.busy = threading.Lock()

    def __deepcopy__(self, memo: object) -> "_Threads":
        return _Threads()

    def __reduce__(self) -> tuple[type["_Threads"], tuple[()]]:
        return _Threads, ()


class TimestepBuckets(nn.Module):
    """The bucket of the current timestep, shared by all layers of one schedule."""

    edges: Tensor

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.schedule = schedule
        # float64 like the JSON numbers they come from; kept so by _apply
        wide = torch.tensor(schedule.edges, dtype=torch.float64)
        self.register_buffer("edges", wide, persistent=False)
        self.threads = _Threads()
        # What torch.compile traces cannot read another thread's own values. In a whole model that
        # is compiled this one is a value of the graph; blocks that are compiled one by one read
        # the second, and _alone keeps it to one thread.
        self._traced: Tensor | None = None
        self._shared: Tensor | None = None
        #: what ``per_token`` is in a traced call
        self._per_token = False

    @property
    def index(self) -> Tensor:
        """The bucket of this thread's call: int64, (1,).

        Raises:
            InputError: the root model was not called in this thread.
        """
        if torch.compiler.is_compiling():
            index = self._shared if self._traced is None else self._traced
        else:
            index = getattr(self.threads.own, "index", None)
        if index is None:
            raise _unknown_timestep()
        return index

    @property
    def per_token(self) -> bool:
        """True in this thread's call when each row has a scale of its own.

        Raises:
            InputError: the root model was not called in this thread.
        """
        if torch.compiler.is_compiling():
            return self._per_token
        found: bool | None = getattr(self.threads.own, "per_token", None)
        if found is None:
            raise _unknown_timestep()
        return found

    def update(self, timestep: Tensor | float) -> None:
        """Find the bucket: bucket i holds edges[i - 1] <= timestep < edges[i].

        Args:
            timestep: number or tensor; of a batch, the first element counts.
        """
        if self.schedule.token_below is not None:
            self._per_token = is_before(self.schedule.token_below, timestep)
            if not torch.compiler.is_compiling():
                self.threads.own.per_token = self._per_token
        if not isinstance(timestep, Tensor):
            timestep = torch.full((1,), float(timestep), device=self.edges.device)
        first = timestep.reshape(-1)[:1].to(self.edges)
        index = torch.bucketize(first, self.edges, right=True)
        if torch.compiler.is_compiling():
            self._traced = index
        else:
            self.threads.own.index = self._shared = index

    def forget(self) -> None:
        """Drop the state of a traced call: its tensors may be a CUDA graph's."""
        self._traced = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002  torch's signature
        return apply_keeping_dtype(self, super()._apply, fn, recurse=recurse)


def _unknown_timestep() -> InputError:
    return InputError(
        "a layer with a scale per timestep was called by itself, so the timestep is unknown; call "
        "the denoiser instead"
    )


def apply_keeping_dtype(
    module: nn.Module,
    apply: Callable[..., Any],
    fn: Callable[[Tensor], Tensor],
    *,
    recurse: bool,
    but: tuple[str, ...] = (),
) -> nn.Module:
    """Move tensors as ``fn`` does, without the casts and memory formats that come with it.

    Args:
        module: its own tensors are kept; children are applied as usual.
        apply: ``nn.Module._apply`` bound to the module.
        fn: what ``module.to``, ``half``, ``cuda`` and the like hand down.
        recurse: passed on.
        but: names of tensors that are cast as usual.
    """
    own = {**module._parameters, **module._buffers}  # noqa: SLF001  joined layers name none
    kept = {id(tensor) for name, tensor in own.items() if name not in but}
    result: nn.Module = apply(lambda t: _moved(t, fn) if id(t) in kept else fn(t), recurse)
    return result


def _moved(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    # A row of bytes: what casts leaves integers alone, and what lays out pictures wants four axes.
    row = tensor.detach().reshape(-1).view(torch.uint8)
    moved = fn(row)
    moved = moved if moved.dtype is torch.uint8 else row.to(moved.device)
    return moved.view(tensor.dtype).view(tensor.shape)


def install(model: nn.Module, schedules: set[Schedule]) -> dict[Schedule | None, Any]:
    """Give the root model its buckets and a forward that updates them.

    Args:
        model: the root, whose forward takes ``timestep``.
        schedules: the distinct ones of its schemes.

    Returns:
        the buckets of each schedule.

    Raises:
        CheckpointError: the model's forward has no ``timestep``.
    """
    if not schedules:
        return {}
    names = list(inspect.signature(model.forward).parameters)
    if "timestep" not in names:
        raise CheckpointError(without_timestep(type(model).__name__, ", ".join(names)))
    buckets: dict[Schedule | None, Any] = {
        s: TimestepBuckets(s) for s in sorted(schedules, key=str)
    }
    model.add_module(CHILD, nn.ModuleList(buckets.values()))
    give_stages(model, stages_of(schedules, functools.partial(_timestep, names.index("timestep"))))
    forward: Any = functools.partial(_with_bucket, model, names.index("timestep"))
    # Pipelines ask what a denoiser takes. A function inside of one would say it, and not pickle.
    forward.__signature__ = inspect.signature(model.forward)
    model.forward = forward
    return buckets


def stages_of(
    schedules: Iterable[Schedule],
    timestep: Callable[[Sequence[Any], Mapping[str, Any]], Any],
) -> Stages | None:
    """Return the stages that schedules have together; None: they have none."""
    starts = {s.token_below for s in schedules if s.token_below is not None}
    return Stages(tuple(sorted(starts)), timestep) if starts else None


def uninstall(model: nn.Module) -> None:
    """Give a model its class' forward back, if it has buckets."""
    if hasattr(model, CHILD):
        delattr(model, CHILD)
        give_stages(model, None)
        del model.forward


def _with_bucket(model: nn.Module, position: int, *args: Any, **kwargs: Any) -> Any:
    """Find the buckets, then call the forward of the model's class.

    Not a hook: torch.compile would trace that as a graph of its own, and what passes from one graph
    to the next lies in the module, where threads meet.
    """
    forward = type(model).forward
    timestep = _timestep(position, args, kwargs)
    shared: Any = model.get_submodule(CHILD)
    if torch.compiler.is_compiling():
        for buckets in shared:
            buckets.update(timestep)
        output = forward(model, *args, **kwargs)
        for buckets in shared:
            buckets.forget()
        return output
    with _alone(model, shared[0].threads.busy):
        for buckets in shared:
            buckets.update(timestep)
        return forward(model, *args, **kwargs)


def _timestep(position: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[position] if len(args) > position else kwargs["timestep"]


@contextmanager
def _alone(model: nn.Module, busy: threading.Lock) -> Iterator[None]:
    """Refuse a second thread in a model whose blocks are compiled one by one.

    Raises:
        InputError: there is another.
    """
    first = busy.acquire(blocking=False)
    try:
        if not first and any(map(_is_compiled, model.modules())):
            raise InputError(
                f"{type(model).__name__}: called by two threads at the same time, and its blocks, "
                "compiled one by one, share one timestep; compile the whole model, or load one "
                "model for each thread"
            )
        yield
    finally:
        if first:
            busy.release()


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")  # noqa: SLF001  compile() tells nobody else
