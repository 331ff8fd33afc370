"""Softmax over the last axis, with scale and causal mask, and its gradient.

The exponentials are first taken without subtracting the row's maximum: when every row's sum is
far from overflow and underflow, that is as exact as with it (more so: nothing is rounded before
the exponential) and saves two of the seven passes, the slow ones (16 blocks of 32,768 float32:
0.5 against 1.1 ms). A block with a sum outside those bounds, or with NaN, is computed again from
the untouched input in the classical way.

The causal mask is a limit of +inf or -inf per element, a window on one vector of T + S - 1
numbers: element (i, j) depends on j - i only. `fmin` with -inf hides even a NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import flag, number
from actors.kernels.interpret.blocks import block_elements, cut, num_elements, rows_per_block
from actors.kernels.interpret.rows import are_row_floats, safe_sums, sum_is_safe
from actors.kernels.interpret.sums import row_sums
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, equal_operands, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import Pass, Product, Work, item_weight, over_blocks
from actors.protocol import Array, Launch


@dataclass(frozen=True, slots=True)
class SoftmaxKernel:
    """`softmax`: attrs scale, causal."""

    name: str = "numpy.softmax"
    op: str = "softmax"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take float32 and float64; scratch is a block, its row sums, and the mask's vector."""
        if not are_row_floats(inputs):
            return None
        out = outputs[0]
        causal, is_scaled = flag(attrs, "causal"), number(attrs, "scale") != 1.0
        # The causal mask's fmin costs as much as two additions.
        passes = {Pass.SIMPLE: is_scaled, Pass.PLAIN: 2 * causal, Pass.EXP: 1, Pass.DIVIDE: 1}
        return cost.needs(
            inputs,
            outputs,
            _row_work(out, passes, small_calls=3, loops_per_row=1),
            scratch.size_bytes(_pieces(out.shape, out.dtype, causal)),
            equal_operands(0, outputs, inputs),
        )

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return the launch over row blocks."""
        (x,), (out,) = inputs, outputs
        causal = flag(attrs, "causal")
        if x.size == 0:
            return in_sequence(())
        block, sums, extremes, ones, limits, mask = scratch.carve(
            workspace, _pieces(x.shape, x.dtype, causal)
        )
        calls: list[Launch] = [partial(ones.fill, 1)]
        window = _limit_window(limits, x.shape) if causal else None
        if window is not None:
            split = x.shape[-1]
            calls += [partial(limits[:split].fill, np.inf), partial(limits[split:].fill, -np.inf)]
            if mask.size:
                calls.append(partial(np.copyto, mask, window))
                window = mask
        scale = np.array(number(attrs, "scale"), x.dtype)
        for rows, result, limit in _row_blocks(x, out, window):
            t = scratch.window(block, rows.shape)
            total = scratch.window(sums, rows.shape[:-1])
            start = _scaled(rows, t, scale, limit)
            calls.append(_row_softmax(start, t, total, extremes, ones, result))
        return in_sequence(calls)


def _row_work(
    out: Operand, passes: Mapping[Pass, float], *, small_calls: int, loops_per_row: int
) -> Work:
    """Return the work of passes over row blocks, with one product for the sums of the rows."""
    columns, rows = out.shape[-1], num_elements(out.shape[:-1])
    # matmul takes the blocks matrix by matrix.
    height = min(out.shape[-2] if len(out.shape) > 2 else rows, rows)
    sums = Product(item_weight(out.dtype.itemsize) * rows / max(height, 1), height, 1, columns)
    return over_blocks(
        out.type.num_elements,
        out.dtype.itemsize,
        passes,
        small_calls=small_calls,
        loops=loops_per_row * rows,
        products=(sums,),
    )


def _pieces(shape: tuple[int, ...], dtype: np.dtype[np.generic], causal: bool) -> tuple[Piece, ...]:
    """Return block, sums, extremes, ones, the mask's vector and, if small, its matrix."""
    columns = shape[-1]
    rows = min(num_elements(shape[:-1]), rows_per_block(columns, dtype.itemsize))
    length = shape[-2] + columns - 1 if causal else 0
    is_matrix = causal and shape[-2] * columns <= block_elements(dtype.itemsize)
    extents = (
        (rows * columns,),
        (rows,),
        (2,),
        (columns,),
        (max(length, 0),),
        (shape[-2], columns) if is_matrix else (0, columns),
    )
    return tuple([Piece(extent, dtype) for extent in extents])


def _limit_window(limits: Array, shape: tuple[int, ...]) -> Array:
    """Return the mask as a [T, S] view whose element (i, j) is limits[T - 1 - i + j]."""
    item, extent = limits.itemsize, shape[-2]
    return np.lib.stride_tricks.as_strided(limits[extent - 1 :], shape[-2:], (-item, item))


