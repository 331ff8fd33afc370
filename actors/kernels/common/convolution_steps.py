"""Convolution and its adjoints as fills, copies and products: what the kernels of all devices walk.

A convolution is the product of its weights with columns, one per window: the elements that it has
(Chellapilla, Puri & Simard, 2006). Columns are copies of a view whose steps overlap, in planned
scratch, for some images or some rows of one image at a time; where a window is a single element
they are x itself. The gradient of the weights is a product with the same columns. That of the input
is a convolution again, of dy with the weights turned around: for strides s one for each of the s
remainders of an element's place, with the elements of the kernel that reach it. So nothing is ever
added up by place. With channels last, windows of single elements are the rows of one matrix, and
each of the three is one product of matrices that lie where they are.

No step depends on where arrays lie: without scratch the steps are those of a call, on arrays that
nobody may touch. Pooling shares no steps, but the windows (`windows_of`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from actors.kernels.common.kernel import Attrs, Piece, integer, integers, is_dense
from actors.kernels.common.strides import collapse_axes
from actors.machine.protocol import Array, Arrays
from compiler.contract.spaces import Windows
from compiler.contract.types import contiguous_strides

OPS = ("conv", "conv_input_grad", "conv_weight_grad")

_ENOUGH_COLUMNS = 256
"""Windows of an image that are worth a product of their own; of fewer, images are joined."""


@dataclass(frozen=True, slots=True)
class Fill:
    """Zeros."""

    target: Array


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of a source of the target's shape."""

    target: Array
    source: Array


@dataclass(frozen=True, slots=True)
class Multiply:
    """out = a @ b, or with `adds` added to out. Leading axes broadcast.

    The matrices have adjacent rows, or columns, and out has adjacent columns.
    """

    a: Array
    b: Array
    out: Array
    adds: bool = False


Step = Fill | Copy | Multiply


