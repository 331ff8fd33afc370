"""The host's kernels.

- `kernel`: what a kernel is (query at compile time, bind at load); `catalogue`: all of them, by
  op and name, of these rooms: `interpret` (numpy, every call), `codegen` (C made for a program),
  `native` (C in files), `library` (oneDNN, OpenBLAS, and what was measured here).
- `scratch`: how planned scratch is carved; `axes`: the axes that are left of a walk over operands;
  `indices`, `attributes`: what several families share.
- `work`: what a launch does in quantities that no machine changes; `cost`: its time at some rates.
- `python_function`: a kernel that calls a function from outside.
- `floating_point`: what a thread must set once before it runs launches.
"""
