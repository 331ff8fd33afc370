"""All kernels of a CUDA device, by op and by name, in order of preference."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from actors.kernels.cuda.attention import CudaAttention, CudaAttentionGrad
from actors.kernels.cuda.embedding import CudaEmbedding, CudaEmbeddingGrad
from actors.kernels.cuda.embedding_update import CudaEmbeddingUpdate
from actors.kernels.cuda.fused import CudaFused
from actors.kernels.cuda.gpu import Gpu, gpu_named
from actors.kernels.cuda.kernel import CudaKernel
from actors.kernels.cuda.matmul import CudaMatmul
from actors.kernels.cuda.movement import movement_kernels
from actors.kernels.cuda.reduce import reduce_kernels
from actors.kernels.cuda.region import CudaRegion
from actors.kernels.kernel import Attrs, KernelNeeds, Operands

GENERATION = 1
"""Part of the fingerprint: raised when kernels change their results or their scratch."""


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
        CudaEmbeddingUpdate(gpu),
        CudaAttention(gpu),
        CudaAttentionGrad(gpu),
        *movement_kernels(gpu),
        *reduce_kernels(gpu),
    )


def choose(
    gpu: str, op: str, attrs: Attrs, inputs: Operands, outputs: Operands, runs_as: str = ""
) -> tuple[str, KernelNeeds]:
    """Return the name and needs of the first kernel that takes this call.

    Those of `runs_as` are asked after its own. Raises LookupError, naming op, types and kernels
    asked, when none does.
    """
    asked = [k for wanted in (op, runs_as) for k in kernels_of(gpu) if k.op == wanted]
    for kernel in asked:
        needs = kernel.query(attrs, inputs, outputs)
        if needs is not None:
            return kernel.name, needs
    types = [", ".join([str(x.type) for x in operands]) for operands in (inputs, outputs)]
    call = f"{op}({types[0]}) -> ({types[1]})"
    if not asked:
        raise LookupError(f"CUDA devices have no kernel for op {op!r}, called as {call}")
    names = ", ".join([kernel.name for kernel in asked])
    raise LookupError(f"no kernel of CUDA devices takes {call}; asked: {names}")


def binders(gpu: str) -> Mapping[str, CudaKernel]:
    """Return every kernel for a GPU by its name in the plan."""
    return MappingProxyType({kernel.name: kernel for kernel in kernels_of(gpu)})


def fingerprint(gpu: str) -> str:
    """Return what needs and results depend on: our generation, and the description of the GPU."""
    return f"cuda-{GENERATION} {gpu_named(gpu).fingerprint}"
