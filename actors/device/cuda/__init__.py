"""CUDA devices: the plan's streams, events and arenas on a GPU, its chains as CUDA graphs.

- `driver`: what is asked of CUDA itself, some twenty calls; all else is ours.
- `cupy_driver`: those calls on a GPU, by `cupy_calls`: the only module that imports cupy, and late.
- `device`: a device over a driver; `streams`: its streams and events; `memory`: its blocks, which
  go with their object; `graphs`: its launches, and a chain as a graph for each slot phase.
- `status`: where kernels report bad indices; `faults`: what the driver's errors mean.
- `cublaslt`: products by the library; `choices`: which algorithms were the fastest.
- `nvml`: which GPUs are here, asked without opening one.

`actors.device.emulated` answers the same calls on the host.
"""
