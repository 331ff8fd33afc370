"""The runtime: runs a physical plan and nothing else.

- `protocol`: what a launch, a host port and a clock are; `errors`: how a run fails.
- `machine`: the pure actor machine, messages in, actions out; no thread, no clock, no array.
- `load`: from a plan to bound launches on arenas; `kernels/`: what launches are made of.
- `loop`: the only place with threads; `timeline`: what happened when; `simulate`: the same
  machine on virtual time.
"""
