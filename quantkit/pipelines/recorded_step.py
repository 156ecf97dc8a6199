"""One call of a model, recorded as a CUDA or HIP graph: launched again without Python."""

import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantkit.device import log
from quantkit.device.backends import forced, sums_are_fast
from quantkit.device.log import KernelLog, note_again
from quantkit.errors import KernelError
from quantkit.fusion.checking import WrongKernelError, is_near, run_checked
from quantkit.fusion.fuse import fuse
from quantkit.fusion.patterns.channels_last import laid_out, reads_pixels, with_picture_calls
from quantkit.fusion.program import Program
from quantkit.fusion.simplify import simplify
from quantkit.fusion.trace import UntraceableError, trace
from quantkit.pipelines.kept_results import KeptResults, keeping
from quantkit.pipelines.step_stage import known_stage

_logger = logging.getLogger(__name__)

#: What an argument may be that is no tensor.
_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)
#: Queues what it recorded, again.
Launch = Callable[[], None]


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments of a call, split into tensors and the rest."""

    tensors: tuple[Tensor, ...]
    #: hashable: everything but what the tensors hold
    key: Hashable
    #: puts them together again
    rebuild: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    #: torch counts what is written to them
    counted: bool


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
    layouts = tuple((t.shape, t.stride(), t.dtype) for t in tensors)
    counted = not torch.is_inference_mode_enabled() and not any(t.is_inference() for t in tensors)
    key = (str(spec), others, layouts, counted, _modes())

    def rebuild(given: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        whole = rest | dict(zip(places, given, strict=True))
        found = pytree.tree_unflatten([whole[i] for i in range(len(leaves))], spec)
        return found[0], found[1]

    return Inputs(tensors, key, rebuild, counted)


def _modes() -> tuple[object, ...]:
    """Return the global modes that decide which kernels a call launches."""
    cast = torch.is_autocast_enabled("cuda")
    return (
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype("cuda") if cast else None,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        forced(),
        sums_are_fast(),
        known_stage(),
    )


@dataclass(frozen=True, eq=False)
class Recording:
    """The actions that a graph of a device must offer."""

    launch: Launch
    #: as it was returned; the next launch overwrites its tensors
    output: Any
    #: memory of what it makes on the way, which other recordings of the model share
    pool: Any
    #: the kernels of ours that it launches
    kernels: KernelLog


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """A recorded call: its inputs are copied in, its results are copied out."""

    inputs: tuple[Tensor, ...]
    step: Recording
    #: cached results that the step reads, with their graph; None: there are none
    kept: KeptResults
    refresh: Recording | None
    #: what the graph reads, and nothing else has
    constants: tuple[Tensor, ...] = ()
    #: what an observed step reads of the host, and what was found in it; None: nothing observes it
    buffers: Any = None
    found: Any = None

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Queue the step on the current stream.

        Args:
            tensors: in the order, shapes and dtypes of those that it was recorded with.
        """
        for mine, given in zip(self.inputs, tensors, strict=True):
            if mine is not given:
                mine.copy_(given, non_blocking=True)
        if self.refresh is None:
            return self._launch(None)
        answer = self._launch(None if self.kept.are_of(tensors) else self.refresh)
        # A hundred weights are looked at while the device is busy.
        return answer if self.kept.are_of_weights() else self._launch(self.refresh)

    def _launch(self, refresh: Recording | None) -> Any:
        if refresh is not None:
            refresh.launch()
            note_again(refresh.kernels.calls)
        self.step.launch()
        return pytree.tree_map_only(Tensor, Tensor.clone, self.step.output)

    def note(self) -> None:
        """Count the kernels of a launch."""
        note_again(self.step.kernels.calls)


def agree(found: Any, expected: Any) -> bool:
    """Tell whether two answers of a call are the same, but for sums in another order."""
    leaves = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return all(is_near(a, b) for a, b in leaves if isinstance(a, Tensor))


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
    with torch.inference_mode(mode=False):
        mine = tuple(tensor.clone() for tensor in inputs.tensors)
    args, kwargs = inputs.rebuild(mine)
    run, kept = partial(call, *args, **kwargs), KeptResults(mine if inputs.counted else ())
    device = mine[0].device
    # Python would look through a hundred thousand new objects again and again: a third of the time.
    with without_collection(), keeping(kept):
        answer = run_aside(run, device)
        kept.complete()
        refresh = capture(kept.compute, device, pool) if kept else None
        shorter, constants = shorten(run, mine, device)
        if shorter is not run:
            answer = run_aside(shorter, device)
        step = capture(shorter, device, refresh.pool if refresh else pool)
    return RecordedStep(mine, step, kept, refresh, constants), answer


