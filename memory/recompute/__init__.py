"""Recomputation: which forward ops run again, and when, so that a step fits a byte budget.

A *sequence* is an order of ops in which forward ops may occur several times; every other op occurs
once. What counts is the arena that its buffers need, as placed. The planner asks for sequences
under a limit of bytes, places the buffers of each, and lowers the limit until the arena fits.

    problem     ops with what they read, write and take; the floor; the buffers of a sequence
    planner     the cheapest sequence found that fits; checkpointing by blocks
    selective   greedy over idle gaps: drop what covers most excess per time, on any graph
    schedule    a sequence in slots, its bytes kept exact under single edits; its gaps

May import: memory. Must not import any floor above: `compiler.budget.recompute` states the problem
for a graph and turns the answer into nodes.

Begin reading at `problem`: it defines ops, buffers and what a sequence costs.
"""
