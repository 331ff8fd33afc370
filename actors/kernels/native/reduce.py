"""Reductions over middle axes (`reduce.c`); order and recurrences along the last one (`along.c`).

Fused kernels take what is reduced over the last axes or the first ones.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from actors.kernels.common import cost, kernel
from actors.kernels.common.host_memory import address
from actors.kernels.common.kernel import (
    Attrs,
    BytePass,
    HostPlan,
    Kernel,
    KernelPlan,
    Operand,
    Operands,
    Piece,
    Workspace,
    flag,
    integers,
    native_work,
)
from actors.kernels.common.strides import MAX_OUTER, Axis, collapse_axes, columns_of
from actors.kernels.library import launch, runtime
from actors.kernels.library.launch import Word, native_launch
from actors.machine.protocol import Arrays, Launch
from compiler.contract.types import DType

_REDUCED_TYPES = (DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64)
"""The types of reduce.c, in its order."""

_MAX_COLUMNS, _MIN_COLUMNS = 512, 64
"""Of a block: what fits on the stack, and cache lines enough for the prefetchers."""

_ENOUGH_UNITS = 16


def _plan_reduce(op: str, attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `sum`, `mean` or `max`.

    It takes the common types over neighbouring axes, with a dense output.
    """
    (x,), (out,) = inputs, outputs
    if not (
        runtime.is_enabled()
        and x.type.dtype in _REDUCED_TYPES
        and x.type.num_elements
        and out.is_dense
    ):
        return None
    if op == "mean" and not x.type.dtype.is_float:
        return None
    walk = _walked(attrs, x.shape, x.strides_bytes, x.dtype.itemsize)
    if walk is None:
        return None
    outer, rows, columns = walk
    num_columns = outer.extent * columns.extent // _ENOUGH_UNITS
    block = max(_MIN_COLUMNS, min(_MAX_COLUMNS, num_columns))
    units, size = outer.extent * -(-columns.extent // block), x.type.size_bytes
    # As reduce.c numbers its functions: sums by type, then maxima by type.
    form = _REDUCED_TYPES.index(x.type.dtype) + len(_REDUCED_TYPES) * (op == "max")

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        words: list[Word] = [
            *(address(inputs[0]), address(outputs[0]), rows.extent, columns.extent),
            *(outer.steps[0], rows.steps[0], x.dtype.itemsize),
            *(block, units, launch.units_per_chunk(units, size), runtime.num_threads(), form),
            float(rows.extent) if op == "mean" else 1.0,
        ]
        entry = runtime.address_in("reduce.c", "af_reduce")
        return native_launch(entry, words, (inputs, outputs))

    work = native_work((BytePass.SIMPLE, float(size)))
    return KernelPlan(cost.needs(inputs, outputs, work), bind)


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


NATIVE_REDUCE_KERNELS = tuple(
    [Kernel(f"c.{op}", op, partial(_plan_reduce, op)) for op in ("sum", "mean", "max")]
)


_ALONG_TYPES = ("float32", "float64", "int64")
"""The types of along.c, in its order."""

_ENTRY = np.dtype(np.complex128)
"""As large as a key and a place."""


def are_walked(x: Operand) -> bool:
    """Whether C can walk the rows of x, and knows its elements."""
    axes = collapse_axes(x.shape[:-1], (x.strides_bytes[:-1],), in_order=True)
    return x.type.dtype.value in _ALONG_TYPES and len(axes) <= MAX_OUTER


def _rows(x: Operand) -> list[Word]:
    """Return how the rows of x lie; its address stands before that."""
    axes = collapse_axes(x.shape[:-1], (x.strides_bytes[:-1],), in_order=True)
    return [x.strides_bytes[-1], *columns_of(axes, 1)]


def _plan_argsort(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `argsort`(x) -> places in ascending order, equal ones as they came; attrs descending.

    It takes a dense output; scratch is two rows of keys and places for each thread.
    """
    (x,), (out,) = inputs, outputs
    if not (runtime.is_enabled() and are_walked(x) and out.is_dense):
        return None
    pieces, size = partial(_sort_pieces, x.shape[-1]), out.type.size_bytes
    rows = _num_rows(out)
    form = _ALONG_TYPES.index(x.dtype.name), int(flag(attrs, "descending"))

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        workers = kernel.workers_for(pieces, workspace, runtime.num_threads())
        (entries,) = kernel.carve(workspace, pieces(workers))
        words: list[Word] = [
            *(address(inputs[0]), *_rows(x), address(outputs[0]), rows, x.shape[-1], *form),
            *(launch.units_per_chunk(rows, 8 * size), workers, address(entries)),
        ]
        entry = runtime.address_in("along.c", "af_argsort")
        return native_launch(entry, words, (inputs, outputs, entries))

    scratch_bytes = kernel.size_bytes(pieces(runtime.num_threads()))
    work = native_work((BytePass.GATHER, 4.0 * size))
    return KernelPlan(cost.needs(inputs, outputs, work, scratch_bytes), bind)


def _num_rows(out: Operand) -> int:
    return math.prod(out.shape[:-1]) if out.type.num_elements else 0


def _sort_pieces(columns: int, workers: int) -> tuple[Piece, ...]:
    return (Piece((workers, 2, columns), _ENTRY),)


def _plan_recurrence(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `recurrence`(a, b): y[i] = a[i] * y[i - 1] + b[i]; attrs reverse.

    It takes a dense output; no scratch.
    """
    (a, b), (out,) = inputs, outputs
    if not (runtime.is_enabled() and are_walked(a) and are_walked(b) and out.is_dense):
        return None
    rows, size = _num_rows(out), out.type.size_bytes
    form = _ALONG_TYPES.index(out.dtype.name), int(flag(attrs, "reverse"))

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        words: list[Word] = [
            *(address(inputs[0]), *_rows(a), address(inputs[1]), *_rows(b)),
            *(address(outputs[0]), rows, out.shape[-1], *form),
            *(launch.units_per_chunk(rows, 8 * size), runtime.num_threads()),
        ]
        entry = runtime.address_in("along.c", "af_recurrence")
        return native_launch(entry, words, (inputs, outputs))

    work = native_work((BytePass.REDUCE, float(size)))
    return KernelPlan(cost.needs(inputs, outputs, work), bind)


NATIVE_ALONG_KERNELS = (
    Kernel("c.argsort", "argsort", _plan_argsort),
    Kernel("c.recurrence", "recurrence", _plan_recurrence),
)