def _row_blocks(
    x: Array, out: Array, limit: Array | None
) -> list[tuple[Array, Array, Array | None]]:
    """Return blocks of x and out with the part of the mask that belongs to them."""
    columns = x.shape[-1]
    if limit is None:
        blocks = cut((x, out), x.ndim - 1, rows_per_block(columns, x.itemsize))
        return [(rows, result, None) for rows, result in blocks]
    matrices = cut((x, out), x.ndim - 2, rows_per_block(limit.size, x.itemsize))
    step = rows_per_block(columns, x.itemsize)
    if limit.shape[0] <= step:
        return [(rows, result, limit) for rows, result in matrices]
    return [
        (rows[i : i + step], result[i : i + step], limit[i : i + step])
        for rows, result in ((r.reshape(limit.shape), s.reshape(limit.shape)) for r, s in matrices)
        for i in range(0, limit.shape[0], step)
    ]


def _scaled(x: Array, t: Array, scale: Array, limit: Array | None) -> tuple[Array, Launch | None]:
    """Return where scale * x under the mask will lie, and the call that puts it there."""
    calls: list[Launch] = []
    source = x
    if scale != 1:
        calls.append(partial(np.multiply, x, scale, out=t))
        source = t
    if limit is not None:
        calls.append(partial(np.fmin, source, limit, out=t))
        source = t
    return source, in_sequence(calls) if calls else None


def _row_softmax(
    start: tuple[Array, Launch | None],
    t: Array,
    total: Array,
    extremes: Array,
    ones: Array,
    out: Array,
) -> Launch:
    source, prepare = start
    low, high = safe_sums(t.dtype)
    exponential = partial(np.exp, source, out=t)
    sums = row_sums(t, ones, total)
    divide = partial(np.divide, t, total[..., None], out=out)
    is_safe = partial(sum_is_safe, total, extremes[0:1].reshape(()), extremes[1:].reshape(()))
    maximum = partial(np.maximum.reduce, source, axis=-1, out=total)
    shifted = (
        partial(np.subtract, source, total[..., None], out=t),
        partial(np.exp, t, out=t),
        sums,
    )

    def launch() -> None:
        if prepare is not None:
            prepare()
        exponential()
        sums()
        if not is_safe(low, high):
            if prepare is not None:
                prepare()
            maximum()
            for call in shifted:
                call()
        divide()

    return launch


@dataclass(frozen=True, slots=True)
class SoftmaxGradKernel:
    """`softmax_grad`(dy, y): scale * y * (dy - sum(dy * y)); what the mask hid has y = 0."""

    name: str = "numpy.softmax_grad"
    op: str = "softmax_grad"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take float32 and float64; scratch is a block and its row sums."""
        if not are_row_floats(inputs):
            return None
        out = outputs[0]
        passes = {Pass.SIMPLE: number(attrs, "scale") != 1.0, Pass.PLAIN: 3}
        return cost.needs(
            inputs,
            outputs,
            _row_work(out, passes, small_calls=0, loops_per_row=1),
            scratch.size_bytes(_grad_pieces(out.shape, out.dtype)),
            equal_operands(0, outputs, inputs),
        )

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return the launch over row blocks."""
        (dy, y), (out,) = inputs, outputs
        if y.size == 0:
            return in_sequence(())
        block, sums, ones = scratch.carve(workspace, _grad_pieces(y.shape, y.dtype))
        scale = np.array(number(attrs, "scale"), y.dtype)
        calls: list[Launch] = [partial(ones.fill, 1)]
        limit = rows_per_block(y.shape[-1], y.itemsize)
        for g, p, result in cut((dy, y, out), y.ndim - 1, limit):
            t = scratch.window(block, p.shape)
            total = scratch.window(sums, p.shape[:-1])
            calls += [partial(np.multiply, g, p, out=t), row_sums(t, ones, total)]
            calls.append(partial(np.subtract, g, total[..., None], out=t))
            if scale != 1:
                calls.append(partial(np.multiply, t, scale, out=t))
            calls.append(partial(np.multiply, t, p, out=result))
        return in_sequence(calls)


def _grad_pieces(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> tuple[Piece, ...]:
    rows = min(num_elements(shape[:-1]), rows_per_block(shape[-1], dtype.itemsize))
    return (Piece((rows * shape[-1],), dtype), Piece((rows,), dtype), Piece((shape[-1],), dtype))


SOFTMAX_KERNELS = (SoftmaxKernel(), SoftmaxGradKernel())
