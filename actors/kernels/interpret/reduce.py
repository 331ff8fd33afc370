"""Sums, means, maxima and argmax."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import flag, integer, integers
from actors.kernels.interpret.bfloat16 import has_bfloat16
from actors.kernels.interpret.blocks import cut, num_elements, rows_per_block
from actors.kernels.interpret.sums import (
    LONG_ROW,
    SHORT_ROW,
    TERMS,
    WIDE,
    SumScratch,
    column_sums,
    row_sums,
    sum_pieces,
)
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, Operands, Workspace, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import Pass, Product, Work, item_weight, over_blocks
from actors.protocol import Array, Arrays, Launch
from compiler.types import contiguous_strides

_LOOPS_PER_RESULT = 4
_ENOUGH_TERMS = 1024
"""A block of columns with fewer terms is not worth the calls: its rows are gathered instead."""


@dataclass(frozen=True, slots=True)
class _ReducedWalk:
    """How a sum of floats is computed from `order`, the axes with those of the result first.

    With `outer` the result has axes before the summed ones, and others behind that are summed as
    columns; -1: rows of all that is summed are gathered.
    """

    order: tuple[int, ...]
    num_kept: int
    terms: int
    outer: int = -1


def _walk(shape: tuple[int, ...], axes: tuple[int, ...]) -> _ReducedWalk:
    kept = tuple([axis for axis in range(len(shape)) if axis not in axes])
    terms = num_elements(tuple([shape[axis] for axis in axes]))
    outer = axes[0]
    columns = num_elements(shape[axes[-1] + 1 :])
    is_range = axes == tuple(range(axes[0], axes[-1] + 1))
    is_range &= axes[-1] + 2 == len(shape) or columns <= TERMS
    is_worth = num_elements(shape[:outer]) == 1 or terms * columns >= _ENOUGH_TERMS
    if is_range and columns > 1 and is_worth:
        return _ReducedWalk(tuple(range(len(shape))), len(kept), terms, outer)
    return _ReducedWalk((*kept, *axes), len(kept), terms)


def _pieces(walk: _ReducedWalk, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """Return the scratch of sums, and ones."""
    results = num_elements(tuple([shape[axis] for axis in walk.order[: walk.num_kept]]))
    if walk.outer < 0:
        results = min(results, max(1, TERMS // max(walk.terms, 1)))
    else:
        results = num_elements(shape[len(shape) - walk.num_kept + walk.outer :])
    ones = Piece((min(walk.terms, TERMS),), WIDE)
    return (*sum_pieces(num_elements(shape), results), ones)


def _is_pairwise(
    shape: tuple[int, ...], strides: tuple[int, ...], item: int, axes: tuple[int, ...]
) -> bool:
    """Whether the summed axes are one dense run of many elements, which numpy adds in pairs."""
    steps = contiguous_strides(shape, item)
    terms = num_elements(tuple([shape[axis] for axis in axes]))
    is_last = axes == tuple(range(len(shape) - len(axes), len(shape)))
    return is_last and terms >= SHORT_ROW and all([strides[i] == steps[i] for i in axes])


@dataclass(frozen=True, slots=True)
class SumKernel:
    """`sum` and `mean`; of floats in float64 (see `sums`)."""

    op: str

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"numpy.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every number; a mean only of floats. Scratch is a block, its sums, and ones."""
        (x,), (out,) = inputs, outputs
        if has_bfloat16(inputs) or (self.op == "mean" and not x.type.dtype.is_float):
            return None
        axes = integers(attrs, "axes")
        is_pairwise = _is_pairwise(x.shape, x.strides_bytes, x.dtype.itemsize, axes)
        if not (axes and x.type.dtype.is_float) or is_pairwise:
            return cost.needs(inputs, outputs, _reduction(x, out))
        elements = x.type.num_elements
        size = scratch.size_bytes(_pieces(_walk(x.shape, axes), x.shape))
        rows = max(out.type.num_elements, 1)
        product = Product(item_weight(WIDE.itemsize), rows, 1, elements // rows)
        work = over_blocks(elements, WIDE.itemsize, {Pass.SIMPLE: 1}, products=(product,))
        return cost.needs(inputs, outputs, work, size)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the sum, and for a mean the division by the count."""
        (x,), (out,) = inputs, outputs
        axes, kept = integers(attrs, "axes"), flag(attrs, "keepdims")
        if not axes:
            return partial(np.copyto, out, x, casting="unsafe")
        if x.dtype.kind != "f" or _is_pairwise(x.shape, x.strides, x.itemsize, axes):
            reduced: Launch = partial(np.add.reduce, x, axes, out.dtype, out, kept)
            terms = num_elements(tuple([x.shape[axis] for axis in axes]))
            if x.dtype.kind == "f" and terms > LONG_ROW:
                rows = x.reshape((*x.shape[: x.ndim - len(axes)], terms))
                reduced = row_sums(rows, rows, out.reshape(rows.shape[:-1]))
            count = np.array(terms, out.dtype)
            mean = partial(np.divide, out, count, out=out)
            return in_sequence((reduced, mean) if self.op == "mean" else (reduced,))
        if kept:
            out = out[(*[0 if axis in axes else slice(None) for axis in range(x.ndim)], ...)]
        walk = _walk(x.shape, axes)
        *held, ones = scratch.carve(workspace, _pieces(walk, x.shape))
        s = SumScratch(*held)
        count = np.array(walk.terms if self.op == "mean" else 1, WIDE)
        sums = _sums_of_columns if walk.outer >= 0 else _sums_of_rows
        calls = sums(x.transpose(walk.order), out, walk, count, ones, s)
        return in_sequence([partial(ones.fill, 1), *calls])


def _sums_of_columns(
    x: Array, out: Array, walk: _ReducedWalk, count: Array, ones: Array, s: SumScratch
) -> list[Launch]:
    calls: list[Launch] = []
    num_axes = x.ndim - walk.num_kept
    for index in np.ndindex(x.shape[: walk.outer]):
        own, result = x[index], out[(*index, ...)]
        totals = s.totals[: result.size]
        calls += [
            partial(totals.fill, 0),
            *column_sums(own, num_axes, ones, totals, s),
            partial(np.divide, totals, count, out=totals),
            partial(np.copyto, result, totals.reshape(result.shape), casting="unsafe"),
        ]
    return calls


def _sums_of_rows(
    x: Array, out: Array, walk: _ReducedWalk, count: Array, ones: Array, s: SumScratch
) -> list[Launch]:
    calls: list[Launch] = []
    for rows, result in cut((x, out), walk.num_kept, max(1, TERMS // max(walk.terms, 1))):
        totals, parts = s.totals[: result.size], s.parts[: result.size]
        calls.append(partial(totals.fill, 0))
        # More terms than a block has are those of a single row.
        pieces = cut((rows,), rows.ndim, TERMS) if walk.terms > TERMS else [(rows,)]
        for (piece,) in pieces:
            wide = scratch.window(s.wide, (result.size, piece.size // max(result.size, 1)))
            calls += [
                partial(np.copyto, wide.reshape(piece.shape), piece),
                partial(np.matmul, wide, ones[: wide.shape[1]], out=parts),
                partial(np.add, totals, parts, out=totals),
            ]
        calls += [
            partial(np.divide, totals, count, out=totals),
            partial(np.copyto, result, totals.reshape(result.shape), casting="unsafe"),
        ]
    return calls


def _reduction(x: Operand, out: Operand) -> Work:
    """Return the work of a reduction by numpy: every result starts a loop, a slow one."""
    loops = _LOOPS_PER_RESULT * out.type.num_elements
    return Work(loops=loops, passes=((Pass.REDUCE, float(x.type.size_bytes)),))


@dataclass(frozen=True, slots=True)
class MaxKernel:
    """`max`; NaN wins. A maximum over no element is refused."""

    name: str = "numpy.max"
    op: str = "max"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every type, unless an empty axis would have to give a value."""
        (x,), (out,) = inputs, outputs
        if has_bfloat16(inputs) or (x.type.num_elements == 0 and out.type.num_elements > 0):
            return None
        return cost.needs(inputs, outputs, _reduction(x, out))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one reduction."""
        (x,), (out,) = inputs, outputs
        axes = integers(attrs, "axes")
        if not axes or out.size == 0:
            return partial(np.copyto, out, x) if x.shape == out.shape else in_sequence(())
        return partial(np.maximum.reduce, x, axis=axes, out=out, keepdims=flag(attrs, "keepdims"))


@dataclass(frozen=True, slots=True)
class ArgmaxKernel:
    """`argmax`: position of the first maximum along an axis, int64.

    numpy's argmax copies an operand that is not dense with the axis last; here a block is copied to
    scratch instead.
    """

    name: str = "numpy.argmax"
    op: str = "argmax"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every type with a dense output; scratch is one block of rows."""
        (x,), (out,) = inputs, outputs
        extent = x.shape[integer(attrs, "axis")]
        if has_bfloat16(inputs) or not out.is_dense:
            return None
        if extent == 0 and out.type.num_elements > 0:
            return None
        pieces = _argmax_pieces(out.type.num_elements, extent, x.dtype)
        return cost.needs(inputs, outputs, _reduction(x, out), scratch.size_bytes(pieces))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return a copy and an argmax per block of rows."""
        (x,), (out,) = inputs, outputs
        axis = integer(attrs, "axis")
        last = np.moveaxis(x, axis, -1)
        positions = out.reshape(last.shape[:-1])
        if out.size == 0:
            return in_sequence(())
        (flat,) = scratch.carve(workspace, _argmax_pieces(out.size, last.shape[-1], x.dtype))
        calls: list[Launch] = []
        limit = rows_per_block(last.shape[-1], x.dtype.itemsize)
        for rows, found in cut((last, positions), positions.ndim, limit):
            dense = rows
            if not rows.flags.c_contiguous:
                dense = scratch.window(flat, rows.shape)
                calls.append(partial(np.copyto, dense, rows))
            calls.append(partial(np.argmax, dense, axis=-1, out=found))
        return in_sequence(calls)


def _argmax_pieces(rows: int, extent: int, dtype: np.dtype[np.generic]) -> tuple[Piece, ...]:
    return (Piece((min(rows, rows_per_block(extent, dtype.itemsize)) * extent,), dtype),)


REDUCE_KERNELS = (SumKernel("sum"), SumKernel("mean"), MaxKernel(), ArgmaxKernel())
