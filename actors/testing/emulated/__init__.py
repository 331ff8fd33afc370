"""A CUDA driver on the host: late as a seed likes, strict as CUDA is, without a GPU.

`EmulatedDriver` is a `CudaDriver`: the CUDA device, its streams and its graphs run on it unchanged.
What is put on a stream is done later, in an order that a seed picks, and is checked first.

- `driver`         the driver: streams, events, launches and graphs, done late and checked.
- `memory`         blocks at real addresses with bounds and guards; captures and their errors.
- `kernels`        kernel texts, built by the C compiler and run; `emulated.h` has CUDA's words.
- `fibers.c`       the threads of a block, in any order that is legal.
- `nccl`           collectives of ranks, through a segment that they share.
- `library_calls`  calls of cuBLASLt and cuDNN, computed by numpy.

It may import `actors.testing.simulated`, `actors.device.cuda`, `actors.collectives`,
`actors.kernels.cuda`, `actors.kernels.library`, `actors.machine` and `compiler.contract`.

Begin reading at `driver`, because it lists what is stricter than CUDA.
"""
