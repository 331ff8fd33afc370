"""Sums, means and maxima that no fused kernel makes, and order and recurrences along an axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels.common import cost, kernel
from actors.kernels.common.kernel import (
    Attrs,
    BytePass,
    KernelNeeds,
    Operand,
    Operands,
    Piece,
    Work,
    Workspace,
    flag,
    in_sequence,
    integers,
)
from actors.kernels.common.strides import cut
from actors.kernels.reference.bfloat16 import has_bfloat16
from actors.machine.protocol import Array, Arrays, Launch

# Sums of many floats by numpy's kernels, in an order that loses little.
#
# `add.reduce` along the last axis adds in pairs (Higham 1993, section 3), but over others adds rows
# one after the other, and loses 1e-3 of a million float32. So columns are added in trees of 8 rows
# in their own type, whose three roundings lose less than 2e-7 of a sum, and the trees in float64;
# numpy casts them on the way, a buffer at a time. A product with ones in float64 takes as long.

WIDE = np.dtype(np.float64)

SHORT_ROW = 64
"""Rows from here on go to `add.reduce`: of 128 float32 it takes 0.3 ns an element, and BLAS 0.07,
but with 64 terms one after the other where it has no vectors."""


def row_sums(x: Array, ones: Array, out: Array) -> Launch:
    """Return the call that writes the sums over the last axis of x; `ones` has its dtype."""
    if x.shape[-1] < SHORT_ROW:
        return partial(np.matmul, x, ones, out=out)
    return partial(np.add.reduce, x, axis=-1, out=out)


def column_sums(x: Array, total: Array, part: Array, trees: Array) -> list[Launch]:
    """Return the calls that add the sums over the rows of x [rows, columns] to `total`.

    `part` is scratch like `total`, in float64 for floats; `trees` has the dtype of x, and half as
    many elements, or none: then rows are added one by one.
    """
    rows, columns = x.shape
    # Whole trees of 8 rows; those that are left are added one by one.
    treed = rows // 8 * 8 if trees.size else 0
    calls: list[Launch] = []
    summed = [x[treed:]] if treed < rows else []
    if treed:
        half = kernel.window(trees, (treed // 2, columns))
        quarter, eighth = half[: treed // 4], half[: treed // 8]
        calls += [
            partial(np.add, x[: treed // 2], x[treed // 2 : treed], out=half),
            partial(np.add, quarter, half[treed // 4 :], out=quarter),
            partial(np.add, eighth, quarter[treed // 8 :], out=eighth),
        ]
        summed.append(eighth)
    for terms in summed:
        calls.append(partial(np.add.reduce, terms, axis=0, dtype=total.dtype, out=part))
        calls.append(partial(np.add, total, part, out=total))
    return calls


_LOOPS_PER_RESULT = 4
_RESULTS = 8192
"""Results that are under way in float64 at a time."""


@dataclass(frozen=True, slots=True)
class NumpyReduce:
    """`sum`, `mean` or `max`, where NaN wins; floats are added up in float64.

    numpy casts on the way, a buffer at a time, and walks the axes in the order of their strides:
    that is faster than columns by a product with ones, and loses nothing of a million float32.
    """

    op: str

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"numpy.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every number, a mean only of floats, and no maximum over no element."""
        (x,), (out,) = inputs, outputs
        if has_bfloat16(inputs) or (self.op == "mean" and not x.type.dtype.is_float):
            return None
        if self.op == "max" and x.type.num_elements == 0 and out.type.num_elements > 0:
            return None
        size = kernel.size_bytes(self._pieces(out.type.num_elements, x.dtype))
        return cost.needs(inputs, outputs, _reduction(x, out), size)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the results, block by block, and for a mean their division."""
        (x,), (out,) = inputs, outputs
        axes = integers(attrs, "axes")
        if not axes:
            return partial(np.copyto, out, x, casting="unsafe")
        if flag(attrs, "keepdims"):
            out = out[(*[0 if axis in axes else slice(None) for axis in range(x.ndim)], ...)]
        (totals,) = kernel.carve(workspace, self._pieces(out.size, x.dtype))
        kept_axes = [axis for axis in range(x.ndim) if axis not in axes]
        terms = np.array(math.prod(tuple([x.shape[axis] for axis in axes])), WIDE)
        function = np.maximum if self.op == "max" else np.add
        calls: list[Launch] = []
        for rows, block in cut((x.transpose(*kept_axes, *axes), out), len(kept_axes), _RESULTS):
            total = kernel.window(totals, block.shape) if totals.size else block
            reduced_axes = tuple(range(block.ndim, rows.ndim))
            calls.append(partial(function.reduce, rows, reduced_axes, total.dtype, total))
            if self.op == "mean":
                calls.append(partial(np.divide, total, terms, out=total))
            if totals.size:
                calls.append(partial(np.copyto, block, total, casting="unsafe"))
        return in_sequence(calls)

    def _pieces(self, results: int, dtype: np.dtype[np.generic]) -> tuple[Piece, ...]:
        """Return scratch for sums of narrow floats; what is wide is added up in place."""
        is_widened = self.op != "max" and dtype.kind == "f" and dtype != WIDE
        return (Piece((min(results, _RESULTS) if is_widened else 0,), WIDE),)


def _reduction(x: Operand, out: Operand) -> Work:
    """Return the work of a reduction by numpy: every result starts a loop, a slow one."""
    loops = _LOOPS_PER_RESULT * out.type.num_elements
    return Work(loops=loops, passes=((BytePass.REDUCE, float(x.type.size_bytes)),))


REDUCE_KERNELS = tuple([NumpyReduce(op) for op in ("sum", "mean", "max")])


@dataclass(frozen=True, slots=True)
class ArgsortKernel:
    """`argsort`(x) -> places in ascending order, equal ones as they came; attrs descending.

    numpy sorts into an array of its own: this launch allocates one.
    """

    name: str = "numpy.argsort"
    op: str = "argsort"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take what numpy knows."""
        if has_bfloat16(inputs):
            return None
        size = float(outputs[0].type.size_bytes)
        return cost.needs(inputs, outputs, Work(2, passes=((BytePass.POWER, 8 * size),)))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one sort; of what is turned around where the largest come first."""
        (x,), (out,) = inputs, outputs
        if not flag(attrs, "descending"):
            return lambda: np.copyto(out, np.argsort(x, -1, kind="stable"))
        # Stable from the other end: turned back, equal elements keep their order.
        turned, last = x[..., ::-1], x.shape[-1] - 1

        def launch() -> None:
            np.subtract(last, np.argsort(turned, -1, kind="stable")[..., ::-1], out=out)

        return launch


@dataclass(frozen=True, slots=True)
class RecurrenceKernel:
    """`recurrence`(a, b): y[i] = a[i] * y[i - 1] + b[i]; attrs reverse."""

    name: str = "numpy.recurrence"
    op: str = "recurrence"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take what numpy knows; scratch is a number for each row."""
        (out,) = outputs
        if has_bfloat16(inputs):
            return None
        work = Work(3.0 * out.shape[-1], passes=((BytePass.STRIDED, 3.0 * out.type.size_bytes),))
        size = kernel.size_bytes(_pieces(out.shape, out.dtype))
        return cost.needs(inputs, outputs, work, size)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the steps, each of all rows."""
        (a, b), (out,) = inputs, outputs
        (total,) = kernel.carve(workspace, _pieces(out.shape, out.dtype))
        calls: list[Launch] = [partial(total.fill, 0)]
        order = range(out.shape[-1])
        for i in reversed(order) if flag(attrs, "reverse") else order:
            calls += [
                partial(np.multiply, total, a[..., i], out=total),
                partial(np.add, total, b[..., i], out=total),
                partial(np.copyto, out[..., i, None], total[..., None], casting="unsafe"),
            ]
        return in_sequence(calls)


def _pieces(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> tuple[Piece, ...]:
    return (Piece(shape[:-1], WIDE if dtype.kind == "f" else dtype),)


ALONG_KERNELS = (ArgsortKernel(), RecurrenceKernel())
