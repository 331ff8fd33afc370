"""Order of elements and recurrences along the last axis, in C (`along.c`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import flag
from actors.kernels.axes import MAX_OUTER, columns_of, walk
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, Operands, Workspace
from actors.kernels.native import chunks, runtime
from actors.kernels.native.launch import Word, address, native_launch
from actors.kernels.scratch import Piece
from actors.kernels.work import NATIVE_CALLS, BytePass, CWork, Work
from actors.protocol import Array, Arrays, Launch

_TYPES = ("float32", "float64", "int64")
"""The types of along.c, in its order."""

_ENTRY = np.dtype(np.complex128)
"""As large as a key and a place."""


def are_walked(x: Operand) -> bool:
    """Whether C can walk the rows of x, and knows its elements."""
    axes = walk(x.shape[:-1], (x.strides_bytes[:-1],), in_order=True)
    return x.type.dtype.value in _TYPES and len(axes) <= MAX_OUTER


def _rows(x: Array) -> list[Word]:
    axes = walk(x.shape[:-1], (x.strides[:-1],), in_order=True)
    return [address(x), x.strides[-1], *columns_of(axes, 1)]


def _in_c(sort: BytePass, size_bytes: float) -> CWork:
    return CWork(((sort, size_bytes),), pieces=chunks.num_chunks(size_bytes))


@dataclass(frozen=True, slots=True)
class NativeArgsort:
    """`argsort`(x) -> places in ascending order, equal ones as they came; attrs descending."""

    name: str = "c.argsort"
    op: str = "argsort"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take a dense output; scratch is two rows of keys and places for each thread."""
        (x,), (out,) = inputs, outputs
        if not (runtime.is_on() and are_walked(x) and out.is_dense):
            return None
        size = 4.0 * out.type.size_bytes
        in_c = partial(_in_c, BytePass.GATHER, size)
        work = Work(NATIVE_CALLS, passes=((BytePass.GATHER, size),), in_c=in_c)
        pieces = _sort_pieces(x.shape[-1], runtime.num_threads())
        return cost.needs(inputs, outputs, work, scratch.size_bytes(pieces))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one launch."""
        (x,), (out,) = inputs, outputs
        pieces = partial(_sort_pieces, x.shape[-1])
        workers = scratch.workers_for(pieces, workspace, runtime.num_threads())
        (entries,) = scratch.carve(workspace, pieces(workers))
        rows = math.prod(out.shape[:-1]) if out.size else 0
        words: list[Word] = [
            *(*_rows(x), address(out)),
            *(rows, x.shape[-1], _TYPES.index(x.dtype.name), int(flag(attrs, "descending"))),
            *(chunks.units_per_chunk(rows, 8 * out.nbytes), workers, address(entries)),
        ]
        where = runtime.address_in("along.c", "af_argsort")
        return native_launch(where, words, (inputs, outputs, entries))


def _sort_pieces(columns: int, workers: int) -> tuple[Piece, ...]:
    return (Piece((workers, 2, columns), _ENTRY),)


@dataclass(frozen=True, slots=True)
class NativeRecurrence:
    """`recurrence`(a, b): y[i] = a[i] * y[i - 1] + b[i]; attrs reverse."""

    name: str = "c.recurrence"
    op: str = "recurrence"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take a dense output; no scratch."""
        (out,) = outputs
        if not (runtime.is_on() and all(map(are_walked, inputs)) and out.is_dense):
            return None
        size = float(out.type.size_bytes)
        in_c = partial(_in_c, BytePass.REDUCE, 3 * size)
        work = Work(NATIVE_CALLS, passes=((BytePass.REDUCE, size),), in_c=in_c)
        return cost.needs(inputs, outputs, work)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one launch."""
        (a, b), (out,) = inputs, outputs
        rows = math.prod(out.shape[:-1]) if out.size else 0
        words: list[Word] = [
            *(*_rows(a), *_rows(b), address(out)),
            *(rows, out.shape[-1], _TYPES.index(out.dtype.name), int(flag(attrs, "reverse"))),
            *(chunks.units_per_chunk(rows, 8 * out.nbytes), runtime.num_threads()),
        ]
        where = runtime.address_in("along.c", "af_recurrence")
        return native_launch(where, words, (inputs, outputs))


NATIVE_ALONG_KERNELS = (NativeArgsort(), NativeRecurrence())
