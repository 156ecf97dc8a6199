"""GFX12's hazard of scalar registers, found in machine code that leaves out the waits.

A vector instruction that reads a scalar register can hide a later write of that register from who
reads it next, until ``s_wait_alu`` waits for the writer: ``sa_sdst`` for scalar instructions,
``va_sdst`` for vector ones, ``va_vcc`` for vector ones that write ``vcc``. Scalar instructions wait
for vector ones by themselves. Registers count in even pairs. clang has put the waits in since 20.

Source: LLVM, the pass that mitigates it on GFX12 and its rewrite (pull requests 100067,
118750).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from quantkit.device.aot.disassembly import Instruction, states_before

_VCC = "vcc"
_NONE: frozenset[str] = frozenset()
#: Counter of s_wait_alu -> first bit and width of its field, where an older disassembler prints
#: the number.
_COUNTERS = {"sa_sdst": (0, 1), "va_vcc": (1, 1), "va_sdst": (9, 3)}


@dataclass(frozen=True)
class _State:
    """The possible states on all paths to a place in the code."""

    #: pairs that a vector instruction has read
    read: frozenset[str] = _NONE
    #: registers of such pairs, written since by scalar and by vector instructions, not waited for
    scalar: frozenset[str] = _NONE
    vector: frozenset[str] = _NONE


def unwaited_reads(code: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Return the instructions that may read a stale scalar register, of a whole gfx12 kernel."""
    before = states_before(code, _State(), lambda state, i, _: _step(state, i), _meet)
    return tuple(i for place, i in enumerate(code) if place in before and _stale(before[place], i))


def _step(state: _State, instruction: Instruction) -> _State:
    if instruction.mnemonic in {"s_wait_alu", "s_waitcnt_depctr"}:
        return _waited(state, _counters(instruction.operands))
    if _is_load(instruction):
        # Its address comes through the same path, behind all writes.
        return _State(state.read)
    if not _computes(instruction):
        return state
    sources = _tracked(instruction.sources)
    # One wait is enough: what follows the first stale read is not reported again.
    state = _waited(state, _stale(state, instruction))
    if _is_vector(instruction):
        state = replace(state, read=state.read | {_pair(name) for name in sources})
    elif any(_pair(name) in state.read for name in sources):
        waits = {"va_vcc"} if _VCC in sources else set()
        waits |= {"va_sdst"} if set(sources) - {_VCC} else set()
        state = _waited(state, waits)
    return _written(state, instruction)


def _stale(state: _State, instruction: Instruction) -> set[str]:
    """Return the counters that should have been waited for."""
    if not _computes(instruction):
        return set()
    sources = set(_tracked(instruction.sources))
    waits = {"sa_sdst"} if sources & state.scalar else set()
    if _is_vector(instruction):
        found = sources & state.vector
        waits |= {"va_vcc" if name == _VCC else "va_sdst" for name in found}
    return waits


def _written(state: _State, instruction: Instruction) -> _State:
    results = {name for name in _tracked(instruction.results) if _pair(name) in state.read}
    if not results:
        return state
    # vcc has one writer to wait for, the last.
    last = results & {_VCC}
    if _is_vector(instruction):
        return replace(state, vector=state.vector | results, scalar=state.scalar - last)
    return replace(state, scalar=state.scalar | results, vector=state.vector - last)


def _waited(state: _State, counters: Iterable[str]) -> _State:
    for counter in counters:
        if counter == "sa_sdst":
            state = replace(state, scalar=_NONE)
        elif counter == "va_vcc":
            state = replace(state, vector=state.vector - {_VCC})
        else:
            state = replace(state, vector=state.vector & {_VCC})
    return state


def _counters(operands: str) -> set[str]:
    """Return the counters that are waited for until they are 0."""
    if match := re.fullmatch(r"0x[0-9a-f]+|\d+", operands):
        mask = int(match[0], 0)
        return {name for name, (bit, width) in _COUNTERS.items() if not mask >> bit & 2**width - 1}
    return {name for name in _COUNTERS if f"depctr_{name}(0)" in operands}


def _meet(a: _State, b: _State) -> _State:
    return _State(a.read | b.read, a.scalar | b.scalar, a.vector | b.vector)


def _is_load(instruction: Instruction) -> bool:
    return instruction.mnemonic.startswith(("s_load", "s_buffer_load", "buffer_"))


def _is_vector(instruction: Instruction) -> bool:
    return instruction.kind in {"vector", "matrix"}


def _computes(instruction: Instruction) -> bool:
    computes = instruction.kind in {"vector", "matrix", "scalar", "branch"}
    return computes and not _is_load(instruction)


def _tracked(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name != "exec")


def _pair(name: str) -> str:
    return name if name == _VCC else f"s{int(name[1:]) // 2}"
