"""A CUDA driver acted by the host, late and strict."""
