"""The convolutions of Hopper: tiles of pixels, their tensor maps, and what they cannot compute.

A convolution is the GEMM of hopper.py whose token operand the copy engine reads from the picture.
A tile's tokens are rows of output pixels; K steps walk the taps (kernels/include/view_sm90.h).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter

from quantkit.device.geometry import ceil_div
from quantkit.device.hopper.hopper_choice import COSTS, estimate
from quantkit.device.hopper.hopper_gemm import (
    CONV_NUMBERS,
    GROUP,
    MULTIPROCESSORS,
    STEP_K,
    TILES,
    HopperKernel,
    HopperLaunch,
    HopperTile,
    Sums,
    grid_of,
)
from quantkit.device.hopper.tensormap import ITEM_BYTES, TensorMap
from quantkit.errors import KernelError
from quantkit.numerics.conv_windows import ConvShape

#: Widths of a tile in pixels, the best first where several need as many tiles.
_WIDTHS = (32, 64, 128, 256, 16, 8)
#: Smaller tiles are for a few rows, and a picture has more pixels.
_LEAST_TOKENS = 64
#: Where accurate sparse kernels spill: a picture's numbers take registers that the GEMM has left.
_SPILLING = {(True, Sums.ACCURATE): "c128x192"}
#: Pixels along a side of the copy engine's box, and its largest step.
_BOX, _STEP = 256, 8


@dataclass(frozen=True)
class PixelTiles:
    """The cover of the result by tiles of ``m`` tokens."""

    m: int
    #: output pixels of a tile along W
    wide: int
    #: tiles of a picture along W and H
    across: int
    down: int

    @property
    def high(self) -> int:
        """Output pixels of a tile along H."""
        return self.m // self.wide


def pixel_tiles(tile: HopperTile, shape: ConvShape) -> PixelTiles:
    """Return the fewest tiles that cover a picture, of those whose chunks of y are boxes."""
    tall, wide = shape.outputs
    stride_y, stride_x = shape.windows.stride
    covers = [
        PixelTiles(tile.m, width, ceil_div(wide, width), ceil_div(tall, tile.m // width))
        for width in _WIDTHS
        if tile.m % width == 0
        and 0 in {tile.chunk % width, width % tile.chunk}
        and width * stride_x <= _BOX
        and tile.m // width * stride_y <= _BOX
    ]
    return min(covers, key=lambda cover: cover.across * cover.down)


def tokens_of(tiles: PixelTiles, shape: ConvShape) -> int:
    """Return the tokens of all tiles, those outside the pictures included."""
    return shape.batch * tiles.across * tiles.down * tiles.m


def why_not(shape: ConvShape, io: str, multiple: int) -> str:
    """Return why the kernels cannot compute a convolution, or should not; empty when they do.

    Args:
        shape: of the convolution.
        io: of its result.
        multiple: of the channels, that the operation takes.
    """
    row = shape.n * ITEM_BYTES[io]
    if shape.windows.are_pixels:
        return "its windows are the pixels: a GEMM as it is"
    if shape.channels % multiple:
        return f"{shape.channels} channels are not a multiple of {multiple}"
    if row % 16:
        return f"{shape.n} outputs in {io} are rows of {row} bytes, not a multiple of 16"
    if max(shape.windows.stride) > _STEP:
        return f"stride {shape.windows.stride} is over {_STEP}"
    return ""


def conv_numbers(kernel: HopperKernel, shape: ConvShape) -> dict[str, int]:
    """Return the integers among the kernel's arguments, in order."""
    tiles, windows = pixel_tiles(kernel.tile, shape), shape.windows
    (stride_y, stride_x), (dilation_y, dilation_x) = windows.stride, windows.dilation
    left, _, top, _ = windows.padding
    values = (
        *(tokens_of(tiles, shape), shape.n, shape.channels, windows.taps, windows.kernel[1]),
        *(tiles.wide.bit_length() - 1, tiles.across, tiles.down),
        *(stride_x, stride_y, dilation_x, dilation_y, left, top, GROUP),
    )
    return dict(zip(CONV_NUMBERS, values, strict=True))


def plan_conv(
    kernel: HopperKernel, shape: ConvShape, multiprocessors: int = MULTIPROCESSORS
) -> HopperLaunch:
    """Return how ``kernel`` computes a convolution.

    Raises:
        KernelError: it cannot.
    """
    problem = why_not(shape, kernel.io, kernel.op.k_multiple)
    if problem or min(shape.batch, shape.n, *shape.outputs) < 1:
        raise KernelError(f"{kernel.symbol}: {problem or f'{shape}: no output'}")
    numbers, maps = conv_numbers(kernel, shape), _maps(kernel, shape)
    return HopperLaunch(
        grid=grid_of(kernel.tile, numbers["m"], shape.n, multiprocessors),
        block=kernel.tile.threads,
        shared_bytes=kernel.shared_bytes,
        maps=(*maps, *((replace(maps[-1], operand="residual"),) if kernel.adds else ())),
        numbers=tuple(numbers.values()),
    )


@lru_cache(maxsize=4096)
def choose_conv_tile(
    shape: ConvShape, *, sparse: bool, sums: tuple[Sums, ...], multiprocessors: int
) -> tuple[HopperTile, Sums]:
    """Return the fastest tile by the costs of the GEMMs, and its sums, of those that will do."""
    found = [
        (_seconds(tile, shape, sparse, mode, multiprocessors), tile, mode)
        for mode in sums
        for tile in conv_tiles(sparse=sparse, sums=mode)
    ]
    _, tile, mode = min(found, key=itemgetter(0))
    return tile, mode


def conv_tiles(*, sparse: bool, sums: Sums) -> Iterator[HopperTile]:
    """Yield the tiles that can be cut into rows of pixels, but for those of few tokens."""
    for name in COSTS[sparse, sums]:
        tile = TILES[name]
        spills = _SPILLING.get((sparse, sums)) == name
        if tile.m >= _LEAST_TOKENS and tile.team == 1 and not spills:
            yield tile


def _seconds(
    tile: HopperTile,
    shape: ConvShape,
    sparse: bool,  # noqa: FBT001  the key of COSTS
    sums: Sums,
    multiprocessors: int,
) -> float:
    return estimate(
        tile,
        tokens_of(pixel_tiles(tile, shape), shape),
        shape.n,
        # No step has two taps.
        shape.windows.taps * ceil_div(shape.channels, STEP_K) * STEP_K,
        sparse=sparse,
        sums=sums,
        multiprocessors=multiprocessors,
    )


def _maps(kernel: HopperKernel, shape: ConvShape) -> tuple[TensorMap, TensorMap, TensorMap]:
    tile, tiles, windows = kernel.tile, pixel_tiles(kernel.tile, shape), shape.windows
    (stride_y, stride_x), (tall, wide) = windows.stride, shape.outputs
    stored = shape.channels * kernel.weight_row // STEP_K
    row = min(tiles.wide, tile.chunk)
    x = TensorMap(
        "x",
        "u8",
        (shape.channels, shape.width, shape.height, shape.batch),
        (STEP_K, tiles.wide, tiles.high, 1),
        steps=(1, stride_x, stride_y, 1),
    )
    w = TensorMap(
        "w",
        "u8",
        (stored, windows.taps, shape.n),
        (kernel.weight_row, 1, tile.n),
        swizzle=kernel.weight_row,
    )
    y = TensorMap(
        "y",
        kernel.io,
        (shape.n, wide, tall, shape.batch),
        (128 // ITEM_BYTES[kernel.io], row, tile.chunk // row, 1),
    )
    return x, w, y
