"""Fusions of norms, activations and residuals of blocks with quantization."""
