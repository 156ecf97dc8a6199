"""The recorded step of a model as a program, and what makes it shorter."""
