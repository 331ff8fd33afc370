"""Kernels of CUDA devices: planned from the description of a GPU, described as calls."""
