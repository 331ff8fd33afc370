"""Rows of several tables and other tensors, joined along the last axis, by numpy.

numpy gathers into dense arrays only, so the rows of a table go through scratch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import integers
from actors.kernels.interpret.embedding import EmbeddingKernel
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import Pass, Work
from actors.protocol import Array, Launch
from compiler.types import DType, TensorType, contiguous_strides

_LOOKUP = EmbeddingKernel()
_BYTE = np.dtype(np.uint8)
_CALLS_PER_PART = 5

T = TypeVar("T")


def parts_of(attrs: Attrs, inputs: Sequence[T]) -> Iterator[tuple[T, T | None]]:
    """Yield, per part, a table and its ids, or a tensor and None."""
    left = iter(inputs)
    for is_picked in integers(attrs, "picked"):
        first = next(left)
        yield first, next(left) if is_picked else None


@dataclass(frozen=True, slots=True)
class EmbeddingConcatKernel:
    """`embedding_concat`(parts) -> the parts along the last axis; attrs picked."""

    name: str = "numpy.embedding_concat"
    op: str = "embedding_concat"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take every call; scratch is the rows of one part, and that of one gather."""
        pieces = _pieces(attrs, inputs)
        if pieces is None:
            return None
        moved = float(outputs[0].type.size_bytes)
        calls = _CALLS_PER_PART * len(integers(attrs, "picked"))
        work = Work(
            calls,
            passes=((Pass.GATHER, moved), (Pass.SIMPLE, moved)),
            unswept=tuple(range(len(inputs))),
        )
        return cost.needs(inputs, outputs, work, scratch.size_bytes(pieces))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return a gather and a copy per table, and a copy per other part."""
        pieces = _pieces(attrs, tuple(map(_operand, inputs))) or ()
        rows, own = scratch.carve(workspace, pieces)
        calls: list[Launch] = []
        stop = 0
        for part, ids in parts_of(attrs, inputs):
            start, stop = stop, stop + part.shape[-1]
            source = part
            if ids is not None:
                shape = (*ids.shape, part.shape[-1])
                size = int(np.prod(shape)) * part.itemsize
                source = rows[:size].view(part.dtype).reshape(shape)
                calls.append(_LOOKUP.bind({}, (part, ids), (source,), own))
            calls.append(partial(np.copyto, outputs[0][..., start:stop], source))
        return in_sequence(calls)


def _pieces(attrs: Attrs, inputs: tuple[Operand, ...]) -> tuple[Piece, Piece] | None:
    """Return scratch for the largest rows of a part and for the neediest gather."""
    rows, own = 0, 0
    for table, ids in parts_of(attrs, inputs):
        if ids is None:
            continue
        type_ = TensorType(table.type.dtype, (*ids.shape, table.shape[-1]))
        dense = contiguous_strides(type_.shape, table.dtype.itemsize)
        needs = _LOOKUP.query({}, (table, ids), (Operand(type_, 0, dense),))
        if needs is None:
            return None
        rows, own = max(rows, type_.size_bytes), max(own, needs.workspace_bytes)
    return Piece((rows,), _BYTE), Piece((own,), _BYTE)


def _operand(array: Array) -> Operand:
    return Operand(TensorType(DType(array.dtype.name), array.shape), 0, array.strides)


EMBEDDING_CONCAT_KERNELS = (EmbeddingConcatKernel(),)
