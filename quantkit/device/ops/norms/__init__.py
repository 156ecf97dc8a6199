"""Norms, activations and casts that quantize inputs, and statistics for calibration."""
