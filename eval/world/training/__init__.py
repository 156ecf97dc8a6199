"""Training of the bundled pipeline."""
