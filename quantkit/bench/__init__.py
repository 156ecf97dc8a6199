"""Measuring: kernels against libraries, and whole denoisers, in one interleaved run."""
