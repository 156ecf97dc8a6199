"""Cycle estimates of the K loop with latencies: a simulation of the waves of a compute unit.

``k_loop`` counts what is issued; here every wave runs the loop's instructions in their order, waits
for its loads and at its barriers, and shares matrix units and LDS with the others. What is not in
it stands in docs/notes/kernels.md.
"""

import heapq
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from quantkit.device.aot.disassembly import Instruction
from quantkit.device.aot.k_loop import lds_bytes
from quantkit.device.archs import MatrixUnit


@dataclass(frozen=True)
class Assumptions:
    """Assumed latencies, not published by vendors: cycles from issue to use of the result."""

    #: other instructions issue while a matrix instruction runs
    co_issue: bool
    lds_load: int
    #: until what is stored can be waited for
    lds_store: int
    memory: int


#: Public pointer chases on RDNA3 and RDNA4 give LDS some 60 to 70 cycles without load. Memory: what
#: an L2 and what Infinity Cache take under load, assumed.
OPTIMISTIC = Assumptions(co_issue=True, lds_load=64, lds_store=16, memory=400)
PESSIMISTIC = Assumptions(co_issue=False, lds_load=110, lds_store=40, memory=900)
#: Between two matrix instructions that add to the same sums: measured by others on RDNA4.
_MATRIX = 27
#: Of exp, log, reciprocals and roots, which have a quarter of the rate.
_SLOW = re.compile(r"v_(?:s_)?(?:exp|log|rcp|rsq|sqrt|sin|cos)_")
_SLOW_CYCLES = 4
#: Passes that the first wave runs, and those of the last until all have found their places.
_PASSES, _SETTLED = 16, 4
_WAIT = re.compile(r"s_wait_(loadcnt_ds|load|ds)cnt")


def issue_cycles(instruction: Instruction) -> int:
    """Return the cycles that an instruction takes of the others' time; none of a matrix one's."""
    if instruction.kind == "matrix":
        return 0
    return _SLOW_CYCLES if _SLOW.match(instruction.mnemonic) else 1


@dataclass(frozen=True)
class Residents:
    """The waves that a compute unit holds at once."""

    per_simd: int
    simds: int
    #: waves of a block, which wait for each other at barriers
    of_block: int


@dataclass
class _Wave:
    simd: int
    block: int
    at: int = 0
    passes: int = 0
    barriers: int = 0
    #: when those that are still under way are done, in order
    lds: deque[float] = field(default_factory=deque)
    loads: deque[float] = field(default_factory=deque)
    #: accumulator -> when it can be added to again
    sums: dict[str, float] = field(default_factory=dict)


def latency_share(
    code: Sequence[Instruction], residents: Residents, unit: MatrixUnit, assumed: Assumptions
) -> float | None:
    """Return the share of the matrix peak that a loop reaches; None where it is not one pass.

    Args:
        code: one pass, without loops inside.
        residents: how many waves run it beside each other.
        unit: of the target.
        assumed: of its latencies.
    """
    steps = tuple((i.kind, i.mnemonic, i.operands) for i in code)
    matrix = sum(kind == "matrix" for kind, _, _ in steps)
    # RDNA3's barriers come and wait in one.
    if not matrix or not residents.per_simd or any(name == "s_barrier" for _, name, _ in steps):
        return None
    return _run(steps, residents, unit, assumed)


@lru_cache(maxsize=1024)
def _run(
    steps: tuple[tuple[str, str, str], ...],
    residents: Residents,
    unit: MatrixUnit,
    assumed: Assumptions,
) -> float:
    return _Unit(steps, residents, unit, assumed).run()


