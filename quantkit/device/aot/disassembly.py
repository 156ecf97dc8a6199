"""Parsing llvm-objdump's output of AMD objects: instructions, scalar registers, branches.

Only what the gates of ``check`` need: contents of vector registers are not tracked.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

_State = TypeVar("_State")

_LABEL = re.compile(r"^([0-9a-f]+) <(.+)>:$")
_CODE = re.compile(r"^\t(\w+)\s*(.*?)\s*// ([0-9A-F]+):")
_TARGET = re.compile(r"<.+\+0x([0-9a-f]+)>$")
_REGISTER = re.compile(r"\bs(?:(\d+)\b|\[(\d+):(\d+)\])|\b(vcc|exec)_lo\b")
# In vector instructions a scalar result stands first, or second behind a vector one.
_SECOND_RESULT = re.compile(r"v_(?:\w+_co_|div_scale_|mad_[ui]64_)")
# Those whose first operand is read, too.
_NO_RESULT = re.compile(r"v_cmpx|s_(?:cmp|bitcmp|c?branch|wait|barrier|setreg|store|sleep|nop|end)")
# Those that read vcc without naming it.
_READS_VCC = re.compile(r"cbranch_vcc|div_fmas|dual_cndmask")
_END = "s_endpgm"

#: First prefix that fits names the class. Waits include what only steers the issue.
_CLASSES = (
    ("matrix", ("v_wmma", "v_swmmac", "v_dot4c_i32_i8", "v_dot4_i32_i8")),
    ("vector", ("v_",)),
    ("lds", ("ds_",)),
    ("memory", ("global_", "buffer_", "flat_", "scratch_")),
    ("wait", ("s_wait", "s_delay_alu", "s_clause", "s_nop", "s_sendmsg")),
    ("branch", ("s_branch", "s_cbranch")),
    ("barrier", ("s_barrier",)),
    ("scalar", ("s_",)),
)


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly."""

    address: int
    mnemonic: str
    #: as printed, without the encoding
    operands: str
    #: where a branch goes
    target: int | None

    @property
    def falls_through(self) -> bool:
        """True when the next line may be executed after it."""
        return self.mnemonic not in {"s_branch", _END}

    @cached_property
    def kind(self) -> str:
        """Its class."""
        return class_of(self.mnemonic)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The operands one by one, both halves of a dual instruction in one row."""
        halves = re.sub(r"::\s*v_dual_\w+", ",", self.operands)
        return tuple(part.strip() for part in re.split(r",(?![^\[]*\])", halves))

    @cached_property
    def results(self) -> tuple[str, ...]:
        """The scalar registers that it writes, ``exec`` and ``vcc`` among them.

        Those that a mnemonic alone implies are not: v_cmpx and the saveexecs write ``exec``.
        """
        return tuple(name for at in self._written for name in _registers(self.parts[at]))

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The scalar registers that it reads by name, and ``vcc`` where the mnemonic says so."""
        rest = (part for at, part in enumerate(self.parts) if at not in self._written)
        implied = ("vcc",) if _READS_VCC.search(self.mnemonic) else ()
        return tuple(name for part in rest for name in _registers(part)) + implied

    @property
    def _written(self) -> tuple[int, ...]:
        """Return the places among the operands where scalar registers are written."""
        if _NO_RESULT.match(self.mnemonic) or self.kind in {"memory", "lds", "matrix"}:
            return ()
        return (1,) if _SECOND_RESULT.match(self.mnemonic) else (0,)


def read_code(text: str, symbol: str) -> tuple[Instruction, ...]:
    """Return the instructions of ``symbol`` in a disassembly."""
    code, base, inside = [], 0, False
    for line in text.splitlines():
        if label := _LABEL.match(line):
            inside = label[2] == symbol
            base = int(label[1], 16)
        elif inside and (match := _CODE.match(line)):
            target = _TARGET.search(line) if class_of(match[1]) == "branch" else None
            goal = base + int(target[1], 16) if target else None
            code.append(Instruction(int(match[3], 16), match[1], match[2], goal))
    return tuple(code)


def class_of(mnemonic: str) -> str:
    """Return the class of an instruction, ``other`` for one that has none."""
    for name, prefixes in _CLASSES:
        if mnemonic.startswith(prefixes):
            return name
    return "other"


def states_before(
    code: Sequence[Instruction],
    start: _State,
    step: Callable[[_State, Instruction, bool], _State],
    meet: Callable[[_State, _State], _State],
) -> dict[int, _State]:
    """Return, by place in ``code``, what holds before each instruction that can be reached.

    Args:
        start: what holds before the first.
        step: what holds after an instruction, the last argument saying that its branch is taken.
        meet: what holds where two ways come together; repeated, it must come to an end.
    """
    if not code:
        return {}
    places = {instruction.address: place for place, instruction in enumerate(code)}
    # Of NVIDIA's objects no code is read.
    before, todo = ({0: start}, [0]) if code else ({}, [])
    while todo:
        place = todo.pop()
        for follower, taken in followers(code, places, place):
            after = step(before[place], code[place], taken)
            if follower in before:
                after = meet(before[follower], after)
            if follower not in before or after != before[follower]:
                before[follower] = after
                todo.append(follower)
    return before


def followers(
    code: Sequence[Instruction], places: dict[int, int], place: int
) -> Iterator[tuple[int, bool]]:
    """Yield the places that may be executed after one, and whether its branch is taken then.

    Args:
        places: address -> place in ``code``.
    """
    instruction = code[place]
    # A branch out of the kernel ends it.
    if instruction.target in places:
        yield places[instruction.target], True
    if instruction.falls_through and place + 1 < len(code):
        yield place + 1, False


def _registers(part: str) -> tuple[str, ...]:
    names: list[str] = []
    for one, first, last, special in _REGISTER.findall(part):
        if special:
            names.append(special)
        elif one:
            names.append(f"s{one}")
        else:
            names += [f"s{n}" for n in range(int(first), int(last) + 1)]
    return tuple(names)
