"""What layers with a table of weights compute: products, and rows of the table by integers."""

from __future__ import annotations

import math

import numpy as np

from actorflow.functional.arranging import full, ones, zeros
from actorflow.functional.elementwise import logical_and, maximum, where
from actorflow.functional.indexing import Index, index_add, index_value
from actorflow.functional.order import searchsorted
from actorflow.functional.products import einsum
from actorflow.functional.reduce import max as largest
from actorflow.functional.shape import concat
from actorflow.tensor.literals import checked_size
from actorflow.tensor.op_math import rounded, widened
from actorflow.tensor.tensor import Tensor, apply, as_tensor
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType
from compiler.ops.families.embedding import EMBEDDING

__all__ = [
    "bilinear",
    "embedding",
    "embedding_bag",
    "linear",
]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias.

    Args:
        x: [..., in]; all leading axes become the rows of one matrix product.
        weight: [out, in].
        bias: [out], or None.
    """
    x, weight = as_tensor(x), as_tensor(weight)
    if weight.ndim != 2:
        raise CompileError(f"{find_source()}: linear expects a weight [out, in], got {weight.type}")
    if x.ndim < 1 or x.shape[-1] != weight.shape[-1]:
        raise CompileError(
            f"{find_source()}: linear expects [..., {weight.shape[-1]}] for a weight"
            f" {weight.type}, got {x.type}"
        )
    leading = x.shape[:-1]
    rows = x.reshape(math.prod(leading), x.shape[-1])
    y = rows @ weight.T
    if bias is not None:
        y = y + bias
    return y.reshape(*leading, weight.shape[0])


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x1 @ weight[o] @ x2 + bias[o] for each o: [..., out].

    Args:
        input1: [..., in1].
        input2: [..., in2], with the same leading axes.
        weight: [out, in1, in2].
        bias: [out], or None.
    """
    x, y, weight = as_tensor(input1), as_tensor(input2), as_tensor(weight)
    fits = weight.ndim == 3 and min(x.ndim, y.ndim) > 0 and x.shape[:-1] == y.shape[:-1]
    if not fits or (x.shape[-1], y.shape[-1]) != weight.shape[1:]:
        raise CompileError(
            f"{find_source()}: bilinear expects [..., in1] and [..., in2] for a weight"
            f" [out, in1, in2], got {x.type} and {y.type} for {weight.type}"
        )
    out = einsum("...i,oij,...j->...o", x, weight, y)
    return out if bias is None else out + bias


_LOWEST = float("-inf")


