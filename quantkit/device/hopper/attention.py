"""Attention on Hopper: the tile of a head, how its kernel is compiled, and how it is launched.

Plain numbers: nothing here needs a GPU. No tensor maps: rows of keys change places on their way to
shared memory (kernels/include/attend_sm90.h), which copies by the copy engine cannot do.
"""

from dataclasses import dataclass

from quantkit.device.geometry import ceil_div
from quantkit.device.hopper.gemm import MULTIPROCESSORS
from quantkit.device.hopper.tensormap import ITEM_BYTES
from quantkit.device.ops.op import Op
from quantkit.numerics.formats import FORMATS, INT8

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
    #: columns of queries and keys that are multiplied
    rank: int

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
        """What was chosen, as ``f16_e4m3fn_d64`` or ``f16_e4m3fn_d64_r32``."""
        rank = (f"r{self.rank}",) if self.rank < self.head else ()
        return "_".join((self.io, self.qk_format, f"d{self.head}", *rank))

    @property
    def symbol(self) -> str:
        """Name of the kernel in its object."""
        return f"{self.operation}_sm90_{self.name}"

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros of the command line."""
        values = {
            "HEAD": self.head // 16,
            "RANK": self.rank // 16,
            "GROUPS": GROUPS,
            "KEYS": self.keys,
            "X_FORMAT": _FORMATS.index(self.qk_format),
            "IO": _IOS.index(self.io),
            "SHARED_BYTES": self.shared_bytes,
        }
        macros = (f"-DQK_{name}={value}" for name, value in values.items())
        return (f"-DQK_SYMBOL={self.symbol}", *macros)

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        table = _KEYS_INT8 if self.qk_format == INT8.name else _KEYS
        return next(keys for widest, keys in table.items() if self.head <= widest)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (GROUPS + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; the source asserts the same number."""
        row = 32 * ceil_div(self.rank, 32)
        queries = 2 * GROUPS * 64 * row
        scales = self.keys // 16 * 4 if self.qk_format == INT8.name else 0
        values = (self.head + 8) * self.keys + scales
        stage = _up(_up(self.keys * row) + values)
        stages = 8 if queries + 8 * stage <= _ROOM else 4
        return queries + stages * stage + 16 * stages + 16


def plan_attention(
    kernel: HopperAttention, m: int, n: int, multiprocessors: int = MULTIPROCESSORS
) -> tuple[tuple[int, int, int], int, int]:
    """Return grid, threads of a block and its shared memory for M queries of N heads."""
    pieces = ceil_div(m, 64 * GROUPS) * n
    return (min(pieces, multiprocessors), 1, 1), kernel.threads, kernel.shared_bytes


def _up(size: int) -> int:
    return _ALIGNED * ceil_div(size, _ALIGNED)
