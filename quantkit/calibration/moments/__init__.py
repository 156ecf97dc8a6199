"""Second moments of the inputs of layers."""
