"""The bottom floor: arithmetic on intervals, bytes and tokens; it imports nothing of ours.

A *buffer* is a half-open interval [lower, upper) of step numbers and a size. The wing answers, in
the order in which a compiler asks:

    order.py      in which order should the ops run, so that fewer bytes are alive at the peak?
    recompute/    which forward ops run again, so that a step fits a byte budget?
    liveness.py   from when to when is each buffer alive, and how many bytes at each step?
    registers.py  are the rates consistent, how many slots does an edge need, is there a deadlock?
    offsets.py    at which offset does each buffer lie, and how far is the peak from the bound?
      sections.py   an instance stripped to what decides: merged time, rounded sizes
      first_fit.py  first-fit in several orders over one shared index
      from_peak.py  first-fit outwards from the step with the most live bytes
      search_schedule.py  which searches run, and for how many nodes
        search.py       branch and bound: does a packing within a capacity exist?
        skyline.py      the state of a search, and what follows from each choice
        buffer_sets.py  sets of buffers as the bits of integers
    verify.py     do two live buffers share a byte? Independent of the planner.
    report.py     who holds the peak, in words

Everything is pure and deterministic: equal arguments give equal answers on every machine, and
searches are limited by counted work, never by a clock.
"""
