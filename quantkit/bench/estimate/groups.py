"""The groups that kernels are in."""

from quantkit.bench.kernels.operator_costs import ATTENTION, NORMS, PRODUCTS, SMALL
from quantkit.bench.models.profiling import IDLE

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
