"""The libraries that multiply matrices, which of them is fastest, and what this machine does.

- `onednn`: oneDNN through its C interface; `openblas`: the BLAS that numpy carries.
- `gemm_onednn`: chunks of a product as primitives; `gemm_held`: packed once for a loop.
- `tuning`: which library for which shape.
- `calibration`: rates of this machine, kept in a `measured_file`; `recost`: launches at them.
"""
