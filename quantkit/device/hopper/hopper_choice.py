"""Choosing the tile of a Hopper GEMM by measured costs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from quantkit.device.geometry import ceil_div
from quantkit.device.hopper.hopper_gemm import MULTIPROCESSORS, STEP_K, TILES, HopperTile, Sums
from quantkit.numerics.formats import INT4, INT8


@dataclass(frozen=True)
class Cost:
    """Microseconds of a launch, of each round of tiles, and of each K step of a round."""

    launch: float
    round: float
    step: float

    def microseconds(self, rounds: int, steps: int) -> float:
        """Return the time of so many rounds of tiles, each of so many K steps."""
        return self.launch + rounds * (self.round + steps * self.step)


#: (sparse, sums) -> tile -> cost, fitted by least squares of relative errors (rms 0-9 %) to the
#: medians of 19 shapes from 1x1280x1280 to 8192x8192x8192 on one H200: random codes, L2 cold, CUDA
#: events, f16 output, scales per token and channel. Errors weigh the less the longer a launch takes
#: (time to the -0.15, sparse -0.25), since the clock falls in long ones and the choice is between
#: tiles of one shape. Of integers on one H100, medians of 13; c128x64 of dense int8 and c128x192 of
#: sparse int8 are moved by hand to where the measured times put the choice.
COSTS: dict[tuple[bool, Sums], dict[str, Cost]] = {
    (False, Sums.ACCURATE): {
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
    (False, Sums.FAST): {
        "c128x128": Cost(5.142, 1.100, 0.378),
        "c128x160": Cost(5.467, 1.283, 0.458),
        "p128x160": Cost(6.777, 0.537, 0.451),
        "p128x192": Cost(6.889, 0.452, 0.530),
        "c192x192r": Cost(4.448, 2.313, 0.778),
    },
    (True, Sums.ACCURATE): {
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
    (True, Sums.FAST): {
        "c128x64": Cost(4.627, 1.756, 0.211),
        "c128x128": Cost(4.806, 1.728, 0.301),
        "c128x160": Cost(5.207, 1.726, 0.358),
        "p128x160": Cost(6.311, 1.121, 0.367),
        "c192x192": Cost(4.418, 2.885, 0.498),
        "c128x256": Cost(4.250, 3.045, 0.440),
    },
    (False, Sums.INT8): {
        "c64x16": Cost(2.500, 3.761, 0.113),
        "k64x16": Cost(3.527, 3.527, 0.415),
        "c64x64": Cost(3.834, 2.250, 0.142),
        "c128x64": Cost(5.718, 1.599, 0.201),
        "c128x96": Cost(5.740, 0.973, 0.281),
        "c128x128": Cost(5.072, 0.739, 0.445),
        "c128x160": Cost(5.967, 0.729, 0.524),
        "c128x192": Cost(5.473, 1.317, 0.541),
        "c128x256": Cost(6.231, 2.033, 0.658),
        "c192x144": Cost(6.059, 1.354, 0.615),
        "c192x192r": Cost(6.030, 2.304, 0.737),
        "c256x128": Cost(5.183, 1.997, 0.702),
        "p128x160": Cost(6.658, 0.300, 0.533),
        "p128x192": Cost(7.387, 0.411, 0.550),
    },
    (True, Sums.INT8): {
        "c64x16": Cost(2.500, 3.018, 0.215),
        "k64x16": Cost(3.406, 3.406, 0.329),
        "c64x64": Cost(2.500, 3.835, 0.188),
        "c128x64": Cost(3.947, 2.358, 0.192),
        "c128x96": Cost(3.389, 4.379, 0.176),
        "c128x128": Cost(4.533, 1.511, 0.335),
        "c128x160": Cost(4.546, 1.034, 0.480),
        "c128x192": Cost(3.708, 1.492, 0.488),
        "c128x256": Cost(3.818, 2.594, 0.553),
        "c192x192": Cost(4.120, 2.569, 0.583),
        "p128x160": Cost(6.220, 0.480, 0.487),
    },
    (False, Sums.INT4): {
        "c64x16": Cost(2.847, 0.522, 0.500),
        "k64x16": Cost(3.407, 3.407, 0.429),
        "c64x64": Cost(2.769, 3.734, 0.243),
        "c128x64": Cost(2.811, 2.811, 0.445),
        "c128x96": Cost(5.708, 2.514, 0.309),
        "c128x128": Cost(5.360, 1.496, 0.483),
        "c128x160": Cost(5.728, 1.772, 0.508),
        "c128x192": Cost(6.405, 1.736, 0.545),
        "c128x256": Cost(5.480, 2.733, 0.670),
        "c192x144": Cost(6.382, 1.797, 0.635),
        "c192x192r": Cost(5.609, 2.773, 0.749),
        "c256x128": Cost(5.523, 2.797, 0.781),
        "p128x128": Cost(8.223, 0.834, 0.450),
        "p128x160": Cost(7.898, 0.533, 0.566),
    },
}
#: Tiles of 16 tokens were measured up to here; beyond, larger ones read the weights less often.
FEW_TOKENS = 64


def estimate(
    tile: HopperTile,
    m: int,
    n: int,
    k: int,
    *,
    sparse: bool = False,
    sums: Sums = Sums.ACCURATE,
    multiprocessors: int = MULTIPROCESSORS,
) -> float:
    """Return the microseconds that ``tile`` should take for M tokens x N outputs over K."""
    cost = COSTS[sparse, sums][tile.name]
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
    sums: Sums = Sums.ACCURATE,
    multiprocessors: int = MULTIPROCESSORS,
) -> HopperTile:
    """Return the tile with the lowest estimate among those that can compute the shape."""

    def seconds(tile: HopperTile) -> float:
        return estimate(tile, m, n, k, sparse=sparse, sums=sums, multiprocessors=multiprocessors)

    tiles = (TILES[name] for name in COSTS[sparse, sums])
    return min((tile for tile in tiles if _suits(tile, m, k)), key=seconds)


def fastest(
    tiles: Mapping[str, HopperTile],
    costs: Mapping[Sums, Mapping[str, Cost]],
    count: Callable[[HopperTile], int],
    k: int,
    multiprocessors: int,
) -> tuple[HopperTile, Sums]:
    """Return the fastest tile, and its sums.

    Args:
        tiles: by name.
        costs: of those that will do, by sums and name.
        count: how many of a tile cover the result.
        k: length of the sums.
        multiprocessors: of the device.
    """

    def microseconds(tile: HopperTile, cost: Cost) -> float:
        return cost.microseconds(ceil_div(count(tile), multiprocessors), ceil_div(k, STEP_K))

    found = [
        (microseconds(tiles[name], cost), tiles[name], mode)
        for mode, by_name in costs.items()
        for name, cost in by_name.items()
    ]
    _, tile, mode = min(found, key=itemgetter(0))
    return tile, mode


def sums_for(x_format: str, w_format: str, *, accurate: bool) -> tuple[Sums, ...]:
    """Return which sums may be taken of codes in these formats.

    Accurate ones have tiles for fewer tokens, so that they may win where fast ones would do.

    Args:
        x_format: of the inputs.
        w_format: of the weights.
        accurate: FP8's partial sums have to leave the matrix unit.
    """
    if w_format == INT4.name:
        return (Sums.INT4,)
    if x_format == INT8.name:
        return (Sums.INT8,)
    return (Sums.ACCURATE,) if accurate else (Sums.FAST, Sums.ACCURATE)


def choose_sums(
    m: int,
    n: int,
    k: int,
    *,
    sparse: bool,
    sums: tuple[Sums, ...],
    multiprocessors: int,
) -> tuple[HopperTile, Sums]:
    """Return the fastest tile, and its sums, of those that will do."""
    found = []
    for mode in sums:
        tile = choose_tile(m, n, k, sparse=sparse, sums=mode, multiprocessors=multiprocessors)
        cost = estimate(tile, m, n, k, sparse=sparse, sums=mode, multiprocessors=multiprocessors)
        found.append((cost, tile, mode))
    _, tile, mode = min(found, key=itemgetter(0))
    return tile, mode


def _suits(tile: HopperTile, m: int, k: int) -> bool:
    if tile.m < FEW_TOKENS < m:
        return False
    return tile.team == 1 or ceil_div(k, STEP_K) >= tile.team
