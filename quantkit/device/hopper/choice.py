"""Which tile a Hopper GEMM takes, from measured costs."""

from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from quantkit.device.geometry import ceil_div
from quantkit.device.hopper.gemm import MULTIPROCESSORS, STEP_K, TILES, HopperTile


@dataclass(frozen=True)
class Cost:
    """Microseconds of a launch, of each round of tiles, and of each K step of a round."""

    launch: float
    round: float
    step: float

    def microseconds(self, rounds: int, steps: int) -> float:
        """Return the time of so many rounds of tiles, each of so many K steps."""
        return self.launch + rounds * (self.round + steps * self.step)


#: (sparse, accurate) -> tile -> cost, fitted by least squares of relative errors (rms 0-9 %) to the
#: medians of 19 shapes from 1x1280x1280 to 8192x8192x8192 on one H200: random codes, L2 cold, CUDA
#: events, f16 output, scales per token and channel. Errors weigh the less the longer a launch takes
#: (time to the -0.15, sparse -0.25), since the clock falls in long ones and the choice is between
#: tiles of one shape.
COSTS: dict[tuple[bool, bool], dict[str, Cost]] = {
    (False, True): {
        "c64x16": Cost(3.079, 2.979, 0.143),
        "k64x16": Cost(5.126, 1.924, 0.249),
        "c64x64": Cost(5.259, 1.007, 0.181),
        "c128x64": Cost(5.497, 1.163, 0.227),
        "c128x96": Cost(5.232, 1.381, 0.306),
        "c128x128": Cost(5.108, 1.219, 0.391),
        "c128x160": Cost(5.379, 1.456, 0.461),
        "c128x192": Cost(5.622, 1.200, 0.575),
        "c192x144": Cost(5.517, 1.458, 0.606),
        "c256x128": Cost(4.521, 2.196, 0.716),
    },
    (False, False): {
        "c128x128": Cost(5.142, 1.100, 0.378),
        "c128x160": Cost(5.467, 1.283, 0.458),
        "p128x160": Cost(6.777, 0.537, 0.451),
        "p128x192": Cost(6.889, 0.452, 0.530),
        "c192x192r": Cost(4.448, 2.313, 0.778),
    },
    (True, True): {
        "c64x16": Cost(2.872, 2.483, 0.241),
        "k64x16": Cost(5.904, 0.944, 0.336),
        "c64x64": Cost(5.172, 1.060, 0.214),
        "c128x64": Cost(4.459, 1.853, 0.239),
        "c128x96": Cost(4.688, 2.344, 0.266),
        "c128x128": Cost(5.046, 1.865, 0.323),
        "c128x160": Cost(5.434, 2.148, 0.380),
        "c128x176": Cost(5.479, 2.170, 0.412),
        "c128x192": Cost(5.282, 2.503, 0.431),
    },
    (True, False): {
        "c128x64": Cost(4.627, 1.756, 0.211),
        "c128x128": Cost(4.806, 1.728, 0.301),
        "c128x160": Cost(5.207, 1.726, 0.358),
        "p128x160": Cost(6.311, 1.121, 0.367),
        "c192x192": Cost(4.418, 2.885, 0.498),
        "c128x256": Cost(4.250, 3.045, 0.440),
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
    steps = ceil_div(ceil_div(k, STEP_K), tile.team)
    rounds = ceil_div(tile.tiles(m, n), multiprocessors // tile.team)
    return cost.microseconds(rounds, steps)


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


def modes_for(*, accurate: bool) -> tuple[bool, ...]:
    """Return which sums may be taken, accurate ones being True.

    Their menu has tiles for fewer tokens, so that they may win where fast ones would do.
    """
    return (True,) if accurate else (False, True)


def choose_sums(
    m: int, n: int, k: int, *, sparse: bool, accurate: bool, multiprocessors: int
) -> tuple[HopperTile, bool]:
    """Return the fastest tile, and whether its sums are accurate, as they have to be or not."""
    found = []
    for mode in modes_for(accurate=accurate):
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
    return tile.team == 1 or ceil_div(k, STEP_K) >= tile.team
