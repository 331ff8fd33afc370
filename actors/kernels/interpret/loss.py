"""Softmax cross-entropy against integer labels, and its gradient.

As in `softmax`, exponentials are first taken without the row's maximum, and a block is computed
again in the classical way when a sum is not safe. The label's logit is gathered from a dense
block by flat index.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.indices import INDEX, as_index, checked, fill_range, index_pieces
from actors.kernels.interpret.blocks import cut, rows_per_block
from actors.kernels.interpret.rows import are_row_floats, safe_sums, sum_is_safe
from actors.kernels.interpret.sums import WIDE, row_sums, sum_into
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, equal_operands, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import Pass, Product, item_weight, over_blocks
from actors.protocol import Array, Launch


@dataclass(frozen=True, slots=True)
class CrossEntropyKernel:
    """`cross_entropy`(logits [N, C], labels [N]) -> (mean loss [], log of the sum of exp [N])."""

    name: str = "numpy.cross_entropy"
    op: str = "cross_entropy"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take float32 and float64 with any integer labels; scratch is two blocks and vectors."""
        logits, labels = inputs
        if not (are_row_floats((logits,)) and labels.type.dtype.is_integer):
            return None
        rows, columns = logits.shape
        item = logits.dtype.itemsize
        work = over_blocks(
            rows * columns,
            item,
            {Pass.EXP: 1, Pass.SIMPLE: 0 if logits.is_dense else 1},
            small_calls=10,
            products=(Product(item_weight(item), rows, 1, columns),),
        )
        return cost.needs(
            inputs, outputs, work, scratch.size_bytes(_pieces(rows, columns, logits.dtype))
        )

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return the check of the labels, then the launch over row blocks."""
        (logits, labels), (loss, lse) = inputs, outputs
        rows, columns = logits.shape
        block, copy, starts, flat, picked, maxima, ones, scalars, total, part, dense, extremes = (
            scratch.carve(workspace, _pieces(rows, columns, logits.dtype))
        )
        calls: list[Launch] = [
            checked("label", labels, columns, dense, extremes),
            *fill_range(starts, columns),
            partial(ones.fill, 1),
            partial(total.fill, 0),
        ]
        for x, index, result in cut(
            (logits, dense, lse), 1, rows_per_block(columns, block.itemsize)
        ):
            place, value = scratch.window(flat, index.shape), scratch.window(picked, index.shape)
            t = scratch.window(block, x.shape)
            source = x
            if not x.flags.c_contiguous:
                source = scratch.window(copy, x.shape)
                calls.append(partial(np.copyto, source, x))
            calls += [
                partial(np.add, index, starts[: index.size], out=place),
                partial(source.reshape(-1).take, place, out=value, mode="clip"),
                _log_sum_exp(source, t, ones, maxima[: index.size], scalars, result),
                partial(np.subtract, result, value, out=value),
                *sum_into(value, _scalar(scalars, 0), part, total),
            ]
        calls.append(partial(np.divide, total, np.array(rows, WIDE), out=total))
        calls.append(partial(np.copyto, loss, total, casting="unsafe"))
        return in_sequence(calls)


def _pieces(rows: int, columns: int, dtype: np.dtype[np.generic]) -> tuple[Piece, ...]:
    """Return block, copy, row starts, places, picked, maxima, ones, scalars, sums, labels."""
    height = min(rows, rows_per_block(columns, dtype.itemsize))
    return (
        Piece((height * columns,), dtype),
        Piece((height * columns,), dtype),
        Piece((height,), INDEX),
        Piece((height,), INDEX),
        Piece((height,), dtype),
        Piece((height,), dtype),
        Piece((columns,), dtype),
        Piece((3,), dtype),
        Piece((), WIDE),
        Piece((), WIDE),
        *index_pieces(rows),
    )


def _scalar(vector: Array, index: int) -> Array:
    return vector[index : index + 1].reshape(())


def _log_sum_exp(
    x: Array, t: Array, ones: Array, maxima: Array, scalars: Array, out: Array
) -> Launch:
    low, high = safe_sums(t.dtype)
    is_safe = partial(sum_is_safe, out, _scalar(scalars, 1), _scalar(scalars, 2))
    exponential = partial(np.exp, x, out=t)
    sums = row_sums(t, ones, out)
    logarithm = partial(np.log, out, out=out)
    shifted = (
        partial(np.maximum.reduce, x, axis=-1, out=maxima),
        partial(np.subtract, x, maxima[:, None], out=t),
        partial(np.exp, t, out=t),
        sums,
        logarithm,
        partial(np.add, out, maxima, out=out),
    )

    def launch() -> None:
        exponential()
        sums()
        if is_safe(low, high):
            logarithm()
            return
        for call in shifted:
            call()

    return launch


@dataclass(frozen=True, slots=True)
class CrossEntropyGradKernel:
    """`cross_entropy_grad`(dloss [], logits, labels, lse) -> dlogits.

    That is (exp(logits - lse) - onehot(labels)) * dloss / N.
    """

    name: str = "numpy.cross_entropy_grad"
    op: str = "cross_entropy_grad"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take float32 and float64; scratch is a block and vectors. dlogits may lie over logits."""
        dloss, logits, labels, lse = inputs
        if not (are_row_floats((dloss, logits, lse)) and labels.type.dtype.is_integer):
            return None
        pairs = equal_operands(0, outputs, inputs)
        rows, columns = logits.shape
        passes = {Pass.SIMPLE: 1, Pass.PLAIN: 1, Pass.EXP: 1}
        item = logits.dtype.itemsize
        return cost.needs(
            inputs,
            outputs,
            over_blocks(rows * columns, item, passes, small_calls=5, loops=rows),
            scratch.size_bytes(_grad_pieces(rows, columns, logits.dtype)),
            tuple([pair for pair in pairs if pair[1] == 1]),
        )

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return the check of the labels, then the launch over row blocks."""
        (dloss, logits, labels, lse), (out,) = inputs, outputs
        rows, columns = logits.shape
        block, starts, flat, picked, scalars, dense, extremes = scratch.carve(
            workspace, _grad_pieces(rows, columns, logits.dtype)
        )
        factor = _scalar(scalars, 0)
        one = np.array(1, logits.dtype)
        calls: list[Launch] = [
            checked("label", labels, columns, dense, extremes),
            *fill_range(starts, columns),
            partial(np.divide, dloss, np.array(max(rows, 1), logits.dtype), out=factor),
        ]
        operands = (logits, dense, lse, out)
        for x, index, total, result in cut(operands, 1, rows_per_block(columns, block.itemsize)):
            t = scratch.window(block, x.shape)
            place, value = scratch.window(flat, index.shape), scratch.window(picked, index.shape)
            vector = t.reshape(-1)
            calls += [
                partial(np.subtract, x, total[:, None], out=t),
                partial(np.exp, t, out=t),
                partial(np.add, index, starts[: index.size], out=place),
                partial(vector.take, place, out=value, mode="clip"),
                partial(np.subtract, value, one, out=value),
                partial(vector.put, as_index(place), value, mode="clip"),
                partial(np.multiply, t, factor, out=result),
            ]
        return in_sequence(calls)


def _grad_pieces(rows: int, columns: int, dtype: np.dtype[np.generic]) -> tuple[Piece, ...]:
    """Return block, row starts, flat indices, picked values, a scalar, labels, extremes."""
    height = min(rows, rows_per_block(columns, dtype.itemsize))
    return (
        Piece((height * columns,), dtype),
        Piece((height,), INDEX),
        Piece((height,), INDEX),
        Piece((height,), dtype),
        Piece((1,), dtype),
        *index_pieces(rows),
    )


LOSS_KERNELS = (CrossEntropyKernel(), CrossEntropyGradKernel())
