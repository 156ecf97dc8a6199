"""The groups that kernels are in."""

from quantkit.bench.models.profiling import IDLE

PRODUCTS, ATTENTION, NORMS, SMALL = "products", "attention", "norms", "elementwise and copies"
LAUNCHES = "launches"
#: Group of an estimate -> groups of a profile.
PROFILED: dict[str, tuple[str, ...]] = {
    PRODUCTS: ("library products", "quantkit products", "convolutions"),
    ATTENTION: ("attention",),
    NORMS: ("norms",),
    SMALL: ("elementwise and copies", "quantize"),
    LAUNCHES: (IDLE,),
}
GROUPS = tuple(PROFILED)
