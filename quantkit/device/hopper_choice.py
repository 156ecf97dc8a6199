"""Which tile a Hopper GEMM takes, from measured costs."""

from dataclasses import dataclass
from functools import lru_cache

from quantkit.device.geometry import ceil_div
from quantkit.device.hopper import MULTIPROCESSORS, STEP_K, TILES, HopperTile, Share


@dataclass(frozen=True)
class Cost:
    """Microseconds of a launch, of each round of tiles, and of each K step of a round."""

    launch: float
    round: float
    step: float


#: (sparse, accurate) -> tile -> cost, fitted by least squares of relative errors (rms 4-7 %) to the
#: medians of 19 shapes from 1x1280x1280 to 8192x8192x8192 on one H200: random codes, L2 cold, CUDA
#: events (which count 3.2 us for an empty kernel), f16 output, scales per token and channel.
COSTS: dict[tuple[bool, bool], dict[str, Cost]] = {
    (False, True): {
        "c64x16": Cost(2.976, 3.669, 0.114),
        "k64x16": Cost(5.973, 1.975, 0.173),
        "c64x64": Cost(5.504, 1.207, 0.179),
        "c128x64": Cost(5.580, 1.197, 0.228),
        "c128x96": Cost(4.883, 1.413, 0.326),
        "c128x128": Cost(4.722, 1.518, 0.399),
        "c128x160": Cost(4.441, 1.723, 0.481),
        "c128x192": Cost(4.738, 1.976, 0.553),
        "c256x128": Cost(4.024, 2.407, 0.734),
    },
    (False, False): {
        "c128x64": Cost(4.899, 1.426, 0.200),
        "c128x128": Cost(4.481, 1.466, 0.394),
        "c128x160": Cost(4.826, 1.636, 0.471),
        "c128x192": Cost(4.632, 1.903, 0.546),
        "c256x128": Cost(4.366, 2.490, 0.695),
        "p128x128w": Cost(6.938, 0.733, 0.356),
        "c128x256": Cost(4.253, 2.800, 0.712),
        "c256x192": Cost(4.384, 3.179, 1.016),
    },
    (True, True): {
        "c64x16": Cost(2.806, 3.299, 0.248),
        "k64x16": Cost(7.322, 0.839, 0.270),
        "c64x64": Cost(6.420, 0.923, 0.220),
        "c128x64": Cost(5.731, 1.104, 0.298),
        "c128x96": Cost(5.119, 1.554, 0.349),
        "c128x128": Cost(4.997, 1.346, 0.417),
        "c128x160": Cost(5.452, 1.569, 0.470),
        "c128x192": Cost(5.236, 1.799, 0.525),
        "p128x128": Cost(7.091, 0.105, 0.476),
    },
    (True, False): {
        "c128x128": Cost(5.349, 1.295, 0.464),
        "c128x160": Cost(5.386, 1.530, 0.509),
        "c128x192": Cost(4.800, 1.744, 0.564),
        "c128x256": Cost(4.334, 2.728, 0.638),
    },
}
#: Tiles of 16 tokens were measured up to here; beyond, larger ones read the weights less often.
_FEW_TOKENS = 64


def estimate(
    tile: HopperTile,
    m: int,
    n: int,
    k: int,
    *,
    sparse: bool = False,
    accurate: bool = True,
    multiprocessors: int = MULTIPROCESSORS,
) -> float:
    """Return the microseconds that ``tile`` should take for M tokens x N outputs over K."""
    cost = COSTS[sparse, accurate][tile.name]
    steps = ceil_div(k, STEP_K)
    if tile.share is Share.SPLIT_K:
        steps = ceil_div(steps, tile.team)
    rounds = ceil_div(tile.team_tiles(m, n), multiprocessors // tile.team)
    return cost.launch + rounds * (cost.round + steps * cost.step)


@lru_cache(maxsize=4096)
def choose_tile(
    m: int,
    n: int,
    k: int,
    *,
    sparse: bool = False,
    accurate: bool = True,
    multiprocessors: int = MULTIPROCESSORS,
) -> HopperTile:
    """Return the tile with the lowest estimate among those that can compute the shape."""

    def seconds(tile: HopperTile) -> float:
        return estimate(
            tile, m, n, k, sparse=sparse, accurate=accurate, multiprocessors=multiprocessors
        )

    tiles = (TILES[name] for name in COSTS[sparse, accurate])
    return min((tile for tile in tiles if _suits(tile, m, k)), key=seconds)


def _suits(tile: HopperTile, m: int, k: int) -> bool:
    if tile.m < _FEW_TOKENS < m:
        return False
    return tile.share is not Share.SPLIT_K or ceil_div(k, STEP_K) >= tile.team
