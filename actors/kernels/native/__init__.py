"""Kernels in C, written or generated."""
