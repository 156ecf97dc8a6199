"""Checks that all lanes are active at matrix instructions, which require it.

Followed along every way through the code: sets of scalar registers, ``exec`` among them, that hold
all lanes between them. ``{exec}`` says that no lane is off. Branches of a condition are left by
``exec |= saved``, which such a set with both in it makes whole again. What the code does otherwise
is taken to turn lanes off, so that a fault is never missed.

Source: RDNA4 ISA reference, WMMA and SWMMAC: "EXEC must be all ones".
"""

from collections.abc import Callable, Sequence

from quantkit.device.aot.disassembly import Instruction, states_before

#: Registers whose union is all lanes.
Cover = frozenset[str]
#: The least of them: none holds another.
Covers = frozenset[Cover]

_EXEC = "exec"
#: Nested branches need as many registers to name all lanes; more are forgotten.
_MOST_REGISTERS = 6


def masked_matrix_instructions(code: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Return the matrix instructions that may run while lanes are off, of a whole kernel."""
    before = states_before(code, frozenset({frozenset({_EXEC})}), _step, _meet)
    matrix = ((place, i) for place, i in enumerate(code) if _needs_all(i))
    return tuple(i for place, i in matrix if frozenset({_EXEC}) not in before.get(place, ()))


def _needs_all(instruction: Instruction) -> bool:
    # dot4 is of each lane alone.
    return instruction.kind == "matrix" and not instruction.mnemonic.startswith("v_dot")


def _step(covers: Covers, instruction: Instruction, taken: bool) -> Covers:  # noqa: FBT001
    if instruction.kind == "branch":
        # No lane is on there, so the others hold all.
        empty = taken and instruction.mnemonic == "s_cbranch_execz"
        return _least({cover - {_EXEC} for cover in covers}) if empty else covers
    if instruction.mnemonic.startswith("v_cmpx"):
        return _without(covers, {_EXEC})
    known = _KNOWN.get(instruction.mnemonic)
    if known:
        return known(covers, instruction.parts)
    lost = set(instruction.results)
    return _without(covers, lost | {_EXEC} if "saveexec" in instruction.mnemonic else lost)


def _move(covers: Covers, parts: Sequence[str]) -> Covers:
    target, source = map(_name, parts)
    if source == "-1":
        return _least({*_without(covers, {target}), frozenset({target})})
    return _least({*_without(covers, {target}), *_swapped(covers, source, target)})


def _or(covers: Covers, parts: Sequence[str]) -> Covers:
    """Put d = a | b in the place of either, or of both."""
    target, *sources = map(_name, parts)
    kept = _without(covers, {target} - set(sources))
    return _least({*_without(kept, {target}), *_joined(covers, set(sources), target)})


def _and_not(covers: Covers, parts: Sequence[str]) -> Covers:
    """Follow d = a & ~b: d | b holds a."""
    target, a, b = map(_name, parts)
    found = _without(covers, {target})
    return found if target == b else _least({*found, *_swapped(covers, a, target, b)})


def _xor(covers: Covers, parts: Sequence[str]) -> Covers:
    """Follow d = a ^ b: d | a holds b, and d | b holds a."""
    target, a, b = map(_name, parts)
    found = set(_without(covers, {target}))
    for this, other in ((a, b), (b, a)):
        if this != target:
            found |= _swapped(covers, other, target, this)
    return _least(found)


def _save_and_mask(covers: Covers, parts: Sequence[str]) -> Covers:
    """Save exec in d, and mask it."""
    return _without(_move(covers, (parts[0], _EXEC)), {_EXEC})


def _save_and_add(covers: Covers, parts: Sequence[str]) -> Covers:
    """Save exec in d, and add s to it."""
    target, source = map(_name, parts)
    added = _joined(covers, {_EXEC, source}, _EXEC)
    saved = _move(covers, (target, _EXEC))
    # A cover through the old content of d is none any more, but that content is in exec now.
    own = {cover for cover in added if target not in cover}
    return _least({*_without(saved, {_EXEC}), *own})


#: What is known of an instruction that writes masks.
_KNOWN: dict[str, Callable[[Covers, Sequence[str]], Covers]] = {
    "s_mov_b32": _move,
    "s_or_b32": _or,
    "s_and_not1_b32": _and_not,
    "s_xor_b32": _xor,
    "s_and_saveexec_b32": _save_and_mask,
    "s_or_saveexec_b32": _save_and_add,
}


def _meet(a: Covers, b: Covers) -> Covers:
    """Return what holds either way: the unions of one of each."""
    return _least({x | y for x in a for y in b})


def _name(operand: str) -> str:
    return operand.removesuffix("_lo")


def _without(covers: Covers, lost: set[str]) -> Covers:
    return frozenset(cover for cover in covers if not cover & lost)


def _swapped(covers: Covers, old: str, target: str, *others: str) -> set[Cover]:
    """Return the covers with ``old`` in them, with the others in its place, the target new."""
    rests = (cover - {old} for cover in covers if old in cover)
    # What the target held before is gone.
    return {rest | {target, *others} for rest in rests if target not in rest}


def _joined(covers: Covers, old: set[str], new: str) -> set[Cover]:
    return {(cover - old) | {new} for cover in covers if old & cover and new not in cover - old}


def _least(covers: set[Cover]) -> Covers:
    small = {cover for cover in covers if len(cover) <= _MOST_REGISTERS}
    return frozenset(c for c in small if not any(other < c for other in small))
