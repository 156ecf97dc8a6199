"""What attention gains where it multiplies fewer columns of queries and keys: a model of gfx12."""

from quantkit.numerics.attention import padded

#: Cycles for 16 queries and 16 keys, by format of the values, columns of a head and what is
#: multiplied of them: 8 for each matrix instruction of the machine code for gfx1201 on codes, 16 on
#: 16 bit, 1 for others, 4 for an exponential (docs/notes/kernels.md; with 1, all is 24 less and
#: gains are larger). Heads that are not here have no kernel with fewer columns. All columns come
#: first.
CYCLES = {
    "e4m3fn": {
        64: {"all": 118, "rank 48": 112, "rank 32": 102, "2:4": 107},
        128: {"all": 198, "rank 96": 180, "rank 64": 162, "2:4": 167},
    },
    "none": {
        64: {"all": 155, "rank 48": 152, "rank 32": 141},
        128: {"all": 269, "rank 96": 253, "rank 64": 234},
    },
}
#: Bytes of a column that making codes reads and writes.
_BYTES = {"e4m3fn": 9, "none": 10}
#: What a byte adds to them, divided by the number of keys: at 640 GB/s, for each of 256 scores,
#: where 359 TFLOPS are 1024 a cycle (RX 9070 XT).
_BYTE = 256 / 640e9 * 359e12 / 1024

#: Less is not worth an error.
LEAST_GAIN = 0.05

#: What a kernel exists for: two of four as the sparse operand of a matrix instruction has none, as
#: it would gain less than half of the columns.
HAS_KERNEL = {"rank": True, "2:4": False}


def gain(columns: int, keys: int, way: str, pv: str = "e4m3fn") -> float:
    """Return how much more attention computes in the same time, the making of codes included.

    Args:
        columns: of a head.
        keys: of a call.
        way: as ``rank 32``, or ``2:4``.
        pv: of probabilities and values: e4m3fn or none.

    Returns:
        0.1 for a tenth more; 0 where no kernel is known.
    """
    cycles = CYCLES[pv].get(padded(columns), {})
    if way not in cycles:
        return 0.0
    codes = _BYTE * _BYTES[pv] * columns / max(keys, 1)
    return (cycles["all"] + codes) / (cycles[way] + codes) - 1
