"""A job's function as a graph, and whether it still holds."""
