"""The kernel "numpy.embedding_update": the gradient of the whole table, then the dense update.

numpy cannot add equal ids up without a table or fresh arrays; what the op saves in traffic it saves
in C.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.kernels import scratch
from actors.kernels.interpret.embedding import EmbeddingGradKernel
from actors.kernels.interpret.fused import NumpyFusedKernel
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
from compiler.fusion.program import GRADIENT
from compiler.types import contiguous_strides

_GRADIENT, _UPDATE = EmbeddingGradKernel(), NumpyFusedKernel()


@dataclass(frozen=True, slots=True)
class NumpyEmbeddingUpdate:
    """As "c.embedding_update", by way of the gradient of all rows."""

    name: str = "numpy.embedding_update"
    op: str = "embedding_update"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take what both kernels take; scratch has the gradient."""
        found = _needs(attrs, inputs, outputs)
        if found is None:
            return None
        gradient, update = found
        return KernelNeeds(
            scratch.size_bytes(_pieces(inputs[0], found)),
            tuple([(out, i + (i > GRADIENT)) for out, i in update.in_place if i != GRADIENT]),
            gradient.duration_ns + update.duration_ns,
            (gradient.work or Work()).then(update.work or Work()),
        )

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the two launches in order."""
        table, dy, ids, *rest = inputs
        found = _needs(attrs, operands_of(inputs), operands_of(outputs))
        if found is None:
            raise InternalError(f"{self.name} is bound to arrays that it does not take")
        pieces = _pieces(operands_of(inputs)[0], found)
        gradient, first, second = scratch.carve(workspace, pieces)
        calls = (
            _GRADIENT.bind({"rows": table.shape[0]}, (dy, ids), (gradient,), first),
            _UPDATE.bind(attrs, (table, gradient, *rest), outputs, second),
        )
        return in_sequence(calls)


def _needs(
    attrs: Attrs, inputs: Operands, outputs: Operands
) -> tuple[KernelNeeds, KernelNeeds] | None:
    """Return what the gradient needs, and what the update does."""
    table, dy, ids, *rest = inputs
    dense = contiguous_strides(table.shape, table.dtype.itemsize)
    gradient = Operand(table.type, 0, dense)
    first = _GRADIENT.query({"rows": table.shape[0]}, (dy, ids), (gradient,))
    second = _UPDATE.query(attrs, (table, gradient, *rest), outputs)
    return None if first is None or second is None else (first, second)


def _pieces(table: Operand, found: tuple[KernelNeeds, KernelNeeds]) -> tuple[Piece, ...]:
    """Return the gradient, and the scratch of the two kernels."""
    sizes = [Piece((needs.workspace_bytes,), np.dtype(np.uint8)) for needs in found]
    return (Piece(table.shape, table.dtype), *sizes)


EMBEDDING_UPDATE = NumpyEmbeddingUpdate()
