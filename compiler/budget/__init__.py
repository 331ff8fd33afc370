"""How a byte budget is met: launches that run again, and bytes that live on the host.

- `meet_budget`: both ways, and the better one. `fit_budget`: the search among recomputations.
- `recompute`, `spill`, `offload`: the rewrites; `choose_offload`: what is worth its way there.
"""
