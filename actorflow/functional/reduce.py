"""Functions that bring the elements along axes together.

In this order: reductions; then sums, products and extremes of all elements up to each one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np

from actorflow.functional.elementwise import (
    abs,  # noqa: A004  # torch's name
    exp,
    isfinite,
    isnan,
    log,
    logical_not,
    maximum,
    minimum,
    sqrt,
    square,
    truth,
    where,
)
from actorflow.functional.indexing import gather
from actorflow.functional.shape import concat
from actorflow.tensor.literals import checked_number, with_numpy_names
from actorflow.tensor.op_math import in_float32
from actorflow.tensor.tensor import (
    Tensor,
    ValuesAndIndices,
    apply,
    as_tensor,
    checked_axis,
    integers,
)
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType
from compiler.graph.registry import Op
from compiler.ops.families.along import RECURRENCE
from compiler.ops.primitives import reduce

__all__ = [
    "all",
    "amax",
    "amin",
    "any",
    "argmax",
    "argmin",
    "count_nonzero",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "logcumsumexp",
    "logsumexp",
    "max",
    "mean",
    "min",
    "nansum",
    "norm",
    "prod",
    "std",
    "std_mean",
    "sum",
    "var",
    "var_mean",
]


Dims = int | Sequence[int] | None
"""An axis, several, or None for all; as in torch an empty sequence is all, too."""


@with_numpy_names
def sum(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:  # noqa: A001  # torch's name
    """Return the sum over `dim`, in the dtype of x; of integers and bools in int64."""
    return _over(reduce.SUM, _wide(x), dim, keepdim)


def _wide(x: Tensor) -> Tensor:
    """Return integers and bools as int64, or uint64 as it is: so many are added or multiplied."""
    x = as_tensor(x)
    is_wide = x.dtype.is_float or x.dtype.itemsize == 8
    return x if is_wide else x.to(DType.INT64)


@with_numpy_names
def nansum(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Return the sum over `dim` of what is not NaN."""
    return sum(where(isnan(x), 0, x), dim, keepdim=keepdim)


