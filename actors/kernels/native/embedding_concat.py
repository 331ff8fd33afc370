"""Rows of several tables and other tensors, joined along the last axis, in C (`embedding.c`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from actors.kernels import cost
from actors.kernels.interpret.embedding_concat import parts_of
from actors.kernels.kernel import Attrs, KernelNeeds, Operand
from actors.kernels.native import chunks, runtime
from actors.kernels.native.axes import MAX_OUTER, columns_of, walk
from actors.kernels.native.embedding import (
    CALLS,
    ROW_BYTES,
    explain_ids,
    has_dense_rows,
    ids_words,
    is_id,
    rows_words,
)
from actors.kernels.native.launch import Word, address, argument_block, native_launch
from actors.kernels.work import Pass, Work
from actors.protocol import Array, Launch

_NO_IDS: list[Word] = [0, 0, 0, *columns_of((), 1)]
_NO_ROWS: list[Word] = columns_of((), 1)


@dataclass(frozen=True, slots=True)
class EmbeddingConcatKernel:
    """`embedding_concat`(parts) -> the parts along the last axis; attrs picked."""

    name: str = "c.embedding_concat"
    op: str = "embedding_concat"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take parts with dense rows, and a dense output."""
        (out,) = outputs
        if not (runtime.is_on() and out.is_dense and out.shape):
            return None
        if not all([_is_part(part, ids) for part, ids in parts_of(attrs, inputs)]):
            return None
        passes = ((Pass.GATHER, float(out.type.size_bytes)),)
        work = Work(CALLS, passes=passes, unswept=tuple(range(len(inputs))))
        return cost.needs(inputs, outputs, work)

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return one launch."""
        (out,) = outputs
        parts = [part for part in parts_of(attrs, inputs) if part[0].shape[-1]]
        words: list[Word] = []
        offset = 0
        for part, ids in parts:
            row_bytes = part.shape[-1] * part.itemsize
            words += [address(part), *(_NO_IDS if ids is None else ids_words(ids))]
            words += [part.shape[0] if part.ndim else 0, part.strides[0] if part.ndim else 0]
            words += _NO_ROWS if ids is not None else rows_words(part)
            words += [row_bytes, offset]
            offset += row_bytes
        block = argument_block(words)
        num_rows = out.size // max(out.shape[-1], 1)
        moved = 2 * out.size * out.itemsize + num_rows * len(parts) * ROW_BYTES
        header: list[Word] = [
            *(address(out), ctypes.addressof(block), len(parts), num_rows, offset),
            *(chunks.units_per_chunk(num_rows, moved), runtime.num_threads()),
            0,  # whether an id was bad
        ]

        def explain(status: int) -> str:
            for part, ids in parts:
                if ids is not None:
                    explain_ids(ids, part.shape[0])(status)
            return "an id was no row of its table"

        where = runtime.address_in("embedding.c", "af_embedding_concat")
        return native_launch(where, header, (inputs, outputs, block), explain)


def _is_part(part: Operand, ids: Operand | None) -> bool:
    if not has_dense_rows(part):
        return False
    if ids is not None:
        return is_id(ids)
    return len(walk(part.shape[:-1], (part.strides_bytes[:-1],), in_order=True)) <= MAX_OUTER


NATIVE_EMBEDDING_CONCAT_KERNELS = (EmbeddingConcatKernel(),)
