"""Limits of a device that computes by round numbers, for the tests of benchmarks."""

from quantkit.bench.kernels.roofline import Ceiling, Ceilings

#: A microsecond moves 1e6 bytes, or multiplies 1e8.
CEILINGS = Ceilings(
    Ceiling(1000.0, measured=True, source=""),
    dict.fromkeys(("f16", "fp8", "int8", "fp8 2:4"), Ceiling(100.0, measured=True, source="")),
)
