"""The kernel benchmark."""
