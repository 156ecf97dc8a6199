"""Pictures between packed convolutions, made a band of lines at a time."""
