"""Leaving out of a program what changes nothing: the answers stay the same, bit for bit."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
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

    Calls whose results follow from no input and no weight are made now; of equal calls the first
    is left, of copies and of products with one their source; and none whose result nobody reads.
    """
    for step in (_fold, _without_copies, _share, _without_unread):
        program = step(program)
    return program


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
    for call in program.calls:
        source = call.arguments[0] if call.arguments else None
        if isinstance(source, Value) and _lasts(call, program) and _is_copy(call, program):
            (result,) = call.results
            assert result is not None
            sources[result] = sources.get(source, source)
    return _reading(program, lambda value: sources.get(value, value))


def _is_copy(call: Call, program: Program) -> bool:
    by_one = call.operator in _BY_ONE and call.arguments[1] == 1
    if not by_one and call.operator not in _COPIES:
        return False
    source, (result,) = call.arguments[0], call.results
    assert result is not None
    return source not in program.written and program.layouts[source] == program.layouts[result]


def _share(program: Program) -> Program:
    """Make equal calls once."""
    first: dict[Hashable, tuple[Value | None, ...]] = {}
    same: dict[Value, Value] = {}
    for call in program.calls:
        key = _key(call, same) if call.fresh and _lasts(call, program) else None
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


def _without_unread(program: Program) -> Program:
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
    calls = tuple(
        replace(
            call,
            arguments=replaced(call.arguments, change),
            keywords={name: replaced(given, change) for name, given in call.keywords.items()},
        )
        for call in program.calls
    )
    output = pytree.tree_map_only(Value, change, program.output)
    return replace(program, calls=calls, output=output)
