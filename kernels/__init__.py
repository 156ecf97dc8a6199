"""HIP sources of quantkit's kernels, their host runtime and their launch geometry (data, no code)."""
