"""The bottom floor: arithmetic on intervals, bytes and tokens.

A *buffer* is a half-open interval [lower, upper) of step numbers, and a size. Everything is pure
and deterministic: equal arguments give equal answers on every machine, and searches are limited by
counted work, never by a clock. In the order in which a compiler asks:

    order            in which order should ops run, so that fewer bytes live at the peak?
    recompute        (a room) which forward ops run again, so that a step fits a byte budget?
    liveness         when does each buffer live, how many bytes at each step, the lower bound
    registers        do rates fit, how many slots does an edge need, is there a deadlock?
    offsets          at which offset does each buffer lie, how far is the peak from the bound?
    packing            instances in sections, first-fit in several orders, sets of buffers
    dissection         a packing without a free byte, from all orders that a PQ-tree allows
    pq_tree            the orders of leaves in which given sets are consecutive
    packing_search     branch and bound: the skyline, the search, which searches run
    repair             what ends above a capacity is put back among the rest
    verify           do two live buffers share a byte? It imports nothing of the planner.
    report           who holds the peak, in words

Imports numpy and nothing of ours; every floor above may import it. It knows no op, no tensor, no
device: `compiler.storage` and `compiler.lowering` translate graphs into its columns of integers.

Begin reading at `liveness`: intervals and the lower bound are what all other files speak of.
"""
