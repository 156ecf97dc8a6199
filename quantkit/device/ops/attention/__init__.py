"""Attention on codes, and what makes codes of its heads."""
