"""GEGLU on Hopper: the GEMM of hopper.py whose outputs leave gated, as codes for the next product.

A tile has rows of w and the rows that gate them, which the copy engine brings as one box of two
matrices (kernels/include/gated_sm90.h).
"""

from functools import lru_cache

from quantkit.device.geometry import ceil_div
from quantkit.device.hopper.hopper_choice import Cost, fastest
from quantkit.device.hopper.hopper_gemm import (
    GROUP,
    MULTIPROCESSORS,
    STEP_K,
    HopperKernel,
    HopperLaunch,
    HopperTile,
    Sums,
)
from quantkit.device.hopper.tensormap import TensorMap
from quantkit.errors import KernelError

#: Columns of y come in pieces of so many codes, which are 16 bytes.
COLUMNS = 16

#: Every tile; its n counts rows of w, two for each column of y. A warpgroup has 64 columns.
TILES: dict[str, HopperTile] = {
    tile.name: tile
    for tile in (
        HopperTile("c256x96", 256, 96, blocks=2),
        HopperTile("c256x128", 256, 128, blocks=2),
        HopperTile("p128x128", 128, 128, blocks=2, ping_pong=True),
        HopperTile("p128x160", 128, 160, blocks=2, ping_pong=True),
        HopperTile("p128x192", 128, 192, blocks=2, ping_pong=True),
    )
}

#: (sparse, sums) -> tile -> cost, fitted as those of ``hopper_choice`` (relative errors up to
#: 14 %) to the medians of 9 shapes from 128x5120x1280 to 4608x12288x3072 on one H200: random codes,
#: L2 cold, CUDA events, scales per channel and one for the tokens. Accurate sums of two blocks of
#: sparse weights leave registers for 96 tokens alone; in turns (p128x96) they are slower.
COSTS: dict[tuple[bool, Sums], dict[str, Cost]] = {
    (False, Sums.ACCURATE): {
        "c256x96": Cost(5.775, 1.802, 0.631),
        "c256x128": Cost(4.828, 2.550, 0.788),
        "p128x128": Cost(7.256, 0.690, 0.504),
    },
    (False, Sums.FAST): {
        "p128x128": Cost(6.223, 1.061, 0.362),
        "p128x160": Cost(7.180, 1.050, 0.453),
        "p128x192": Cost(7.209, 1.035, 0.539),
    },
    (True, Sums.ACCURATE): {
        "c256x96": Cost(6.701, 2.513, 0.537),
    },
    (True, Sums.FAST): {
        "c256x128": Cost(6.235, 2.704, 0.553),
        "p128x128": Cost(7.200, 1.299, 0.294),
        "p128x160": Cost(8.230, 1.607, 0.336),
    },
    (False, Sums.INT8): {
        "c256x96": Cost(6.815, 1.531, 0.694),
        "c256x128": Cost(7.547, 2.470, 0.723),
        "p128x128": Cost(7.060, 0.916, 0.425),
        "p128x160": Cost(9.000, 1.252, 0.476),
        "p128x192": Cost(9.000, 1.558, 0.478),
    },
    (True, Sums.INT8): {
        "c256x96": Cost(8.523, 2.390, 0.506),
        "c256x128": Cost(6.939, 2.964, 0.577),
        "p128x128": Cost(8.418, 1.360, 0.364),
        "p128x160": Cost(7.962, 1.392, 0.430),
    },
    (False, Sums.INT4): {
        "c256x96": Cost(6.164, 2.628, 0.771),
        "c256x128": Cost(6.218, 3.298, 0.857),
        "p128x128": Cost(9.000, 1.463, 0.456),
        "p128x160": Cost(9.000, 1.809, 0.512),
    },
}


@lru_cache(maxsize=4096)
def choose_gated_tile(
    m: int, n: int, k: int, *, sparse: bool, sums: tuple[Sums, ...], multiprocessors: int
) -> tuple[HopperTile, Sums]:
    """Return the fastest tile by ``COSTS``, and its sums.

    Args:
        m: tokens.
        n: columns of y.
        k: length of the sums.
        sparse: two of four weights are stored.
        sums: those that will do.
        multiprocessors: of the device.
    """
    costs = {mode: COSTS[sparse, mode] for mode in sums}
    return fastest(TILES, costs, lambda tile: tiles_of(tile, m, n), k, multiprocessors)


def tiles_of(tile: HopperTile, m: int, n: int) -> int:
    """Return how many tiles cover M tokens and N columns of y."""
    return ceil_div(m, tile.m) * ceil_div(n, tile.n // 2)


def plan_gated(
    kernel: HopperKernel, m: int, n: int, k: int, multiprocessors: int = MULTIPROCESSORS
) -> HopperLaunch:
    """Return how ``kernel`` computes M tokens x N columns of y over K.

    Raises:
        KernelError: N is no multiple of 16, or K of what the operation takes.
    """
    tile, multiple = kernel.tile, kernel.op.k_multiple
    if k % multiple or n % 16 or min(m, n, k) < 1:
        raise KernelError(
            f"{kernel.symbol}: {m}x{n}x{k}: expected sizes from 1, N in 16s and K in {multiple}s"
        )
    row = kernel.weight_row
    stored = k * row // STEP_K
    x = TensorMap("x", "u8", (k, m), (STEP_K, tile.m))
    w = TensorMap("w", "u8", (stored, n, 2), (row, tile.n // 2, 2), swizzle=row)
    return HopperLaunch(
        grid=(min(tiles_of(tile, m, n), multiprocessors), 1, 1),
        block=tile.threads,
        shared_bytes=kernel.shared_bytes,
        maps=(x, w),
        numbers=(m, n, k, GROUP),
    )
