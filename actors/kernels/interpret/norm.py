"""Layer normalisation over the last axis and its gradient (Ba, Kiros & Hinton 2016, section 3).

The means of the gradient's rows are products with a vector that holds gamma/D; other sums are those
of `sums`. The variance is taken from centred values; the
shorter E[x^2] - E[x]^2 loses all digits when the mean is large.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import number
from actors.kernels.interpret.blocks import cut, num_elements, rows_per_block
from actors.kernels.interpret.rows import are_row_floats
from actors.kernels.interpret.sums import WIDE, SumScratch, column_sums, row_sums, sum_pieces
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, equal_operands, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import Pass, Product, item_weight, over_blocks
from actors.protocol import Array, Launch


@dataclass(frozen=True, slots=True)
class LayerNormKernel:
    """`layer_norm`(x [..., D], gamma [D], beta [D]) -> (y, mean [...], rstd [...]); attrs eps."""

    name: str = "numpy.layer_norm"
    op: str = "layer_norm"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take float32 and float64; scratch is two blocks and a row. y may lie over x."""
        if not are_row_floats(inputs):
            return None
        x = inputs[0]
        columns, rows = x.shape[-1], num_elements(x.shape[:-1])
        mean = Product(item_weight(x.dtype.itemsize), rows, 1, columns)
        work = over_blocks(
            x.type.num_elements,
            x.dtype.itemsize,
            {Pass.PLAIN: 4, Pass.SIMPLE: 1},
            small_calls=3,
            loops=4 * rows,
            products=(mean, mean),
        )
        return cost.needs(
            inputs,
            outputs,
            work,
            scratch.size_bytes(_pieces(x.shape, x.dtype)),
            equal_operands(0, outputs, inputs[:1]),
        )

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return the launch over row blocks."""
        x, gamma, beta = inputs
        columns, rank = x.shape[-1], x.ndim - 1
        first, second, ones = scratch.carve(workspace, _pieces(x.shape, x.dtype))
        eps = np.array(number(attrs, "eps"), x.dtype)
        calls: list[Launch] = [partial(ones.fill, 1)]
        count = np.array(max(columns, 1), x.dtype)
        operands = (x, *outputs)
        for rows, y, mean, rstd in cut(operands, rank, rows_per_block(columns, x.itemsize)):
            t, u = scratch.window(first, rows.shape), scratch.window(second, rows.shape)
            calls += [
                row_sums(rows, ones, mean),
                partial(np.divide, mean, count, out=mean),
                partial(np.subtract, rows, mean[..., None], out=t),
                partial(np.multiply, t, t, out=u),
                row_sums(u, ones, rstd),
                partial(np.divide, rstd, count, out=rstd),
                partial(np.add, rstd, eps, out=rstd),
                partial(np.sqrt, rstd, out=rstd),
                partial(np.reciprocal, rstd, out=rstd),
                partial(np.multiply, t, rstd[..., None], out=t),
                partial(np.multiply, t, gamma, out=t),
                partial(np.add, t, beta, out=y),
            ]
        return in_sequence(calls)


def _pieces(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> tuple[Piece, ...]:
    columns = shape[-1]
    rows = min(num_elements(shape[:-1]), rows_per_block(columns, dtype.itemsize))
    return (
        Piece((rows * columns,), dtype),
        Piece((rows * columns,), dtype),
        Piece((columns,), dtype),
    )


@dataclass(frozen=True, slots=True)
class LayerNormGradKernel:
    """`layer_norm_grad`(dy, x, gamma, mean, rstd) -> (dx, dgamma, dbeta).

    With xhat = (x - mean) rstd and g = dy gamma: dx = rstd (g - mean(g) - xhat mean(g xhat)). The
    two means are products of dy and of dy * xhat with gamma / D, so g * xhat is never formed.
    """

    name: str = "numpy.layer_norm_grad"
    op: str = "layer_norm_grad"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take float32 and float64; scratch is two blocks and vectors. dx may lie over dy or x."""
        if not are_row_floats(inputs):
            return None
        x = inputs[1]
        columns, rows = x.shape[-1], num_elements(x.shape[:-1])
        weight = item_weight(x.dtype.itemsize)
        mean, total = Product(weight, rows, 1, columns), Product(weight, 1, columns, rows)
        work = over_blocks(
            x.type.num_elements,
            x.dtype.itemsize,
            {Pass.PLAIN: 8, Pass.SIMPLE: 1},
            small_calls=2,
            loops=6 * rows,
            products=(mean, mean, total, total),
        )
        return cost.needs(
            inputs,
            outputs,
            work,
            scratch.size_bytes(_grad_pieces(x.shape, x.dtype)),
            equal_operands(0, outputs, inputs[:2]),
        )

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return the launch over row blocks; they add to dgamma and dbeta in order."""
        dy, x, gamma, mean, rstd = inputs
        dx, dgamma, dbeta = outputs
        columns, rank = x.shape[-1], x.ndim - 1
        first, second, sums, ones, weights, wide, total, other, part = scratch.carve(
            workspace, _grad_pieces(x.shape, x.dtype)
        )
        s = SumScratch(wide, total, part)
        count = np.array(max(columns, 1), x.dtype)
        calls: list[Launch] = [
            partial(ones.fill, 1),
            partial(np.divide, gamma, count, out=weights),
            partial(total.fill, 0),
            partial(other.fill, 0),
        ]
        limit = rows_per_block(columns, x.itemsize)
        for g, rows, m, r, result in cut((dy, x, mean, rstd, dx), rank, limit):
            t, u = scratch.window(first, rows.shape), scratch.window(second, rows.shape)
            c = scratch.window(sums, rows.shape[:-1])
            calls += [
                partial(np.subtract, rows, m[..., None], out=t),
                partial(np.multiply, t, r[..., None], out=t),
                partial(np.multiply, g, t, out=u),
                *column_sums(u.reshape(-1, columns), 1, ones, total, s),
                partial(np.matmul, u, weights, out=c),
                partial(np.multiply, t, c[..., None], out=t),
                # u is free now: a dense copy of dy, whose columns and rows BLAS can read.
                partial(np.copyto, u, g),
                *column_sums(u.reshape(-1, columns), 1, ones, other, s),
                partial(np.matmul, u, weights, out=c),
                partial(np.multiply, u, gamma, out=u),
                partial(np.subtract, u, t, out=u),
                partial(np.subtract, u, c[..., None], out=u),
                partial(np.multiply, u, r[..., None], out=result),
            ]
        calls += [
            partial(np.copyto, dgamma, total, casting="unsafe"),
            partial(np.copyto, dbeta, other, casting="unsafe"),
        ]
        return in_sequence(calls)


def _grad_pieces(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> tuple[Piece, ...]:
    columns = shape[-1]
    rows = min(num_elements(shape[:-1]), rows_per_block(columns, dtype.itemsize))
    wide, total, part = sum_pieces(rows * columns, columns)
    return (
        *[Piece((extent,), dtype) for extent in (rows * columns, rows * columns, rows)],
        Piece((rows,), WIDE),
        Piece((columns,), dtype),
        wide,
        total,
        total,
        part,
    )


NORM_KERNELS = (LayerNormKernel(), LayerNormGradKernel())
