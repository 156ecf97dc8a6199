"""Noise floors, gates, the verdict, and the evaluation as one value."""
