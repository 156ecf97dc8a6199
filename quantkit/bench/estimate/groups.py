"""The groups that kernels are in."""

PRODUCTS, ATTENTION, NORMS, SMALL = "products", "attention", "norms", "elementwise and copies"
LAUNCHES = "launches"
GROUPS = (PRODUCTS, ATTENTION, NORMS, SMALL, LAUNCHES)
