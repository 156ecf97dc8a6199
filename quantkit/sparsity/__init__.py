"""Choosing n:m masks for a model, and the file that holds them."""
