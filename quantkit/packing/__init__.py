"""Packing: from a 16-bit model and a recipe to a packed checkpoint."""
