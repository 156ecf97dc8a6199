"""Static scales per timestep bucket: the root model says which bucket, packed layers read it.

The bucket is a tensor on the device, found by a forward pre-hook of the root model: no value comes
back to the host, nothing in a layer changes, and ``torch.compile`` traces it all. It belongs to one
call: threads may share a model. A buffer that hooks write would be the same for all of them.
"""

import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.skeleton import without_timestep
from quantkit.errors import CheckpointError, InputError

#: The root model's child that holds its buckets; without persistent state, so never in a file.
CHILD = "quantkit_buckets"


class _OfThread(threading.local):
    """What each thread has of its own; a copy of the model starts without it."""

    index: Tensor | None = None

    def __deepcopy__(self, memo: object) -> "_OfThread":
        return _OfThread()

    def __reduce__(self) -> tuple[type["_OfThread"], tuple[()]]:
        return _OfThread, ()


class TimestepBuckets(nn.Module):
    """The bucket of the current timestep, shared by all layers of one set of edges."""

    edges: Tensor

    def __init__(self, edges: tuple[float, ...]) -> None:
        super().__init__()
        # float64 like the JSON numbers they come from; kept so by _apply
        wide = torch.tensor(edges, dtype=torch.float64)
        self.register_buffer("edges", wide, persistent=False)
        self._of_thread = _OfThread()
        # Inside of what torch.compile traces, which does not follow writes to the other: there it
        # is a value of the graph, and no thread sees another's.
        self._traced: Tensor | None = None

    @property
    def index(self) -> Tensor:
        """The bucket of this thread's call: int64, (1,).

        Raises:
            InputError: the root model was not called in this thread.
        """
        index = self._traced if torch.compiler.is_compiling() else None
        if index is None:
            # Also of a compiled block whose root is not compiled.
            index = self._of_thread.index
        if index is None:
            raise InputError(
                "a layer with scales per timestep bucket was called alone, and no timestep is "
                "known; call the denoiser itself"
            )
        return index

    def update(self, timestep: Tensor | float) -> None:
        """Find the bucket: bucket i holds edges[i - 1] <= timestep < edges[i].

        Args:
            timestep: number or tensor; of a batch, the first element counts.
        """
        if not isinstance(timestep, Tensor):
            timestep = torch.full((1,), float(timestep), device=self.edges.device)
        first = timestep.reshape(-1)[:1].to(self.edges)
        index = torch.bucketize(first, self.edges, right=True)
        if torch.compiler.is_compiling():
            self._traced = index
        else:
            self._of_thread.index = index

    def forget(self) -> None:
        """Leave nothing of a traced call behind: its tensors may be a CUDA graph's."""
        if torch.compiler.is_compiling():
            self._traced = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002  torch's signature
        return apply_keeping_dtype(self, super()._apply, fn, recurse=recurse)


def apply_keeping_dtype(
    module: nn.Module,
    apply: Callable[..., Any],
    fn: Callable[[Tensor], Tensor],
    *,
    recurse: bool,
) -> nn.Module:
    """Move buffers as ``fn`` does, without the casts and memory formats that come with it.

    Args:
        module: its own buffers are kept; parameters and children are applied as usual.
        apply: ``nn.Module._apply`` bound to the module.
        fn: what ``module.to``, ``half``, ``cuda`` and the like hand down.
        recurse: passed on.
    """
    before = dict(module.named_buffers(recurse=False))
    apply(fn, recurse)
    for name, tensor in before.items():
        moved = getattr(module, name)
        if moved.dtype != tensor.dtype or not moved.is_contiguous():
            setattr(module, name, tensor.to(moved.device))
    return module


def install(model: nn.Module, edges: set[tuple[float, ...]]) -> dict[tuple[float, ...], Any]:
    """Give the root model its buckets and the hook that updates them.

    Args:
        model: the root, whose forward takes ``timestep``.
        edges: the distinct edges of its schemes.

    Returns:
        the buckets of each edges.

    Raises:
        CheckpointError: the model's forward has no ``timestep``.
    """
    if not edges:
        return {}
    names = list(inspect.signature(model.forward).parameters)
    if "timestep" not in names:
        raise CheckpointError(without_timestep(type(model).__name__, ", ".join(names)))
    buckets = {e: TimestepBuckets(e) for e in sorted(edges)}
    model.add_module(CHILD, nn.ModuleList(buckets.values()))
    hook = partial(_update_all, names.index("timestep"))
    model.register_forward_pre_hook(hook, with_kwargs=True)
    model.register_forward_hook(_forget_all)
    return buckets


def _update_all(
    position: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    timestep = args[position] if len(args) > position else kwargs["timestep"]
    for buckets in model.get_submodule(CHILD).children():
        assert isinstance(buckets, TimestepBuckets)
        buckets.update(timestep)


def _forget_all(model: nn.Module, args: object, output: object) -> None:
    del args, output
    for buckets in model.get_submodule(CHILD).children():
        assert isinstance(buckets, TimestepBuckets)
        buckets.forget()
