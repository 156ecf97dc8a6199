"""Running kernels on a GPU: one loader, two vendor files."""
