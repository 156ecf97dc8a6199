"""Projections to codes of heads on Hopper: the GEMM of hopper.gemm with another end.

Three projections of one input are one launch: each tile has rows of one of the weights
(kernels/include/codes_sm90.h), which the copy engine finds by three tensor maps.
"""

from functools import lru_cache
from operator import itemgetter

from quantkit.device.geometry import ceil_div
from quantkit.device.hopper.choice import COSTS
from quantkit.device.hopper.gemm import (
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

#: Every tile: those of GEMM whose tokens are in 32s, in which codes are turned.
TILES: dict[str, HopperTile] = {
    tile.name: tile
    for tile in (
        HopperTile("c64x64", 64, 64),
        HopperTile("c128x64", 128, 64),
        HopperTile("c128x96", 128, 96),
        HopperTile("c128x128", 128, 128),
        HopperTile("c128x160", 128, 160),
        HopperTile("c128x192", 128, 192),
        HopperTile("c192x192r", 192, 192),
        HopperTile("c256x128", 256, 128, blocks=2),
        HopperTile("p128x128", 128, 128, blocks=2, ping_pong=True),
        HopperTile("p128x160", 128, 160, blocks=2, ping_pong=True),
    )
}

#: Tiles that registers suffice for, or that are ever the fastest.
MENU: dict[Sums, tuple[str, ...]] = {
    Sums.ACCURATE: ("c64x64", "c128x64", "c128x96", "c128x128", "c128x160", "c128x192", "c256x128"),
    Sums.FAST: ("c128x128", "c128x160", "p128x160", "c192x192r"),
    Sums.INT8: (
        *("c64x64", "c128x64", "c128x96", "c128x128", "c128x160", "c128x192", "c192x192r"),
        *("c256x128", "p128x160"),
    ),
}


def parts_of(family: Family) -> int:
    """Return how many weights a launch has."""
    return 3 if family is Family.HEADS else 1


@lru_cache(maxsize=4096)
def choose_projection_tile(
    m: int, n: int, k: int, *, parts: int, sums: tuple[Sums, ...], multiprocessors: int
) -> tuple[HopperTile, Sums]:
    """Return the fastest tile by the costs of GEMM, and its sums.

    Args:
        m: tokens.
        n: outputs of each weight.
        k: length of the sums.
        parts: weights.
        sums: those that will do.
        multiprocessors: of the device.
    """

    def seconds(name: str, mode: Sums) -> float:
        rounds = ceil_div(tiles_of(TILES[name], m, n, parts), multiprocessors)
        return COSTS[False, mode][name].microseconds(rounds, ceil_div(k, STEP_K))

    found = [(seconds(name, mode), TILES[name], mode) for mode in sums for name in MENU[mode]]
    _, tile, mode = min(found, key=itemgetter(0))
    return tile, mode


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
        raise KernelError(f"{kernel.symbol}: {m}x{n}x{k}: wanted sizes from 1 and K in {multiple}s")
    x = TensorMap("x", "u8", (k, m), (STEP_K, tile.m))
    w = TensorMap("w", "u8", (k, n), (STEP_K, tile.n))
    return HopperLaunch(
        grid=(min(tiles_of(tile, m, n, parts), multiprocessors), 1, 1),
        block=tile.threads,
        shared_bytes=kernel.shared_bytes,
        maps=(x, *(w,) * parts),
        numbers=(m, n, k, tokens, d, GROUP),
    )
