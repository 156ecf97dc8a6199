"""A whole block of a tiled kernel: its K loop, and what comes before and after it.

The K loop's share of the matrix peak (``k_loop``) is what a block comes near with many K steps.
With few, addresses, the first and last step and the end of the product take as long as the loop.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.device.aot.disassembly import Instruction, followers
from quantkit.device.aot.k_loop import Loop, issue_cycles

#: A way through the code: cycles, matrix instructions, whether it has written, the next place.
_State = tuple[int, int, bool, int]


@dataclass(frozen=True)
class WholeBlock:
    """Issue slots of one wave, as a function of K."""

    #: K of one pass of the loop
    step: int
    #: cycles of matrix instructions in a pass, and of all others
    busy: int
    others: int
    #: cycles of others that do not depend on K
    rest: float

    def share(self, k: int) -> float:
        """Return the share of the matrix peak that issue allows with K values a row.

        As ``Loop.issue_share``: every other instruction costs the matrix unit a cycle, and a
        transcendental one four.
        """
        passes = k / self.step
        return passes * self.busy / (passes * (self.busy + self.others) + self.rest)


def find_block(code: Sequence[Instruction], loop: Loop, step: int) -> WholeBlock | None:
    """Return what a wave issues whose block lies inside of the matrix, None where no way is found.

    Of all ways from the first instruction through the loop and a store to the end, it is the
    shortest that leaves no lane out: what a launch can do without (a bias) is not in it, both sides
    of a branch by lanes are, and loops after the K loop count once.

    Args:
        code: the whole kernel.
        loop: its K loop.
        step: K of one pass.
    """
    inside = {n for n, i in enumerate(code) if loop.first <= i.address <= loop.last}
    head = _shortest(code, {0}, inside, writes=False)
    tail = _shortest(code, inside, _ends(code), writes=True)
    if head is None or tail is None:
        return None
    cycles, matrix = head[0] + tail[0], head[1] + tail[1]
    # The last step is multiplied after the loop: as many as there count as the loop's.
    rest = cycles - loop.other_cycles * matrix / loop.matrix
    return WholeBlock(step, loop.busy, loop.other_cycles, rest)


def _ends(code: Sequence[Instruction]) -> set[int]:
    return {place for place, instruction in enumerate(code) if instruction.mnemonic == "s_endpgm"}


def _shortest(
    code: Sequence[Instruction], starts: set[int], goals: set[int], *, writes: bool
) -> tuple[int, int] | None:
    """Return cycles of others and matrix instructions on the shortest way; starts cost nothing."""
    places = {instruction.address: place for place, instruction in enumerate(code)}
    todo: list[_State] = [(0, 0, not writes, place) for place in sorted(starts)]
    seen: set[tuple[bool, int]] = set()
    while todo:
        cycles, matrix, written, place = heapq.heappop(todo)
        if (written, place) in seen:
            continue
        seen.add((written, place))
        if place in goals and written:
            return cycles, matrix
        instruction = code[place]
        if place not in starts or not writes:
            cycles += issue_cycles(instruction)
            matrix += instruction.kind == "matrix"
            stores = instruction.mnemonic.startswith("global_store")
            written = written or stores
        for follower, taken in followers(code, places, place):
            if _has_all_lanes(instruction, taken=taken):
                heapq.heappush(todo, (cycles, matrix, written, follower))
    return None


def _has_all_lanes(instruction: Instruction, *, taken: bool) -> bool:
    """Return False for the way of a branch that waves take whose lanes are all off."""
    repeats = instruction.target is not None and instruction.target <= instruction.address
    if repeats or not instruction.mnemonic.startswith("s_cbranch_exec"):
        return True
    return taken == instruction.mnemonic.endswith("nz")
