"""Kernels on the CPU, compiled by the system's C++ compiler at first use."""
