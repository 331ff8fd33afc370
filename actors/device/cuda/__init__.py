"""CUDA devices: the plan's streams, events and arenas on a GPU, its chains as CUDA graphs.

- `driver`: what is asked of CUDA itself, some twenty calls; all else is ours.
- `cupy_driver`: those calls on a GPU; the only module that imports cupy, and it does so late.
- `device`: streams, events, arenas, kernels.
- `graphs`: a chain as a graph for each slot phase.
- `faults`: what the driver's errors mean.

`actors.device.emulated` answers the same calls on the host.
"""
