"""Recovering what masks cost: training on the dense model's own trajectories, without data."""
