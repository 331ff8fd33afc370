"""Recomputation: which forward ops run again, and when, so that a step fits a byte budget.

A *sequence* is an order of ops in which forward ops may occur several times; every other op occurs
once. Whoever proposes one, `simulate` is its only judge.

    problem.py      what is asked: ops with what they read, write and take; sequences
    simulate.py     the exact bytes and time of a sequence
    planner.py      the cheapest sequence whose buffers, as placed, fit a budget
      selective.py    greedy on any graph: drop the buffers that cover most excess per time
        schedule.py     a sequence in slots, its bytes kept exact under single edits
        gaps.py         where a buffer lies idle between two uses
      chain.py        dynamic programming over the chain of blocks
        blocks.py       articulation blocks of the forward ops, and the backward ops of each
        local.py        one block by itself
        options.py      what a block may save: a Pareto front of save-sets
        save_sets.py    what many save-sets of one block cost
        chain_table.py  the least time for any part of the chain and any number of slots
      floor.py        the op whose working set no plan goes below
"""
