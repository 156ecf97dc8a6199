"""The benchmark of whole denoisers."""
