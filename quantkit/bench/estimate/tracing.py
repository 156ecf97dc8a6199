"""Traces of a step: its calls, reads and writes, recorded from tensors without numbers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quantkit.bench.kernels.matrix_product import Product
from quantkit.bench.kernels.operator_costs import product_of
from quantkit.fusion import program as fusion
from quantkit.fusion.program import Layout, Program, Value, replaced
from quantkit.fusion.trace import Recorder
from quantkit.pipelines.kept_results import keeping

#: What only asks, or makes memory that nobody has written.
_FREE = {"prim.device", "aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided",
         "aten.sym_size", "aten.detach", "aten.lift_fresh", "aten.scalar_tensor"}  # fmt: skip
_SDPA = "scaled_dot_product_attention"


@dataclass(frozen=True)
class View:
    """A tensor that is read or written."""

    #: of the memory, the same in all its views
    storage: int
    #: elements that differ: what is repeated along an axis counts once
    elements: int
    item_bytes: int
    shape: tuple[int, ...]
    #: elements of the memory before it: parts of one tensor differ in this alone
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are moved."""
        return self.elements * self.item_bytes


@dataclass(frozen=True)
class Call:
    """One operator that computes."""

    #: as aten.mul or quantkit.gemm_fp8
    name: str
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    #: None for what multiplies no matrices
    product: Product | None = None

    @property
    def nbytes(self) -> int:
        """Bytes read and written, each tensor once."""
        return sum(view.nbytes for view in {*self.reads, *self.writes})


@dataclass(frozen=True, eq=False)
class Trace:
    """A step."""

    program: Program
    #: why a run of the program is no run of the step; empty where it is one
    reason: str = ""

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """Operators that compute."""
        return calls_of(self.program.calls, self.program.layouts)

    @property
    def asked(self) -> int:
        """Operators that were asked for, views and questions included: what the host pays for."""
        return sum(call.operator.namespace != "prim" for call in self.program.calls)

    @property
    def has_quantized_attention(self) -> bool:
        """True when some attention is on codes."""
        return any(call.name.startswith("quantkit.attention_") for call in self.calls)

    @property
    def flops(self) -> float:
        """Multiplications and additions of all products."""
        return sum(call.product.flops for call in self.calls if call.product)


def trace(
    step: Callable[[], object],
    inputs: Iterable[Tensor] = (),
    *,
    keeps: bool = True,
) -> Trace:
    """Return what ``step`` computes, without computing it.

    Args:
        step: on tensors of a FakeTensorMode that holds, or of the meta device.
        inputs: its tensors that are others at the next picture.
        keeps: layers keep what they make of inputs that are the same at every step.
    """
    inputs = tuple(inputs)
    recorder = Recorder(inputs)
    outside = _Outside(recorder, inputs if keeps else ())
    with (
        torch.no_grad(),
        _Attention(),
        keeping(outside),
        recorder,
    ):
        answer = step()
    return Trace(recorder.program(answer), recorder.reason)


def calls_of(calls: Iterable[fusion.Call], layouts: Mapping[Value, Layout]) -> tuple[Call, ...]:
    """Return those calls of a program that compute: a view of another's memory does not."""
    found = (_call_of(call, layouts) for call in calls)
    return tuple(call for call in found if call is not None)


def _call_of(call: fusion.Call, layouts: Mapping[Value, Layout]) -> Call | None:
    operator = call.operator
    name = f"{operator.namespace}.{operator.overloadpacket.__name__}"
    if name in _FREE:
        return None
    reads = tuple(view_of(layouts[value]) for value in call.reads)
    known = {view.storage for view in reads}
    results = [layouts[value] for value in call.results if value is not None]
    product = product_of(name, _hollow(call.arguments, layouts), next(map(_tensor, results), None))
    if product is not None and product.kind == "attention":
        # What it keeps for gradients is empty.
        results = results[:1]
    writes = tuple(view_of(one) for one in results if call.writes or one.storage not in known)
    return Call(name, reads, writes, product) if writes else None


def view_of(layout: Layout) -> View:
    """Return what is moved of a tensor with a layout."""
    steps = zip(layout.shape, layout.strides, strict=True)
    elements = prod(size for size, step in steps if step or size == 0)
    return View(layout.storage, elements, layout.dtype.itemsize, layout.shape, layout.offset)


def _hollow(arguments: Any, layouts: Mapping[Value, Layout]) -> Any:
    """Return arguments with tensors of their shapes."""
    return replaced(arguments, lambda value: _tensor(layouts[value]))


def _tensor(layout: Layout) -> Tensor:
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta")


class _Outside:
    """Leaves out what layers make of inputs that are the same at every step, and keep."""

    def __init__(self, recorder: Recorder, inputs: Iterable[Tensor]) -> None:
        self._recorder = recorder
        self._inputs = {id(t) for t in inputs}

    def result(self, layer: nn.Module, x: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
        """Return what a layer makes of ``x``; None where that is computed at every step."""
        del layer
        base = x if x._base is None else x._base  # noqa: SLF001  a view may be made anew
        if id(base) not in self._inputs:
            return None
        with self._recorder.paused():
            return compute()


class _Attention(TorchFunctionMode):
    """Calls an operator for torch's attention: without a device it would be matrices of scores."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        del types
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != _SDPA:
            return func(*args, **kwargs)
        return _attend(*args, **kwargs)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *_: Any, **more: Any
) -> Any:
    mask = more.get("attn_mask", mask)
    # As all kernels of attention it puts tokens outside, so that heads are joined without a copy.
    attend = torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001  an operator
    return attend(query, key, value, mask, compute_log_sumexp=False)[0]
