"""Sums, means and maxima that no fused kernel makes, and order and recurrences along an axis."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from actors.kernels.common import cost, kernel
from actors.kernels.common.kernel import (
    Attrs,
    BytePass,
    HostPlan,
    Kernel,
    KernelPlan,
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


def _plan_reduce(op: str, attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `sum`, `mean` or `max`, where NaN wins; floats are added up in float64.

    numpy casts on the way, a buffer at a time, and walks the axes in the order of their strides:
    that is faster than columns by a product with ones, and loses nothing of a million float32.

    It takes every number, a mean only of floats, and no maximum over no element.
    """
    (x,), (out,) = inputs, outputs
    if has_bfloat16(inputs) or (op == "mean" and not x.type.dtype.is_float):
        return None
    if op == "max" and x.type.num_elements == 0 and out.type.num_elements > 0:
        return None
    # Sums of narrow floats have scratch; what is wide is added up in place.
    is_widened = op != "max" and x.dtype.kind == "f" and x.dtype != WIDE
    num_totals = min(out.type.num_elements, _RESULTS) if is_widened else 0
    pieces, axes = (Piece((num_totals,), WIDE),), integers(attrs, "axes")
    needs = cost.needs(inputs, outputs, _reduction(x, out), kernel.size_bytes(pieces))

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        (x,), (out,) = inputs, outputs
        if not axes:
            return partial(np.copyto, out, x, casting="unsafe")
        if flag(attrs, "keepdims"):
            out = out[(*[0 if axis in axes else slice(None) for axis in range(x.ndim)], ...)]
        (totals,) = kernel.carve(workspace, pieces)
        kept_axes = [axis for axis in range(x.ndim) if axis not in axes]
        terms = np.array(math.prod(tuple([x.shape[axis] for axis in axes])), WIDE)
        function = np.maximum if op == "max" else np.add
        calls: list[Launch] = []
        for rows, block in cut((x.transpose(*kept_axes, *axes), out), len(kept_axes), _RESULTS):
            total = kernel.window(totals, block.shape) if totals.size else block
            reduced_axes = tuple(range(block.ndim, rows.ndim))
            calls.append(partial(function.reduce, rows, reduced_axes, total.dtype, total))
            if op == "mean":
                calls.append(partial(np.divide, total, terms, out=total))
            if totals.size:
                calls.append(partial(np.copyto, block, total, casting="unsafe"))
        return in_sequence(calls)

    return KernelPlan(needs, bind)


def _reduction(x: Operand, out: Operand) -> Work:
    """Return the work of a reduction by numpy: every result starts a loop, a slow one."""
    loops = _LOOPS_PER_RESULT * out.type.num_elements
    return Work(loops=loops, passes=((BytePass.REDUCE, float(x.type.size_bytes)),))


REDUCE_KERNELS = tuple(
    [Kernel(f"numpy.{op}", op, partial(_plan_reduce, op)) for op in ("sum", "mean", "max")]
)


def _plan_argsort(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `argsort`(x) -> places in ascending order, equal ones as they came; attrs descending.

    numpy sorts into an array of its own: this launch allocates one.

    It takes what numpy knows.
    """
    if has_bfloat16(inputs):
        return None
    work = Work(2, passes=((BytePass.POWER, 8.0 * outputs[0].type.size_bytes),))
    bind = _bind_descending if flag(attrs, "descending") else _bind_ascending
    return KernelPlan(cost.needs(inputs, outputs, work), bind)


def _bind_ascending(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
    return lambda: np.copyto(outputs[0], np.argsort(inputs[0], -1, kind="stable"))


def _bind_descending(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
    (x,), (out,) = inputs, outputs
    # Stable from the other end: turned back, equal elements keep their order.
    turned, last = x[..., ::-1], x.shape[-1] - 1

    def launch() -> None:
        np.subtract(last, np.argsort(turned, -1, kind="stable")[..., ::-1], out=out)

    return launch


def _plan_recurrence(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `recurrence`(a, b): y[i] = a[i] * y[i - 1] + b[i]; attrs reverse.

    It takes what numpy knows; scratch is a number for each row.
    """
    (out,) = outputs
    if has_bfloat16(inputs):
        return None
    work = Work(3.0 * out.shape[-1], passes=((BytePass.STRIDED, 3.0 * out.type.size_bytes),))
    pieces = (Piece(out.shape[:-1], WIDE if out.dtype.kind == "f" else out.dtype),)
    order = range(out.shape[-1])[:: -1 if flag(attrs, "reverse") else 1]

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        (a, b), (out,) = inputs, outputs
        (total,) = kernel.carve(workspace, pieces)
        calls: list[Launch] = [partial(total.fill, 0)]
        for i in order:
            calls += [
                partial(np.multiply, total, a[..., i], out=total),
                partial(np.add, total, b[..., i], out=total),
                partial(np.copyto, out[..., i, None], total[..., None], casting="unsafe"),
            ]
        return in_sequence(calls)

    return KernelPlan(cost.needs(inputs, outputs, work, kernel.size_bytes(pieces)), bind)


ALONG_KERNELS = (
    Kernel("numpy.argsort", "argsort", _plan_argsort),
    Kernel("numpy.recurrence", "recurrence", _plan_recurrence),
)
