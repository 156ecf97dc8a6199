"""Training of the bundled pipeline: scenes as pictures, their tokens, and each of its models."""
