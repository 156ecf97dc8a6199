"""Packed modules, their torch operators, and loading in diffusers and transformers."""
