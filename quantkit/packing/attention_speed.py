"""What attention gains where it multiplies fewer columns of queries and keys: a model of gfx12."""

from quantkit.numerics.attention import padded

#: What everything costs for a query and a key, in columns of one of the two products.
#: - softmax: fits 1.18 and 1.23 for half of 64 and of 128 columns, which issue slots of machine
#:   code for gfx1201 give where exponentials take 4 cycles (if they take 1, 1.24 and 1.27).
#: - compressing: fits 1.14 and 1.19 for two of four, of the same origin: a part of the columns, for
#:   choosing the largest two and their places.
#: - codes: of a column, divided by the number of keys: 9 bytes are moved at 640 GB/s while 359
#:   TFLOPS are multiplied (RX 9070 XT), two for each column.
COSTS = {"softmax": 86.0, "compressing": 1 / 12, "codes": 9 / 640e9 * 359e12 / 2}

#: Less is not worth an error.
LEAST_GAIN = 0.05

#: What a kernel exists for. Two of four as the sparse operand of a matrix instruction has none: it
#: would gain less than half of the columns, at a similar error.
HAS_KERNEL = {"rank": True, "2:4": False}


def gain(columns: int, keys: int, *, rank: int | None) -> float:
    """Return how much more attention computes in the same time, the making of codes included.

    Args:
        columns: of a head.
        keys: of a call.
        rank: columns of queries and keys that are multiplied; None: two of every four of the keys.

    Returns:
        0.1 for a tenth more.
    """
    whole = padded(columns)
    first = float(padded(rank)) if rank else whole * (1 / 2 + COSTS["compressing"])
    rest = whole + COSTS["softmax"] + COSTS["codes"] * columns / max(keys, 1)
    return (whole + rest) / (first + rest) - 1
