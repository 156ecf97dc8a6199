"""Leaving out of a program what changes nothing: the answers stay the same, bit for bit."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from quantkit.fusion.program import Call, Program, Value, replaced, values_in

_ATEN = torch.ops.aten
#: Operators that change nothing where their second argument is one.
_BY_ONE = frozenset({
    _ATEN.div.Tensor, _ATEN.div.Scalar, _ATEN.mul.Tensor, _ATEN.mul.Scalar,
})  # fmt: skip
#: Operators that change nothing where their result has the dtype, device and layout of the first.
_COPIES = frozenset({_ATEN.clone.default, _ATEN._to_copy.default})  # noqa: SLF001  operators' names


def simplify(program: Program) -> Program:
    """Return a program that gives the same answers by fewer calls.

    Operators that write to a tensor of their own give a new one. Calls whose results follow from
    no input and no weight are made now; of equal calls the first is left, of copies and of products
    with one their source; and none whose result nobody reads.
    """
    for step in (_out_of_place, _fold, _without_copies, _one_of_equal, _share, without_unread):
        program = step(program)
    return program


def _out_of_place(program: Program) -> Program:
    """Give a result of its own to what writes to a tensor that no view shares."""
    viewed = {v for call in program.calls if call.is_view for v in call.reads}
    own = {v for call in program.calls if call.fresh and not call.writes for v in _results(call)}
    owned = own - viewed
    last: dict[Value, Value] = {}
    numbers = count(1 + max((value.number for value in program.layouts), default=0))
    calls, layouts, written = [], dict(program.layouts), {*program.written}
    for call in program.calls:
        now = _reading_call(call, lambda value: last.get(value, value))
        twin = _twin(call.operator)
        target = call.arguments[0] if call.arguments else None
        if call.writes and twin is not None and target in owned:
            assert isinstance(target, Value)
            new = last[target] = Value(next(numbers))
            layouts[new] = replace(layouts[target], storage=-new.number)
            now = replace(now, operator=twin, results=(new,), writes=False, fresh=True)
        elif call.writes:
            owned -= {*call.reads}
        calls.append(now)
    output = pytree.tree_map_only(Value, lambda value: last.get(value, value), program.output)
    kept = frozenset(written - last.keys())
    return replace(program, calls=tuple(calls), output=output, layouts=layouts, written=kept)


def _twin(operator: Any) -> Any:
    """Return the operator that writes to a new tensor; None where there is none."""
    name, overload = operator.overloadpacket.__name__, operator._overloadname  # noqa: SLF001
    packet = getattr(_ATEN, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, overload, None)


def _fold(program: Program) -> Program:
    """Make the calls that depend on nothing: positions, frequencies, masks of ones."""
    known: dict[Value, Tensor] = {v: program.constants[v] for v in program.literals}
    left = []
    for call in program.calls:
        if _lasts(call, program) and all(value in known for value in call.reads):
            known |= call.make(known)
        else:
            left.append(call)
    read = {value for call in left for value in call.reads} | {*values_in(program.output)}
    constants = {**program.constants, **known}
    kept = {v: t for v, t in constants.items() if v in read or v not in known}
    return replace(program, calls=tuple(left), constants=kept)


def _without_copies(program: Program) -> Program:
    """Read the source of what is a copy of it."""
    sources: dict[Value, Value] = {}
    views: dict[Value, Value] = {}
    for call in program.calls:
        source = _copied(call, program, views) if _lasts(call, program) else None
        if source is not None:
            sources[call.result] = sources.get(source, source)
        elif not call.fresh and call.arguments and isinstance(call.arguments[0], Value):
            views |= dict.fromkeys(_results(call), call.arguments[0])
    return _reading(program, lambda value: sources.get(value, value))


def _copied(call: Call, program: Program, views: Mapping[Value, Value]) -> Value | None:
    """Return what a call's result is a copy of; None: it is none."""
    if call.operator is _ATEN.cat.default:
        source = _rejoined(call, program, views)
    elif call.operator in _COPIES or (call.operator in _BY_ONE and call.arguments[1] == 1):
        source = call.arguments[0]
    else:
        return None
    if not isinstance(source, Value) or source in program.written:
        return None
    return source if program.layouts[source] == program.layouts[call.result] else None


