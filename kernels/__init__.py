"""HIP sources of the kernels, their host runtime and their launch geometry: data, no code."""
