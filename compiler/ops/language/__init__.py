"""Ops stated by a program: expressions, definition, derivation of gradients, reference."""
