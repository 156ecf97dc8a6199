"""Traces of a step: its calls, reads and writes, recorded from tensors without numbers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quantkit.bench.kernels.matrix_product import Product
from quantkit.bench.kernels.operator_costs import product_of
from quantkit.pipelines.kept_results import keeping

#: What only asks, or makes memory that nobody has written.
_FREE = {"prim.device", "aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided",
         "aten.sym_size", "aten.detach", "aten.lift_fresh", "aten.scalar_tensor"}  # fmt: skip
SDPA = "scaled_dot_product_attention"


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


@dataclass(frozen=True)
class Trace:
    """A step."""

    calls: tuple[Call, ...]
    #: operators that were asked for, views and questions included: what the host pays for
    asked: int

    @property
    def has_quantized_attention(self) -> bool:
        """True when some attention is on codes."""
        return any(call.name.startswith("quantkit.attention_") for call in self.calls)

    @property
    def flops(self) -> float:
        """Multiplications and additions of all products."""
        return sum(call.product.flops for call in self.calls if call.product)


def trace(step: Callable[[], object], kept: Iterable[object] = ()) -> Trace:
    """Return what ``step`` computes, without computing it.

    Args:
        step: on tensors of a FakeTensorMode that holds, or of the meta device.
        kept: inputs that are the same at every step: what layers keep of them is not computed.
    """
    recorder = _Recorder()
    with torch.no_grad(), _Attention(recorder), keeping(_Outside(recorder, kept)), recorder:
        step()
    return Trace(tuple(recorder.calls), recorder.asked)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Records operators that write memory of their own; a view of another's computes nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.asked = 0
        self._paused = False
        # Alive until the end, so that no memory has the key of another's.
        self._seen: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        del types
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            self._record(func, (args, kwargs or {}), result)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the block."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def add(self, name: str, reads: Sequence[Tensor], write: Tensor, product: Product) -> None:
        """Record a call that was not made."""
        self.asked += 1
        self.calls.append(Call(name, self._views(reads), self._views([write]), product))

    def _record(self, func: Any, given: Any, result: Any) -> None:
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        if name.startswith("prim."):
            return
        self.asked += 1
        inputs, outputs = (
            [t for t in tree_leaves(found) if isinstance(t, Tensor)] for found in (given, result)
        )
        changes = func._schema.is_mutable  # noqa: SLF001  the only place that says so
        reads, writes = self._views(inputs), self._views(outputs)
        known = {view.storage for view in reads}
        fresh = tuple(view for view in writes if changes or view.storage not in known)
        if name not in _FREE and fresh:
            self.calls.append(Call(name, reads, fresh, product_of(name, given[0], result)))

    def _views(self, tensors: Iterable[Tensor]) -> tuple[View, ...]:
        return tuple(self._view(t) for t in tensors)

    def _view(self, t: Tensor) -> View:
        storage = t.untyped_storage()
        self._seen.append(storage)
        steps = zip(t.shape, t.stride(), strict=True)
        elements = prod(size for size, step in steps if step or size == 0)
        key = storage._cdata  # noqa: SLF001  what tells memory without addresses apart
        return View(key, elements, t.element_size(), tuple(t.shape), int(t.storage_offset()))


class _Outside:
    """Leaves out what layers make of inputs that are the same at every step, and keep."""

    def __init__(self, recorder: _Recorder, inputs: Iterable[object]) -> None:
        self._recorder = recorder
        self._inputs = {id(t) for t in inputs if isinstance(t, Tensor)}

    def result(self, layer: nn.Module, x: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
        """Return what a layer makes of ``x``; None where that is computed at every step."""
        del layer
        base = x if x._base is None else x._base  # noqa: SLF001  a view may be made anew
        if id(base) not in self._inputs:
            return None
        with self._recorder.paused():
            return compute()


class _Attention(TorchFunctionMode):
    """Records torch's attention as one call: without a device it would be matrices of scores."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        del types
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != SDPA:
            return func(*args, **kwargs)
        return self._attend(*args, **kwargs)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        with self._recorder.paused():
            batch, heads, queries, _ = query.shape
            # As kernels lay it out: tokens outside, so that heads are joined without a copy.
            y = query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)
        masks = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        product = Product.attention(
            batch * heads, queries, key.shape[-2], query.shape[-1], value.shape[-1]
        )
        self._recorder.add(f"aten.{SDPA}", [query, key, value, *masks], y, product)
        return y
