"""Attention on codes in packed and 16-bit models."""
