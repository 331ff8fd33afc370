"""Plain descent on the rows of a table that a batch picked, by numpy.

Numpy cannot add equal ids up without a table or fresh arrays, so the gradient of the whole table
goes to scratch here; what the op saves in traffic it saves in C.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.interpret.embedding import EmbeddingGradKernel
from actors.kernels.interpret.update import SgdKernel
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, Operands, Workspace, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import Work
from actors.protocol import Array, Arrays, Launch
from compiler.errors import InternalError
from compiler.types import DType, TensorType, contiguous_strides

_GRADIENT = EmbeddingGradKernel()
_UPDATE = SgdKernel("sgd_update", has_buffer=False)
_NO_DECAY: Attrs = {"weight_decay": 0.0}
_BYTE = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class EmbeddingSgdUpdateKernel:
    """`embedding_sgd_update`(param, dy, ids, lr) -> param': the gradient, then the update."""

    name: str = "numpy.embedding_sgd_update"
    op: str = "embedding_sgd_update"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take float32 and float64; scratch is a table, and that of the two kernels."""
        found = _both(inputs, outputs)
        if found is None:
            return None
        works = [needs.work or Work() for needs in found]
        work = Work(
            sum([own.calls for own in works]),
            sum([own.loops for own in works]),
            tuple([entry for own in works for entry in own.passes]),
        )
        size = scratch.size_bytes(_pieces(inputs[0].shape, inputs[0].dtype, found))
        return cost.needs(inputs, outputs, work, size, ((0, 0),))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the calls of both kernels."""
        param, dy, ids, lr = inputs
        found = _both(tuple(map(_operand, inputs)), tuple(map(_operand, outputs)))
        if found is None:
            raise InternalError(f"{self.name} was bound to operands that it does not take")
        table, first, second = scratch.carve(workspace, _pieces(param.shape, param.dtype, found))
        return in_sequence(
            (
                _GRADIENT.bind({"rows": param.shape[0]}, (dy, ids), (table,), first),
                _UPDATE.bind(_NO_DECAY, (param, table, lr), outputs, second),
            )
        )


def _both(inputs: Operands, outputs: Operands) -> tuple[KernelNeeds, KernelNeeds] | None:
    """Return what gradient and update need, or None where one of them does not take the call."""
    param, dy, ids, lr = inputs
    strides = contiguous_strides(param.shape, param.dtype.itemsize)
    table = Operand(param.type, 0, strides)
    gradient = _GRADIENT.query({"rows": param.shape[0]}, (dy, ids), (table,))
    update = _UPDATE.query(_NO_DECAY, (param, table, lr), outputs)
    return None if gradient is None or update is None else (gradient, update)


def _pieces(
    shape: tuple[int, ...], dtype: np.dtype[np.generic], found: tuple[KernelNeeds, KernelNeeds]
) -> tuple[Piece, ...]:
    """Return the gradient of the table, and the scratch of the two kernels."""
    sizes = [Piece((needs.workspace_bytes,), _BYTE) for needs in found]
    return (Piece(shape, dtype), *sizes)


def _operand(array: Array) -> Operand:
    return Operand(TensorType(DType(array.dtype.name), array.shape), 0, array.strides)


SPARSE_UPDATE_KERNELS = (EmbeddingSgdUpdateKernel(),)
