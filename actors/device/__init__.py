"""Devices: where a plan's launches run and its bytes lie.

- `protocol`: what a device is: streams and events, memory and kernels.
- `host`: this process, done when a call returns; `host_memory`: numpy on memory it can address;
  `host_kernels`: kernels that are bound to arrays.
- `simulated`: devices on numpy whose streams a `schedule` makes late, as a seed likes; `poison`:
  free bytes scribbled over, so that a value that is read too late shows.
- `cuda`: CUDA devices, whose chains are graphs; `emulated`: the same driver on the host.
- `executor`: what a firing calls, whatever devices a plan has; `waits`: which firing waits for
  which, from the rates alone; `gate`: streams, rings of events, and the waiting; `order`: what all
  that orders, for the race check.
"""
