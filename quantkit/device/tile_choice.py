"""The tiles of a target, and choosing one for a GEMM."""

from collections.abc import Sequence
from functools import lru_cache

from quantkit.device.archs import Arch
from quantkit.device.geometry import ceil_div, tiles
from quantkit.device.ops.op import Variant


def variants_for(arch: Arch, variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return those that the target has, their tile among them."""
    return tuple(
        v
        for v in variants
        if v.op.family not in arch.own
        and not arch.why_without(v.op.family, v.op.name)
        and arch.has_tile(v.op.name, v.word("QK_TILE"))
    )


@lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, units: int, speed: Sequence[float]) -> str:
    """Return the tile that finishes M tokens and N outputs first on ``units`` cores or CUs.

    Blocks at the edge cost as much as whole ones, and a unit that has none waits: both follow from
    the number of rounds. On ties the larger tile wins.

    Args:
        speed: throughput of one unit per tile of the menu; only the ratios matter, and 0 is a tile
            that there is none of.
    """

    def cost(index: int) -> tuple[float, int]:
        tile = tiles()[index]
        blocks = ceil_div(m, tile.m) * ceil_div(n, tile.n)
        size = tile.m * tile.n
        return ceil_div(blocks, units) * size / speed[index], -size

    return f"t{min((i for i, rate in enumerate(speed) if rate), key=cost)}"
