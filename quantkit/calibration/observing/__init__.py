"""Hooks on a running pipeline, and the sums that they add to."""
