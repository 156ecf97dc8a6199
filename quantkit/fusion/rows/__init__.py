"""Row kernels: chains of elementwise operators and reductions of rows, generated as HIP source."""
