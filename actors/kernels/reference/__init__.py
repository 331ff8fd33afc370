"""Kernels in numpy: one for every op."""
