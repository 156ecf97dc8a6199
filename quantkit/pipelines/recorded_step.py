"""One call of a model, recorded as a CUDA or HIP graph: launched again without Python."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantkit.device import log
from quantkit.device.backends import forced, sums_are_fast
from quantkit.device.log import KernelLog, note_again

#: What an argument may be that is no tensor.
_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)
#: Of the largest number of an answer: what float16 and atomic sums may change from run to run.
_NEAR = 0.02
#: Queues what it recorded, again.
Launch = Callable[[], None]


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments of a call, taken apart."""

    tensors: tuple[Tensor, ...]
    #: hashable: everything but what the tensors hold
    key: Hashable
    #: puts them together again
    rebuild: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]


def take_apart(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Inputs:
    """Return the tensors of a call and a key of all else.

    Args:
        args: of the model's forward; tensors may be within lists, tuples, dicts and outputs.
        kwargs: the same.
        device: of the model. Tensors of the CPU, as timesteps are with some schedulers, are moved.

    Raises:
        TypeError: an argument that is neither a tensor nor a value.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    rest = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
    tensors = tuple(leaves[i].to(device, non_blocking=True) for i in places)
    for leaf in rest.values():
        if not isinstance(leaf, _VALUES):
            raise TypeError(f"an argument is a {type(leaf).__name__}")
    # 1, 1.0 and True are equal, and models may ask which they have.
    others = tuple((i, type(leaf), leaf) for i, leaf in rest.items())
    key = (str(spec), others, tuple((t.shape, t.stride(), t.dtype) for t in tensors), _modes())

    def rebuild(given: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        whole = rest | dict(zip(places, given, strict=True))
        found = pytree.tree_unflatten([whole[i] for i in range(len(leaves))], spec)
        return found[0], found[1]

    return Inputs(tensors, key, rebuild)


def _modes() -> tuple[object, ...]:
    """Return what else decides which kernels a call launches."""
    cast = torch.is_autocast_enabled("cuda")
    return (
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype("cuda") if cast else None,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        forced(),
        sums_are_fast(),
    )


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """A recorded call: its inputs are copied in, what it returns is copied out."""

    launch: Launch
    inputs: tuple[Tensor, ...]
    #: as the model returned it; the next launch overwrites its tensors
    output: Any
    #: memory of what the call makes on the way, which other steps of the model share
    pool: Any
    #: the kernels of ours that it launches
    kernels: KernelLog

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Queue the step on the current stream.

        Args:
            tensors: in the order, shapes and dtypes of those that it was recorded with.
        """
        for mine, given in zip(self.inputs, tensors, strict=True):
            if mine is not given:
                mine.copy_(given, non_blocking=True)
        self.launch()
        note_again(self.kernels.calls)
        return pytree.tree_map_only(Tensor, Tensor.clone, self.output)


def agree(found: Any, wanted: Any) -> bool:
    """Tell whether two answers of a call are the same, but for sums in another order."""
    leaves = zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True)
    return all(_near(a, b) for a, b in leaves if isinstance(a, Tensor))


def _near(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b = a.float(), b.float()
    return torch.allclose(
        a, b, rtol=0, atol=_NEAR * float(b.abs().nan_to_num().amax()), equal_nan=True
    )


def record(call: Callable[..., Any], inputs: Inputs, pool: Any) -> tuple[RecordedStep, Any]:
    """Run a call once, then record it.

    What a first call compiles, allocates for good or looks up must not be recorded, so the call is
    run beforehand; its answer is returned too.

    Args:
        call: the model's forward.
        inputs: of this call.
        pool: of an earlier step, to share its memory; None: a new one.

    Returns:
        the recorded step, and what the call returned.

    Raises:
        RuntimeError: the call waits for the device, or does what cannot be recorded.
    """
    device = inputs.tensors[0].device
    with torch.inference_mode(mode=False):
        mine = tuple(tensor.clone() for tensor in inputs.tensors)
    args, kwargs = inputs.rebuild(mine)
    with torch.cuda.device(device):
        aside = _aside(device)
        current = torch.cuda.current_stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            answer = call(*args, **kwargs)
        current.wait_stream(aside)
        # The allocator gives what was made aside to the next work there, which waits for this copy.
        answer = pytree.tree_map_only(Tensor, Tensor.clone, answer)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=aside), log.record() as kernels:
            output = call(*args, **kwargs)
    launch = partial(_launch, graph, device)
    return RecordedStep(launch, mine, output, graph.pool(), kernels), answer


@lru_cache(maxsize=64)
def _aside(device: torch.device) -> Any:
    """Return the stream that all steps of a device are recorded on.

    cuBLAS keeps 32 MB for every stream that it was ever called on.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _launch(graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
    with torch.cuda.device(device):
        graph.replay()
