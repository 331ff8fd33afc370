"""Sums, products and extremes of all elements up to each one along an axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from actorflow.functional.elementwise import exp, log, where
from actorflow.functional.indexing import gather
from actorflow.functional.names import with_numpy_names
from actorflow.functional.reduce import ValuesAndIndices
from actorflow.functional.shape import concat
from actorflow.tensor import Tensor, apply, as_tensor, checked_axis
from compiler.ops.along import RECURRENCE
from compiler.types import DType

__all__ = ["cummax", "cummin", "cumprod", "cumsum", "logcumsumexp"]


def _along_last(x: Tensor, dim: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply what works along the last axis along `dim`; a number is a row of one."""
    if not x.ndim:
        return function(x.reshape(1)).reshape(())
    axis, last = checked_axis(x, dim), x.ndim - 1
    return function(x) if axis == last else function(x.swapaxes(axis, last)).swapaxes(axis, last)


def _recurring(x: Tensor, dim: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute in what recurrences know: integers and bools are int64 then, as in torch."""
    return _along_last(x if x.dtype.is_float else x.to("int64"), dim, function)


def _first(x: Tensor) -> np.ndarray[Any, Any]:
    """Return whether an element is the first of a row."""
    return np.asarray(np.arange(x.shape[-1]) == 0)


@with_numpy_names
def cumsum(x: Tensor, dim: int) -> Tensor:
    """Return the sum of the elements up to each one along `dim`; of integers int64."""

    def summed(row: Tensor) -> Tensor:
        one = as_tensor(1, row.dtype).broadcast_to(row.shape)
        return apply(RECURRENCE, one, row, reverse=False)

    return _recurring(as_tensor(x), dim, summed)


@with_numpy_names
def cumprod(x: Tensor, dim: int) -> Tensor:
    """Return the product of the elements up to each one along `dim`; of integers int64.

    Its gradient divides by nothing, so zeros do no harm.
    """

    def multiplied(row: Tensor) -> Tensor:
        first = as_tensor(_first(row))  # times nothing: an infinite one would leave NaN
        return apply(RECURRENCE, where(first, 0, row), where(first, row, 0), reverse=False)

    return _recurring(as_tensor(x), dim, multiplied)


@with_numpy_names
def cummax(x: Tensor, dim: int) -> ValuesAndIndices:
    """Return the largest element up to each one along `dim`, and where the last such one is."""
    return _extremes(as_tensor(x), dim, lambda before, own: before > own)


@with_numpy_names
def cummin(x: Tensor, dim: int) -> ValuesAndIndices:
    """Return the smallest element up to each one along `dim`, and where the last such one is."""
    return _extremes(as_tensor(x), dim, lambda before, own: before < own)


def _extremes(
    x: Tensor, dim: int, is_better: Callable[[Tensor, Tensor], Tensor]
) -> ValuesAndIndices:
    if not x.ndim:
        return ValuesAndIndices(x, as_tensor(0, DType.INT64))
    axis = checked_axis(x, dim)
    places = _along_last(x.detach(), axis, lambda row: _places(row, is_better))
    return ValuesAndIndices(gather(x, axis, places), places)


def _places(row: Tensor, is_better: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Look back over twice as many elements each time (Hillis & Steele, 1986)."""
    extent = row.shape[-1]
    place = as_tensor(np.arange(extent)).broadcast_to(row.shape)
    back = 1
    while back < extent:
        before, own = row[..., :-back], row[..., back:]
        wins = is_better(before, own)
        if row.dtype.is_float:
            wins = where(before != before, own == own, wins)  # NaN stays
        values = where(wins, before, own)
        places = where(wins, place[..., :-back], place[..., back:])
        row = concat([row[..., :back], values], -1)
        place = concat([place[..., :back], places], -1)
        back *= 2
    return place


@with_numpy_names
def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Return the logarithm of the sum of exponentials up to each one along `dim`.

    Sums are kept relative to the largest element so far, so nothing overflows or gets lost.
    """

    def summed(row: Tensor) -> Tensor:
        if not row.shape[-1]:
            return row
        most = cummax(row, -1).values.detach()
        most = where(most - most == 0.0, most, 0.0)  # an infinite one would leave NaN
        before = concat([most[..., :1], most[..., :-1]], -1)
        total = apply(RECURRENCE, exp(before - most), exp(row - most), reverse=False)
        return log(total) + most

    return _recurring(as_tensor(x), dim, summed)
