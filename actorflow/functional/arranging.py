"""Elements repeated, turned around, taken from diagonals and in windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from actorflow.functional.names import with_numpy_names
from actorflow.functional.row_numbers import picked
from actorflow.functional.shape import concat, movedim, narrow
from actorflow.literals import checked_size
from actorflow.tensor import Tensor, apply, as_tensor, checked_axis, integers
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops import slicing

__all__ = [
    "diag",
    "diagonal",
    "flip",
    "fliplr",
    "flipud",
    "repeat",
    "repeat_interleave",
    "roll",
    "rot90",
    "tile",
]


def repeat(x: Tensor, *sizes: int | Sequence[int]) -> Tensor:
    """Return copies of x, so many side by side along each axis; torch's `repeat`, numpy's tile."""
    x, times = as_tensor(x), integers(*sizes, what="a number of copies")
    if len(times) < x.ndim or any([n < 0 for n in times]):
        raise CompileError(
            f"{find_source()}: repeat needs a number of copies, 0 or more, for each axis of"
            f" {x.type}, got {list(times)}"
        )
    own = (*[1] * (len(times) - x.ndim), *x.shape)
    split = [n for extent in own for n in (1, extent)]
    wide = [n for pair in zip(times, own, strict=True) for n in pair]
    joined = [n * m for n, m in zip(times, own, strict=True)]
    return x.reshape(split).broadcast_to(wide).reshape(joined)


def tile(x: Tensor, *dims: int | Sequence[int]) -> Tensor:
    """Return `repeat`; axes that come before the given ones are not repeated."""
    x, times = as_tensor(x), integers(*dims, what="a number of copies")
    return repeat(x, *[1] * (x.ndim - len(times)), *times)


@with_numpy_names
def repeat_interleave(x: Tensor, repeats: Any, dim: int | None = None) -> Tensor:
    """Return each slice of x along `dim` so many times in a row; of x flattened without `dim`.

    How often is an integer, or one for each slice, known when the job is traced.
    """
    x = as_tensor(x)
    if isinstance(repeats, Tensor):
        raise CompileError(
            f"{find_source()}: repeat_interleave by a tensor has a shape that only the data tells;"
            " give integers"
        )
    flat = x.reshape(-1) if dim is None else x
    axis = 0 if dim is None else checked_axis(x, dim)
    times = integers(repeats, what="a number of copies")
    if any([n < 0 for n in times]) or len(times) not in (1, flat.shape[axis]):
        raise CompileError(
            f"{find_source()}: repeat_interleave needs one number of copies, or one for each of the"
            f" {flat.shape[axis]} slices; got {list(times)}"
        )
    if len(times) == 1:
        before, extent, after = flat.shape[:axis], flat.shape[axis], flat.shape[axis + 1 :]
        wide = flat.reshape(*before, extent, 1, *after).broadcast_to(
            *before, extent, times[0], *after
        )
        return wide.reshape(*before, extent * times[0], *after)
    return picked(flat, axis, [np.repeat(np.arange(len(times)), times)])


def flip(x: Tensor, *dims: int | Sequence[int]) -> Tensor:
    """Reverse the order along axes."""
    x = as_tensor(x)
    for axis in [checked_axis(x, axis) for axis in integers(*dims, what="an axis")]:
        x = x[(*(slice(None),) * axis, slice(None, None, -1))] if x.shape[axis] > 1 else x
    return x


def fliplr(x: Tensor) -> Tensor:
    """Reverse the order along the second axis."""
    return flip(x, 1)


def flipud(x: Tensor) -> Tensor:
    """Reverse the order along the first axis."""
    return flip(x, 0)


def roll(x: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor:
    """Move elements along axes by `shifts`; what leaves at an end comes in at the other."""
    x = as_tensor(x)
    by = integers(shifts, what="a shift")
    if dims is None:
        return roll(x.reshape(-1), shifts, 0).reshape(x.shape)
    axes = [checked_axis(x, axis) for axis in integers(dims, what="an axis")]
    if len(axes) != len(by):
        raise CompileError(
            f"{find_source()}: roll needs a shift for each axis, got {by} and {dims}"
        )
    for axis, shift in zip(axes, by, strict=True):
        extent = x.shape[axis]
        cut = -shift % extent if extent else 0
        if cut:
            x = concat([narrow(x, axis, cut, extent - cut), narrow(x, axis, 0, cut)], axis)
    return x


def rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Turn by 90 degrees, k times, from the first of two axes towards the second."""
    x = as_tensor(x)
    axes = [checked_axis(x, axis) for axis in integers(dims, what="an axis")]
    if len(axes) != 2 or axes[0] == axes[1]:
        raise CompileError(f"{find_source()}: rot90 turns in a plane of two axes, got {dims}")
    first, second = axes
    quarter = checked_size(k, "k") % 4
    if quarter == 2:
        return flip(x, first, second)
    if quarter == 1:
        return flip(x, second).swapaxes(first, second)
    return flip(x.swapaxes(first, second), second) if quarter else x


def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Return the diagonal of two axes as the last one; `offset` > 0 is above the main one."""
    x = as_tensor(x)
    first, second = checked_axis(x, dim1), checked_axis(x, dim2)
    if first == second:
        raise CompileError(f"{find_source()}: a diagonal needs two axes, got {dim1} and {dim2}")
    others = [axis for axis in range(x.ndim) if axis not in (first, second)]
    rows, columns = x.shape[first], x.shape[second]
    shift = checked_size(offset, "the offset")
    start = shift if shift >= 0 else -shift * columns
    count = max(0, min(rows + min(shift, 0), columns - max(shift, 0)))
    turned = x.permute(*others, first, second)
    flat = turned.reshape(*turned.shape[:-2], rows * columns)
    if not count:
        return flat[..., :0]
    return flat[..., start : start + (count - 1) * (columns + 1) + 1 : columns + 1]


_of_matrices = diagonal


def diag(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return the diagonal of a matrix, or the matrix with a vector on it and zeros elsewhere."""
    x, shift = as_tensor(x), checked_size(diagonal, "the diagonal")
    if x.ndim == 2:
        return _of_matrices(x, shift)
    if x.ndim != 1:
        raise CompileError(f"{find_source()}: diag needs a vector or a matrix, got {x.type}")
    extent = x.shape[0]
    side = extent + abs(shift)
    low = shift if shift >= 0 else -shift * side
    span = (extent - 1) * (side + 1) + 1 if extent else 0
    high = (side * side - low - span,)
    flat = apply(slicing.PAD, x, low=(low,), high=high, steps=(side + 1,))
    return flat.reshape(side, side)


def trace(x: Tensor) -> Tensor:
    """Return the sum of the diagonal of a matrix."""
    x = as_tensor(x)
    if x.ndim != 2:
        raise CompileError(f"{find_source()}: trace needs a matrix, got {x.type}")
    return diagonal(x).sum()


def unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Return windows of `size` elements along an axis, `step` apart, as an axis that comes last."""
    x = as_tensor(x)
    axis, width = checked_axis(x, dimension), checked_size(size, "the size")
    apart, extent = checked_size(step, "the step"), x.shape[checked_axis(x, dimension)]
    if not 0 <= width <= extent or apart < 1:
        raise CompileError(
            f"{find_source()}: unfold needs windows of 0..{extent} elements and steps of 1 or more,"
            f" got {width} and {apart}"
        )
    starts = np.arange(0, extent - width + 1, apart)
    windows = picked(x, axis, [starts[:, None] + np.arange(width)])
    return movedim(windows, axis + 1, -1)