@with_numpy_names
@in_float32
def prod(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Return the product over `dim`, multiplied in pairs; of integers and bools in int64."""
    x = _wide(x)
    axes = _axes(x, dim)
    shape = [1 if i in axes else n for i, n in enumerate(x.shape)]
    # Reduced axes become one last axis, of which halves are multiplied: log2(n) ops, whose gradient
    # divides by nothing.
    others = [i for i in range(x.ndim) if i not in axes]
    extent = math.prod([x.shape[i] for i in axes])
    y = x.permute(*others, *axes).reshape(*[x.shape[i] for i in others], extent)
    if not extent:
        y = as_tensor(1, x.dtype).broadcast_to(*[x.shape[i] for i in others], 1)
    while (extent := y.shape[-1]) > 1:
        half = extent // 2
        pairs = y[..., :half] * y[..., half : 2 * half]
        y = concat([pairs, y[..., 2 * half :]], -1) if extent % 2 else pairs
    return y.reshape(shape if keepdim else [x.shape[i] for i in others])


@with_numpy_names
@in_float32
def var(x: Tensor, dim: Dims = None, *, correction: float = 1, keepdim: bool = False) -> Tensor:
    """Return the variance over `dim` of floats: squares over the number less `correction`."""
    axes = _axes(as_tensor(x), dim)
    return _variance(_centred(as_tensor(x), axes), axes, correction, keepdim)


def _centred(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return x less its mean."""
    # Detached: the variance does not change with what is subtracted from all numbers, so the
    # gradient is right without. Twice, because a mean of large numbers is rounded.
    difference = x - mean(x, axes, keepdim=True).detach()
    return difference - mean(difference, axes, keepdim=True).detach()


def _variance(x: Tensor, axes: tuple[int, ...], correction: float, keepdim: bool) -> Tensor:
    """Return the variance of numbers whose mean is 0."""
    variance = mean(square(x), axes, keepdim=keepdim)
    count = math.prod([x.shape[i] for i in axes])
    divisor = count - checked_number(correction, "correction of var")
    # As torch: 0 * inf is NaN for one number.
    return variance * (count / divisor if divisor > 0 else math.inf)


@with_numpy_names
@in_float32
def std(x: Tensor, dim: Dims = None, *, correction: float = 1, keepdim: bool = False) -> Tensor:
    """Return the square root of the variance, also where `var` overflows; no gradient at 0."""
    x, axes = as_tensor(x), _axes(as_tensor(x), dim)
    difference = _centred(x, axes)
    largest = _scale_of(abs(difference), axes)
    root = _root(_variance(difference / largest, axes, correction, keepdim=True)) * largest
    return root if keepdim else root.reshape([n for i, n in enumerate(x.shape) if i not in axes])


def std_mean(
    x: Tensor, dim: Dims = None, *, correction: float = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the standard deviation and the mean over `dim`; see `std`."""
    return std(x, dim, correction=correction, keepdim=keepdim), mean(x, dim, keepdim=keepdim)


def var_mean(
    x: Tensor, dim: Dims = None, *, correction: float = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the variance and the mean over `dim`; see `var`."""
    return var(x, dim, correction=correction, keepdim=keepdim), mean(x, dim, keepdim=keepdim)


def _root(x: Tensor) -> Tensor:
    """Return the square root, with a gradient of 0 at 0."""
    # Both `where`s: an infinite gradient of sqrt at 0 times the 0 of the outer one would be NaN.
    return where(x == 0, 0.0, sqrt(where(x == 0, 1.0, x)))


@with_numpy_names
@in_float32
def logsumexp(x: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
    """Return log(sum(e^x)) over `dim`, of which nothing overflows in between."""
    x = as_tensor(x)
    axes = _axes(x, dim)
    largest = amax(x, axes, keepdim=True).detach()
    # inf - inf would be NaN where all are -inf, or one is inf.
    largest = where(isfinite(largest), largest, 0.0)
    y = log(sum(exp(x - largest), axes, keepdim=True)) + largest
    return y if keepdim else y.reshape([n for i, n in enumerate(x.shape) if i not in axes])


@with_numpy_names
@in_float32
def norm(
    x: Tensor, p: float | str | None = "fro", dim: Dims = None, *, keepdim: bool = False
) -> Tensor:
    """Return the p-norm over `dim` of the elements as one vector; "fro" is p = 2.

    p = inf is the largest absolute value, -inf the least, 0 the number of those that are not 0.
    Where a norm of p = 2 is 0 no gradient flows.
    """
    if isinstance(p, str) and p != "fro":
        raise CompileError(f"{find_source()}: norm has p of 'fro' or a number, got {p!r}")
    power = 2.0 if p is None or isinstance(p, str) else checked_number(p, "p of norm")
    x, size = as_tensor(x), abs(as_tensor(x))
    if power == math.inf:
        return amax(size, dim, keepdim=keepdim)
    if power == -math.inf:
        return amin(size, dim, keepdim=keepdim)
    if power == 0.0:
        return sum((x != 0).to(x.dtype), dim, keepdim=keepdim)
    if power == 1.0:
        return sum(size, dim, keepdim=keepdim)
    # By squares: the general power has no finite gradient at 0.
    if power == 2.0:
        return _root(sum(square(x), dim, keepdim=keepdim))
    # Divided by the largest: no power overflows, and the root of a sum of about 1 hardly depends on
    # the last digit of 1 / p. Detached: the norm does not change with what it is divided by.
    axes = _axes(x, dim)
    largest = _scale_of(size, axes)
    root = sum((size / largest) ** power, axes, keepdim=True) ** (1.0 / power) * largest
    return root if keepdim else root.reshape([n for i, n in enumerate(x.shape) if i not in axes])


def _scale_of(sizes: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the largest number, detached; 1 where it is 0, infinite or of no elements."""
    if not math.prod([sizes.shape[i] for i in axes]):
        return as_tensor(1.0, sizes.dtype)
    largest = amax(sizes, axes, keepdim=True).detach()
    return where((largest > 0) & (largest < math.inf), largest, 1.0)


@with_numpy_names
def count_nonzero(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Return how many elements over `dim` are not 0, int64."""
    return sum(truth(x), dim, keepdim=keepdim)


@with_numpy_names
def any(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:  # noqa: A001  # torch's
    """Return whether an element over `dim` is not 0; of none, not.

    As in torch, `all` and `any` over an empty sequence of axes reduce nothing.
    """
    return truth(x) if _is_empty(dim) else count_nonzero(x, dim, keepdim=keepdim) != 0


@with_numpy_names
def all(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:  # noqa: A001  # torch's
    """Return whether all elements over `dim` are not 0; of none, they are."""
    return truth(x) if _is_empty(dim) else count_nonzero(logical_not(x), dim, keepdim=keepdim) == 0


@with_numpy_names
def mean(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Return the mean over `dim` of floats."""
    return _over(reduce.MEAN, x, dim, keepdim)


@with_numpy_names
def amax(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Return the maximum over `dim`, NaN where one is. Ties share the gradient, NaN of a NaN."""
    x = as_tensor(x)
    # Bools as bytes: `or` and `and` of them are their extremes.
    if x.dtype is DType.BOOL:
        return amax(x.to(DType.UINT8), dim, keepdim=keepdim).to(DType.BOOL)
    return _over(reduce.MAX, x, dim, keepdim)


@with_numpy_names
def amin(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Return the minimum over `dim`, NaN where one is. Ties share the gradient, NaN of a NaN."""
    return _turned(amax(_turned(x), dim, keepdim=keepdim))


def _turned(x: Tensor) -> Tensor:
    """Return numbers in opposite order; integers by bits, as the least has no negative."""
    x = as_tensor(x)
    # ~x = -x - 1 turns the order of signed and unsigned integers, and overflows nowhere.
    return -x if x.dtype.is_float else ~x


@overload
def min(x: Tensor, dim: Tensor | None = ..., *, keepdim: bool = ...) -> Tensor: ...  # noqa: A001
@overload
def min(x: Tensor, dim: int, *, keepdim: bool = ...) -> ValuesAndIndices: ...  # noqa: A001
@overload
def min(x: Tensor, *, axis: int, keepdims: bool = ...) -> ValuesAndIndices: ...  # noqa: A001
@with_numpy_names
def min(  # noqa: A001  # torch's name
    x: Tensor, dim: int | Tensor | None = None, *, keepdim: bool = False
) -> Tensor | ValuesAndIndices:
    """Return the smallest element; with an axis the smallest along it and where they are.

    With another tensor it is `minimum`. For values without places see `amin`. The gradient goes to
    the first of several.
    """
    if isinstance(dim, Tensor):
        return _of_two(minimum, x, dim, keepdim)
    if dim is None:
        return _turned(_largest(_turned(x), keepdim))
    values, indices = max(_turned(x), dim, keepdim=keepdim)
    return ValuesAndIndices(_turned(values), indices)


def _of_two(function: Callable[..., Tensor], x: Tensor, other: Tensor, keepdim: bool) -> Tensor:
    if keepdim:  # torch takes such a tensor for an axis
        raise CompileError(f"{find_source()}: keepdim needs an axis, got a tensor")
    return function(x, other)


@with_numpy_names
def argmin(x: Tensor, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
    """Return the index of the first minimum along `dim`, int64; of x flattened without `dim`."""
    return argmax(_turned(x), dim, keepdim=keepdim)


@overload
def max(x: Tensor, dim: Tensor | None = ..., *, keepdim: bool = ...) -> Tensor: ...  # noqa: A001
@overload
def max(x: Tensor, dim: int, *, keepdim: bool = ...) -> ValuesAndIndices: ...  # noqa: A001
@overload
def max(x: Tensor, *, axis: int, keepdims: bool = ...) -> ValuesAndIndices: ...  # noqa: A001
@with_numpy_names
def max(  # noqa: A001  # torch's name
    x: Tensor, dim: int | Tensor | None = None, *, keepdim: bool = False
) -> Tensor | ValuesAndIndices:
    """Return the largest element; with an axis the largest along it and where they are.

    With another tensor it is `maximum`. For values without places see `amax`. The gradient goes to
    the first of several.
    """
    if isinstance(dim, Tensor):
        return _of_two(maximum, x, dim, keepdim)
    if dim is None:
        return _largest(x, keepdim)
    x = as_tensor(x)
    axes = (checked_axis(x, dim),)
    largest = apply(reduce.MAX, x, axes=axes, keepdims=bool(keepdim), by_place=True)
    return ValuesAndIndices(largest, argmax(x, dim, keepdim=keepdim))


def _largest(x: Tensor, keepdim: bool) -> Tensor:
    """Return the largest of all elements; of several, or NaN, each has a share of the gradient."""
    x = as_tensor(x)
    axes = tuple(range(x.ndim))
    return apply(reduce.MAX, x, axes=axes, keepdims=bool(keepdim), nan_shares=True)


@with_numpy_names
def argmax(x: Tensor, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
    """Return the index of the first maximum along `dim`, int64; of x flattened without `dim`."""
    x = as_tensor(x)
    if dim is None:
        flat = apply(reduce.ARGMAX, x.reshape(-1), axis=0, keepdims=False)
        return flat.reshape((1,) * x.ndim) if keepdim else flat
    return apply(reduce.ARGMAX, x, axis=checked_axis(x, dim), keepdims=bool(keepdim))


def _over(op: Op, x: Tensor, dim: Dims, keepdim: bool) -> Tensor:
    x = as_tensor(x)
    return apply(op, x, axes=_axes(x, dim), keepdims=bool(keepdim))


def _axes(x: Tensor, dim: Dims) -> tuple[int, ...]:
    dims = range(x.ndim) if dim is None or _is_empty(dim) else integers(dim, what="an axis")
    # Sorted, so that equal reductions are equal nodes.
    return tuple(sorted([checked_axis(x, axis) for axis in dims]))


def _is_empty(dim: Dims) -> bool:
    return isinstance(dim, Sequence) and not dim


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
        # y[i] = a[i] y[i-1] + b[i] with a = 1.
        one = as_tensor(1, row.dtype).broadcast_to(row.shape)
        return apply(RECURRENCE, one, row, reverse=False)

    return _recurring(as_tensor(x), dim, summed)


@with_numpy_names
@in_float32
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
        before, later = row[..., :-back], row[..., back:]
        wins = is_better(before, later)
        if row.dtype.is_float:
            wins = where(before != before, later == later, wins)  # NaN stays
        values = where(wins, before, later)
        places = where(wins, place[..., :-back], place[..., back:])
        row = concat([row[..., :back], values], -1)
        place = concat([place[..., :back], places], -1)
        back *= 2
    return place


@with_numpy_names
@in_float32
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
