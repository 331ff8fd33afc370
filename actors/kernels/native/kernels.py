"""All kernels in C, in the order of preference; they stand before numpy's in the catalogue."""

from __future__ import annotations

from actors.kernels.codegen.chunked import CHUNKED_KERNELS
from actors.kernels.codegen.embedding_update import EMBEDDING_UPDATE_KERNELS
from actors.kernels.codegen.fused_kernel import FUSED_KERNELS
from actors.kernels.codegen.fused_product import FUSED_PRODUCT_KERNELS
from actors.kernels.kernel import Kernel
from actors.kernels.native import runtime
from actors.kernels.native.along import NATIVE_ALONG_KERNELS
from actors.kernels.native.attention import ATTENTION_KERNELS
from actors.kernels.native.convolution import CONVOLUTION_KERNELS
from actors.kernels.native.embedding import NATIVE_EMBEDDING_KERNELS
from actors.kernels.native.matmul import NATIVE_MATMUL_KERNELS
from actors.kernels.native.movement import MOVEMENT_KERNELS
from actors.kernels.native.pooling import NATIVE_POOLING_KERNELS
from actors.kernels.native.reduce import NATIVE_REDUCE_KERNELS

_BY_FILES: tuple[tuple[tuple[str, ...], tuple[Kernel, ...]], ...] = (
    (("gemm.c",), NATIVE_MATMUL_KERNELS),
    (("gemm.c",), CONVOLUTION_KERNELS),
    ((), FUSED_KERNELS),
    (("gemm.c", "fused_product.c"), FUSED_PRODUCT_KERNELS),
    (("gemm.c", "chunked.c"), CHUNKED_KERNELS),
    (("attention.c",), ATTENTION_KERNELS),
    (("embedding.c",), NATIVE_EMBEDDING_KERNELS),
    (("embedding.c",), EMBEDDING_UPDATE_KERNELS),
    (("along.c",), NATIVE_ALONG_KERNELS),
    (("copy.c",), MOVEMENT_KERNELS),
    (("reduce.c",), NATIVE_REDUCE_KERNELS),
    (("pooling.c",), NATIVE_POOLING_KERNELS),
)
"""Kernels, with the C files of this folder that they call."""

NATIVE_KERNELS: tuple[Kernel, ...] = tuple([k for _, kernels in _BY_FILES for k in kernels])

FILES = {kernel.name: files for files, kernels in _BY_FILES for kernel in kernels}
"""The C files of a kernel, by its name in the plan."""


def is_refused(kernel: str) -> bool:
    """Whether the compiler refused a file that a kernel calls: it takes no call any more."""
    return any([runtime.is_refused(file) for file in FILES.get(kernel, ())])
