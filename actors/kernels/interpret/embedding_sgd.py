"""The kernel "numpy.embedding_sgd_update": the gradient of the whole table, then plain descent.

numpy cannot add equal ids up without a table or fresh arrays; what the op saves in traffic it saves
in C.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.kernels import scratch
from actors.kernels.interpret.embedding import EmbeddingGradKernel
from actors.kernels.interpret.update import SGD
from actors.kernels.kernel import (
    Attrs,
    KernelNeeds,
    Operand,
    Operands,
    Workspace,
    in_sequence,
    operands_of,
)
from actors.kernels.scratch import Piece
from actors.kernels.work import Work
from actors.protocol import Arrays, Launch
from compiler.errors import InternalError
from compiler.types import contiguous_strides

_GRADIENT = EmbeddingGradKernel()
_PLAIN: Attrs = {"weight_decay": 0.0}
_READS = (0, None, 3)
"""Inputs of the op that descent reads: parameter, rate and, between them, the gradient."""


@dataclass(frozen=True, slots=True)
class EmbeddingSgdUpdateKernel:
    """`embedding_sgd_update`(param [V, D], dy, ids, lr) -> param'."""

    name: str = "numpy.embedding_sgd_update"
    op: str = "embedding_sgd_update"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take what both kernels take; scratch has the gradient."""
        found = _needs(inputs, outputs)
        if found is None:
            return None
        gradient, descent = found
        pairs = [(out, _READS[i]) for out, i in descent.in_place]
        return KernelNeeds(
            scratch.size_bytes(_pieces(inputs[0], found)),
            tuple([(out, read) for out, read in pairs if read is not None]),
            gradient.duration_ns + descent.duration_ns,
            (gradient.work or Work()).then(descent.work or Work()),
        )

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the two launches in order."""
        table, dy, ids, rate = inputs
        found = _needs(operands_of(inputs), operands_of(outputs))
        if found is None:
            raise InternalError(f"{self.name} is bound to arrays that it does not take")
        pieces = _pieces(operands_of(inputs)[0], found)
        gradient, first, second = scratch.carve(workspace, pieces)
        calls = (
            _GRADIENT.bind({"rows": table.shape[0]}, (dy, ids), (gradient,), first),
            SGD.bind(_PLAIN, (table, gradient, rate), outputs, second),
        )
        return in_sequence(calls)


def _needs(inputs: Operands, outputs: Operands) -> tuple[KernelNeeds, KernelNeeds] | None:
    """Return what the gradient needs, and what descent does."""
    table, dy, ids, rate = inputs
    dense = contiguous_strides(table.shape, table.dtype.itemsize)
    gradient = Operand(table.type, 0, dense)
    first = _GRADIENT.query({"rows": table.shape[0]}, (dy, ids), (gradient,))
    second = SGD.query(_PLAIN, (table, gradient, rate), outputs)
    return None if first is None or second is None else (first, second)


def _pieces(table: Operand, found: tuple[KernelNeeds, KernelNeeds]) -> tuple[Piece, ...]:
    """Return the gradient, and the scratch of the two kernels."""
    sizes = [Piece((needs.workspace_bytes,), np.dtype(np.uint8)) for needs in found]
    return (Piece(table.shape, table.dtype), *sizes)


EMBEDDING_SGD_UPDATE = EmbeddingSgdUpdateKernel()
