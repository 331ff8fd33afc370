"""Tensors between the ranks of one host."""
