"""Which tile of the menu a GEMM takes."""

from collections.abc import Sequence
from functools import lru_cache

from quantkit.device.geometry import ceil_div, tiles


@lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, units: int, speed: Sequence[float]) -> str:
    """Return the tile that finishes M tokens and N outputs first on ``units`` cores or CUs.

    Blocks at the edge cost as much as whole ones, and a unit that has none waits: both follow from
    the number of rounds. On ties the larger tile wins.

    Args:
        speed: throughput of one unit per tile of the menu; only the ratios matter.
    """

    def seconds(index: int) -> float:
        tile = tiles()[index]
        blocks = ceil_div(m, tile.m) * ceil_div(n, tile.n)
        return ceil_div(blocks, units) * tile.m * tile.n / speed[index]

    return f"t{min(range(len(speed)), key=seconds)}"
