"""Recomputation: which forward ops run again, and when, so that a step fits a byte budget.

A *sequence* is an order of ops in which forward ops may occur several times; every other op occurs
once. What counts is the arena that its buffers need, as placed.

    problem.py      what is asked: ops with what they read, write and take; sequences
    simulate.py     the buffers of a sequence: who lives from when to when
    planner.py      the cheapest sequence found whose buffers, as placed, fit a budget
    selective.py    greedy over idle gaps: drop what covers most excess per time, on any graph
        schedule.py     a sequence in slots, its bytes kept exact under single edits
        gaps.py         where a buffer lies idle between two uses
    blocks.py       all between two articulation points runs again, budget or not
    floor.py        the op whose working set no plan goes below
"""
