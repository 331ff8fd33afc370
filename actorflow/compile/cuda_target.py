"""A GPU as the compiler sees it: `compiler.graph.target.Target` answered by `actors.kernels.cuda`.

Loaded by `actorflow.compile.hardware.target_for` for jobs on GPUs alone.
"""

from __future__ import annotations

from dataclasses import replace

from actorflow.compile.targets import operands_of_call
from actorflow.environment.settings import logger
from actors.kernels.cuda import catalogue
from actors.kernels.cuda.calls import NCCL_DTYPES
from actors.kernels.cuda.cudnn_library import CUDNN, CudnnLibrary
from actors.kernels.cuda.fused import most_joined
from actors.kernels.cuda.kernel import gpu_named
from actors.kernels.host import catalogue as host_catalogue
from compiler.contract.placement import Device
from compiler.contract.types import DType
from compiler.graph.registry import Op, kernel_op
from compiler.graph.target import KernelCall, KernelInfo, Link, TilingPolicy


class CudaTarget:
    """The kernels of a GPU, planned from its description alone; see `actors.kernels.cuda`."""

    alignment = 256
    """What CUDA's allocator gives."""

    wide_values = TilingPolicy(
        256 << 20, 4096, 256 << 20, 1 << 30, rounded_bytes=32 << 20, cheap_instructions=6
    )
    """Chunks that keep all of a GPU busy for some tenths of a millisecond: logits of 50,304 classes
    go by 4,096 rows, a product of 32 waves of tiles on an H100; the gradient of their weight is
    read and written once a chunk, 309 MB for 317 GFLOP. In bfloat16 a row of logits for each block
    of the GPU fits into its cache, so that a loss reads memory once. Computed, not measured. Six
    instructions are a normalised element, of a tensor and four statistics of its column."""

    reduced_dtypes = (*NCCL_DTYPES, DType.BOOL)
    """NCCL's: booleans are bytes of 0 and 1, and of 16 bits there are floats alone."""

    epilogue_ops = ("gelu",)
    """cuBLASLt stores GELU and what it is of; see `actors.kernels.cuda.epilogues`."""

    def __init__(self, device: Device, gpu: str, cudnn: CudnnLibrary | None = None) -> None:
        self._device = device
        self._gpu = gpu_named(gpu)
        self._cudnn = cudnn
        self._logged: set[tuple[str, DType]] = set()
        self._answers: dict[KernelCall, KernelInfo] = {}

    @property
    def message_ns(self) -> float:
        """What a stream that waits for an event of another one loses."""
        return self._gpu.event_ns

    @property
    def memory_bytes(self) -> int:
        """What the GPU has."""
        return self._gpu.memory_bytes

    @property
    def link(self) -> Link:
        """The way to pinned memory of the host."""
        rate = self._gpu.link_bytes_per_ns
        return Link(rate, rate, self._gpu.link_latency_ns)

    @property
    def fingerprint(self) -> str:
        """The generation of the kernels, the GPU, and which cuDNN is used."""
        return catalogue.fingerprint(self._gpu.name, uses_cudnn=self._cudnn or False)

    def query(self, call: KernelCall) -> KernelInfo:
        """Choose the first kernel that takes the call. Raises LookupError when there is none.

        Answers are kept: a search for a budget asks for the launches of every plan that it tries.
        """
        if call not in self._answers:
            self._answers[call] = self._chosen(call)
        return self._answers[call]

    def _chosen(self, call: KernelCall) -> KernelInfo:
        family = kernel_op.get(Op(call.op))
        query = (call.op, call.attrs, *operands_of_call(call), family)
        library = self._cudnn
        try:
            name, needs = catalogue.select_kernel(
                self._gpu.name, *query, uses_cudnn=library or False
            )
            if library is not None and library.is_jit and not name.startswith(CUDNN):
                same = replace(library, is_jit=False)
                whole, _ = catalogue.select_kernel(self._gpu.name, *query, uses_cudnn=same)
                if whole.startswith(CUDNN):
                    self._log_ours(call)
        except LookupError as error:
            text = f"{self._device}: {error.args[0]}{self._mend(call.op)}"
            raise LookupError(text) from None
        return KernelInfo(name, needs.workspace_bytes, needs.in_place, needs.duration_ns)

    def _log_ours(self, call: KernelCall) -> None:
        """Log, once for an op and a type, what only the whole library computes."""
        kind = call.op, call.inputs[0].type.dtype
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(
                "%s: %s of %s is planned with actorflow's kernels: the small cuDNN"
                " (nvidia-cudnn-jit-cu13) has no plan for it, and nvidia-cudnn-cu13 has one",
                self._device,
                call.op,
                " and ".join([str(x.type) for x in call.inputs]),
            )

    def _mend(self, op: str) -> str:
        """Return what to do about an op that somebody's kernel computes on the host."""
        kernels = [kernel.name for kernel in host_catalogue.registered(op)]
        if not kernels:
            return ""
        return (
            f"; the kernel {kernels[0]!r} computes it on the host alone. State the op as a program"
            " (@af.op), which every device computes, or run it on the host:"
            f' @af.job(devices=["{self._device}", "host:0"]) and with af.device("host:0"):'
        )

    def max_merged_updates(self, num_full: int) -> int:
        """Return how many updates fit into the argument block of a kernel."""
        return most_joined(num_full)
