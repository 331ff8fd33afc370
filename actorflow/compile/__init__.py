"""A plan for a graph: cache, targets, ops and passes from outside, proof before it runs."""
