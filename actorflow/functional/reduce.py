"""Reductions over axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from actorflow.functional.comparison import isfinite, isnan, logical_not, truth
from actorflow.functional.elementwise import (
    abs,  # noqa: A004  # torch's name
    exp,
    log,
    maximum,
    minimum,
    sqrt,
    square,
    where,
)
from actorflow.functional.names import with_numpy_names
from actorflow.functional.shape import concat
from actorflow.literals import checked_number
from actorflow.tensor import Tensor, apply, as_tensor, checked_axis, integers
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops import reduce
from compiler.registry import Op
from compiler.types import DType

__all__ = [
    "all",
    "amax",
    "amin",
    "any",
    "argmax",
    "argmin",
    "count_nonzero",
    "logsumexp",
    "max",
    "mean",
    "min",
    "nansum",
    "norm",
    "prod",
    "std",
    "sum",
    "var",
]

Dims = int | Sequence[int] | None
"""An axis, several, or None for all; as in torch an empty sequence is all, too."""


class ValuesAndIndices(NamedTuple):
    """Elements that were picked along an axis, and where they were."""

    values: Tensor
    indices: Tensor


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
def prod(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Return the product over `dim`, multiplied in pairs; of integers and bools in int64."""
    x = _wide(x)
    axes = _axes(x, dim)
    shape = [1 if i in axes else n for i, n in enumerate(x.shape)]
    left = [i for i in range(x.ndim) if i not in axes]
    extent = math.prod([x.shape[i] for i in axes])
    made = x.permute(*left, *axes).reshape(*[x.shape[i] for i in left], extent)
    if not extent:
        made = as_tensor(1, x.dtype).broadcast_to(*[x.shape[i] for i in left], 1)
    while (extent := made.shape[-1]) > 1:
        half = extent // 2
        pairs = made[..., :half] * made[..., half : 2 * half]
        made = concat([pairs, made[..., 2 * half :]], -1) if extent % 2 else pairs
    return made.reshape(shape if keepdim else [x.shape[i] for i in left])


@with_numpy_names
def var(x: Tensor, dim: Dims = None, *, correction: float = 1, keepdim: bool = False) -> Tensor:
    """Return the variance over `dim` of floats: squares over the number less `correction`."""
    x, less = as_tensor(x), checked_number(correction, "correction of var")
    axes = _axes(x, dim)
    count = math.prod([x.shape[i] for i in axes])
    squares = square(x - mean(x, axes, keepdim=True))
    divisor = count - less
    return sum(squares, axes, keepdim=keepdim) / (divisor if divisor > 0 else 0.0)


@with_numpy_names
def std(x: Tensor, dim: Dims = None, *, correction: float = 1, keepdim: bool = False) -> Tensor:
    """Return the square root of `var`. Where it is 0 no gradient flows."""
    return _root(var(x, dim, correction=correction, keepdim=keepdim))


def _root(x: Tensor) -> Tensor:
    """Return the square root, with a gradient of 0 at 0."""
    return where(x == 0, 0.0, sqrt(where(x == 0, 1.0, x)))


@with_numpy_names
def logsumexp(x: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
    """Return log(sum(e^x)) over `dim`, of which nothing overflows in between."""
    x = as_tensor(x)
    axes = _axes(x, dim)
    largest = amax(x, axes, keepdim=True).detach()
    largest = where(isfinite(largest), largest, 0.0)
    made = log(sum(exp(x - largest), axes, keepdim=True)) + largest
    return made if keepdim else made.reshape([n for i, n in enumerate(x.shape) if i not in axes])


@with_numpy_names
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
    if power == 2.0:
        return _root(sum(square(x), dim, keepdim=keepdim))
    return sum(size**power, dim, keepdim=keepdim) ** (1.0 / power)


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
    """Return the maximum over `dim`, NaN where one is. Ties share the gradient."""
    return _over(reduce.MAX, x, dim, keepdim)


@with_numpy_names
def amin(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Return the minimum over `dim`, NaN where one is. Ties share the gradient."""
    return _turned(amax(_turned(x), dim, keepdim=keepdim))


def _turned(x: Tensor) -> Tensor:
    """Return numbers in opposite order; integers by bits, as the least has no negative."""
    x = as_tensor(x)
    return -x if x.dtype.is_float else ~x


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
        return amin(x, keepdim=keepdim)
    values, indices = max(_turned(x), dim, keepdim=keepdim)
    return ValuesAndIndices(_turned(values), indices)


def _of_two(function: Callable[..., Tensor], x: Tensor, other: Tensor, keepdim: bool) -> Tensor:
    if keepdim:  # torch takes such a tensor for an axis
        raise CompileError(f"{find_source()}: keepdim goes with an axis, and a tensor came")
    return function(x, other)


@with_numpy_names
def argmin(x: Tensor, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
    """Return the index of the first minimum along `dim`, int64; of x flattened without `dim`."""
    return argmax(_turned(x), dim, keepdim=keepdim)


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
        return amax(x, keepdim=keepdim)
    x = as_tensor(x)
    axes = (checked_axis(x, dim),)
    largest = apply(reduce.MAX, x, axes=axes, keepdims=bool(keepdim), by_place=True)
    return ValuesAndIndices(largest, argmax(x, dim, keepdim=keepdim))


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
    given = range(x.ndim) if dim is None or _is_empty(dim) else integers(dim, what="an axis")
    return tuple(sorted([checked_axis(x, axis) for axis in given]))


def _is_empty(dim: Dims) -> bool:
    return isinstance(dim, Sequence) and not dim
