"""Tiles, tensor maps and kernels for NVIDIA's Hopper (sm_90a)."""
