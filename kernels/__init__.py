"""HIP sources of the kernels."""
