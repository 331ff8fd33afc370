"""The bottom floor: arithmetic on intervals, bytes and tokens; it imports nothing of ours.

A *buffer* is a half-open interval [lower, upper) of step numbers and a size. The wing answers, in
the order in which a compiler asks:

    order.py      in which order should the ops run, so that fewer bytes are alive at the peak?
    liveness.py   from when to when is each buffer alive, and how many bytes at each step?
    registers.py  are the rates consistent, how many slots does an edge need, is there a deadlock?
    offsets.py    at which offset does each buffer lie, and how far is the peak from the bound?
      sections.py   an instance stripped to what decides: merged time, rounded sizes
      first_fit.py  first-fit in several orders over one shared index
    verify.py     do two live buffers share a byte? Independent of the planner.
    report.py     who holds the peak, in words

Everything is pure and deterministic: equal arguments give equal answers on every machine, and
searches are limited by counted work, never by a clock.
"""
