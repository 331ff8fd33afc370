"""Where elements are: of a tensor in a program's space of rows and columns, of a window.

An *access* says which element of a tensor belongs to row r and column c: with the tensor's
own row o = (r // every) % count it is o * columns + c (FULL), o (ROW), c (COLUMN) or 0 (SCALAR).
Views that keep the row-major order of elements do not change an access.

`Windows` are those of convolutions and pooling, along the spatial axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, NamedTuple

from compiler.contract.program import Kind

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """The extents that a program works on."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Access:
    """How an operand is read; `count` is 0 where it has as many rows as the space."""

    kind: Kind
    every: int = 1
    count: int = 0


FULL = Access(Kind.FULL)
ROW = Access(Kind.ROW)
COLUMN = Access(Kind.COLUMN)
SCALAR = Access(Kind.SCALAR)


def canonical(kind: Kind, space: Space) -> Kind:
    """Return the least kind with as many elements: in a space of one row, FULL is COLUMN."""
    if space.rows == 1:
        kind = {Kind.FULL: Kind.COLUMN, Kind.ROW: Kind.SCALAR}.get(kind, kind)
    if space.columns == 1:
        kind = {Kind.FULL: Kind.ROW, Kind.COLUMN: Kind.SCALAR}.get(kind, kind)
    return kind


@lru_cache(maxsize=4096)
def access_of(shape: Shape, stretched: Shape, columns: int) -> Access | None:
    """Return how a tensor is read that numpy's rule stretches to [..., columns].

    None where the columns are no whole axes of `stretched`, where they hold a part of the tensor's
    elements, or where its rows are not one block repeated: [8, 1, 4, 1] stretched to
    [8, 6, 4, columns], say. A tensor without axes is a number, whatever it is stretched to; in a
    single column, what has a row for each is read as ROW.
    """
    if not shape and stretched:
        return SCALAR
    shape = (1,) * (len(stretched) - len(shape)) + shape
    if shape == stretched:
        return ROW if columns == 1 else FULL
    first = _first_column_axis(stretched, columns)
    if first is None:
        split = _split(shape, stretched, columns)
        return None if split is None else access_of(*split, columns)
    tail = shape[first:]
    has_columns = tail == stretched[first:]
    if not has_columns and any([n != 1 for n in tail]):
        return None
    block = _repeated_block(shape[:first], stretched[:first])
    if block is None:
        return None
    every, count = block
    if count == 1:
        return COLUMN if has_columns else SCALAR
    kind = Kind.FULL if has_columns else Kind.ROW
    is_whole = count == math.prod(stretched[:first])
    return Access(kind) if is_whole else Access(kind, every, count)


def _first_column_axis(shape: Shape, columns: int) -> int | None:
    """Return the axis from which on the extents multiply to `columns`."""
    product = 1
    for axis in range(len(shape), 0, -1):
        if product == columns:
            return axis
        product *= shape[axis - 1]
    return 0 if product == columns else None


def _split(shape: Shape, stretched: Shape, columns: int) -> tuple[Shape, Shape] | None:
    """Return the shapes with the axis in two inside of which the columns begin.

    A gain of 32 channels seen by groups of 8 is [4, 8].
    """
    inner = 1
    for axis in range(len(stretched) - 1, -1, -1):
        extent = stretched[axis]
        if inner * extent > columns:
            width, remainder = divmod(columns, inner)
            if remainder or extent % width:
                return None
            factors = (extent // width, width) if shape[axis] == extent else (1, 1)
            return (
                (*shape[:axis], *factors, *shape[axis + 1 :]),
                (*stretched[:axis], extent // width, width, *stretched[axis + 1 :]),
            )
        inner *= extent
    return None


def _repeated_block(shape: Shape, stretched: Shape) -> tuple[int, int] | None:
    """Return (every, count) of a row-major block that repeats along the stretched axes."""
    axes = [axis for axis, n in enumerate(shape) if n != 1]
    if not axes:
        return 1, 1
    low, high = axes[0], axes[-1] + 1
    if shape[low:high] != stretched[low:high]:
        return None
    return math.prod(stretched[high:]), math.prod(shape[low:high])


def through_broadcast(access: Access, before: Shape, after: Shape, columns: int) -> Access | None:
    """Return how the tensor behind a broadcast_to is read whose result is read by `access`."""
    if math.prod(before) == 1:
        return SCALAR
    if access == FULL:
        return access_of(before, after, columns)
    if access == ROW:
        return access_of((*before, 1), (*after, columns), columns)
    if access == COLUMN and math.prod(before) == math.prod(after):
        return COLUMN
    return None


@lru_cache(maxsize=4096)
def row_stride(kind: Kind, columns: int, shape: Shape, strides: Shape) -> int | None:
    """Return how many elements the rows of an operand are apart; None where unevenly many.

    What belongs to a row must lie without gaps. So it does in a dense tensor, and in a cut of some
    columns of one.
    """
    if 0 in shape:
        return columns
    axes = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    width = {Kind.FULL: columns, Kind.COLUMN: columns}.get(kind, 1)
    inner = 1
    while axes and inner < width:
        extent, step = axes.pop()
        if step != inner:
            return None
        inner *= extent
    if inner != width:
        return _dense_stride(kind, width, shape, strides)
    if not axes:
        return width if kind is Kind.FULL else 1
    is_even = all([outer == extent * step for (_, outer), (extent, step) in pairwise(axes)])
    return axes[-1][1] if is_even else None


def _dense_stride(kind: Kind, width: int, shape: Shape, strides: Shape) -> int | None:
    """Return the stride where the columns end inside an axis: all must be dense."""
    inner = 1
    for extent, step in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and step != inner:
            return None
        inner *= extent
    return width if kind is Kind.FULL and math.prod(shape) % width == 0 else None


# Window t of an axis has the elements t * stride - low + k * dilation, of which some may lie
# outside.

Extents = tuple[int, ...]
Index = tuple[Any, ...]
"""Slices of the last axes, after an ellipsis."""


class Tap(NamedTuple):
    """One element of the windows, where it lies inside.

    `number` counts in row-major order; `own` is its index in a kernel, `windows` that of the
    windows where it lies inside, `places` that of those elements.
    """

    number: int
    own: Index
    windows: Index
    places: Index


class Windows(NamedTuple):
    """One number per spatial axis."""

    kernel: Extents
    strides: Extents
    dilation: Extents
    low: Extents

    def taps(self, spatial: Extents, counts: Extents) -> Iterator[Tap]:
        """Yield the taps of which one lies inside in some window, in row-major order."""
        for number, tap in enumerate(product(*[range(k) for k in self.kernel])):
            at: list[Any] = [...]
            places: list[Any] = [...]
            for k, extent, count, stride, dilation, low in zip(
                tap, spatial, counts, self.strides, self.dilation, self.low, strict=True
            ):
                begin = k * dilation - low
                first = max(0, -(begin // stride))
                stop = max(first, min(count, (extent - 1 - begin) // stride + 1))
                at.append(slice(first, stop))
                places.append(
                    slice(first * stride + begin, (stop - 1) * stride + begin + 1, stride)
                )
            if all([span.start < span.stop for span in at[1:]]):
                yield Tap(number, (..., *tap), tuple(at), tuple(places))
