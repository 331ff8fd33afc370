"""The machine on virtual time: one rank, many ranks, what they cost."""
