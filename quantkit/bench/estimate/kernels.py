"""The kernels that the calls of a step become: one each, or fused as torch.compile fuses them.

Fusing is Inductor's in outline: products and quantkit's operators are kernels of their own, what
stands between two of them in one chain is one kernel, a norm over a row among it. A group norm
reads its picture for its statistics first, and again to apply them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from quantkit.bench.estimate.operators import Product
from quantkit.bench.estimate.tracing import Call, View

PRODUCTS, ATTENTION, NORMS, SMALL = "products", "attention", "norms", "elementwise and copies"
LAUNCHES = "launches"
GROUPS = (PRODUCTS, ATTENTION, NORMS, SMALL, LAUNCHES)

_GROUP_NORM = "aten.native_group_norm"
_STATISTICS, _APPLIED = "group_norm statistics", "group_norm applied"
_NORM = re.compile(r"norm|amax|aminmax|var_mean|softmax|quantize_\w+_token")
#: Operators of quantkit that are plain PyTorch where torch.compile fuses them (inference/fusing).
_QUANTIZE = "quantkit.quantize_"
_SUMMED = re.compile(r"layer_norm|rms_norm|statistics|amax|softmax|_token")
#: Columns of a row that Inductor keeps in registers while it sums (its persistent reductions).
_LONGEST_ROW = 1024

#: Instructions of a vector unit for an element: polynomials and divisions as compilers write them
#: out, conversions. The first name that is found counts; others have two.
_INSTRUCTIONS = (("gelu", 30), ("silu", 16), ("quantize", 20), ("exp", 8), ("sin", 20), ("cos", 20),
                 ("div", 8), ("statistics", 3), ("norm", 6), ("softmax", 16))  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """One launch."""

    group: str
    names: tuple[str, ...]
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    product: Product | None = None
    #: of the vector unit, over all elements
    instructions: float = 0.0
    #: it sums over rows, which takes longer to start and to end
    summed: bool = False
    #: these rows are longer than a block keeps, and are read again
    twice: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return sum(view.nbytes for view in (*self.reads, *self.writes))


def separate(calls: Sequence[Call]) -> tuple[Kernel, ...]:
    """Return the kernels of a model that is called module by module."""
    return tuple(_single(call) for call in _with_group_norms(calls))


def fused(calls: Sequence[Call], *, quantizing: bool) -> tuple[Kernel, ...]:
    """Return the kernels of a compiled model.

    Args:
        calls: of the model as it is.
        quantizing: the compiler writes the quantizing of inputs, too.
    """
    calls = tuple(_with_group_norms(calls))
    members = _chains(calls, quantizing=quantizing)
    readers: dict[int, set[int]] = {}
    for place, call in enumerate(calls):
        for view in call.reads:
            readers.setdefault(view.storage, set()).add(members[place])
    found, chains = list[Kernel](), dict[int, list[Call]]()
    for place, call in enumerate(calls):
        chains.setdefault(members[place], []).append(call)
    for number, chain in chains.items():
        found.append(_joined(chain, number, readers) if len(chain) > 1 else _single(chain[0]))
    return tuple(found)


def _with_group_norms(calls: Iterable[Call]) -> Iterator[Call]:
    """Yield the calls, group norms as the two passes that they are."""
    for call in calls:
        if call.name != _GROUP_NORM:
            yield call
            continue
        (x, *rest), (y, *moments) = call.reads, call.writes
        yield Call(_STATISTICS, (x,), tuple(moments))
        yield Call(_APPLIED, (x, *rest, *moments), (y,))


def _single(call: Call) -> Kernel:
    return Kernel(
        _group(call),
        (call.name,),
        _unique(call.reads),
        _unique(call.writes),
        call.product,
        0.0 if call.product else _instructions(call),
        bool(_SUMMED.search(call.name)),
    )


def _group(call: Call) -> str:
    if call.product is not None:
        return ATTENTION if call.product.kind == "attention" else PRODUCTS
    if "head_codes" in call.name or "value_codes" in call.name:
        return ATTENTION
    is_norm = _NORM.search(call.name) and not call.name.startswith(_QUANTIZE)
    return NORMS if is_norm else SMALL


def _instructions(call: Call) -> float:
    elements = max((view.elements for view in (*call.reads, *call.writes)), default=0)
    return elements * next((n for word, n in _INSTRUCTIONS if word in call.name), 2)


def _unique(views: Iterable[View]) -> tuple[View, ...]:
    return tuple(dict.fromkeys(views))


def _is_opaque(call: Call, *, quantizing: bool) -> bool:
    if call.product is not None:
        return True
    if call.name.startswith(_QUANTIZE):
        return not quantizing
    return call.name.startswith("quantkit.")


def _chains(calls: Sequence[Call], *, quantizing: bool) -> list[int]:
    """Return the number of the kernel that each call is part of.

    A value has a level: the most kernels of their own that its makers went through. Calls of one
    level that feed each other are one kernel, so that no kernel waits for itself.
    """
    levels: dict[int, int] = {}
    makers: dict[int, tuple[int, int]] = {}
    numbers, members = count(), list[int]()
    parents: dict[int, int] = {}
    for call in calls:
        level = max((levels.get(view.storage, 0) for view in call.reads), default=0)
        opaque = _is_opaque(call, quantizing=quantizing)
        number = next(numbers)
        parents[number] = number
        if not opaque:
            for view in call.reads:
                maker, at = makers.get(view.storage, (-1, -1))
                if at == level:
                    parents[_root(parents, maker)] = _root(parents, number)
        ends = opaque or call.name == _STATISTICS
        for view in call.writes:
            levels[view.storage] = level + ends
            makers[view.storage] = (number, -1 if ends else level)
        members.append(number)
    return [_root(parents, number) for number in members]


def _root(parents: dict[int, int], number: int) -> int:
    while parents[number] != number:
        number = parents[number]
    return number


def _joined(chain: Sequence[Call], number: int, readers: dict[int, set[int]]) -> Kernel:
    made = {view.storage for call in chain for view in call.writes}
    reads = _unique(v for call in chain for v in call.reads if v.storage not in made)
    # The last to write a memory writes all of it that anybody reads.
    last = {view.storage: view for call in chain for view in call.writes}
    writes = tuple(v for s, v in last.items() if readers.get(s, set()) - {number})
    singles = [_single(call) for call in chain]
    return Kernel(
        NORMS if any(single.group == NORMS for single in singles) else SMALL,
        tuple(call.name for call in chain),
        _once(reads),
        # What nobody reads is the step's result.
        writes or chain[-1].writes[:1],
        None,
        sum(single.instructions for single in singles),
        any(single.summed for single in singles),
        any(_is_long(call) for call in chain),
    )


def _is_long(call: Call) -> bool:
    """Tell whether a norm's rows are too long for a block's registers: they are read twice."""
    rows = "layer_norm" in call.name or "rms_norm" in call.name
    return rows and call.reads[0].shape[-1:] > (_LONGEST_ROW,)


def _once(views: Sequence[View]) -> tuple[View, ...]:
    """Return views of which none is read twice: the same elements in another shape are one."""
    found: dict[tuple[int, int], View] = {}
    for view in views:
        found.setdefault((view.storage, view.elements), view)
    return tuple(found.values())


def with_layout_copies(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Return the kernels and the copies that cuDNN makes of pictures with channels first."""
    return tuple(each for kernel in kernels for each in _with_copies(kernel))


def _with_copies(kernel: Kernel) -> Iterator[Kernel]:
    if kernel.names != ("aten.convolution",):
        yield kernel
        return
    (x, *_), (y, *_) = kernel.reads, kernel.writes
    copy = Kernel(SMALL, ("layout",), (x,), (replace(x, storage=-1 - x.storage),))
    yield copy
    yield kernel
    yield replace(copy, reads=(y,), writes=(replace(y, storage=-1 - y.storage),))