def _rejoined(call: Call, program: Program, views: Mapping[Value, Value]) -> Value | None:
    """Return the tensor whose parts, in their order, a concatenation joins again.

    Transformers of two streams split what they have joined at the end of each block.
    """
    (first, *others), axis = (*call.arguments, 0)[:2]
    layouts = program.layouts
    whole = views.get(first)
    while whole is not None and layouts[whole] != layouts[call.result]:
        whole = views.get(whole)
    if whole is None:
        return None
    at = layouts[whole].offset
    for part in (first, *others):
        mine = layouts[part]
        if mine.storage != layouts[whole].storage or mine.strides != layouts[whole].strides:
            return None
        if mine.offset != at:
            return None
        at += mine.shape[axis] * mine.strides[axis]
    return whole


def _one_of_equal(program: Program) -> Program:
    """Read one of several constants of one element that are equal: scales of what several read."""
    first: dict[Hashable, Value] = {}
    same: dict[Value, Value] = {}
    singles = [
        v for v, t in program.constants.items() if t.numel() == 1 and v not in program.written
    ]
    for value, number in zip(singles, _numbers(program, singles), strict=True):
        same[value] = first.setdefault((program.layouts[value], number), value)
    return _reading(program, lambda value: same.get(value, value))


def _has_numbers(tensor: Tensor) -> bool:
    """Tell whether a tensor is more than its shape."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _numbers(program: Program, values: Sequence[Value]) -> list[Hashable]:
    """Return the bits of constants of one element, brought to the host at once.

    None where there are but shapes: then constants of one layout count as equal.
    """
    found: list[Hashable] = [None] * len(values)
    kinds: dict[Hashable, list[int]] = {}
    for place, value in enumerate(values):
        tensor = program.constants[value]
        if _has_numbers(tensor):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(place)
    for places in kinds.values():
        numbers = torch.stack([program.constants[values[place]].reshape(()) for place in places])
        rows = numbers.unsqueeze(1).view(torch.uint8).cpu()
        for place, row in zip(places, rows, strict=True):
            found[place] = bytes(row.tolist())
    return found


def _share(program: Program) -> Program:
    """Make equal calls once."""
    first: dict[Hashable, tuple[Value | None, ...]] = {}
    same: dict[Value, Value] = {}
    for call in program.calls:
        key = _key(call, same) if _lasts(call, program) else None
        if key is None or not program.written.isdisjoint(call.reads):
            continue
        others = first.setdefault(key, call.results)
        pairs = zip(call.results, others, strict=True)
        same |= {mine: other for mine, other in pairs if mine and other and mine != other}
    return _reading(program, lambda value: same.get(value, value))


def _key(call: Call, same: Mapping[Value, Value]) -> Hashable | None:
    def known(value: Value) -> Value:
        return same.get(value, value)

    leaves, tree = pytree.tree_flatten((call.arguments, dict(call.keywords)))
    # 1 and 1.0 are equal, and give other dtypes.
    key = (call.operator, str(tree), tuple((type(x), replaced(x, known)) for x in leaves))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def without_unread(program: Program) -> Program:
    """Leave out calls whose results nobody reads, and constants."""
    read = {*values_in(program.output)}
    left: list[Call] = []
    for call in reversed(program.calls):
        if not call.writes and read.isdisjoint(_results(call)):
            continue
        read |= {*call.reads}
        left.append(call)
    constants = {value: t for value, t in program.constants.items() if value in read}
    return replace(program, calls=tuple(reversed(left)), constants=constants)


def _results(call: Call) -> tuple[Value, ...]:
    return tuple(result for result in call.results if result is not None)


def _lasts(call: Call, program: Program) -> bool:
    """Tell whether a call writes nothing, and nobody writes to its results."""
    return not call.writes and program.written.isdisjoint(_results(call))


def _reading(program: Program, change: Callable[[Value], Value]) -> Program:
    """Return a program that reads other values."""
    calls = tuple(_reading_call(call, change) for call in program.calls)
    output = pytree.tree_map_only(Value, change, program.output)
    return replace(program, calls=calls, output=output)


def _reading_call(call: Call, change: Callable[[Value], Value]) -> Call:
    """Return a call that reads other values; the same where it does not."""
    if all(change(value) == value for value in call.reads):
        return call
    return replace(
        call,
        arguments=replaced(call.arguments, change),
        keywords={name: replaced(given, change) for name, given in call.keywords.items()},
    )