def embedding(input: Index, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Return the rows of `weight` [V, D] at integers: input.shape + [D].

    An id outside 0..V-1 fails the step with an IndexError that names it. The row `padding_idx`,
    which counts from the end where it is negative, gets no gradient.
    """
    ids, weight = _ids_and_table(input, weight, "embedding")
    rows = apply(EMBEDDING, weight, ids)
    if padding_idx is None:
        return rows
    is_padding = (ids == padding_row(padding_idx, weight.shape[0])).reshape(*ids.shape, 1)
    return where(is_padding, rows.detach(), rows)


def _ids_and_table(input: Index, weight: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Return both as tensors. Raises CompileError where one stands in the place of the other."""
    indices = index_value(input, f"the ids of {what}") if isinstance(input, list) else input
    ids = as_tensor(indices, DType.INT64)
    table = as_tensor(weight)
    if table.dtype.is_integer and not ids.dtype.is_integer:
        raise CompileError(
            f"{find_source()}: {what} takes integers first and then the weight, as torch's does;"
            f" got {ids.type} and {table.type}: exchange them"
        )
    return ids, table


def padding_row(padding_idx: int, rows: int) -> int:
    """Return which row is padding. Raises CompileError for one that a table of `rows` has not."""
    row = checked_size(padding_idx, "padding_idx")
    if not -rows <= row < rows:
        raise CompileError(f"{find_source()}: padding_idx is {row}, and the weight has {rows} rows")
    return row % rows


def embedding_bag(
    input: Index,
    weight: Tensor,
    offsets: Index | None = None,
    *,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Return what bags of rows of `weight` [V, D] come to: [bags, D].

    Args:
        input: integers [bags, length]; or [n], with offsets.
        weight: the table.
        offsets: where the bags of [n] begin, from 0 upwards. An empty bag gives 0.
        mode: "sum", "mean" or "max" of the rows of a bag.
        per_sample_weights: with "sum", of the shape of input: what rows are multiplied by.
        include_last_offset: whether the offsets end with n, where no bag begins.
        padding_idx: a row that no bag counts.
    """
    ids, weight = _ids_and_table(input, weight, "embedding_bag")
    if mode not in ("sum", "mean", "max"):
        raise CompileError(f"{find_source()}: embedding_bag knows sum, mean and max, got {mode!r}")
    if ids.ndim != (2 if offsets is None else 1):
        word = "without" if offsets is None else "with"
        raise CompileError(
            f"{find_source()}: embedding_bag takes ids of shape [bags, length], or [n] with"
            f" offsets; got {ids.type} {word} offsets"
        )
    if per_sample_weights is not None and (
        mode != "sum" or tuple(per_sample_weights.shape) != ids.shape
    ):
        raise CompileError(
            f"{find_source()}: per_sample_weights are for mode='sum' and of the shape"
            f" {list(ids.shape)} of the ids; got {list(per_sample_weights.shape)} in {mode!r}"
        )
    bags = _Bags(ids, offsets, include_last_offset)
    rows = widened(embedding(ids, weight))
    share = ones((*ids.shape, 1), dtype=rows.dtype)
    if padding_idx is not None:
        counts = ids != padding_row(padding_idx, weight.shape[0])
        share = counts.to(rows.dtype).reshape(share.shape)
        rows = where(share > 0, rows, _LOWEST if mode == "max" else 0.0)
    if mode == "max":
        return rounded(bags.largest(rows), weight.dtype)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(share.shape)
    total = bags.total(rows)
    if mode == "mean":
        total = total / maximum(bags.total(share), 1.0)
    return rounded(total, weight.dtype)


class _Bags:
    """Which rows belong together: those of axis 1; or of a vector, by where bags begin in it."""

    def __init__(self, ids: Tensor, offsets: Index | None, ends_with_n: bool) -> None:
        self.starts: Tensor | None = None
        if offsets is not None:
            starts = as_tensor(offsets, DType.INT64)
            self.starts = starts[:-1] if ends_with_n else starts
            self.numbers = searchsorted(self.starts, np.arange(ids.shape[0]), right=True) - 1

    def total(self, rows: Tensor) -> Tensor:
        """Return the sums of bags."""
        if self.starts is None:
            return rows.sum(1)
        none = zeros((self.starts.shape[0], rows.shape[-1]), dtype=rows.dtype)
        return index_add(none, 0, self.numbers, rows)

    def largest(self, rows: Tensor) -> Tensor:
        """Return the largest elements of bags; 0 of those that have none above minus infinity.

        Of a vector each row takes the larger of itself and of the one 1, 2, 4, ... before it, where
        that is of its bag: then the last of a bag has it (Hillis & Steele, 1986).
        """
        count = rows.shape[-2]
        if not count:
            return rows.sum(-2) if self.starts is None else self.total(rows)
        if self.starts is None:
            maxima = largest(rows, 1)[0]
            return where(maxima == _LOWEST, 0.0, maxima)
        back = 1
        while back < count:
            lowest = full((back, rows.shape[1]), _LOWEST, dtype=rows.dtype)
            is_same = (self.numbers[back:] == self.numbers[:-back]).reshape(-1, 1)
            before = concat([lowest, where(is_same, rows[:-back], _LOWEST)])
            rows, back = maximum(rows, before), 2 * back
        ends = concat([self.starts[1:], as_tensor(np.array([count]))]) - 1
        maxima = apply(EMBEDDING, rows, maximum(ends, 0))
        has_some = (ends >= self.starts).reshape(-1, 1)
        return where(logical_and(has_some, maxima != _LOWEST), maxima, 0.0)
