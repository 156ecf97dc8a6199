"""Pictures, metrics, and comparisons of pairs."""
