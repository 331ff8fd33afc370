"""Order along an axis: sorted elements, the largest, quantiles, and places among sorted numbers."""

from __future__ import annotations

from typing import Any, NoReturn, overload

import numpy as np

from actorflow.functional.elementwise import isnan, maximum, where
from actorflow.functional.indexing import gather
from actorflow.functional.reduce import all, argmax, count_nonzero  # noqa: A004  # torch's name
from actorflow.tensor.literals import checked_size, with_numpy_names
from actorflow.tensor.op_math import in_float32
from actorflow.tensor.tensor import Tensor, ValuesAndIndices, apply, as_tensor, checked_axis
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType
from compiler.ops.families.along import ARGSORT

__all__ = [
    "argsort",
    "bucketize",
    "kthvalue",
    "median",
    "nanquantile",
    "quantile",
    "searchsorted",
    "sort",
    "topk",
    "unique",
]


@with_numpy_names
def argsort(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Tensor:
    """Return where the elements along `dim` are in order, int64. Equal ones stay as they came.

    NaN is larger than any number. `stable` changes nothing: the order is always stable.
    """
    x = as_tensor(x)
    if not x.ndim:
        return as_tensor(0, DType.INT64)
    axis, last = checked_axis(x, dim), x.ndim - 1
    if x.dtype is DType.UINT64:
        raise CompileError(f"{find_source()}: uint64 has no order here; cast it with .to('int64')")
    wide = x if x.dtype.is_float else x.to("int64")
    moved = wide if axis == last else wide.swapaxes(axis, last)
    order = apply(ARGSORT, moved, descending=bool(descending))
    return order if axis == last else order.swapaxes(axis, last)


@with_numpy_names
def sort(
    x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = True
) -> ValuesAndIndices:
    """Return the elements along `dim` in order, and where they were; see `argsort`."""
    x = as_tensor(x)
    places = argsort(x, dim, descending, stable=stable)
    return ValuesAndIndices(gather(x, dim, places) if x.ndim else x, places)


@with_numpy_names
def topk(
    x: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002  # torch's name
) -> ValuesAndIndices:
    """Return the k largest, or smallest, elements along `dim` in order, and where they were.

    Of equal ones those that come first. They are sorted whether `sorted` asks for it or not.
    """
    x = as_tensor(x)
    axis, count = checked_axis(x, dim), checked_size(k, "k")
    if not 0 <= count <= x.shape[axis]:
        raise CompileError(f"{find_source()}: topk takes 0..{x.shape[axis]} elements, got {count}")
    # A stable sort has the first of equal ones first.
    order = argsort(x, axis, descending=bool(largest))
    places = order[(*(slice(None),) * axis, slice(count))]
    return ValuesAndIndices(gather(x, axis, places), places)


@with_numpy_names
def kthvalue(x: Tensor, k: int, dim: int = -1, *, keepdim: bool = False) -> ValuesAndIndices:
    """Return the k-th smallest element along `dim`, counted from 1, and where it is."""
    x = as_tensor(x)
    axis, count = checked_axis(x, dim), checked_size(k, "k")
    if not 1 <= count <= x.shape[axis]:
        raise CompileError(f"{find_source()}: kthvalue has k in 1..{x.shape[axis]}, got {count}")
    places = argsort(x, axis)[(*(slice(None),) * axis, slice(count - 1, count))]
    return _picked(x, axis, places, keepdim)


def _picked(x: Tensor, axis: int, places: Tensor, keepdim: bool) -> ValuesAndIndices:
    values = gather(x, axis, places)
    if keepdim:
        return ValuesAndIndices(values, places)
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    return ValuesAndIndices(values.reshape(shape), places.reshape(shape))


@overload
def median(x: Tensor, dim: None = ..., *, keepdim: bool = ...) -> Tensor: ...
@overload
def median(x: Tensor, dim: int, *, keepdim: bool = ...) -> ValuesAndIndices: ...
@overload
def median(x: Tensor, *, axis: int, keepdims: bool = ...) -> ValuesAndIndices: ...
@with_numpy_names
def median(
    x: Tensor, dim: int | None = None, *, keepdim: bool = False
) -> Tensor | ValuesAndIndices:
    """Return the median, the lower one of two; along an axis with where it is. NaN where one is."""
    x = as_tensor(x)
    if dim is None:
        pair = median(x.reshape(-1), 0)
        return pair[0]
    axis = checked_axis(x, dim)
    if not x.shape[axis]:
        raise CompileError(f"{find_source()}: the median of no elements, {x.type} along {dim}")
    middle = (x.shape[axis] - 1) // 2
    places = argsort(x, axis)[(*(slice(None),) * axis, slice(middle, middle + 1))]
    if x.dtype.is_float:
        is_nan = x != x
        has_nan = is_nan.to("int32").sum(axis, keepdim=True) > 0
        places = where(has_nan, argmax(is_nan.to("int32"), axis, keepdim=True), places)
    return _picked(x, axis, places, keepdim)


INTERPOLATIONS = ("linear", "lower", "higher", "nearest", "midpoint")
"""What a quantile between two elements is."""


@with_numpy_names
@in_float32
def quantile(
    x: Tensor,
    q: Any,
    dim: int | None = None,
    *,
    keepdim: bool = False,
    interpolation: str = "linear",
) -> Tensor:
    """Return the quantiles q, in 0..1, along `dim`, of x flattened without `dim`; NaN where one is.

    q is a number, or a list, an array or a tensor of some, which the first axis of the result has.
    Between two elements `interpolation` decides: "linear", "lower", "higher", "nearest" (the lower
    one of an even place) or "midpoint".
    """
    return _quantile(x, q, dim, keepdim, interpolation, skips_nan=False)


@with_numpy_names
@in_float32
def nanquantile(
    x: Tensor,
    q: Any,
    dim: int | None = None,
    *,
    keepdim: bool = False,
    interpolation: str = "linear",
) -> Tensor:
    """Return the quantiles of what is not NaN, NaN where all is; see `quantile`."""
    return _quantile(x, q, dim, keepdim, interpolation, skips_nan=True)


def _quantile(
    x: Tensor, q: Any, dim: int | None, keepdim: bool, interpolation: str, *, skips_nan: bool
) -> Tensor:
    x = as_tensor(x)
    q = as_tensor(np.asarray(q) if isinstance(q, (list, tuple)) else q, x.dtype)
    _check_quantile(x, q, interpolation)
    axis = None if dim is None else checked_axis(x, dim)
    # Rows last, [..., n]; then the quantiles of a row, [..., k].
    rows = x.reshape(-1) if axis is None else x.moveaxis(axis, -1)
    if not rows.shape[-1]:
        raise CompileError(f"{find_source()}: a quantile of no elements, {x.type} along {dim}")
    values = sort(rows, -1).values
    is_number = values == values
    counts = count_nonzero(is_number, -1, keepdim=True) if skips_nan else rows.shape[-1]
    last = maximum(counts - 1, 0) if isinstance(counts, Tensor) else counts - 1
    place = q.reshape(-1).to("float64") * (
        last.to("float64") if isinstance(last, Tensor) else float(last)
    )
    place = place.broadcast_to(*rows.shape[:-1], place.shape[-1])
    if not skips_nan:  # NaN is sorted to the end
        place = where(all(is_number, -1, keepdim=True), place, float(rows.shape[-1] - 1))
    made = _between(values, place, interpolation)
    kept = [1 if keepdim and axis in (None, i) else n for i, n in enumerate(x.shape)]
    shape = kept if keepdim else [] if axis is None else [*x.shape[:axis], *x.shape[axis + 1 :]]
    return made.moveaxis(-1, 0).reshape(*([made.shape[-1]] if q.ndim else []), *shape)


def _between(values: Tensor, place: Tensor, interpolation: str) -> Tensor:
    """Return what lies at places of float64 among sorted rows."""
    low = place.floor()
    if interpolation == "nearest":
        return gather(values, -1, place.round().to("int64"))
    lower = gather(values, -1, low.to("int64"))
    if interpolation == "lower":
        return lower
    upper = gather(values, -1, place.ceil().to("int64"))
    if interpolation == "higher":
        return upper
    share = (place - low).to(values.dtype) if interpolation == "linear" else 0.5
    # Exact at both ends; equal infinities have no difference. A whole place has no other side.
    step = where(lower == upper, 0.0, upper - lower)
    return where(place == low, lower, lower + step * share)


def _check_quantile(x: Tensor, q: Tensor, interpolation: str) -> None:
    if interpolation not in INTERPOLATIONS:
        raise CompileError(
            f"{find_source()}: interpolation of quantile is one of {', '.join(INTERPOLATIONS)}, got"
            f" {interpolation!r}"
        )
    if not x.dtype.is_float or q.ndim > 1 or not q.dtype.is_float:
        raise CompileError(
            f"{find_source()}: quantile needs floats, and for q a number or a vector; got {x.type}"
            f" and {q.type}"
        )


def searchsorted(sorted_sequence: Tensor, values: Any, *, right: bool = False) -> Tensor:
    """Return where values would go into sorted rows so that those stay sorted, int64.

    Before what is equal, or behind it with `right`. The sequence is a vector, or has the leading
    axes of the values. Every value is compared with its whole row.
    """
    row = as_tensor(sorted_sequence)
    queries = as_tensor(values, row.dtype)
    if not row.ndim or (row.ndim > 1 and row.shape[:-1] != queries.shape[:-1]):
        raise CompileError(
            f"{find_source()}: searchsorted needs a vector, or rows for the leading axes of"
            f" {queries.type}; got {row.type}"
        )
    rows = row if row.ndim == 1 else row.reshape(*row.shape[:-1], 1, row.shape[-1])
    each = queries.reshape(*queries.shape, 1)
    is_before = rows <= each if right else rows < each
    if queries.dtype.is_float:
        is_before = is_before | (isnan(each) if right else isnan(each) & ~isnan(rows))
    return is_before.to("int64").sum(-1)


def bucketize(x: Any, boundaries: Tensor, *, right: bool = False) -> Tensor:
    """Return between which sorted boundaries elements lie; see `searchsorted`."""
    row = as_tensor(boundaries)
    if row.ndim != 1:
        raise CompileError(f"{find_source()}: bucketize needs a vector of bounds, got {row.type}")
    return searchsorted(row, x, right=right)


def unique(x: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
    """Say that how many elements differ is known from the data alone."""
    raise CompileError(
        f"{find_source()}: the number of elements of unique depends on values, and shapes are"
        " static; sort the tensor, or compare neighbours of a sorted one"
    )
