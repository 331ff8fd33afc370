"""Reductions over axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from actorflow.functional.elementwise import maximum
from actorflow.functional.names import with_numpy_names
from actorflow.tensor import Tensor, apply, as_tensor, checked_axis, integers
from compiler.ops import reduce
from compiler.registry import Op

__all__ = ["amax", "argmax", "max", "mean", "sum"]

Dims = int | Sequence[int] | None
"""An axis, several, or None for all."""


class ValuesAndIndices(NamedTuple):
    """Elements that were picked along an axis, and where they were."""

    values: Tensor
    indices: Tensor


@with_numpy_names
def sum(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:  # noqa: A001  # torch's name
    """Return the sum over `dim`, in the dtype of x."""
    return _over(reduce.SUM, x, dim, keepdim)


@with_numpy_names
def mean(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Return the mean over `dim` of floats."""
    return _over(reduce.MEAN, x, dim, keepdim)


@with_numpy_names
def amax(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Return the maximum over `dim`, NaN where one is. Ties share the gradient."""
    return _over(reduce.MAX, x, dim, keepdim)


@with_numpy_names
def max(  # noqa: A001  # torch's name
    x: Tensor, dim: int | Tensor | None = None, *, keepdim: bool = False
) -> Tensor | ValuesAndIndices:
    """Return the largest element; with an axis the largest along it and where they are.

    With another tensor it is `maximum`. For values without places see `amax`.
    """
    if isinstance(dim, Tensor):
        return maximum(x, dim)
    if dim is None:
        return amax(x, keepdim=keepdim)
    return ValuesAndIndices(amax(x, dim, keepdim=keepdim), argmax(x, dim, keepdim=keepdim))


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
    given = range(x.ndim) if dim is None else integers(dim, what="an axis")
    axes = tuple(sorted([checked_axis(x, axis) for axis in given]))
    return apply(op, x, axes=axes, keepdims=bool(keepdim))
