"""Sums, means, maxima and argmax.

A sum of floats over the last or the first axes of a dense tensor is a product of a matrix with a
vector of ones: BLAS sums 262,144 float32 along rows of 128 in 17 us, `add.reduce` in 74; along
columns in 16 against 48. Long rows stay with `add.reduce`, whose pairwise order (Higham 1993,
section 3) loses less.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import flag, integer, integers
from actors.kernels.bfloat16 import has_bfloat16
from actors.kernels.blocks import cut, num_elements, rows_per_block
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import CALLS_PER_PRODUCT, Pass, Product, Work, item_weight
from actors.protocol import Array, Launch
from compiler.types import DType

LONGEST_BLAS_ROW = 4096
_LOOPS_PER_RESULT = 4
_BLAS = (DType.FLOAT32, DType.FLOAT64)


class _Form(Enum):
    """How a sum is computed."""

    ROWS = "matrix times ones"
    COLUMNS = "ones times matrix"
    PLAIN = "add.reduce"


def _form(shape: tuple[int, ...], axes: tuple[int, ...], is_dense: bool, is_blas: bool) -> _Form:
    num_axes, rank = len(axes), len(shape)
    if not (axes and is_dense and is_blas) or num_axes == rank:
        return _Form.PLAIN
    if axes == tuple(range(rank - num_axes, rank)):
        short = num_elements(shape[rank - num_axes :]) <= LONGEST_BLAS_ROW
        return _Form.ROWS if short else _Form.PLAIN
    return _Form.COLUMNS if axes == tuple(range(num_axes)) else _Form.PLAIN


def _ones(
    form: _Form, shape: tuple[int, ...], axes: tuple[int, ...], dtype: np.dtype[np.generic]
) -> tuple[Piece, ...]:
    if form is _Form.PLAIN:
        return ()
    return (Piece((num_elements(tuple([shape[axis] for axis in axes])),), dtype),)


@dataclass(frozen=True, slots=True)
class SumKernel:
    """`sum` and `mean`."""

    op: str

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"numpy.{self.op}"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take every number; a mean only of floats. Scratch is the vector of ones, if any."""
        (x,), (out,) = inputs, outputs
        if has_bfloat16(inputs) or (self.op == "mean" and not x.type.dtype.is_float):
            return None
        axes = integers(attrs, "axes")
        is_blas = x.type.dtype in _BLAS and out.type.dtype is x.type.dtype
        form = _form(x.shape, axes, x.is_dense and out.is_dense, is_blas)
        work = _sum_work(form, x, out)
        pieces = _ones(form, x.shape, axes, x.dtype)
        return cost.needs(inputs, outputs, work, scratch.size_bytes(pieces))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return the sum, and for a mean the division by the count."""
        (x,), (out,) = inputs, outputs
        axes = integers(attrs, "axes")
        is_blas = DType(x.dtype.name) in _BLAS and out.dtype == x.dtype
        form = _form(x.shape, axes, x.flags.c_contiguous and out.flags.c_contiguous, is_blas)
        calls = _sum_calls(form, x, out, axes, flag(attrs, "keepdims"), workspace)
        if self.op == "mean" and axes:
            count = np.array(num_elements(tuple([x.shape[axis] for axis in axes])), out.dtype)
            calls.append(partial(np.divide, out, count, out=out))
        return in_sequence(calls)


def _sum_work(form: _Form, x: Operand, out: Operand) -> Work:
    if form is _Form.PLAIN:
        return _reduction(x, out)
    rows = out.type.num_elements
    summed = x.type.num_elements // max(rows, 1)
    m, n = (rows, 1) if form is _Form.ROWS else (1, rows)
    return Work(
        1.0 + CALLS_PER_PRODUCT, products=(Product(item_weight(x.dtype.itemsize), m, n, summed),)
    )


def _reduction(x: Operand, out: Operand) -> Work:
    """Return the work of a reduction by numpy: every result starts a loop, a slow one."""
    loops = _LOOPS_PER_RESULT * out.type.num_elements
    return Work(loops=loops, passes=((Pass.REDUCE, float(x.type.size_bytes)),))


def _sum_calls(
    form: _Form,
    x: Array,
    out: Array,
    axes: tuple[int, ...],
    keepdims: bool,
    workspace: Array | None,
) -> list[Launch]:
    if not axes:
        return [partial(np.copyto, out, x, casting="unsafe")]
    if form is _Form.PLAIN:
        reduced = partial(np.add.reduce, x, axis=axes, dtype=out.dtype, out=out, keepdims=keepdims)
        return [reduced]
    (ones,) = scratch.carve(workspace, _ones(form, x.shape, axes, x.dtype))
    fill: Launch = partial(ones.fill, 1)
    if form is _Form.ROWS:
        return [fill, partial(np.matmul, x.reshape(out.size, ones.size), ones, out=out.reshape(-1))]
    return [fill, partial(np.matmul, ones, x.reshape(ones.size, out.size), out=out.reshape(-1))]


@dataclass(frozen=True, slots=True)
class MaxKernel:
    """`max`; NaN wins. A maximum over no element is refused."""

    name: str = "numpy.max"
    op: str = "max"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take every type, unless an empty axis would have to give a value."""
        (x,), (out,) = inputs, outputs
        if has_bfloat16(inputs) or (x.type.num_elements == 0 and out.type.num_elements > 0):
            return None
        return cost.needs(inputs, outputs, _reduction(x, out))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
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

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take every type with a dense output; scratch is one block of rows."""
        (x,), (out,) = inputs, outputs
        extent = x.shape[integer(attrs, "axis")]
        if has_bfloat16(inputs) or not out.is_dense:
            return None
        if extent == 0 and out.type.num_elements > 0:
            return None
        pieces = _argmax_pieces(out.type.num_elements, extent, x.dtype)
        return cost.needs(inputs, outputs, _reduction(x, out), scratch.size_bytes(pieces))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
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
