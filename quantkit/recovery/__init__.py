"""Recovering quality lost to masks: distillation on the dense model's trajectories, no data."""
