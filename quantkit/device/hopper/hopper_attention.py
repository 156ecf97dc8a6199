"""Attention on Hopper: the tile of a head, how its kernel is compiled, and how it is launched.

Plain numbers: nothing here needs a GPU. Rows of keys change places on their way to shared memory
(kernels/include/attend_sm90.h). The copy engine can do that where heads have a multiple of 16 keys,
which makes a call 4 to 11 % shorter than copies by threads (D 64 and 128, 4096 keys, H200).
"""

from dataclasses import dataclass

from quantkit.device.geometry import ceil_div
from quantkit.device.hopper.hopper_gemm import MULTIPROCESSORS
from quantkit.device.hopper.tensormap import ITEM_BYTES, TensorMap
from quantkit.device.ops.op import Op
from quantkit.numerics.formats import E4M3FN, FORMATS, INT8

#: Warpgroups that multiply, 64 queries each; one more copies.
GROUPS = 2
#: Columns of the widest head -> keys of a tile: as many as registers hold without spilling. Scores
#: in int8 take more of them.
_KEYS = {64: 128, 96: 96, 128: 64, 160: 32}
_KEYS_INT8 = {128: 64, 160: 32}
#: What the panels of a stage start on, and what a block may have but for its barriers.
_ALIGNED, _ROOM = 1024, 226 * 1024
_IOS, _FORMATS = tuple(io for io in ITEM_BYTES if io != "u8"), list(FORMATS)


@dataclass(frozen=True)
class HopperAttention:
    """One compile of Hopper's attention."""

    op: Op
    io: str
    qk_format: str
    #: columns of a head, padded to 16
    head: int
    #: the copy engine fetches
    maps: bool = False
    #: of codes of the result; empty: it is written in the io type
    y_format: str = ""

    @property
    def operation(self) -> str:
        """Name of the operation in ``OPS``."""
        return self.op.name

    @property
    def source(self) -> str:
        """File below ``kernels``."""
        return self.op.source.replace(".hip", "_sm90.hip")

    @property
    def name(self) -> str:
        """The name of the choice, as ``f16_e4m3fn_d64`` or ``f16_e4m3fn_d64_maps``."""
        maps = ("maps",) if self.maps else ()
        codes = (self.y_format,) if self.y_format else ()
        return "_".join((self.io, self.qk_format, f"d{self.head}", *maps, *codes))

    @property
    def symbol(self) -> str:
        """Name of the kernel in its object."""
        return f"{self.operation}_sm90_{self.name}"

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros of the command line."""
        values = {
            "HEAD": self.head // 16,
            "GROUPS": GROUPS,
            "KEYS": self.keys,
            "MAPS": int(self.maps),
            "X_FORMAT": _FORMATS.index(self.qk_format),
            "IO": _IOS.index(self.io),
            "SHARED_BYTES": self.shared_bytes,
        }
        if self.y_format:
            values["Y_FORMAT"] = _FORMATS.index(self.y_format)
        macros = (f"-DQK_{name}={value}" for name, value in values.items())
        return (f"-DQK_SYMBOL={self.symbol}", *macros)

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        table = _KEYS_INT8 if self.qk_format == INT8.name else _KEYS
        return next(keys for widest, keys in table.items() if self.head <= widest)

    @property
    def row(self) -> int:
        """Bytes of a row of queries or keys in shared memory: whole matrix instructions."""
        return 32 * ceil_div(self.head, 32)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (GROUPS + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; the source asserts the same number."""
        row = self.row
        queries = 2 * GROUPS * 64 * row
        scales = self.keys // 16 * 4 if self.qk_format == INT8.name else 0
        values = (self.head + 8) * self.keys + scales
        stage = _up(_up(self.keys * row) + values)
        stages = 8 if queries + 8 * stage <= _ROOM else 4
        return queries + stages * stage + 16 * stages + 16


def has_maps(qk_format: str, keys: int) -> bool:
    """Return whether the copy engine can fetch all of a call; scales of int8 codes it cannot."""
    return qk_format == E4M3FN.name and keys % 16 == 0


@dataclass(frozen=True)
class AttentionLaunch:
    """One launch but for its addresses."""

    grid: tuple[int, int, int]
    block: int
    #: dynamic
    shared_bytes: int
    #: of q, k and v; none where threads fetch
    maps: tuple[TensorMap, ...]


def plan_attention(
    kernel: HopperAttention, sizes: dict[str, int], multiprocessors: int = MULTIPROCESSORS
) -> AttentionLaunch:
    """Return how ``kernel`` computes a call: M queries of N heads, all their keys."""
    pieces = ceil_div(sizes["m"], 64 * GROUPS) * sizes["n"]
    grid = (min(pieces, multiprocessors), 1, 1)
    maps = _maps(kernel, sizes) if kernel.maps else ()
    return AttentionLaunch(grid, kernel.threads, kernel.shared_bytes, maps)


def _maps(kernel: HopperAttention, sizes: dict[str, int]) -> tuple[TensorMap, TensorMap, TensorMap]:
    m, n, keys, head = sizes["m"], sizes["n"], sizes["keys"], kernel.head
    wide, deep = _panel(kernel.row), _panel(kernel.keys)
    # Columns that a panel has beyond the head are outside, and become zeros.
    q = TensorMap("q", "u8", (head, n * m), (wide, 64), wide)
    groups = (2, 4, 2, n * keys // 16)
    # Rows of a tile in their order: key_of in attend_sm90.h.
    strides = tuple(head * rows for rows in (1, 4, 2, 16))
    box = (wide, *groups[:3], kernel.keys // 16)
    k = TensorMap("k", "u8", (head, *groups), box, wide, strides=strides)
    v = TensorMap("v", "u8", (sizes["pitch"], n * head), (deep, head), deep)
    return q, k, v


def _panel(row: int) -> int:
    """Return the widest swizzle that divides a row in shared memory."""
    return next(width for width in (128, 64, 32) if row % width == 0)


def _up(size: int) -> int:
    return _ALIGNED * ceil_div(size, _ALIGNED)
