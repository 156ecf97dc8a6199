"""Norms, activations and residuals of blocks in one kernel with the codes that follow."""