def shorten(
    run: Callable[[], Any], inputs: Sequence[Tensor], device: torch.device
) -> tuple[Callable[[], Any], tuple[Tensor, ...]]:
    """Return what gives the answer of a step by fewer calls, and the tensors that only it has.

    The step itself where that is unknown.

    Args:
        run: the step, on its inputs.
        inputs: whose numbers will be others.
        device: of the model.
    """
    try:
        program, answer = run_aside(lambda: trace(run, inputs), device)
    except UntraceableError as error:
        _logger.info("replay: every call of the step is kept: %s", error)
        return run, ()
    program, answer = _with_channels_last(simplify(program), answer, inputs, device)
    shorter, found = _with_kernels(program, inputs, device)
    if not agree(found, answer):
        _logger.warning("replay: every call of the step is kept: the shorter one answers otherwise")
        return run, ()
    return partial(_without_autocast, shorter.run, inputs), tuple(shorter.constants.values())


def _with_channels_last(
    program: Program, answer: Any, inputs: Sequence[Tensor], device: torch.device
) -> tuple[Program, Any]:
    """Return a program and its answer, with channels last where convolutions of ours read them.

    Codes may differ in single steps of rounding, so that answers are those of the new program.
    """
    if not reads_pixels(program):
        return program, answer
    pictured = with_picture_calls(program)
    try:
        check = partial(_without_autocast, partial(run_checked, program, pictured), inputs)
        if agree(run_aside(check, device), answer):
            run = partial(_without_autocast, partial(laid_out, pictured), inputs)
            laid, found = run_aside(run, device)
            return laid, found
        _logger.warning("replay: pictures keep their layout: the shorter step answers otherwise")
    except (WrongKernelError, RuntimeError) as error:
        _logger.warning("replay: pictures keep their layout: %s", error)
    return program, answer


def _with_kernels(
    program: Program, inputs: Sequence[Tensor], device: torch.device
) -> tuple[Program, Any]:
    """Return a program with kernels, where they are right, and what it gives without them."""
    try:
        fused = fuse(program)
        checked = partial(_without_autocast, fused.check, inputs)
        return fused.program, run_aside(checked, device)
    except (KernelError, WrongKernelError) as error:
        _logger.warning("replay: the step's calls are not fused: %s", error)
    return program, run_aside(partial(_without_autocast, program.run, inputs), device)


def _without_autocast(run: Callable[[Sequence[Tensor]], Any], inputs: Sequence[Tensor]) -> Any:
    """Run a program, whose calls have the dtypes that autocasting gave them."""
    with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
        return run(inputs)


def run_aside(run: Callable[[], Any], device: torch.device) -> Any:
    """Return the result of a call, run on the stream that it is captured on afterwards."""
    with torch.cuda.device(device):
        aside, current = _aside(device), torch.cuda.current_stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            answer = run()
        current.wait_stream(aside)
        # The allocator reuses this memory for the next work on that stream, after this copy.
        return pytree.tree_map_only(Tensor, Tensor.clone, answer)


def capture(run: Callable[[], Any], device: torch.device, pool: Any) -> Recording:
    """Return a graph of a call's kernels, which are not run.

    Args:
        run: the call.
        device: where it queues.
        pool: of an earlier recording; None: a new one.
    """
    graph = torch.cuda.CUDAGraph()
    with (
        without_collection(),
        torch.cuda.device(device),
        torch.cuda.graph(graph, pool=pool, stream=_aside(device)),
        log.record() as kernels,
    ):
        output = run()
    return Recording(partial(_launch, graph, device), output, graph.pool(), kernels)


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep Python from looking for dead objects within the body, if it does at all.

    A dead model's graphs may be among them, and freeing a graph ends a capture that is under way.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@lru_cache(maxsize=64)
def _aside(device: torch.device) -> Any:
    """Return the stream that all steps of a device are recorded on.

    cuBLAS keeps 32 MB for every stream that it was ever called on.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _launch(graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
    with torch.cuda.device(device):
        graph.replay()
