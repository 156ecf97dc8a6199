"""The kernels that the calls of a step become: one each, or fused as torch.compile fuses them.

Fusing is Inductor's in outline: products and quantkit's operators are kernels of their own, what
stands between two of them in one chain is one kernel, a norm over a row among it. A group norm
reads its picture for its statistics first, and again to apply them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from quantkit.bench.estimate.tracing import Call, View
from quantkit.bench.kernels.matrix_product import Product
from quantkit.bench.kernels.operator_costs import (
    ATTENTION,
    NORMS,
    PRODUCTS,
    SMALL,
    Cost,
    cost_of,
)

_GROUP_NORM = "aten.native_group_norm"
_STATISTICS, _APPLIED = "group_norm statistics", "group_norm applied"
_NORM = re.compile(r"norm|amax|aminmax|var_mean|softmax")
_SUMMED = re.compile(r"layer_norm|rms_norm|statistics|amax|softmax")
#: What torch's own kernels do with an element a thread where rows are not one behind the other.
_SCATTERED = {"aten.cat", "aten.clone", "aten.upsample_nearest2d"}
#: Columns of a row that Inductor keeps in registers while it sums (its persistent reductions).
_LONGEST_ROW = 1024

#: Instructions of a vector unit for an element: polynomials and divisions as compilers write them
#: out, conversions. The first name that is found counts; others have two.
_INSTRUCTIONS = (("gelu", 30), ("silu", 16), ("exp", 8), ("sin", 20), ("cos", 20), ("div", 8),
                 ("statistics", 3), ("norm", 6), ("softmax", 16))  # fmt: skip


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
    #: torch moves its elements one by one
    scattered: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return sum(view.nbytes for view in (*self.reads, *self.writes))


def separate(calls: Sequence[Call]) -> tuple[Kernel, ...]:
    """Return the kernels of a model that is not compiled."""
    return tuple(
        replace(_single(call), scattered=call.name in _SCATTERED)
        for call in _with_group_norms(calls)
    )


def fused(calls: Sequence[Call]) -> tuple[Kernel, ...]:
    """Return the kernels of a compiled model."""
    calls = tuple(_with_group_norms(calls))
    members = _chains(calls)
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
    cost = cost_of(call.name) or _cost_of_torch(call)
    elements = max((view.elements for view in (*call.reads, *call.writes)), default=0)
    return Kernel(
        cost.group,
        (call.name,),
        _unique(call.reads),
        _unique(call.writes),
        call.product,
        float(elements * cost.instructions),
        cost.summed,
    )


def _cost_of_torch(call: Call) -> Cost:
    if call.product is not None:
        return Cost(ATTENTION if call.product.kind == "attention" else PRODUCTS)
    instructions = next((n for word, n in _INSTRUCTIONS if word in call.name), 2)
    group = NORMS if _NORM.search(call.name) else SMALL
    return Cost(group, instructions, bool(_SUMMED.search(call.name)))


def _unique(views: Iterable[View]) -> tuple[View, ...]:
    return tuple(dict.fromkeys(views))


def _is_opaque(call: Call) -> bool:
    return call.product is not None or call.name.startswith("quantkit.")


def _chains(calls: Sequence[Call]) -> list[int]:
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
        opaque = _is_opaque(call)
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
        once(reads),
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


def once(views: Sequence[View]) -> tuple[View, ...]:
    """Return views of which none is read twice: the same elements in another shape are one."""
    found: dict[tuple[int, int, int], View] = {}
    for view in views:
        found.setdefault((view.storage, view.start, view.elements), view)
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
