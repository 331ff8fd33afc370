"""All kernels of a CUDA device, by op and by name, in order of preference."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from actors.kernels.common.kernel import Attrs, KernelNeeds, Operands
from actors.kernels.cuda.attention import CudaAttention, CudaAttentionGrad
from actors.kernels.cuda.control import CudaCond, CudaScan
from actors.kernels.cuda.convolution import convolution_kernels, pooling_kernels
from actors.kernels.cuda.cudnn_kernels import (
    CudnnAttention,
    CudnnAttentionGrad,
    CudnnOrderedAttentionGrad,
    cudnn_convolutions,
    is_offered,
)
from actors.kernels.cuda.cudnn_library import CUDNN, ORDERED_GRADIENT, CudnnLibrary
from actors.kernels.cuda.embedding import (
    CudaEmbedding,
    CudaEmbeddingGrad,
    CudaEmbeddingUpdate,
    CudaLastPlace,
)
from actors.kernels.cuda.flash import FlashAttention, FlashAttentionGrad
from actors.kernels.cuda.fused import CudaFused, CudaJoinedUpdates
from actors.kernels.cuda.kernel import CudaKernel, Gpu, gpu_named
from actors.kernels.cuda.matmul import CudaMatmul
from actors.kernels.cuda.movement import movement_kernels
from actors.kernels.cuda.reduce import CudaArgsort, CudaRecurrence, reduce_kernels
from actors.kernels.cuda.region import CudaRegion

GENERATION = 6
"""Part of the fingerprint: raised when kernels change their results or their scratch."""

BY_TIME = (f"{CUDNN}attention_grad", ORDERED_GRADIENT, "cuda.flash_attention_grad")
"""Kernels of one op of which the one that is planned to be faster is taken."""

_INSTEAD = {
    "while": "; how often a loop goes round is decided on the host, so say how often at most: give"
    " af.while_loop max_steps=",
}
"""What to do about an op that has no kernel."""


@functools.lru_cache(maxsize=16)
def kernels_of(gpu: str) -> tuple[CudaKernel, ...]:
    """Return the kernels for a GPU, by its name. Raises LookupError for an unknown one."""
    return _all(gpu_named(gpu))


def _all(gpu: Gpu) -> tuple[CudaKernel, ...]:
    return (
        CudaFused(gpu),
        CudaMatmul(gpu),
        CudaRegion(gpu),
        CudaEmbedding(gpu),
        CudaEmbeddingGrad(gpu),
        CudaLastPlace(gpu),
        CudaArgsort(gpu),
        CudaRecurrence(gpu),
        CudaEmbeddingUpdate(gpu),
        CudaJoinedUpdates(gpu),
        CudnnAttention(gpu),
        CudnnAttentionGrad(gpu),
        CudnnOrderedAttentionGrad(gpu),
        FlashAttention(gpu),
        FlashAttentionGrad(gpu),
        CudaAttention(gpu),
        CudaAttentionGrad(gpu),
        CudaScan(gpu, kernels_by_name),
        CudaCond(gpu, kernels_by_name),
        *cudnn_convolutions(gpu),
        *convolution_kernels(gpu),
        *pooling_kernels(gpu),
        *movement_kernels(gpu),
        *reduce_kernels(gpu),
    )


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
    kernels = [k for k in kernels_of(gpu) if library or not k.name.startswith(CUDNN)]
    candidates = [k for name in (op, kernel_op) for k in kernels if k.op == name]
    taken: tuple[str, KernelNeeds] | None = None
    for kernel in candidates:
        if taken is not None and kernel.name not in BY_TIME:
            continue
        needs = kernel.query(attrs, inputs, outputs)
        if needs is None:
            continue
        if library is not None and not is_offered(library, kernel, attrs, inputs, outputs):
            continue
        if kernel.name not in BY_TIME:
            return kernel.name, needs
        if taken is None or needs.duration_ns < taken[1].duration_ns:
            taken = kernel.name, needs
    if taken is not None:
        return taken
    types = [", ".join([str(x.type) for x in operands]) for operands in (inputs, outputs)]
    call = f"{op}({types[0]}) -> ({types[1]})"
    if not candidates:
        instead = _INSTEAD.get(op, "")
        raise LookupError(f"CUDA devices have no kernel for op {op!r}, called as {call}{instead}")
    names = ", ".join([kernel.name for kernel in candidates])
    raise LookupError(f"no kernel of CUDA devices takes {call}; asked: {names}")


def kernels_by_name(gpu: str) -> Mapping[str, CudaKernel]:
    """Return every kernel for a GPU by its name in the plan."""
    return MappingProxyType({kernel.name: kernel for kernel in kernels_of(gpu)})


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
