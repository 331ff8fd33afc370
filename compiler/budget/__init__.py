"""Byte budgets: what a plan gives up in time so that its arena fits `memory_budget`.

Launches of the forward pass run again in the backward pass, or bytes live on the host while nobody
needs them. The search tries choices (`BudgetChoice`) on the ordered graph. Three passes carry a
choice out; the pipeline runs all passes that are `per_choice` for each. A choice counts only by its
plan: the graph is rewritten and lowered, and the arena measured.

    search      the trials of choices, recomputation, host memory, and the better of both
    recompute   from launches to the problem of `memory.recompute`, and back to a graph
    offload     optimizer state, and idle activations, in host memory

May import: compiler.contract, graph, ops.primitives, storage; lowering, for the time of a step;
memory. Must not import: passes, fusion, pipeline, which hands `rewrite` and `lower` to
`BudgetEvaluator`.

Begin reading at `search.meet_budget`: it decides which way is taken, and calls all the rest.
"""
