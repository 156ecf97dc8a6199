"""Norms, activations and casts: what makes the codes of inputs, and what is observed of them."""
