"""All kernels of a CUDA device, by op and by name, in order of preference."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType

from actors.kernels.common.convolution_steps import OPS, POOLING_OPS
from actors.kernels.common.host_memory import COPIES
from actors.kernels.common.kernel import Attrs, Kernel, KernelNeeds, Operands
from actors.kernels.cuda import attention, cudnn_attention, embedding, flash, reduce
from actors.kernels.cuda.control import plan_cond, plan_scan
from actors.kernels.cuda.convolution import plan_convolution, plan_pooling
from actors.kernels.cuda.cudnn_convolution import is_offered, plan_cudnn_convolution
from actors.kernels.cuda.cudnn_library import CUDNN, ORDERED_GRADIENT, CudnnLibrary
from actors.kernels.cuda.fused import plan_joined, plan_program
from actors.kernels.cuda.kernel import CudaKernel, Gpu, gpu_named
from actors.kernels.cuda.matmul import plan_matmul
from actors.kernels.cuda.movement import Planning, plan_copies, with_copies
from actors.kernels.cuda.region import plan_region

GENERATION = 8
"""Part of the fingerprint: raised when kernels change their results or their scratch."""

BY_TIME = (f"{CUDNN}attention_grad", ORDERED_GRADIENT, "cuda.flash_attention_grad")
"""Kernels of one op of which the one that is planned to be faster is taken."""

_OF_HOSTS = (
    "; it is computed on the host alone, by LAPACK or pocketfft: give the job two devices, as in"
    ' @af.job(devices=["cuda:0", "host:0"]), and write with af.device("host:0"): around it'
)
_INSTEAD = {
    **dict.fromkeys(("cholesky", "det", "eigh", "fft", "qr", "slogdet", "solve", "svd"), _OF_HOSTS),
    "while": (
        "; the host decides after each iteration whether a loop continues, so a GPU needs a"
        " limit: give af.while_loop max_steps="
    ),
}
"""What to do about an op that has no kernel."""


def _plans() -> Iterator[tuple[str, str, Planning]]:
    """Yield names, ops and planning functions, in order of preference."""
    yield "cuda.fused", "fused", plan_program
    yield "cuda.matmul", "matmul", plan_matmul
    yield "cuda.region", "region", plan_region
    yield "cuda.embedding", "embedding", with_copies(embedding.plan_embedding)
    yield "cuda.embedding_grad", "embedding_grad", with_copies(embedding.plan_gradient)
    yield "cuda.last_place", "last_place", with_copies(embedding.plan_last_place)
    yield "cuda.put_rows", "put_rows", with_copies(embedding.plan_put_rows)
    yield "cuda.argsort", "argsort", with_copies(reduce.plan_argsort)
    yield "cuda.recurrence", "recurrence", with_copies(reduce.plan_recurrence)
    yield "cuda.embedding_update", "embedding_update", with_copies(embedding.plan_update)
    yield "cuda.joined_updates", "joined_updates", plan_joined
    yield f"{CUDNN}attention", "attention", cudnn_attention.plan_attention
    yield f"{CUDNN}attention_grad", "attention_grad", cudnn_attention.plan_gradient
    yield ORDERED_GRADIENT, "attention_grad", cudnn_attention.plan_ordered_gradient
    yield "cuda.flash_attention", "attention", flash.plan_attention
    yield "cuda.flash_attention_grad", "attention_grad", flash.plan_gradient
    yield "cuda.attention", "attention", attention.plan_attention
    yield "cuda.attention_grad", "attention_grad", attention.plan_gradient
    yield "cuda.scan", "scan", partial(plan_scan, kernels_by_name)
    yield "cuda.cond", "cond", partial(plan_cond, kernels_by_name)
    yield from [(f"{CUDNN}{op}", op, partial(plan_cudnn_convolution, op)) for op in OPS]
    yield from [(f"cuda.{op}", op, partial(plan_convolution, op)) for op in OPS]
    yield from [(f"cuda.{op}", op, partial(plan_pooling, op)) for op in POOLING_OPS]
    yield from [(f"cuda.{op}", op, partial(plan_copies, op)) for op in COPIES]
    sums = ("sum", "mean", "max")
    yield from [(f"cuda.{op}", op, with_copies(partial(reduce.plan_reduce, op))) for op in sums]


def kernels_on(gpu: Gpu) -> Mapping[str, CudaKernel]:
    """Return every kernel for a GPU by its name in the plan, in order of preference."""
    kernels = {name: Kernel(name, op, partial(plan, gpu)) for name, op, plan in _plans()}
    return MappingProxyType(kernels)


@functools.lru_cache(maxsize=16)
def kernels_by_name(gpu: str) -> Mapping[str, CudaKernel]:
    """Return the kernels for a GPU, by its name. Raises LookupError for an unknown one."""
    return kernels_on(gpu_named(gpu))


def select_kernel(
    gpu: str,
    op: str,
    attrs: Attrs,
    inputs: Operands,
    outputs: Operands,
    kernel_op: str = "",
    *,
    uses_cudnn: CudnnLibrary | bool = False,
) -> tuple[str, KernelNeeds]:
    """Return the name and needs of the first kernel that takes this call, by time in `BY_TIME`.

    Those of `kernel_op` are asked after its own, those of cuDNN only where the plan uses a library
    that has them; True is the newest and whole one. Raises LookupError, naming op, types and
    kernels asked, when none does.
    """
    library = _library(uses_cudnn)
    kernels = [k for k in kernels_by_name(gpu).values() if library or not k.name.startswith(CUDNN)]
    candidates = [k for name in (op, kernel_op) for k in kernels if k.op == name]
    taken: tuple[str, KernelNeeds] | None = None
    for kernel in candidates:
        if taken is not None and kernel.name not in BY_TIME:
            continue
        plan = kernel.plan(attrs, inputs, outputs)
        if plan is None:
            continue
        if library is not None and not is_offered(
            library, gpu_named(gpu), kernel, attrs, inputs, outputs
        ):
            continue
        if kernel.name not in BY_TIME:
            return kernel.name, plan.needs
        if taken is None or plan.needs.duration_ns < taken[1].duration_ns:
            taken = kernel.name, plan.needs
    if taken is not None:
        return taken
    types = [", ".join([str(x.type) for x in operands]) for operands in (inputs, outputs)]
    call = f"{op}({types[0]}) -> ({types[1]})"
    if not candidates:
        instead = _INSTEAD.get(op, "")
        raise LookupError(f"CUDA devices have no kernel for op {op!r}, called as {call}{instead}")
    names = ", ".join([kernel.name for kernel in candidates])
    raise LookupError(f"no kernel of CUDA devices takes {call}; candidates: {names}")


def fingerprint(gpu: str, *, uses_cudnn: CudnnLibrary | bool = False) -> str:
    """Return what needs and results depend on: our generation, the GPU, and cuDNN if it is used.

    `library_of` reads the last.
    """
    library = _library(uses_cudnn)
    about_cudnn = "" if library is None else f" {library.level}"
    return f"cuda-{GENERATION} {gpu_named(gpu).fingerprint}{about_cudnn}"


def _library(uses_cudnn: CudnnLibrary | bool) -> CudnnLibrary | None:
    """Return the library that a plan uses; None for none."""
    if isinstance(uses_cudnn, bool):
        return CudnnLibrary() if uses_cudnn else None
    return uses_cudnn
