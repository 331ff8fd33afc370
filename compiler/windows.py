"""How windows lie along the spatial axes of a tensor; for convolutions, pooling and their kernels.

Window t of an axis has the elements t * stride - low + k * dilation, of which some may lie outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

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
            if all([own.start < own.stop for own in at[1:]]):
                yield Tap(number, (..., *tap), tuple(at), tuple(places))
