"""How a byte budget is met: launches that run again, and bytes that live on the host.

- `meet_budget`: both ways, and the better one. `fit_budget`: the search among recomputations;
  `choose_offload`: what is worth its way to the host. `trials`: what both try a `choice` with.
- `recompute`, `offload`, `spill`: the rewrites that carry it out (`compiler.pipeline.PASSES`).
"""
