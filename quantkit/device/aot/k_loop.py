"""The K loop of a compiled GEMM: its instructions, and the share of the matrix peak they allow.

The model, its constants and what it leaves out stand in docs/notes/kernels.md.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.device.aot.disassembly import Instruction
from quantkit.device.archs import MatrixUnit

_LANES = 32
_MATRIX = re.compile(r"v_s?wmmac?_\w+_\d+x\d+x(\d+)_")
#: Of exp, log, reciprocals and roots, which have a quarter of the rate.
_SLOW = re.compile(r"v_(?:s_)?(?:exp|log|rcp|rsq|sqrt|sin|cos)_")
_SLOW_CYCLES = 4
#: Before gfx11 read and write, read2 and read2st64.
_LDS_ACCESS = re.compile(
    r"ds_(?:load|store|read|write)(?P<two>2(?:st64)?_|_2addr_(?:stride64_)?)?_?[ubi](?P<bits>\d+)"
)


@dataclass(frozen=True)
class Loop:
    """One pass of a wave through the K loop."""

    #: class -> instructions issued; ``matrix`` among them
    issued: dict[str, int]
    #: bytes that the wave loads from and stores to LDS
    lds_bytes: int
    #: cycles that matrix instructions take
    busy: int
    #: cycles that all others take
    other_cycles: int
    unit: MatrixUnit
    #: addresses of its first and last instruction
    first: int
    last: int

    @property
    def matrix(self) -> int:
        """Matrix instructions."""
        return self.issued["matrix"]

    @property
    def others(self) -> dict[str, int]:
        """All other instructions by class."""
        return {name: count for name, count in self.issued.items() if name != "matrix"}

    @property
    def issue_share(self) -> float:
        """Share of the peak if every other instruction costs the matrix unit its cycles."""
        return self.busy / (self.busy + self.other_cycles)

    @property
    def lds_rate(self) -> float:
        """LDS bytes that a compute unit would move per cycle at the peak."""
        return self.unit.simds * self.lds_bytes / self.busy

    @property
    def lds_share(self) -> float:
        """Share of the peak that LDS allows."""
        return min(1.0, self.unit.lds_rate / self.lds_rate) if self.lds_bytes else 1.0

    @property
    def share(self) -> float:
        """Share of the peak that issue and LDS allow."""
        return min(self.issue_share, self.lds_share)


def find_loop(code: Sequence[Instruction], work: int, unit: MatrixUnit) -> Loop | None:
    """Return the K loop of a kernel, None where no loop has matrix instructions.

    Args:
        code: the whole kernel.
        work: products that a wave sums per pass, rows x columns x K.
    """
    spans = _loops(code)
    if not spans:
        return None
    inner = _innermost(spans)
    # Chunks of a step may be a loop of their own: its instructions count once per turn.
    products = next(_products(i.mnemonic) for i in inner.code if i.kind == "matrix")
    turns = max(1, work // (products * inner.matrix))
    # The longest: a compiler that rotates a loop branches back to more than one place.
    whole = max(inner.around(spans), key=_length, default=inner)
    issued: Counter[str] = Counter()
    lds = busy = others = 0
    for instruction in whole.code:
        count = turns if instruction in inner.code else 1
        issued[instruction.kind] += count
        lds += count * lds_bytes(instruction.mnemonic)
        busy += count * _busy(instruction, unit)
        others += count * issue_cycles(instruction)
    return Loop(dict(issued), lds, busy, others, unit, whole.first, whole.last)


def find_shortest_loop(code: Sequence[Instruction], unit: MatrixUnit) -> Loop | None:
    """Return the shortest loop with matrix instructions, None where there is none.

    Of a loop whose pass is written out. What is rare stands behind it and branches back into it
    without a condition.
    """
    spans = _loops([i for i in code if i.mnemonic != "s_branch"])
    if not spans:
        return None
    shortest = min(spans, key=_length)
    issued = Counter(instruction.kind for instruction in shortest.code)
    lds = sum(lds_bytes(i.mnemonic) for i in shortest.code)
    busy = sum(_busy(i, unit) for i in shortest.code)
    others = sum(map(issue_cycles, shortest.code))
    return Loop(dict(issued), lds, busy, others, unit, shortest.first, shortest.last)


def issue_cycles(instruction: Instruction) -> int:
    """Return the cycles that an instruction takes of the others' time; none of a matrix one's."""
    if instruction.kind == "matrix":
        return 0
    return _SLOW_CYCLES if _SLOW.match(instruction.mnemonic) else 1


def lds_bytes(mnemonic: str) -> int:
    """Return the bytes that an instruction of a full wave moves from or to LDS."""
    match = _LDS_ACCESS.match(mnemonic)
    if not match:
        return 0
    return _LANES * (2 if match["two"] else 1) * int(match["bits"]) // 8


@dataclass(frozen=True)
class _Span:
    """The code from the target of a backward branch to the branch."""

    code: tuple[Instruction, ...]

    @property
    def matrix(self) -> int:
        return sum(i.kind == "matrix" for i in self.code)

    @property
    def first(self) -> int:
        return self.code[0].address

    @property
    def last(self) -> int:
        return self.code[-1].address

    def around(self, spans: Sequence["_Span"]) -> list["_Span"]:
        """Return those that hold this one."""
        return [
            span
            for span in spans
            if span != self and span.first <= self.first and span.last >= self.last
        ]


def _products(mnemonic: str) -> int:
    """Return the products of a matrix instruction, or of dot4 in all lanes."""
    match = _MATRIX.match(mnemonic)
    return 16 * 16 * int(match[1]) if match else 4 * _LANES


def _busy(instruction: Instruction, unit: MatrixUnit) -> int:
    return unit.busy(instruction.mnemonic) if instruction.kind == "matrix" else 0


def _length(span: _Span) -> int:
    return len(span.code)


def _loops(code: Sequence[Instruction]) -> tuple[_Span, ...]:
    """Return the spans that hold matrix instructions."""
    ends = {(i.target, i.address) for i in code if i.target and i.target <= i.address}
    spans = (
        _Span(tuple(i for i in code if first <= i.address <= last)) for first, last in sorted(ends)
    )
    return tuple(span for span in spans if span.matrix)


def _innermost(spans: Sequence[_Span]) -> _Span:
    # What follows the K loop multiplies the last step, if need be in a loop of its own: one that
    # nothing holds.
    return max(spans, key=lambda s: (s.matrix, bool(s.around(spans)), -_length(s)))
