"""What attention gains where it multiplies fewer columns of queries and keys: a model of gfx12."""

from quantkit.numerics.attention import padded

#: Cycles for 16 queries and 16 keys, by columns of a head and what is multiplied of them: 8 for
#: each matrix instruction of the machine code for gfx1201, 1 for others, 4 for an exponential
#: (docs/notes/kernels.md; with 1, all is 24 less and gains are larger). Heads that are not here
#: have no kernel with fewer columns. All columns come first.
CYCLES = {
    64: {"all": 118, "rank 48": 113, "rank 32": 102, "2:4": 107},
    128: {"all": 198, "rank 96": 180, "rank 64": 162, "2:4": 167},
}
#: What making codes adds to them, of a column and divided by the number of keys: 9 bytes at
#: 640 GB/s, for each of 256 scores, where 359 TFLOPS are 1024 a cycle (RX 9070 XT).
CODES = 256 * 9 / 640e9 * 359e12 / 1024

#: Less is not worth an error.
LEAST_GAIN = 0.05

#: What a kernel exists for: two of four as the sparse operand of a matrix instruction has none, as
#: it would gain less than half of the columns.
HAS_KERNEL = {"rank": True, "2:4": False}


def gain(columns: int, keys: int, way: str) -> float:
    """Return how much more attention computes in the same time, the making of codes included.

    Args:
        columns: of a head.
        keys: of a call.
        way: as ``rank 32``, or ``2:4``.

    Returns:
        0.1 for a tenth more; 0 where no kernel is known.
    """
    cycles = CYCLES.get(padded(columns), {})
    if way not in cycles:
        return 0.0
    codes = CODES * columns / max(keys, 1)
    return (cycles["all"] + codes) / (cycles[way] + codes) - 1
