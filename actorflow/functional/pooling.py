"""Maxima and means of windows over 1 to 3 axes. Tensors are [N, C, *spatial], as in torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from actorflow.functional.convolution import Sizes, batched, per_axis, unbatched
from actorflow.functional.elementwise import where
from actorflow.functional.names import of_ranks
from actorflow.functional.reduce import mean
from actorflow.functional.shape import concat
from actorflow.literals import checked_number
from actorflow.tensor import Tensor, apply, apply_many, as_tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops.convolution import CONV
from compiler.ops.pooling import MAX_POOL

__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
]

Extents = tuple[int, ...]
ValuesAndIndices = tuple[Tensor, Tensor]


def max_pool(
    rank: int,
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | ValuesAndIndices:
    """Return the largest element of each window; the gradient goes to the first of equal ones.

    Args:
        rank: number of spatial axes.
        x: [N, C, *spatial], or [C, *spatial].
        kernel_size: extents of a window.
        stride: steps between windows; the extents of one where it is None.
        padding: what windows reach beyond x, and never find anything; at most half a window.
        dilation: steps between the elements of a window.
        ceil_mode: a last window may reach beyond the padding, too.
        return_indices: return also where each element lies in its channel, int64.
    """
    images = batched(x, rank, f"max_pool{rank}d")
    kernel, strides, low = _sizes(rank, kernel_size, stride, padding)
    apart = per_axis(dilation, rank, "dilation")
    spans = tuple([(k - 1) * d + 1 for k, d in zip(kernel, apart, strict=True)])
    high = _high(images.shape[2:], spans, strides, low, ceil_mode)
    attrs = {"kernel": kernel, "strides": strides, "low": low, "high": high, "dilation": apart}
    y, taps = apply_many(MAX_POOL, images, **attrs)
    if not return_indices:
        return unbatched(y, x, rank)
    spatial, counts = images.shape[2:], y.shape[2:]
    steps = [math.prod(spatial[axis + 1 :]) for axis in range(rank)]
    firsts = [np.arange(n) * s - p for n, s, p in zip(counts, strides, low, strict=True)]
    first = sum([f * step for f, step in zip(np.ix_(*firsts), steps, strict=True)])
    far = as_tensor(np.zeros(y.shape, np.int64))
    for number, tap in enumerate(np.ndindex(*kernel)):
        shift = sum([k * d * step for k, d, step in zip(tap, apart, steps, strict=True)])
        far = where(taps == number, np.full((), shift, np.int64), far)
    places = far + np.asarray(first, np.int64)
    return unbatched(y, x, rank), unbatched(places, x, rank)


def avg_pool(
    rank: int,
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: float | None = None,
) -> Tensor:
    """Return the mean of each window: a convolution with ones, divided.

    Args:
        rank: number of spatial axes.
        x: [N, C, *spatial], or [C, *spatial].
        kernel_size: extents of a window.
        stride: steps between windows; the extents of one where it is None.
        padding: zeros on both sides of an axis; at most half a window.
        ceil_mode: a last window may reach beyond the padding, too.
        count_include_pad: the zeros of the padding are elements of a window, too.
        divisor_override: what sums are divided by, in place of the number of elements.
    """
    images = batched(x, rank, f"avg_pool{rank}d")
    kernel, strides, low = _sizes(rank, kernel_size, stride, padding)
    spatial = images.shape[2:]
    high = _high(spatial, kernel, strides, low, ceil_mode)
    if math.prod(kernel) > MOST_IN_WINDOW:
        raise CompileError(
            f"{find_source()}: avg_pool has windows of {list(kernel)} on {images.type}, of more"
            f" than {MOST_IN_WINDOW:,} elements; use a smaller kernel"
        )
    # Each channel is a group: libraries take many at once, and an image stays as it lies. Planes of
    # one channel each took 20 to 30 times as long, and had to be copied there and back.
    channels = images.shape[1]
    if not 0 < math.prod(kernel) * channels <= MOST_IN_WINDOW:
        channels = 1
    sums = apply(
        CONV,
        images.reshape(math.prod(images.shape[:2]) // channels, channels, *spatial),
        np.ones((channels, 1, *kernel), images.dtype.value),
        strides=strides,
        low=low,
        high=high,
        dilation=(1,) * rank,
        groups=channels,
    )
    sums = sums.reshape(*images.shape[:2], *sums.shape[2:])
    if divisor_override is not None:
        divisor = checked_number(divisor_override, "divisor_override")
        if not divisor:
            raise CompileError(f"{find_source()}: divisor_override must not be 0")
        return unbatched(sums / divisor, x, rank)
    reach = low if count_include_pad else (0,) * rank
    each = [
        np.minimum(first + k, extent + more) - np.maximum(first, -more)
        for first, k, extent, more in zip(
            [np.arange(n) * s - p for n, s, p in zip(sums.shape[2:], strides, low, strict=True)],
            kernel,
            spatial,
            reach,
            strict=True,
        )
    ]
    counts = np.asarray(math.prod(np.ix_(*each)), images.dtype.value)
    whole = float(math.prod(kernel))
    return unbatched(sums / (whole if (counts == whole).all() else counts), x, rank)


MOST_IN_WINDOW = 1 << 24
"""Elements of a window that is averaged: it is a kernel of ones."""

MOST_WINDOWS = 1024
"""Of several extents, along an axis: each is ops of its own."""


def adaptive(rank: int, x: Tensor, output_size: Sizes, pool: Callable[..., Tensor]) -> Tensor:
    """Return the pool of windows that cover `rank` axes, one axis after the other, the last first.

    Window i of n over an extent e has the elements from floor(i e / n) to ceil((i + 1) e / n).
    """
    made = batched(x, rank, "an adaptive pool")
    if 0 in made.shape[2:]:
        raise CompileError(f"{find_source()}: an adaptive pool needs elements, got {made.type}")
    counts = per_axis(output_size, rank, "output_size")
    if not any([n % count for n, count in zip(made.shape[2:], counts, strict=True)]):
        return unbatched(pool(made, made.shape[2:], counts), x, rank)
    if max(counts) > MOST_WINDOWS:
        raise CompileError(
            f"{find_source()}: an adaptive pool to {list(counts)} of {made.type} has windows of"
            f" several extents, which are computed one by one, up to {MOST_WINDOWS} along an axis"
        )
    for axis in reversed(range(rank)):
        extent, count = made.shape[axis + 2], counts[axis]
        before = (slice(None),) * (axis + 2)
        parts = [
            made[(*before, slice(i * extent // count, -(-(i + 1) * extent // count)))]
            for i in range(count)
        ]
        ones = [tuple([1 if a == axis else n for a, n in enumerate(p.shape[2:])]) for p in parts]
        made = concat([pool(p, p.shape[2:], n) for p, n in zip(parts, ones, strict=True)], axis + 2)
    return unbatched(made, x, rank)


def adaptive_avg_pool(rank: int, x: Tensor, output_size: Sizes) -> Tensor:
    """Return the means of windows, as many as are asked for, that cover x [N, C, *spatial]."""
    return adaptive(rank, x, output_size, _mean_of)


def adaptive_max_pool(rank: int, x: Tensor, output_size: Sizes) -> Tensor:
    """Return the maxima of windows, as many as are asked for, that cover x [N, C, *spatial]."""
    return adaptive(rank, x, output_size, _largest_of)


max_pool1d, max_pool2d, max_pool3d = of_ranks(max_pool, "max_pool")
avg_pool1d, avg_pool2d, avg_pool3d = of_ranks(avg_pool, "avg_pool")
adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = of_ranks(
    adaptive_avg_pool, "adaptive_avg_pool"
)
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = of_ranks(
    adaptive_max_pool, "adaptive_max_pool"
)


def _mean_of(x: Tensor, spatial: Extents, counts: Extents) -> Tensor:
    """Return the means of windows that part the spatial axes evenly."""
    rank = len(spatial)
    along = [axis + 2 for axis in range(rank) if counts[axis] != spatial[axis]]
    if all([counts[axis - 2] == 1 for axis in along]):
        return mean(x, along, keepdim=True) if along else x
    kernel = [n // count for n, count in zip(spatial, counts, strict=True)]
    return avg_pool(rank, x, kernel)


def _largest_of(x: Tensor, spatial: Extents, counts: Extents) -> Tensor:
    """Return the maxima of windows that part the spatial axes evenly."""
    kernel = tuple([n // count for n, count in zip(spatial, counts, strict=True)])
    none = (0,) * len(spatial)
    attrs = {"kernel": kernel, "strides": kernel, "low": none, "high": none}
    return apply_many(MAX_POOL, x, **attrs, dilation=(1,) * len(spatial))[0]


def _sizes(
    rank: int, kernel_size: Sizes, stride: Sizes | None, padding: Sizes
) -> tuple[Extents, Extents, Extents]:
    """Return kernel, strides and padding. Raises CompileError for too much padding."""
    kernel = per_axis(kernel_size, rank, "kernel_size")
    strides = kernel if stride is None else per_axis(stride, rank, "stride")
    low = per_axis(padding, rank, "padding", least=0)
    if any([2 * p > k for p, k in zip(low, kernel, strict=True)]):
        raise CompileError(
            f"{find_source()}: a pool's padding is at most half of its kernel_size, got"
            f" {list(low)} for {list(kernel)}"
        )
    return kernel, strides, low


def _high(
    spatial: Extents, spans: Extents, strides: Extents, low: Extents, ceil_mode: bool
) -> Extents:
    """Return how far the last windows reach: in `ceil_mode` as far as those that begin inside."""
    if not ceil_mode:
        return low
    high = []
    for extent, span, step, p in zip(spatial, spans, strides, low, strict=True):
        last = -(-(extent + 2 * p - span) // step)
        if last < 0:  # not even one window begins: the op says so
            return low
        last -= last * step >= extent + p
        high.append(last * step + span - extent - p)
    return tuple(high)
