"""What FORMAT.md says of scales and codes, in numpy and ml_dtypes: float64, every choice tried."""

from math import fsum

import ml_dtypes
import numpy as np

#: (largest code, smallest) by format; the largest of floats as in OCP's OFP8.
LIMITS = {
    "e4m3fn": (448, -448), "e5m2": (57344, -57344), "int8": (127, -127), "int4": (7, -8),
    "q4_0": (7, -8), "q8_0": (127, -127),
}  # fmt: skip
#: The fractions of the amax scale that ``observer: mse`` tries: from 1 down to a half.
FRACTIONS = [np.float32(1 - i / 50) for i in range(26)]
#: The rules of ``WEIGHT_SCALES``: fractions, and whether of a power of two.
RULES = {
    "amax": ([1], False), "mse": (FRACTIONS, False),
    "amax_pow2": ([1], True), "mse_pow2": ([1, 0.5], True),
}  # fmt: skip


def codes_of(values, step, fmt):
    """Return what values / step becomes, a float32 division, as numbers in float64."""
    largest, smallest = LIMITS[fmt]
    with np.errstate(over="ignore"):
        quotient = np.clip((values / np.float32(step)).astype(np.float32), smallest, largest)
    if fmt.startswith("e"):
        return quotient.astype(getattr(ml_dtypes, f"float8_{fmt}")).astype(np.float64)
    return np.rint(quotient).astype(np.float64)


def loss_of(values, step, fmt, *, value=None, costs=1.0):
    """Return the squared error of values whose codes stand for a multiple of the step."""
    held = codes_of(values, step, fmt) * np.float64(step if value is None else value)
    return fsum((np.square(held - values.astype(np.float64)) * costs).ravel())


def tried_scales(values, fmt, rule):
    """Return the scales that a rule tries for values that share one, in its order."""
    fractions, pow2 = RULES[rule]
    base = np.abs(values).max() / np.float32(LIMITS[fmt][0])
    base = base if base > 0 else np.float32(1)
    if pow2:
        exponent = np.ceil(np.log2(np.float64(base)))
        base = np.float32(2.0**exponent)
    scales = [np.float32(base * np.float32(f)) for f in fractions]
    return [scale for scale in scales if scale > 0]


def least_loss(values, fmt, rule):
    """Return what the best of a rule's scales loses."""
    return min(loss_of(values, scale, fmt) for scale in tried_scales(values, fmt, rule))


def least_factor_loss(group, scale, costs=1.0):
    """Return what the best factor of int4 loses: the least that clips nothing, five below, +-."""
    wanted = np.abs(group).max() / np.float32(8)
    most = int(np.clip(np.ceil(np.float32(wanted / scale)), 1, 15))
    tried = {s * max(most - i, 1) for i in range(6) for s in (1, -1)}
    return min(factor_loss(group, scale, factor, costs) for factor in tried)


def factor_loss(group, scale, factor, costs=1.0):
    """Return what a group of int4 loses with a factor."""
    step = np.float32(scale * np.float32(factor))
    return loss_of(group, step, "int4", value=np.float64(scale) * factor, costs=costs)


def least_block_loss(block, fmt, costs=1.0):
    """Return what the best float16 scale of a block of GGML's loses, of either sign in q4_0."""
    signs = (1, -1) if fmt == "q4_0" else (1,)
    largest = block[np.abs(block).argmax()]
    base = largest / np.float32(-8) if fmt == "q4_0" else np.abs(largest) / np.float32(127)
    tried = [np.float32(np.float16(base * np.float32(s * f))) for s in signs for f in FRACTIONS]
    return min(loss_of(block, d, fmt, costs=costs) for d in tried if d != 0)


def rows_of(kind, columns=96, rows=8):
    """Return 8 rows of random float32: plain ones, and the ends of what there is."""
    generator = np.random.default_rng(sum(map(ord, kind)))
    drawn = generator.standard_normal((rows, columns)).astype(np.float32)
    match kind:
        case "outliers":
            drawn[:, ::37] *= 12
        case "laplace":
            drawn = generator.laplace(size=(rows, columns)).astype(np.float32)
        case "uniform":
            drawn = generator.uniform(-1, 1, (rows, columns)).astype(np.float32)
        case "one sign":
            drawn = np.abs(drawn)
        case "tiny":
            drawn *= np.float32(1e-30)
        case "huge":
            drawn *= np.float32(5e37)
        case "zeros":
            drawn[1], drawn[2, 32:64] = 0, -0.0
        case "few values":
            drawn = generator.integers(-3, 4, (rows, columns)).astype(np.float32)
    return drawn


KINDS = (
    "normal", "outliers", "laplace", "uniform", "one sign", "tiny", "huge", "zeros", "few values",
)  # fmt: skip
