"""The GEMM kernels of Hopper (sm_90a): tiles, how a kernel is compiled, and how it is launched.

Plain numbers: nothing here needs a GPU. A launcher compiles ``HopperKernel.source`` with
``defines``, makes the tensor maps of ``plan_launch`` (gpu.tensor_maps), passes ``arguments`` in
order and asks for the block's shared memory (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES). The
cluster size is compiled in.
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from quantkit.device.geometry import ceil_div
from quantkit.device.hopper.tensormap import ITEM_BYTES, TensorMap
from quantkit.device.ops.op import Op
from quantkit.device.ops.products.project_gelu import ACTIVATIONS
from quantkit.device.ops.products.residual import SUFFIX
from quantkit.device.ops.products.stored_weights import THREE
from quantkit.device.ops.table import find_op, name_for
from quantkit.errors import KernelError
from quantkit.numerics.formats import FORMATS, INT4, INT8

#: NVRTC's --gpu-architecture; wgmma and setmaxnreg exist in no other.
ARCHITECTURE = "sm_90a"
#: Multiprocessors of an H100 SXM or H200.
MULTIPROCESSORS = 132
#: Shared memory a block may have.
SHARED_LIMIT = 227 * 1024

#: K of one stage of the ring: a swizzled row of 128 token codes.
STEP_K = 128
#: Most stages; more are not needed to hide a copy.
_STAGES = 16
#: Kept free beside the ring and the staged outputs, for barriers.
_BARRIER_ROOM = 512
#: Token tiles that are walked together: 4, 8, 16 and 32 differ by less than 1 % on 4608x12288x3072.
GROUP = 8
#: The integers of a convolution, in the order of its arguments (view_sm90.h says what they are).
CONV_NUMBERS = (
    *("m", "n", "channels", "taps", "taps_wide", "wide_bits", "across", "down"),
    *("stride_x", "stride_y", "dilation_x", "dilation_y", "left", "top", "group"),
)
_IOS, _FORMATS = ("f16", "bf16", "f32"), list(FORMATS)
#: How the names of weights' arguments besides their codes end.
_META = ("_meta", "_group")


class Family(Enum):
    """The family of a kernel by its epilogue; its value begins the name of the operation."""

    GEMM = "gemm"
    #: tokens are read from pictures (hopper_conv)
    CONV = "conv"
    #: a GEMM whose second half of outputs gates the first one, quantized (hopper_geglu)
    GEGLU = "geglu"
    #: a GEMM behind which an activation stands, quantized
    GELU = "project_gelu"
    #: GEMMs that end in codes of attention's heads (hopper_projections)
    CODES = "project_codes"
    VALUES = "project_values"
    HEADS = "project_heads"


class Sums(Enum):
    """The kind of accumulation, on which the costs of tiles depend."""

    #: of FP8: partial sums go to float32 registers every 128 stored products
    ACCURATE = "accurate"
    #: of FP8: they stay in the matrix unit, which adds with fewer bits
    FAST = "fast"
    #: of int8, which are exact
    INT8 = "int8"
    #: the same, of int4 weights that become int8 in registers
    INT4 = "int4"


@dataclass(frozen=True)
class HopperTile:
    """One entry of the menu: what a block computes at a time, and with which warpgroups."""

    name: str
    #: outputs (rows of w) and tokens (rows of x)
    n: int
    m: int
    #: groups of 64 outputs per warpgroup
    blocks: int = 1
    #: warpgroups take tiles in turns instead of sharing one
    ping_pong: bool = False
    #: blocks (a cluster) that have a tile together, each a part of K
    team: int = 1
    #: tokens that leave shared memory at once, a box of y
    chunk: int = 32
    #: chunks that wait in shared memory to be written; None: the whole tile
    staged: int | None = None

    @property
    def warpgroups(self) -> int:
        """Those that multiply; one more copies."""
        return 2 if self.ping_pong else self.n // (64 * self.blocks)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.warpgroups + 1)

    @property
    def staged_chunks(self) -> int:
        """Chunks in shared memory per warpgroup."""
        chunks = self.m // self.chunk
        return chunks if self.staged is None else min(self.staged, chunks)

    def tiles(self, m: int, n: int) -> int:
        """Return how many tiles cover M tokens and N outputs."""
        return ceil_div(m, self.m) * ceil_div(n, self.n)


#: Every tile that a kernel is compiled for. Which one a shape takes: ``hopper_choice``.
TILES: dict[str, HopperTile] = {
    tile.name: tile
    for tile in (
        HopperTile("c64x16", 64, 16, chunk=16),
        HopperTile("k64x16", 64, 16, team=4, chunk=16),
        HopperTile("c64x64", 64, 64),
        HopperTile("c128x64", 128, 64),
        HopperTile("c128x96", 128, 96),
        HopperTile("c128x128", 128, 128, chunk=64),
        HopperTile("c128x160", 128, 160, chunk=80),
        HopperTile("c128x176", 128, 176, chunk=176),
        HopperTile("c128x192", 128, 192, chunk=96),
        HopperTile("c128x256", 128, 256, chunk=64, staged=2),
        HopperTile("c192x144", 192, 144, chunk=144),
        HopperTile("c192x192", 192, 192, chunk=64),
        # The same with a deeper ring: dense weights need it.
        HopperTile("c192x192r", 192, 192, chunk=64, staged=1),
        HopperTile("c256x128", 256, 128, blocks=2, staged=2),
        HopperTile("p128x128", 128, 128, blocks=2, ping_pong=True, staged=2),
        HopperTile("p128x160", 128, 160, blocks=2, ping_pong=True, staged=2),
        HopperTile("p128x192", 128, 192, blocks=2, ping_pong=True, staged=2),
    )
}


@dataclass(frozen=True)
class HopperKernel:
    """One compile of a Hopper GEMM."""

    tile: HopperTile
    sparse: bool = False
    family: Family = Family.GEMM
    #: of FP8's sums: ``Sums.ACCURATE``, else ``Sums.FAST``; those of integers have one way
    accurate: bool = True
    x_format: str = "e4m3fn"
    w_format: str = "e4m3fn"
    x_scale: str = "token"
    w_scale: str = "channel"
    io: str = "f16"
    #: of the codes that GEGLU and activations write
    y_format: str = "e4m3fn"
    #: behind a product of Family.GELU: of ACTIVATIONS
    activation: str = ""
    #: the activation is smoothed
    changes: bool = False
    #: to a residual
    adds: bool = False

    @property
    def gated(self) -> bool:
        """True where half of the rows of w gate the other half."""
        return self.family is Family.GEGLU

    @property
    def projects(self) -> bool:
        """True where codes of heads are written."""
        return self.family in {Family.CODES, Family.VALUES, Family.HEADS}

    @property
    def activates(self) -> bool:
        """True where codes of an activation are written."""
        return self.family is Family.GELU

    @property
    def sums(self) -> Sums:
        """The kind of accumulation."""
        if self.w_format == INT4.name:
            return Sums.INT4
        if self.x_format == INT8.name:
            return Sums.INT8
        return Sums.ACCURATE if self.accurate else Sums.FAST

    @property
    def source(self) -> str:
        """File below ``kernels``."""
        return self.op.source.replace(".hip", "_sm90.hip")

    @cached_property
    def op(self) -> Op:
        """The operation that it computes."""
        return find_op(self.operation)

    @property
    def operation(self) -> str:
        """Name of the operation in ``OPS``."""
        family = self.family.value + (SUFFIX if self.adds else "")
        return name_for(family, self.x_format, self.w_format, sparse=self.sparse)

    @property
    def name(self) -> str:
        """The name of the choice, as ``e4m3fn_e4m3fn_token_channel_f16_accurate_c128x192``."""
        codes = (self.y_format,) if self.gated or self.activates else ()
        # The formats say it of integers.
        mode = (self.sums.value,) if self.sums in {Sums.ACCURATE, Sums.FAST} else ()
        scales = (self.x_scale, self.w_scale, self.io)
        changes = ("changes",) if self.changes else ()
        act = (self.activation, *changes) if self.activates else ()
        words = (self.x_format, self.w_format, *scales, *codes, *act, *mode, self.tile.name)
        return "_".join(words)

    @property
    def symbol(self) -> str:
        """Name of the kernel in its object."""
        return f"{self.operation}_sm90_{self.name}"

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros of the command line."""
        tile = self.tile
        values = {
            "TILE_N": tile.n,
            "TILE_M": tile.m,
            "BLOCKS": tile.blocks,
            "PING_PONG": int(tile.ping_pong),
            "TEAM": tile.team,
            "CHUNK": tile.chunk,
            "STAGED": tile.staged_chunks,
            "ACCURATE": int(self.sums is Sums.ACCURATE),
            "X_FORMAT": _FORMATS.index(self.x_format),
            "W_FORMAT": _FORMATS.index(self.w_format),
            "X_SCALE": int(self.x_scale == "token"),
            "W_SCALE": int(self.w_scale == "channel"),
            "IO": _IOS.index(self.io),
            "Y_FORMAT": _FORMATS.index(self.y_format),
            "ACT": 1 + list(ACTIVATIONS).index(self.activation) if self.activates else 0,
            "CHANGES": int(self.changes),
            "SHARED_BYTES": self.shared_bytes,
            "RESIDUAL": int(self.adds),
        }
        macros = (f"-DQK_{name}={value}" for name, value in values.items())
        return (f"-DQK_SYMBOL={self.symbol}", self.op.weights.define, *macros)

    @property
    def weight_row(self) -> int:
        """Bytes of a weight row in a stage: codes, or half as many where they are 2:4 or int4."""
        return STEP_K // 2 if self.weights_meta else STEP_K

    @property
    def weights_meta(self) -> tuple[str, ...]:
        """Arguments of the weights besides their codes: positions, or factors."""
        return tuple(a.name for a in self.op.args if a.name.endswith(_META))

    @property
    def stages(self) -> int:
        """Stages of the ring: what shared memory has room for."""
        room = SHARED_LIMIT - self._tail_bytes - _BARRIER_ROOM
        return min(_STAGES, room // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; the source asserts the same number."""
        tile = self.tile
        barriers = (3 if tile.ping_pong else 2) * self.stages
        barriers += tile.warpgroups * tile.staged_chunks if self.adds else 0
        return self.stages * self._stage_bytes + self._tail_bytes + 8 * barriers

    @property
    def _stage_bytes(self) -> int:
        return self.tile.n * self.weight_row + self.tile.m * STEP_K

    @property
    def _tail_bytes(self) -> int:
        tile = self.tile
        wide = self.gated or self.activates
        outputs, item = 64 * tile.blocks, ITEM_BYTES["f32" if wide else self.io]
        if self.gated:
            # The codes of a tile, one for two of its rows.
            staged = tile.m * outputs // 2
        elif self.projects or self.activates:
            # Rows of values are 16 bytes apart, so that they lie in other banks.
            staged = (tile.m + 16) * outputs
        else:
            staged = tile.staged_chunks * tile.chunk * outputs * item
        # Scales of tokens and outputs in float32, biases as they are.
        return tile.warpgroups * (staged + 4 * (tile.m + outputs) + item * outputs)


@dataclass(frozen=True)
class HopperLaunch:
    """One launch but for its addresses."""

    grid: tuple[int, int, int]
    block: int
    #: dynamic
    shared_bytes: int
    #: of x, weights, y (but for codes) and a residual; None for a y whose rows are no multiple of
    #: 16 bytes: pass 128 zero bytes
    maps: tuple[TensorMap | None, ...]
    #: m, n, k and group; of a convolution, hopper_conv.conv_numbers
    numbers: tuple[int, ...]


def arguments(kernel: HopperKernel) -> tuple[str, ...]:
    """Return the kernel's arguments in order.

    A name that ends in ``_map`` is 128 bytes by value, 64-byte aligned; those behind y and y_map
    are 32-bit integers; the others are device addresses on 16 bytes, of which bias may be null.
    """
    if kernel.projects:
        return _projecting_arguments(kernel)
    if kernel.activates:
        return _activating_arguments(kernel)
    numbers = CONV_NUMBERS if kernel.family is Family.CONV else ("m", "n", "k", "group")
    y: tuple[str, ...] = ("y_scale", "y") if kernel.gated else ("y", "y_map")
    if kernel.adds:
        y = ("residual", *y, "residual_map")
    return ("x_map", "x_scale", "w_map", *kernel.weights_meta, "w_scale", "bias", *y, *numbers)


def _activating_arguments(kernel: HopperKernel) -> tuple[str, ...]:
    product = ("x_map", "x_scale", "w_map", *kernel.weights_meta, "w_scale", "bias")
    numbers = ("m", "n", "k", "prefix_columns", "group")
    return (*product, "prefix", "smooth", "scale", "q", *numbers)


def _projecting_arguments(kernel: HopperKernel) -> tuple[str, ...]:
    numbers = ("m", "n", "k", "tokens", "d", "group")
    if kernel.family is Family.HEADS:
        codes = ("q_codes", "k_codes", "v_codes")
        behind = ("map", "meta") if kernel.sparse else ("map",)
        weights = (f"{w}_{part}" for w in THREE for part in behind)
        return ("x_map", "x_scale", *weights, "w_scale", "bias", *codes, *numbers)
    return ("x_map", "x_scale", "w_map", "w_scale", "bias", "codes", *numbers)


def plan_launch(
    kernel: HopperKernel,
    m: int,
    n: int,
    k: int,
    multiprocessors: int = MULTIPROCESSORS,
    *,
    prefix_columns: int = 0,
) -> HopperLaunch:
    """Return how ``kernel`` computes M tokens x N outputs over K.

    Args:
        prefix_columns: of codes before those of an activation.

    Raises:
        KernelError: K is no multiple of what the operation takes, or too short to be split; rows of
            a sum are no multiple of 16 bytes.
    """
    tile, multiple = kernel.tile, kernel.op.k_multiple
    if k % multiple or min(m, n, k) < 1:
        raise KernelError(
            f"{kernel.symbol}: {m}x{n}x{k}: expected sizes from 1 and K in {multiple}s"
        )
    steps = ceil_div(k, STEP_K)
    if steps < tile.team:
        raise KernelError(
            f"{kernel.symbol}: K {k} has {steps} steps of {STEP_K}, expected {tile.team}; "
            "take a tile that does not split K"
        )
    x, w, y = _maps(kernel, m, n, k)
    if kernel.adds and y is None:
        raise KernelError(f"{kernel.symbol}: rows of {n} outputs are no multiple of 16 bytes")
    added = (replace(y, operand="residual"),) if kernel.adds and y else ()
    prefix = (prefix_columns,) if kernel.activates else ()
    return HopperLaunch(
        grid=grid_of(tile, m, n, multiprocessors),
        block=tile.threads,
        shared_bytes=kernel.shared_bytes,
        maps=(x, w) if kernel.activates else (x, w, y, *added),
        numbers=(m, n, k, *prefix, GROUP),
    )


def grid_of(tile: HopperTile, m: int, n: int, multiprocessors: int) -> tuple[int, int, int]:
    """Return the blocks of a launch: a team per tile, or blocks that take tiles in turns."""
    tiles = tile.tiles(m, n)
    return (tiles * tile.team if tile.team > 1 else min(tiles, multiprocessors), 1, 1)


def _maps(
    kernel: HopperKernel, m: int, n: int, k: int
) -> tuple[TensorMap, TensorMap, TensorMap | None]:
    tile, item = kernel.tile, ITEM_BYTES[kernel.io]
    row = kernel.weight_row
    w_columns = k * row // STEP_K
    x = TensorMap("x", "u8", (k, m), (STEP_K, tile.m))
    w = TensorMap("w", "u8", (w_columns, n), (row, tile.n), swizzle=row)
    y = TensorMap("y", kernel.io, (n, m), (128 // item, tile.chunk))
    return x, w, (None if n * item % 16 else y)
