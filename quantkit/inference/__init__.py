"""Packed modules, the operators that they call, and loading in diffusers and transformers."""
