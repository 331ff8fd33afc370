"""Reductions over middle axes (`reduce.c`); order and recurrences along the last one (`along.c`).

Fused kernels take what is reduced over the last axes or the first ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels.common import cost, kernel
from actors.kernels.common.host_memory import address
from actors.kernels.common.kernel import (
    NATIVE_CALLS,
    Attrs,
    BytePass,
    CWork,
    KernelNeeds,
    Operand,
    Operands,
    Piece,
    Work,
    Workspace,
    flag,
    integers,
)
from actors.kernels.common.strides import MAX_OUTER, Axis, collapse_axes, columns_of
from actors.kernels.library import launch, runtime
from actors.kernels.library.launch import Word, native_launch
from actors.machine.protocol import Array, Arrays, Launch
from compiler.contract.errors import InternalError
from compiler.contract.types import DType

_REDUCED_TYPES = (DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64)
"""The types of reduce.c, in its order."""

_MAX_COLUMNS, _MIN_COLUMNS = 512, 64
"""Of a block: what fits on the stack, and cache lines enough for the prefetchers."""

_ENOUGH_UNITS = 16


@dataclass(frozen=True, slots=True)
class NativeReduce:
    """`sum`, `mean` or `max`."""

    op: str

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"c.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take the common types over neighbouring axes, with a dense output."""
        (x,), (out,) = inputs, outputs
        if not (
            runtime.is_enabled()
            and x.type.dtype in _REDUCED_TYPES
            and x.type.num_elements
            and out.is_dense
        ):
            return None
        if self.op == "mean" and not x.type.dtype.is_float:
            return None
        if _walked(attrs, x.shape, x.strides_bytes, x.dtype.itemsize) is None:
            return None
        size = float(x.type.size_bytes)
        in_c = partial(_reduced_in_c, size)
        work = Work(NATIVE_CALLS, passes=((BytePass.SIMPLE, size),), in_c=in_c)
        return cost.needs(inputs, outputs, work)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one launch."""
        (x,), (out,) = inputs, outputs
        walk = _walked(attrs, x.shape, x.strides, x.itemsize)
        if walk is None:
            raise InternalError(f"{self.name} was bound to axes that it does not take")
        outer, rows, columns = walk
        num_columns = outer.extent * columns.extent // _ENOUGH_UNITS
        block = max(_MIN_COLUMNS, min(_MAX_COLUMNS, num_columns))
        units = outer.extent * -(-columns.extent // block)
        # As reduce.c numbers its functions: sums by type, then maxima by type.
        form = _REDUCED_TYPES.index(DType(x.dtype.name)) + len(_REDUCED_TYPES) * (self.op == "max")
        words: list[Word] = [
            *(address(x), address(out), rows.extent, columns.extent),
            *(outer.steps[0], rows.steps[0], x.itemsize),
            *(block, units, launch.units_per_chunk(units, x.nbytes), runtime.num_threads(), form),
            float(rows.extent) if self.op == "mean" else 1.0,
        ]
        return native_launch(runtime.address_in("reduce.c", "af_reduce"), words, (x, out))


def _reduced_in_c(size_bytes: float) -> CWork:
    return CWork(((BytePass.REDUCE, size_bytes),), pieces=launch.num_chunks(size_bytes))


def _walked(
    attrs: Attrs, shape: tuple[int, ...], strides: tuple[int, ...], item: int
) -> tuple[Axis, Axis, Axis] | None:
    """Return x as [outer, rows, columns], columns dense, or None where it does not lie so."""
    reduced_axes = integers(attrs, "axes")
    # Axes of extent 1 add nothing and may stand anywhere.
    axes = [axis for axis in reduced_axes if shape[axis] != 1] or reduced_axes[:1]
    if not axes:
        return None
    first, last = axes[0], axes[-1] + 1
    # An axis that is kept lies between those that are reduced.
    if math.prod(shape[first:last]) != math.prod([shape[axis] for axis in axes]):
        return None
    parts = [
        collapse_axes(shape[a:b], (strides[a:b],), in_order=True) or (Axis(1, (item,)),)
        for a, b in ((0, first), (first, last), (last, len(shape)))
    ]
    if any([len(part) > 1 for part in parts]) or parts[2][0].steps != (item,):
        return None
    outer, rows, columns = [part[0] for part in parts]
    return outer, rows, columns


NATIVE_REDUCE_KERNELS = tuple([NativeReduce(op) for op in ("sum", "mean", "max")])


_ALONG_TYPES = ("float32", "float64", "int64")
"""The types of along.c, in its order."""

_ENTRY = np.dtype(np.complex128)
"""As large as a key and a place."""


def are_walked(x: Operand) -> bool:
    """Whether C can walk the rows of x, and knows its elements."""
    axes = collapse_axes(x.shape[:-1], (x.strides_bytes[:-1],), in_order=True)
    return x.type.dtype.value in _ALONG_TYPES and len(axes) <= MAX_OUTER


def _rows(x: Array) -> list[Word]:
    axes = collapse_axes(x.shape[:-1], (x.strides[:-1],), in_order=True)
    return [address(x), x.strides[-1], *columns_of(axes, 1)]


def _in_c(sort: BytePass, size_bytes: float) -> CWork:
    return CWork(((sort, size_bytes),), pieces=launch.num_chunks(size_bytes))


@dataclass(frozen=True, slots=True)
class NativeArgsort:
    """`argsort`(x) -> places in ascending order, equal ones as they came; attrs descending."""

    name: str = "c.argsort"
    op: str = "argsort"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take a dense output; scratch is two rows of keys and places for each thread."""
        (x,), (out,) = inputs, outputs
        if not (runtime.is_enabled() and are_walked(x) and out.is_dense):
            return None
        size = 4.0 * out.type.size_bytes
        in_c = partial(_in_c, BytePass.GATHER, size)
        work = Work(NATIVE_CALLS, passes=((BytePass.GATHER, size),), in_c=in_c)
        pieces = _sort_pieces(x.shape[-1], runtime.num_threads())
        return cost.needs(inputs, outputs, work, kernel.size_bytes(pieces))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one launch."""
        (x,), (out,) = inputs, outputs
        pieces = partial(_sort_pieces, x.shape[-1])
        workers = kernel.workers_for(pieces, workspace, runtime.num_threads())
        (entries,) = kernel.carve(workspace, pieces(workers))
        rows = math.prod(out.shape[:-1]) if out.size else 0
        words: list[Word] = [
            *(*_rows(x), address(out)),
            *(rows, x.shape[-1], _ALONG_TYPES.index(x.dtype.name), int(flag(attrs, "descending"))),
            *(launch.units_per_chunk(rows, 8 * out.nbytes), workers, address(entries)),
        ]
        entry = runtime.address_in("along.c", "af_argsort")
        return native_launch(entry, words, (inputs, outputs, entries))


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
        if not (runtime.is_enabled() and all(map(are_walked, inputs)) and out.is_dense):
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
            *(rows, out.shape[-1], _ALONG_TYPES.index(out.dtype.name), int(flag(attrs, "reverse"))),
            *(launch.units_per_chunk(rows, 8 * out.nbytes), runtime.num_threads()),
        ]
        entry = runtime.address_in("along.c", "af_recurrence")
        return native_launch(entry, words, (inputs, outputs))


NATIVE_ALONG_KERNELS = (NativeArgsort(), NativeRecurrence())
