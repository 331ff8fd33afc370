"""The host as a device for kernels: its catalogue, its control flow, and its rates.

The catalogue puts kernels in C before those in numpy and hands itself to the loops and branches,
whose bodies are bound with the same kernels. Calibration binds probes through kernels, solves for
rates, and prices the launches of a plan at them.

catalogue    all kernels of the host; registration; the C of a plan; kernels in Python
control      loops over a body and choices between two
calibration  the rates of this machine, and the price of every launch of a plan

It imports `actors.kernels.{common, library, native, reference}`, `actors.machine` and
`compiler.contract`. It must not import cuda, and no other room of kernels imports it.

Begin reading at catalogue: its tuples say which kernels there are, and which goes first.
"""
