"""Elements repeated, turned, taken from diagonals and in windows; constants, triangles, pads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from actorflow.functional.elementwise import where
from actorflow.functional.indexing import Index, index_value, picked
from actorflow.functional.shape import concat, movedim, narrow
from actorflow.tensor.literals import (
    checked_number,
    checked_size,
    dtype_named,
    scalar,
    with_numpy_names,
)
from actorflow.tensor.tensor import Operand, Tensor, apply, as_tensor, checked_axis, integers
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType
from compiler.ops.families import embedding
from compiler.ops.primitives import slicing

__all__ = [
    "arange",
    "diag",
    "diagonal",
    "eye",
    "flip",
    "fliplr",
    "flipud",
    "full",
    "full_like",
    "linspace",
    "meshgrid",
    "one_hot",
    "ones",
    "ones_like",
    "pad",
    "repeat",
    "repeat_interleave",
    "roll",
    "rot90",
    "tile",
    "tril",
    "triu",
    "zeros",
    "zeros_like",
]


def repeat(x: Tensor, *sizes: int | Sequence[int]) -> Tensor:
    """Return copies of x, so many side by side along each axis; torch's `repeat`, numpy's tile."""
    x, times = as_tensor(x), integers(*sizes, what="a number of copies")
    if len(times) < x.ndim or any([n < 0 for n in times]):
        raise CompileError(
            f"{find_source()}: repeat needs a number of copies, 0 or more, for each axis of"
            f" {x.type}, got {list(times)}"
        )
    extents = (*[1] * (len(times) - x.ndim), *x.shape)
    # An axis of 1 before each axis is broadcast to the copies and then joined with it: no gather.
    split = [n for extent in extents for n in (1, extent)]
    wide = [n for pair in zip(times, extents, strict=True) for n in pair]
    joined = [n * m for n, m in zip(times, extents, strict=True)]
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
    # Different counts have no shape to broadcast to, so the slices are picked by constant indices.
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
        # Python's remainder is never negative: the slice that becomes the first one.
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
    # In the flattened matrix the diagonal is every (columns + 1)-th element.
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
    # The inverse of `diagonal`: the vector's elements lie side + 1 apart in a row of zeros.
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


MOST_CONSTANTS = 1 << 28
"""Numbers that a plan may hold for one `arange` or `linspace`."""

DTypeLike = Any
Shape = int | Sequence[int]


def _dtype(given: DTypeLike, default: DType) -> DType:
    return default if given is None else dtype_named(given, "dtype")


def _default(*numbers: object) -> DType:
    """Return the dtype of Python numbers: float32, int64 or bool."""
    if all([isinstance(n, (bool, np.bool_)) for n in numbers]):
        return DType.BOOL
    is_whole = all([isinstance(n, (int, np.integer)) for n in numbers])
    return DType.INT64 if is_whole else DType.FLOAT32


def arange(
    start: float, end: float | None = None, step: float = 1, *, dtype: DTypeLike = None
) -> Tensor:
    """Return start, start + step, ... before `end`; from 0 to `start` where that is all.

    int64 of integers, float32 of others, unless `dtype` says what.
    """
    first, last = (0, start) if end is None else (start, end)
    for number in (first, last, step):
        checked_number(number, "a bound of arange")
    if step == 0 or (last - first) * step < 0:
        raise CompileError(f"{find_source()}: arange cannot go from {first} to {last} by {step}")
    count = (last - first) / step
    if not count <= MOST_CONSTANTS:  # nor where it is NaN
        raise CompileError(f"{find_source()}: arange would make {count:,.0f} constants")
    out_dtype = _dtype(dtype, _default(first, last, step, 0))
    return _constants(np.arange(first, last, step), out_dtype)


def _constants(numbers: np.ndarray[Any, Any], dtype: DType) -> Tensor:
    """Return numbers in a dtype. Raises CompileError where it does not hold all of them."""
    for extreme in (numbers.min(), numbers.max()) if numbers.size else ():
        # `scalar` refuses a number that the dtype does not hold; the extremes speak for all others.
        is_whole = not dtype.is_float and np.isfinite(extreme)
        scalar(int(extreme) if is_whole else float(extreme), dtype)
    return as_tensor(numbers.astype(dtype.value))


def linspace(start: float, end: float, steps: int, *, dtype: DTypeLike = None) -> Tensor:
    """Return `steps` numbers from `start` to `end`, both included, at equal distances."""
    first, last = [checked_number(number, "an end of linspace") for number in (start, end)]
    count = checked_size(steps, "the steps")
    if not 0 <= count <= MOST_CONSTANTS:
        raise CompileError(
            f"{find_source()}: linspace has 0 to {MOST_CONSTANTS:,} steps, got {count:,}"
        )
    with np.errstate(all="ignore"):  # between infinite ends it is NaN
        numbers = np.linspace(first, last, count)
    return _constants(numbers, _dtype(dtype, DType.FLOAT32))


def full(size: Shape, fill_value: Operand, *, dtype: DTypeLike = None) -> Tensor:
    """Return a tensor of one number, which takes no memory until something is written over it.

    The number may be a tensor without axes, through which, as in torch, no gradient flows.
    """
    if not isinstance(fill_value, (bool, int, float)):
        number = as_tensor(fill_value)
        if number.ndim:
            raise CompileError(f"{find_source()}: full needs one number, got {number.type}")
        default = DType.FLOAT32 if number.dtype.is_float else DType.INT64
        default = DType.BOOL if number.dtype is DType.BOOL else default
        number = number.detach().to(_dtype(dtype, default))
        return number.broadcast_to(integers(size, what="an extent"))
    out_dtype = _dtype(dtype, _default(fill_value))
    return as_tensor(fill_value, out_dtype).broadcast_to(integers(size, what="an extent"))


def zeros(*size: Shape, dtype: DTypeLike = None) -> Tensor:
    """Return zeros, float32 unless `dtype` says what."""
    return full(integers(*size, what="an extent"), 0, dtype=_dtype(dtype, DType.FLOAT32))


def ones(*size: Shape, dtype: DTypeLike = None) -> Tensor:
    """Return ones, float32 unless `dtype` says what."""
    return full(integers(*size, what="an extent"), 1, dtype=_dtype(dtype, DType.FLOAT32))


def full_like(x: Tensor, fill_value: Operand, *, dtype: DTypeLike = None) -> Tensor:
    """Return one number in the shape of x, and in its dtype unless another is given."""
    return full(as_tensor(x).shape, fill_value, dtype=_dtype(dtype, as_tensor(x).dtype))


def zeros_like(x: Tensor, *, dtype: DTypeLike = None) -> Tensor:
    """Return zeros in the shape of x, and in its dtype unless another is given."""
    return full_like(x, 0, dtype=dtype)


def ones_like(x: Tensor, *, dtype: DTypeLike = None) -> Tensor:
    """Return ones in the shape of x, and in its dtype unless another is given."""
    return full_like(x, 1, dtype=dtype)


def eye(n: int, m: int | None = None, *, dtype: DTypeLike = None) -> Tensor:
    """Return ones on the diagonal of n rows and m columns, zeros elsewhere."""
    rows = checked_size(n, "the rows")
    columns = rows if m is None else checked_size(m, "the columns")
    is_diagonal = arange(rows).reshape(rows, 1) == arange(columns)
    return is_diagonal.to(_dtype(dtype, DType.FLOAT32))


def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Return vectors stretched over one another's axes, in their order.

    With indexing "xy", numpy's default, the first two axes change places.
    """
    operands = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], Sequence) else tensors
    vectors = [as_tensor(t).reshape(-1) for t in operands]
    if indexing not in ("ij", "xy"):
        raise CompileError(f"{find_source()}: meshgrid has indexing 'ij' or 'xy', not {indexing!r}")
    shape = [v.shape[0] for v in vectors]
    wide = []
    for axis, vector in enumerate(vectors):
        extents = [n if at == axis else 1 for at, n in enumerate(shape)]
        grid = vector.reshape(extents).broadcast_to(shape)
        wide.append(grid.swapaxes(0, 1) if indexing == "xy" and len(shape) > 1 else grid)
    return tuple(wide)


