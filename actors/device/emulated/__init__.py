"""A CUDA driver on the host: late as a seed likes, strict as CUDA is, without a GPU.

- `driver`: what a CUDA device asks of its driver, done late and checked.
- `memory`: blocks at real addresses, with bounds and guards.
- `captures`: what may be done while a stream is captured, with CUDA's codes for what may not.
- `kernels`: kernel texts, built by the C compiler; `emulated.h` has the words of `device.cuh`.
- `fibers.c`: the threads of a block, in any order that is legal.
- `products`: numpy computes what the descriptors of a product say.

Nothing selects it but ACTORFLOW_CUDA=emulated.
"""
