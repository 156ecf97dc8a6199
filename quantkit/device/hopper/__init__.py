"""What NVIDIA's Hopper (sm_90a) has of its own: tiles, tensor maps, kernels."""