def one_hot(x: Index, num_classes: int) -> Tensor:
    """Return x.shape + [num_classes] int64: 1 at the class that x names, else 0.

    torch finds the number of classes in the data; here it has to be given. One outside of
    0..num_classes - 1 fails the step with an IndexError.
    """
    classes = checked_size(num_classes, "num_classes")
    if classes < 1:
        raise CompileError(
            f"{find_source()}: one_hot needs num_classes of 1 or more, got {classes}: shapes do not"
            " follow from data"
        )
    ids = as_tensor(index_value(x, "the classes of one_hot"))
    numbers = arange(classes)
    labels = apply(embedding.EMBEDDING, numbers.reshape(classes, 1), ids)  # which refuses bad ones
    return (labels == numbers).to("int64")


def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return x with zeros above a diagonal of its last two axes; 1 is that above the main one."""
    return _triangle(x, lambda row, column: column <= row + checked_size(diagonal, "the diagonal"))


def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return x with zeros below a diagonal of its last two axes; 1 is that above the main one."""
    return _triangle(x, lambda row, column: column >= row + checked_size(diagonal, "the diagonal"))


def _triangle(x: Tensor, keeps: Any) -> Tensor:
    x = as_tensor(x)
    if x.ndim < 2:
        raise CompileError(f"{find_source()}: a triangle needs two axes or more, got {x.type}")
    rows, columns = x.shape[-2:]
    row, column = [arange(n, dtype="int32") for n in (rows, columns)]
    return where(keeps(row.reshape(rows, 1), column), x, as_tensor(0, x.dtype))


