"""Order: sorted elements, the largest and those in the middle, and places among sorted numbers."""

from __future__ import annotations

from typing import Any, NoReturn

from actorflow.functional.elementwise import where
from actorflow.functional.indexing import gather
from actorflow.functional.names import with_numpy_names
from actorflow.functional.reduce import ValuesAndIndices, argmax
from actorflow.literals import checked_size
from actorflow.tensor import Tensor, apply, as_tensor, checked_axis
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops.along import ARGSORT
from compiler.types import DType

__all__ = [
    "argsort",
    "bucketize",
    "kthvalue",
    "median",
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
    made = apply(ARGSORT, moved, descending=bool(descending))
    return made if axis == last else made.swapaxes(axis, last)


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


@with_numpy_names
def median(
    x: Tensor, dim: int | None = None, *, keepdim: bool = False
) -> Tensor | ValuesAndIndices:
    """Return the median, the lower one of two; along an axis with where it is. NaN where one is."""
    x = as_tensor(x)
    if dim is None:
        made = median(x.reshape(-1), 0)
        return made[0]
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


def searchsorted(sorted_sequence: Tensor, values: Any, *, right: bool = False) -> Tensor:
    """Return where values would go into sorted rows so that those stay sorted, int64.

    Before what is equal, or behind it with `right`. The sequence is a vector, or has the leading
    axes of the values. Every value is compared with its whole row.
    """
    row = as_tensor(sorted_sequence)
    given = as_tensor(values, row.dtype)
    if not row.ndim or (row.ndim > 1 and row.shape[:-1] != given.shape[:-1]):
        raise CompileError(
            f"{find_source()}: searchsorted needs a vector, or rows for the leading axes of"
            f" {given.type}; got {row.type}"
        )
    own = row if row.ndim == 1 else row.reshape(*row.shape[:-1], 1, row.shape[-1])
    each = given.reshape(*given.shape, 1)
    return (own <= each if right else own < each).to("int64").sum(-1)


def bucketize(x: Any, boundaries: Tensor, *, right: bool = False) -> Tensor:
    """Return between which sorted boundaries elements lie; see `searchsorted`."""
    row = as_tensor(boundaries)
    if row.ndim != 1:
        raise CompileError(f"{find_source()}: bucketize needs a vector of bounds, got {row.type}")
    return searchsorted(row, x, right=right)


def unique(x: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
    """Say that how many elements differ is known from the data alone."""
    raise CompileError(
        f"{find_source()}: unique has as many elements as there are different ones, and shapes are"
        " static here; sort the tensor, or compare neighbours of a sorted one"
    )
