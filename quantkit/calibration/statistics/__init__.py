"""Statistics of layers: sums, their file, merging, and scales from them."""
