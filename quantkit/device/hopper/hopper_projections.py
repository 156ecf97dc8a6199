"""Projections to codes of heads on Hopper: the GEMM of hopper_gemm with another end.

Three projections of one input are one launch: each tile has rows of one of the weights
(kernels/include/codes_sm90.h), which the copy engine finds by three tensor maps.
"""

from functools import lru_cache

from quantkit.device.geometry import ceil_div
from quantkit.device.hopper.hopper_choice import Cost, fastest
from quantkit.device.hopper.hopper_gemm import (
    GROUP,
    MULTIPROCESSORS,
    STEP_K,
    Family,
    HopperKernel,
    HopperLaunch,
    HopperTile,
    Sums,
)
from quantkit.device.hopper.tensormap import TensorMap
from quantkit.errors import KernelError

#: Every tile: tokens are in 32s, in which codes are turned. Attention over few tokens is torch's,
#: so small ones are not among them.
TILES: dict[str, HopperTile] = {
    tile.name: tile
    for tile in (
        HopperTile("c128x128", 128, 128),
        HopperTile("c128x160", 128, 160),
        HopperTile("c128x192", 128, 192),
        HopperTile("c128x256", 128, 256),
        HopperTile("c192x192r", 192, 192),
        HopperTile("c256x128", 256, 128, blocks=2),
        HopperTile("p128x128", 128, 128, blocks=2, ping_pong=True),
        HopperTile("p128x160", 128, 160, blocks=2, ping_pong=True),
    )
}

#: (sparse, sums) -> tile -> cost, fitted as those of ``hopper_choice`` to the medians of ten shapes
#: of three weights, from 128x1280x1280 to 4608x3072x3072, on one H200: random codes, L2 cold, CUDA
#: events, one scale for the tokens (tests/golden/hopper_projection_times.json).
COSTS: dict[tuple[bool, Sums], dict[str, Cost]] = {
    (False, Sums.ACCURATE): {
        "c128x128": Cost(7.106, 1.254, 0.418),
        "c128x160": Cost(8.077, 1.453, 0.496),
        "c128x192": Cost(7.924, 1.751, 0.566),
        "c256x128": Cost(6.688, 2.042, 0.771),
    },
    (False, Sums.FAST): {
        "c128x128": Cost(6.968, 1.244, 0.380),
        "p128x128": Cost(8.116, 0.595, 0.369),
        "p128x160": Cost(9.958, 0.751, 0.458),
        "c192x192r": Cost(7.711, 2.090, 0.822),
    },
    (False, Sums.INT8): {
        "c128x128": Cost(7.619, 1.123, 0.382),
        "c128x192": Cost(8.372, 1.630, 0.541),
        "p128x128": Cost(9.018, 0.485, 0.362),
        "p128x160": Cost(10.624, 0.673, 0.430),
        "c192x192r": Cost(8.137, 2.060, 0.811),
    },
    (True, Sums.ACCURATE): {
        "c128x128": Cost(5.913, 2.128, 0.289),
        "c128x160": Cost(6.950, 2.162, 0.346),
    },
    (True, Sums.FAST): {
        "c128x128": Cost(6.316, 1.812, 0.273),
        "c128x256": Cost(6.103, 2.837, 0.409),
        "c192x192r": Cost(7.410, 2.914, 0.440),
    },
}


def parts_of(family: Family) -> int:
    """Return how many weights a launch has."""
    return 3 if family is Family.HEADS else 1


@lru_cache(maxsize=4096)
def choose_projection_tile(
    m: int,
    n: int,
    k: int,
    *,
    parts: int,
    sums: tuple[Sums, ...],
    multiprocessors: int,
    sparse: bool = False,
) -> tuple[HopperTile, Sums]:
    """Return the fastest tile by ``COSTS``, and its sums.

    Args:
        m: tokens.
        n: outputs of each weight.
        k: length of the sums.
        parts: weights.
        sums: those that will do.
        multiprocessors: of the device.
        sparse: weights are 2:4.
    """
    costs = {mode: COSTS[sparse, mode] for mode in sums}
    return fastest(TILES, costs, lambda tile: tiles_of(tile, m, n, parts), k, multiprocessors)


def tiles_of(tile: HopperTile, m: int, n: int, parts: int) -> int:
    """Return how many tiles cover M tokens and N outputs of each weight."""
    return ceil_div(m, tile.m) * ceil_div(n, tile.n) * parts


def plan_projection(
    kernel: HopperKernel, sizes: dict[str, int], multiprocessors: int = MULTIPROCESSORS
) -> HopperLaunch:
    """Return how ``kernel`` projects M tokens to N outputs of each weight over K.

    Raises:
        KernelError: K is no multiple of what the operation takes.
    """
    tile, multiple, parts = kernel.tile, kernel.op.k_multiple, parts_of(kernel.family)
    m, n, k, tokens, d = (sizes[name] for name in ("m", "n", "k", "tokens", "d"))
    if k % multiple or min(m, n, k) < 1:
        raise KernelError(
            f"{kernel.symbol}: {m}x{n}x{k}: expected sizes from 1 and K in {multiple}s"
        )
    row = kernel.weight_row
    x = TensorMap("x", "u8", (k, m), (STEP_K, tile.m))
    w = TensorMap("w", "u8", (k * row // STEP_K, n), (row, tile.n), swizzle=row)
    return HopperLaunch(
        grid=(min(tiles_of(tile, m, n, parts), multiprocessors), 1, 1),
        block=tile.threads,
        shared_bytes=kernel.shared_bytes,
        maps=(x, *(w,) * parts),
        numbers=(m, n, k, tokens, d, GROUP),
    )
