"""CUDA devices: a plan's arenas, streams and events on a GPU, its chains as CUDA graphs.

A `CudaDevice` answers the device protocol over a `CudaDriver`: some thirty calls on numbers. A GPU
answers them through cupy, `actors.testing.emulated` answers them on the host; nothing else here
knows the difference.

- `driver`       what is asked of CUDA, and what its errors mean.
- `device`       a device over a driver; which of several ways a launch takes.
- `streams`      streams, events, launches, and chains as graphs.
- `memory`       blocks that go with their object, pinned memory, cells that kernels report in.
- `cublaslt`     products by cuBLASLt, and the algorithms that were the fastest.
- `cudnn`        attention and convolutions by cuDNN's frontend.
- `cupy_driver`  the driver of a GPU; this file and `nccl` import cupy, and late.
- `nccl`         collectives between the GPUs of ranks, by cupy's module of NCCL.
- `nvml`         which GPUs are here, asked without opening one.

It may import `actors.kernels.cuda`, `actors.kernels.common`, `actors.machine` and
`compiler.contract`; neither the executor nor the host.

Begin reading at `device`, because it has all that the runtime asks for; then `driver`.
"""