class _Unit:
    """A compute unit: matrix units of its SIMDs, its LDS, and the waves."""

    def __init__(
        self,
        steps: Sequence[tuple[str, str, str]],
        residents: Residents,
        unit: MatrixUnit,
        assumed: Assumptions,
    ) -> None:
        self._steps, self._unit, self._assumed = steps, unit, assumed
        count = residents.per_simd * residents.simds
        self._waves = [_Wave(n % residents.simds, n // residents.of_block) for n in range(count)]
        self._of_block = residents.of_block
        self._vector_free = [0.0] * residents.simds
        self._lds_free = 0.0
        self._signals: dict[tuple[int, int], list[float]] = {}

    def run(self) -> float:
        """Return how much of the time matrix units work, once all waves have found their places."""
        settled, work = 0.0, list[tuple[float, int]]()
        queue = [(float(number), number) for number in range(len(self._waves))]
        while queue:
            now, number = heapq.heappop(queue)
            wave = self._waves[number]
            start = max(now, self._earliest(wave, now))
            if start > now:
                heapq.heappush(queue, (start, number))
                continue
            self._issue(wave, now)
            kind, mnemonic, _ = self._steps[wave.at]
            if kind == "matrix":
                work.append((now, self._unit.busy(mnemonic)))
            wave.at += 1
            if wave.at == len(self._steps):
                wave.at, wave.passes = 0, wave.passes + 1
                settled = now if wave.passes == _SETTLED else settled
                # From here on others have the unit for themselves.
                if wave.passes == _PASSES:
                    break
            heapq.heappush(queue, (now + 1, number))
        busy = sum(cycles for at, cycles in work if at >= settled)
        # Instructions at the window's ends count whole.
        return min(1.0, busy / ((now - settled) * len(self._vector_free)))

    def _earliest(self, wave: _Wave, now: float) -> float:
        """Return when a wave's next instruction can be issued, as far as is known now."""
        free = self._vector_free[wave.simd]
        return max(self._ready(wave, now), 0.0 if self._assumed.co_issue else free)

    def _ready(self, wave: _Wave, now: float) -> float:
        kind, mnemonic, operands = self._steps[wave.at]
        match kind:
            case "matrix":
                ready = wave.sums.get(_result(operands), 0.0)
                return max(self._vector_free[wave.simd], ready)
            case "vector":
                return self._vector_free[wave.simd]
            case "wait":
                return self._waited(wave, mnemonic, operands)
            case "barrier" if "signal" not in mnemonic:
                return self._together(wave, now)
        return 0.0

    def _waited(self, wave: _Wave, mnemonic: str, operands: str) -> float:
        match = _WAIT.match(mnemonic)
        if not match:
            return 0.0
        left = int(operands.split(maxsplit=1)[0], 0)
        if match[1] == "load":
            return _done(wave.loads, left)
        if match[1] == "ds":
            return _done(wave.lds, left)
        return max(_done(wave.loads, left >> 8), _done(wave.lds, left & 0xFF))

    def _together(self, wave: _Wave, now: float) -> float:
        """Return when all waves of the block have come; a little later than now if not all have."""
        there = self._signals.get((wave.block, wave.barriers), [])
        return max(there) if len(there) >= self._of_block else now + 4

    def _issue(self, wave: _Wave, now: float) -> None:
        kind, mnemonic, operands = self._steps[wave.at]
        if not self._assumed.co_issue:
            self._vector_free[wave.simd] = now + 1
        match kind:
            case "matrix":
                busy = self._unit.busy(mnemonic)
                self._vector_free[wave.simd] = now + busy
                wave.sums[_result(operands)] = now + max(_MATRIX, busy)
            case "vector":
                slow = _SLOW_CYCLES if _SLOW.match(mnemonic) else 1
                self._vector_free[wave.simd] = now + slow
            case "lds":
                self._lds_free = max(now, self._lds_free)
                self._lds_free += lds_bytes(mnemonic) / self._unit.lds_rate
                stores = "store" in mnemonic
                last = self._assumed.lds_store if stores else self._assumed.lds_load
                wave.lds.append(self._lds_free + last)
            case "memory" if "load" in mnemonic:
                wave.loads.append(now + self._assumed.memory)
            case "barrier":
                self._arrive(wave, mnemonic, now)

    def _arrive(self, wave: _Wave, mnemonic: str, now: float) -> None:
        if "wait" in mnemonic:
            wave.barriers += 1
            return
        self._signals.setdefault((wave.block, wave.barriers), []).append(now)


def _result(operands: str) -> str:
    return operands.partition(",")[0]


def _done(under_way: deque[float], left: int) -> float:
    """Return when all but ``left`` of what is under way is done, and forget those."""
    last = 0.0
    while len(under_way) > left:
        last = under_way.popleft()
    if last:
        # Asked again later, it is still to be waited for.
        under_way.appendleft(last)
    return last
