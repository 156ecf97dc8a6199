"""Which tile a Hopper GEMM takes, from measured costs."""

from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from quantkit.device.geometry import ceil_div
from quantkit.device.hopper import MULTIPROCESSORS, STEP_K, TILES, HopperTile, Share


@dataclass(frozen=True)
class Cost:
    """Microseconds of a launch, of each round of tiles, and of each K step of a round."""

    launch: float
    round: float
    step: float


#: (sparse, accurate) -> tile -> cost, fitted by least squares of relative errors (rms 2-10 %) to
#: the medians of 19 shapes from 1x1280x1280 to 8192x8192x8192 on one H200: random codes, L2 cold,
#: CUDA events, f16 output, scales per token and channel.
COSTS: dict[tuple[bool, bool], dict[str, Cost]] = {
    (False, True): {
        "c64x16": Cost(2.123, 3.459, 0.128),
        "k64x16": Cost(4.702, 2.119, 0.238),
        "c64x64": Cost(4.793, 1.444, 0.171),
        "c128x64": Cost(4.733, 1.618, 0.221),
        "c128x96": Cost(3.924, 2.278, 0.305),
        "c128x128": Cost(3.827, 1.549, 0.443),
        "c128x160": Cost(4.483, 1.898, 0.489),
        "c128x192": Cost(4.359, 2.192, 0.554),
        "c256x128": Cost(3.511, 2.675, 0.740),
    },
    (False, False): {
        "c128x64": Cost(4.388, 1.737, 0.195),
        "c128x128": Cost(4.196, 1.637, 0.392),
        "c128x160": Cost(4.732, 1.757, 0.472),
        "c128x192": Cost(4.346, 2.085, 0.551),
        "c256x128": Cost(3.511, 2.687, 0.718),
        "p128x128w": Cost(6.734, 0.815, 0.355),
        "c128x256": Cost(3.745, 3.090, 0.717),
        "c256x192": Cost(3.603, 3.590, 1.015),
    },
    (True, True): {
        "c64x16": Cost(2.817, 2.961, 0.253),
        "k64x16": Cost(6.452, 0.855, 0.309),
        "c64x64": Cost(5.909, 1.268, 0.205),
        "c128x64": Cost(5.390, 1.796, 0.235),
        "c128x96": Cost(4.762, 2.251, 0.283),
        "c128x128": Cost(4.698, 1.828, 0.361),
        "c128x160": Cost(5.177, 2.176, 0.410),
        "c128x192": Cost(4.383, 2.500, 0.447),
        "p128x128": Cost(6.400, 0.747, 0.396),
    },
    (True, False): {
        "c128x128": Cost(4.511, 1.754, 0.360),
        "c128x160": Cost(5.125, 1.933, 0.415),
        "c128x192": Cost(4.622, 2.356, 0.449),
        "c128x256": Cost(3.537, 3.439, 0.527),
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


def choose_sums(
    m: int, n: int, k: int, *, sparse: bool, accurate: bool, multiprocessors: int
) -> tuple[HopperTile, bool]:
    """Return the fastest tile, and whether its sums are accurate, as they have to be or not.

    The accurate menu has tiles for fewer tokens, so it may win where fast sums would do.
    """
    found = []
    for mode in (True,) if accurate else (False, True):
        tile = choose_tile(m, n, k, sparse=sparse, accurate=mode, multiprocessors=multiprocessors)
        cost = estimate(
            tile, m, n, k, sparse=sparse, accurate=mode, multiprocessors=multiprocessors
        )
        found.append((cost, tile, mode))
    _, tile, mode = min(found, key=itemgetter(0))
    return tile, mode


def _suits(tile: HopperTile, m: int, k: int) -> bool:
    if tile.m < _FEW_TOKENS < m:
        return False
    return tile.share is not Share.SPLIT_K or ceil_div(k, STEP_K) >= tile.team