def steps_of(
    op: str, attrs: Attrs, inputs: Arrays, outputs: Arrays, room: ScratchLayout
) -> Iterator[tuple[Step, int]]:
    """Yield the steps of a call in order, each with how often it comes.

    That is once, but where only the needs are asked for: there images that lie alike come as one.
    """
    (first, second), (out,) = inputs, outputs
    groups = integer(attrs, "groups")
    x, weight, y = {
        "conv": (first, second, out),
        "conv_input_grad": (out, second, first),
        "conv_weight_grad": (first, out, second),
    }[op]
    if not out.size:
        return
    # A sum over nothing is 0.
    if not (first.size and second.size):
        yield Fill(out), 1
        return
    windows = Windows(
        weight.shape[2:], *[integers(attrs, name) for name in ("strides", "dilation", "low")]
    )
    pointwise = _pointwise_product(op, x, weight, y, windows)
    if pointwise is not None:
        yield pointwise, 1
        return
    whole = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    x, y = [a.reshape(a.shape[0], groups, a.shape[1] // groups, *a.shape[2:]) for a in (x, y)]
    if op == "conv":
        yield from _correlated(room, x, whole, y, windows)
    elif op == "conv_input_grad":
        yield from _spread(room, y, whole, x, windows)
    else:
        yield from _summed(room, x, y, whole, windows)


class ScratchLayout:
    """Scratch by name: without `placed` it finds out how many bytes each name wants.

    `chunk_bytes` is what columns may take at a time.
    """

    def __init__(
        self, dtype: np.dtype[np.generic], chunk_bytes: int, placed: Mapping[str, Array] | None
    ) -> None:
        self.dtype = dtype
        self.chunk_bytes = chunk_bytes
        self.placed = placed
        self._sizes: dict[str, int] = {}

    @property
    def pieces(self) -> dict[str, Piece]:
        """What all that was asked for so far takes."""
        return {name: Piece((size,), np.dtype(np.uint8)) for name, size in self._sizes.items()}

    def at(self, name: str, *shape: int) -> Array:
        """Return a dense array in the scratch of a name."""
        size = math.prod(shape) * self.dtype.itemsize
        self._sizes[name] = max(self._sizes.get(name, 0), size)
        if self.placed is None:
            strides = contiguous_strides(shape, self.dtype.itemsize)
            return as_strided(np.empty((), self.dtype), shape, strides)
        return self.placed[name][:size].view(self.dtype).reshape(shape)


def _pointwise_product(
    op: str, x: Array, weight: Array, y: Array, windows: Windows
) -> Multiply | None:
    """Return a convolution of single elements as one product; None where it is none.

    That is with a kernel and strides of 1, without padding or groups, where images of x and y are
    rows of channels, x [places, channels] and y [places, results].
    """
    has_single_elements = {*windows.kernel, *windows.strides} == {1} and not any(windows.low)
    if not has_single_elements or x.shape[2:] != y.shape[2:] or weight.shape[1] != x.shape[1]:
        return None
    rows_of_x, rows_of_y = _rows_of_channels(x), _rows_of_channels(y)
    if rows_of_x is None or rows_of_y is None:
        return None
    if not is_dense(weight.shape, weight.strides, weight.itemsize):
        return None
    matrix = weight.reshape(weight.shape[:2])
    return {
        "conv": Multiply(rows_of_x, matrix.T, rows_of_y),
        "conv_input_grad": Multiply(rows_of_y, matrix, rows_of_x),
        "conv_weight_grad": Multiply(rows_of_y.T, rows_of_x, matrix),
    }[op]


def _rows_of_channels(images: Array) -> Array | None:
    """Return images [n, c, *S] as [places, c] with adjacent columns; None where they are none."""
    count, channels, *extents = images.shape
    first, step, *others = images.strides
    axes = collapse_axes((count, *extents), ((first, *others),), in_order=True)
    if len(axes) > 1 or (channels > 1 and step != images.itemsize):
        return None
    row_bytes = axes[0].steps[0] if axes else channels * images.itemsize
    if row_bytes < channels * images.itemsize:
        return None
    shape = (count * math.prod(extents), channels)
    return as_strided(images, shape, (row_bytes, images.itemsize))


def _correlated(
    room: ScratchLayout, x: Array, weight: Array, y: Array, windows: Windows
) -> Iterator[tuple[Step, int]]:
    """Yield y[n, g, o, *T] = the sum of weight[g, o, c, *K] over windows of x[n, g, c, *S]."""
    groups, results, channels = weight.shape[:3]
    depth = channels * math.prod(windows.kernel)
    if is_dense(weight.shape, weight.strides, weight.itemsize):
        matrix = weight.reshape(groups, results, depth)
    else:
        matrix = room.at("weights", groups, results, depth)
        yield Copy(matrix.reshape(weight.shape), weight), 1
    for images, times in _cut(room, x, y, depth * groups):
        source, target = x[images], y[images]
        padded, before = _padded(room, source, y.shape[3:], windows)
        for step in before:
            yield step, times
        for rows in _strips(room, y, depth * groups):
            view = _windows(padded, y.shape[3:], windows, rows)
            part = target[:, :, :, rows]
            for step in _product(room, matrix, view, part):
                yield step, times


def _product(room: ScratchLayout, matrix: Array, view: Array, part: Array) -> Iterator[Step]:
    """Yield the steps of one chunk: columns of what windows see, their product, its way to y."""
    count, groups, results, *extents = part.shape
    depth, length = matrix.shape[2], math.prod(extents)
    direct = _as_matrix(view.reshape(*view.shape[:3], *extents)) if depth == view.shape[2] else None
    target = _as_matrix(part)
    # Few windows per image: images are joined to one product, at the price of a copy of the result.
    if direct is None and count > 1 and length < _ENOUGH_COLUMNS:
        columns = room.at("columns", groups, depth, count * length)
        turned = np.moveaxis(view, 0, view.ndim - 1 - len(extents))
        yield Copy(columns.reshape(turned.shape), turned)
        output = room.at("product", groups, results, count * length)
        yield Multiply(matrix, columns, output)
        yield Copy(part, np.moveaxis(output.reshape(groups, results, count, *extents), 2, 0))
        return
    if direct is None:
        direct = room.at("columns", count, groups, depth, length)
        yield Copy(direct.reshape(view.shape), view)
    output = room.at("product", count, groups, results, length) if target is None else target
    yield Multiply(matrix, direct, output)
    if target is None:
        yield Copy(part, output.reshape(part.shape))


def _spread(
    room: ScratchLayout, dy: Array, weight: Array, dx: Array, windows: Windows
) -> Iterator[tuple[Step, int]]:
    """Yield the steps of dx: each remainder of a place by the strides is a convolution of dy.

    dx[s m + r - low] is the sum of weight[k] dy[m - (k d - r) / s] where k d is r modulo s.
    """
    turned = weight.swapaxes(1, 2)
    remainders = [list(_remainders(*axis)) for axis in zip(dx.shape[3:], *windows, strict=True)]
    if any([not remainder.taps for axis in remainders for remainder in axis]):
        yield Fill(dx), 1
    for axes in product(*remainders):
        if not all([remainder.taps for remainder in axes]):
            continue
        kernel = _at(turned, [remainder.turned for remainder in axes])
        part = _at(dx, [remainder.places for remainder in axes])
        ways = Windows(
            kernel.shape[3:],
            (1,) * len(axes),
            tuple([remainder.dilation for remainder in axes]),
            tuple([remainder.low for remainder in axes]),
        )
        yield from _correlated(room, dy, kernel, part, ways)


@dataclass(frozen=True, slots=True)
class _Remainder:
    """Elements of an axis of dx that lie alike between the windows, and what reaches them."""

    places: slice
    taps: range
    dilation: int
    low: int

    @property
    def turned(self) -> slice:
        """The taps as a slice of the kernel, the last first."""
        stop = self.taps[0] - self.taps.step
        return slice(self.taps[-1], None if stop < 0 else stop, -self.taps.step)


def _remainders(
    extent: int, taps: int, stride: int, dilation: int, low: int
) -> Iterator[_Remainder]:
    # Taps k and k + step reach places that are the same modulo the stride.
    step = stride // gcd(stride, dilation)
    spacing = step * dilation // stride
    for remainder in range(stride):
        first = -((remainder - low) // stride)
        place = first * stride + remainder - low
        if place >= extent:
            continue
        firsts = [k for k in range(min(step, taps)) if (k * dilation - remainder) % stride == 0]
        reach = range(firsts[0], taps, step) if firsts else range(0)
        begin = 0
        if firsts:
            begin = (
                first - (firsts[0] * dilation - remainder) // stride - (len(reach) - 1) * spacing
            )
        yield _Remainder(slice(place, None, stride), reach, spacing, -begin)


def _summed(
    room: ScratchLayout, x: Array, dy: Array, dweight: Array, windows: Windows
) -> Iterator[tuple[Step, int]]:
    """Yield the gradient of the weights: dy times the columns, added up over chunks."""
    groups, results, channels = dweight.shape[:3]
    depth = channels * math.prod(windows.kernel)
    is_plain = is_dense(dweight.shape, dweight.strides, dweight.itemsize)
    form = (groups, results, depth)
    total = dweight.reshape(form) if is_plain else room.at("weights", *form)
    is_first = True
    for images, times in _cut(room, x, dy, depth * groups):
        padded, before = _padded(room, x[images], dy.shape[3:], windows)
        for step in before:
            yield step, times
        for rows in _strips(room, dy, depth * groups):
            view = _windows(padded, dy.shape[3:], windows, rows)
            left, columns, copies = _sides(room, dy[images][:, :, :, rows], view)
            for step in copies:
                yield step, times
            right, first = columns.swapaxes(1, 2), int(is_first)
            if is_first:
                yield Multiply(left, right, total), 1
            if times > first:
                yield Multiply(left, right, total, adds=True), times - first
            is_first = False
    if not is_plain:
        yield Copy(dweight, total.reshape(dweight.shape)), 1


def _sides(room: ScratchLayout, slopes: Array, view: Array) -> tuple[Array, Array, list[Step]]:
    """Return some of dy and what it is multiplied by, images joined, and the copies of them."""
    count, groups, results, *extents = slopes.shape
    length, depth = count * math.prod(extents), math.prod(view.shape[2 : view.ndim - len(extents)])
    columns = room.at("columns", groups, depth, length)
    turned = np.moveaxis(view, 0, view.ndim - 1 - len(extents))
    copies: list[Step] = [Copy(columns.reshape(turned.shape), turned)]
    left = _as_matrix(slopes) if count == 1 else None
    if left is not None:
        return left[0], columns, copies
    left, turned = room.at("product", groups, results, length), np.moveaxis(slopes, 0, 2)
    return left, columns, [*copies, Copy(left.reshape(turned.shape), turned)]


def _cut(room: ScratchLayout, x: Array, y: Array, depth: int) -> Iterator[tuple[slice, int]]:
    """Yield images whose columns fit a chunk, or single ones, and how many chunks lie alike."""
    row_bytes = depth * math.prod(y.shape[3:]) * room.dtype.itemsize
    count, size = len(x), max(1, min(len(x), room.chunk_bytes // row_bytes))
    if room.placed is not None:
        for first in range(0, count, size):
            yield slice(first, min(first + size, count)), 1
        return
    # Only the needs are asked for: whole chunks lie alike and come as one.
    yield slice(0, size), count // size
    if count % size:
        yield slice(count - count % size, count), 1


def _strips(room: ScratchLayout, y: Array, depth: int) -> Iterator[slice]:
    """Yield rows of the first spatial axis whose columns fit a chunk."""
    extent, *rest = y.shape[3:]
    rows = max(1, min(extent, room.chunk_bytes // (depth * math.prod(rest) * room.dtype.itemsize)))
    for first in range(0, extent, rows):
        yield slice(first, min(first + rows, extent))


def _padded(
    room: ScratchLayout, x: Array, counts: tuple[int, ...], windows: Windows
) -> tuple[Array, list[Step]]:
    """Return x from the first element of the first window to the last of the last, and its steps.

    What lies outside of x are zeros, in scratch; where nothing does it is x.
    """
    spans = [(n - 1) * s + (k - 1) * d + 1 for n, k, s, d in zip(counts, *windows[:3], strict=True)]
    slices: list[slice] = []
    places: list[slice] = []
    for extent, span, low in zip(x.shape[3:], spans, windows.low, strict=True):
        first, stop = max(0, -low), max(0, -low, min(extent, span - low))
        slices.append(slice(first, stop))
        places.append(slice(first + low, stop + low))
    inside = _at(x, slices)
    # Nothing is padded: windows see x where it lies.
    if inside.shape[3:] == tuple(spans):
        return inside, []
    padded = room.at("padded", *x.shape[:3], *spans)
    if not inside.size:
        return padded, [Fill(padded)]
    return padded, [Fill(padded), Copy(_at(padded, places), inside)]


def _at(array: Array, last: list[slice]) -> Array:
    index: tuple[Any, ...] = (..., *last)
    return np.asarray(array[index])


def _windows(padded: Array, counts: tuple[int, ...], windows: Windows, rows: slice) -> Array:
    """Return the elements [n, g, c, *K, *T] that windows of some rows see: a view."""
    steps = padded.strides[3:]
    begin = padded[:, :, :, rows.start * windows.strides[0] :]
    return as_strided(
        begin,
        (*padded.shape[:3], *windows.kernel, rows.stop - rows.start, *counts[1:]),
        (
            *padded.strides[:3],
            *[step * d for step, d in zip(steps, windows.dilation, strict=True)],
            *[step * s for step, s in zip(steps, windows.strides, strict=True)],
        ),
    )


def _as_matrix(array: Array) -> Array | None:
    """Return [n, g, c, *T] as matrices with adjacent columns; None where it is none."""
    length, item = math.prod(array.shape[3:]), array.itemsize
    axes = collapse_axes(array.shape[3:], (array.strides[3:],), in_order=True)
    if len(axes) > 1 or (axes and axes[0].steps[0] != item):
        return None
    if array.shape[2] > 1 and (array.strides[2] < length * item or array.strides[2] % item):
        return None
    row = array.strides[2] if array.shape[2] > 1 else length * item
    return as_strided(array, (*array.shape[:3], length), (*array.strides[:2], row, item))


POOLING_OPS = ("max_pool", "max_pool_grad", "max_pool_pick")


def windows_of(attrs: Attrs) -> Windows:
    """Return the windows of a pooling op."""
    kernel, strides, dilation, low = [
        integers(attrs, name) for name in ("kernel", "strides", "dilation", "low")
    ]
    return Windows(kernel, strides, dilation, low)