_INDEX_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: Operand = 0) -> Tensor:
    """Put elements around x: of the last axis first, (before, behind, before, behind, ...).

    Modes: "constant" (`value`; where a number is negative, elements go), "reflect" (the edge not
    twice), "replicate" (the edge), "circular".
    """
    x, sizes = as_tensor(x), integers(pad, what="a width of pad")
    if len(sizes) % 2 or len(sizes) > 2 * x.ndim:
        raise CompileError(
            f"{find_source()}: pad needs two widths for each of up to {x.ndim} axes, got {sizes}"
        )
    pairs = [(0, 0)] * x.ndim
    for number in range(len(sizes) // 2):
        pairs[x.ndim - 1 - number] = (sizes[2 * number], sizes[2 * number + 1])
    if mode != "constant" and mode not in _INDEX_MODES:
        modes = ", ".join(["constant", *_INDEX_MODES])
        raise CompileError(f"{find_source()}: pad has modes {modes}; got {mode!r}")
    for axis, (low, high) in enumerate(pairs):
        extent = x.shape[axis]
        most = {"reflect": extent - 1, "circular": extent}.get(mode, 1 << 48 if extent else 0)
        if extent + low + high < 0 or (mode != "constant" and max(low, high) > most):
            raise CompileError(
                f"{find_source()}: cannot pad axis {axis} of {x.type} by {low} and {high} in mode"
                f" {mode!r}"
            )
        if mode != "constant" and (low or high):
            ids = np.pad(np.arange(extent), (max(low, 0), max(high, 0)), mode=_INDEX_MODES[mode])  # type: ignore[call-overload]  # one of numpy's modes
            x = picked(x, axis, [ids[max(-low, 0) : len(ids) - max(-high, 0)]])
        elif low < 0 or high < 0:
            length = extent + min(low, 0) + min(high, 0)
            x = narrow(x, axis, max(-low, 0), max(length, 0))
    around = [(max(low, 0), max(high, 0)) for low, high in pairs]
    return x if mode != "constant" or not any(map(any, around)) else _surrounded(x, around, value)


def _surrounded(x: Tensor, around: Sequence[tuple[int, int]], value: Operand) -> Tensor:
    if isinstance(value, (int, float)) and value == 0:
        low, high = [tuple([pair[side] for pair in around]) for side in (0, 1)]
        return apply(slicing.PAD, x, low=low, high=high, steps=(1,) * x.ndim)
    for axis, widths in enumerate(around):
        if not any(widths):
            continue
        fill, shape = as_tensor(value, x.dtype), x.shape
        sides = [fill.broadcast_to(*shape[:axis], n, *shape[axis + 1 :]) for n in widths]
        x = concat([sides[0], x, sides[1]], axis)
    return x
