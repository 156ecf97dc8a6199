"""Model families, and finding a model's tensors on disk."""
