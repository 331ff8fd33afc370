"""The kernel "numpy.fused_product": the product by numpy, then the group by numpy.

It takes the calls that native kernels do not: where there is no C compiler, or where the compiler
refused the group's text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.kernels import scratch
from actors.kernels.attributes import integer
from actors.kernels.interpret.fused import NumpyFusedKernel
from actors.kernels.interpret.matmul import MatmulKernel
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, Operands, Workspace, in_sequence
from actors.kernels.scratch import Piece
from actors.protocol import Arrays, Launch
from compiler.errors import InternalError
from compiler.types import DType, TensorType, contiguous_strides, numpy_dtype

_PRODUCT = MatmulKernel()
_GROUP = NumpyFusedKernel()


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the two kernels need, and the product between them."""

    product: Operand
    first: KernelNeeds
    second: KernelNeeds

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Scratch: the product, and what each kernel needs."""
        byte = np.dtype(np.uint8)
        return (
            Piece(self.product.shape, self.product.dtype),
            Piece((self.first.workspace_bytes,), byte),
            Piece((self.second.workspace_bytes,), byte),
        )


@dataclass(frozen=True, slots=True)
class NumpyFusedProductKernel:
    """`fused_product`: a [M, K], b [K, N], and the operands of a group behind its first."""

    name: str = "numpy.fused_product"
    op: str = "fused_product"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take what both kernels take."""
        parts = _parts(attrs, inputs, outputs)
        if parts is None:
            return None
        return KernelNeeds(
            scratch.size_bytes(parts.pieces),
            tuple([(out, index + 1) for out, index in parts.second.in_place if index]),
            parts.first.duration_ns + parts.second.duration_ns,
        )

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the two launches in order."""
        parts = _parts(attrs, _operands(inputs), _operands(outputs))
        if parts is None:
            raise InternalError(f"{self.name} is bound to arrays that it does not take")
        product, first, second = scratch.carve(workspace, parts.pieces)
        operands = (product, *inputs[2:])
        return in_sequence(
            (
                _PRODUCT.bind(attrs, inputs[:2], (product,), first),
                _GROUP.bind(attrs, operands, outputs, second),
            )
        )


def _parts(attrs: Attrs, inputs: Operands, outputs: Operands) -> _Parts | None:
    shape, dtype = (integer(attrs, "rows"), integer(attrs, "columns")), inputs[0].type.dtype
    product = Operand(TensorType(dtype, shape), 0, contiguous_strides(shape, dtype.itemsize))
    first = _PRODUCT.query(attrs, inputs[:2], (product,))
    second = _GROUP.query(attrs, (product, *inputs[2:]), outputs)
    return None if first is None or second is None else _Parts(product, first, second)


def _operands(arrays: Arrays) -> Operands:
    known = {numpy_dtype(dtype): dtype for dtype in reversed(DType)}
    return tuple([Operand(TensorType(known[x.dtype], x.shape), 0, x.strides) for x in arrays])


FUSED_PRODUCT_KERNELS = (NumpyFusedProductKernel(),)
