"""Windows of images brought to one number each, and images made larger or smaller.

Tensors are [N, C, *spatial], as in torch, with 1 to 3 spatial axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from actorflow.functional.arranging import MOST_CONSTANTS
from actorflow.functional.convolution import Sizes, batched, per_axis, unbatched
from actorflow.functional.elementwise import where
from actorflow.functional.indexing import picked
from actorflow.functional.reduce import mean
from actorflow.functional.shape import concat
from actorflow.tensor.literals import checked_number, checked_size, of_ranks
from actorflow.tensor.op_math import in_float32
from actorflow.tensor.tensor import Tensor, apply, apply_many, as_tensor, integers
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.ops.primitives.convolution import CONV, MAX_POOL
from compiler.ops.primitives.matmul import KEEPS_PRECISION, MATMUL

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
    "channel_shuffle",
    "interpolate",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "pixel_shuffle",
    "pixel_unshuffle",
    "upsample",
]


Extents = tuple[int, ...]


def max_pool(
    rank: int,
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
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
    kernel, strides, low = _window_sizes(rank, kernel_size, stride, padding)
    dilations = per_axis(dilation, rank, "dilation")
    spans = tuple([(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)])
    high = _high(images.shape[2:], spans, strides, low, ceil_mode)
    attrs = {"kernel": kernel, "strides": strides, "low": low, "high": high, "dilation": dilations}
    y, taps = apply_many(MAX_POOL, images, **attrs)
    if not return_indices:
        return unbatched(y, x, rank)
    spatial, counts = images.shape[2:], y.shape[2:]
    # Elements from one index to the next along each axis, in a channel that is row-major.
    steps = [math.prod(spatial[axis + 1 :]) for axis in range(rank)]
    firsts = [np.arange(n) * s - p for n, s, p in zip(counts, strides, low, strict=True)]
    first = sum([f * step for f, step in zip(np.ix_(*firsts), steps, strict=True)])
    far = as_tensor(np.zeros(y.shape, np.int64))
    for number, tap in enumerate(np.ndindex(*kernel)):
        shift = sum([k * d * step for k, d, step in zip(tap, dilations, steps, strict=True)])
        # The op tells which element of its window won; its place follows from where the window
        # begins, which is constant.
        far = where(taps == number, np.full((), shift, np.int64), far)
    places = far + np.asarray(first, np.int64)
    pair = unbatched(y, x, rank), unbatched(places, x, rank)
    return cast("Tensor", pair)  # it is unpacked as a tensor is, as far as types go


@in_float32
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
    kernel, strides, low = _window_sizes(rank, kernel_size, stride, padding)
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
        # The user called no convolution, so mixed precision leaves these operands as they are.
        **{KEEPS_PRECISION: True},
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
    # Windows at the edges have fewer elements; the counts are an outer product of those along axes.
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
    y = batched(x, rank, "an adaptive pool")
    if 0 in y.shape[2:]:
        raise CompileError(f"{find_source()}: an adaptive pool needs elements, got {y.type}")
    counts = per_axis(output_size, rank, "output_size")
    # Where the counts divide the extents, all windows are alike: one pool.
    if not any([n % count for n, count in zip(y.shape[2:], counts, strict=True)]):
        return unbatched(pool(y, y.shape[2:], counts), x, rank)
    if max(counts) > MOST_WINDOWS:
        raise CompileError(
            f"{find_source()}: an adaptive pool to {list(counts)} of {y.type} has windows of"
            f" several extents, which are computed one by one, up to {MOST_WINDOWS} along an axis"
        )
    for axis in reversed(range(rank)):
        extent, count = y.shape[axis + 2], counts[axis]
        before = (slice(None),) * (axis + 2)
        parts = [
            y[(*before, slice(i * extent // count, -(-(i + 1) * extent // count)))]
            for i in range(count)
        ]
        ones = [tuple([1 if a == axis else n for a, n in enumerate(p.shape[2:])]) for p in parts]
        y = concat([pool(p, p.shape[2:], n) for p, n in zip(parts, ones, strict=True)], axis + 2)
    return unbatched(y, x, rank)


@in_float32
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


def _window_sizes(
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


_RANKS = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}
"""Modes that are of some number of axes; others are of 1 to 3."""

_CUBIC = -0.75
"""The parameter of the cubic convolution, as torch has it (Keys, 1981)."""


@in_float32
def interpolate(
    x: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Return images x [N, C, *spatial] in another size.

    Args:
        x: images of one to three spatial axes.
        size: their new extents; or
        scale_factor: what the extents are multiplied by, and rounded down.
        mode: "nearest", "nearest-exact", "area", or of one axis "linear", of two "bilinear" and
            "bicubic", of three "trilinear".
        align_corners: whether the centres of the first and last elements stay where they are, for
            the modes that weigh elements.
        recompute_scale_factor: whether places follow from the rounded size, not from the factor.
        antialias: not there: anything but False is an error.

    Raises CompileError with the user's line.
    """
    x, rank = as_tensor(x), as_tensor(x).ndim - 2
    weighs = mode in _RANKS
    if not 1 <= rank <= 3 or _RANKS.get(mode, rank) != rank or 0 in x.shape[1:]:
        raise CompileError(
            f"{find_source()}: interpolate by {mode!r} cannot resize {x.type}; 'linear' is for"
            " [N, C, L], 'bilinear' and 'bicubic' for [N, C, H, W], 'trilinear' for three axes"
        )
    if not weighs and mode not in ("nearest", "nearest-exact", "area"):
        raise CompileError(f"{find_source()}: interpolate knows no mode {mode!r:.60}")
    if antialias:
        raise CompileError(f"{find_source()}: interpolate has no antialias; pool before it")
    if align_corners is not None and not weighs:
        raise CompileError(f"{find_source()}: align_corners is for modes that weigh, not {mode!r}")
    if weighs and not x.dtype.is_float:
        raise CompileError(f"{find_source()}: interpolate by {mode!r} needs floats, got {x.type}")
    extents, factors = _resized(x, size, scale_factor)
    if mode == "area":
        return adaptive_avg_pool(rank, x, extents)
    steps = [1.0 / f if f and not recompute_scale_factor else 0.0 for f in factors]
    for axis, (count, step) in enumerate(zip(extents, steps, strict=True), 2):
        # As torch: of an extent that stays, or is doubled, what a factor rounds away is not kept.
        keeps = {"bicubic": (), "nearest": (1, 2), "nearest-exact": ()}.get(mode, (1,))
        ratio = x.shape[axis] / count
        step = step if step and count not in [n * x.shape[axis] for n in keeps] else ratio
        if weighs:
            table = _weights(x.shape[axis], count, step, mode, bool(align_corners))
            x = _weighed(x, axis, table)
        else:
            x = _nearest(x, axis, count, step, 0.5 if mode == "nearest-exact" else 0.0)
    return x


def upsample(
    x: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> Tensor:
    """Return `interpolate`."""
    return interpolate(x, size, scale_factor, mode, align_corners)


def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    """Turn channels into places: [..., C r r, H, W] -> [..., C, H r, W r] (Shi et al., 2016)."""
    x, r = as_tensor(x), checked_size(upscale_factor, "upscale_factor")
    if x.ndim < 3 or r < 1 or x.shape[-3] % (r * r):
        raise CompileError(
            f"{find_source()}: pixel_shuffle by {r} needs [..., C, H, W] with channels that"
            f" {r * r} divides, got {x.type}"
        )
    *outer, channels, high, wide = x.shape
    parts = x.reshape(math.prod(outer), channels // (r * r), r, r, high, wide)
    return parts.permute(0, 1, 4, 2, 5, 3).reshape(*outer, channels // (r * r), high * r, wide * r)


def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    """Turn places into channels: [..., C, H r, W r] -> [..., C r r, H, W]."""
    x, r = as_tensor(x), checked_size(downscale_factor, "downscale_factor")
    if x.ndim < 3 or r < 1 or x.shape[-1] % r or x.shape[-2] % r:
        raise CompileError(
            f"{find_source()}: pixel_unshuffle by {r} needs [..., C, H, W] with an H and a W that"
            f" {r} divides, got {x.type}"
        )
    *outer, channels, high, wide = x.shape
    parts = x.reshape(math.prod(outer), channels, high // r, r, wide // r, r)
    return parts.permute(0, 1, 3, 5, 2, 4).reshape(*outer, channels * r * r, high // r, wide // r)


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """Deal the channels of x [N, C, ...] out anew, one of each group in turn (Zhang, 2018)."""
    x, count = as_tensor(x), checked_size(groups, "groups")
    if x.ndim < 3 or count < 1 or x.shape[1] % count:
        raise CompileError(
            f"{find_source()}: channel_shuffle needs [N, C, ...] with channels that groups divide,"
            f" got {x.type} and groups={count}"
        )
    batch, channels, *spatial = x.shape
    parts = x.reshape(batch, count, channels // count, math.prod(spatial))
    return parts.permute(0, 2, 1, 3).reshape(x.shape)


def _resized(
    x: Tensor, size: int | Sequence[int] | None, scale_factor: float | Sequence[float] | None
) -> tuple[list[int], list[float]]:
    """Return the new extents, and the factors that were given, 0 where none was."""
    rank, old = x.ndim - 2, x.shape[2:]
    if (size is None) == (scale_factor is None):
        raise CompileError(f"{find_source()}: interpolate needs either size or scale_factor")
    if size is not None:
        sizes = integers(size, what="an extent of size")
        extents, factors = [*sizes] * (rank if len(sizes) == 1 else 1), [0.0] * rank
    else:
        listed = scale_factor if isinstance(scale_factor, (list, tuple)) else [scale_factor] * rank
        factors = [checked_number(f, "scale_factor") for f in listed]
        factors = factors if all([0.0 < f < math.inf for f in factors]) else []
        extents = [math.floor(n * f) for n, f in zip(old, factors, strict=False)]
    if {len(extents), len(factors)} != {rank} or not all(
        [1 <= n <= MOST_CONSTANTS for n in extents]
    ):
        raise CompileError(
            f"{find_source()}: interpolate of {x.type} needs one number for each of {rank} axes,"
            f" and extents of 1 to {MOST_CONSTANTS:,}; got size={size}, scale_factor={scale_factor}"
        )
    return extents, factors


def _nearest(x: Tensor, axis: int, count: int, step: float, shift: float) -> Tensor:
    """Return the elements of an axis that lie nearest before new places."""
    extent = x.shape[axis]
    # Places in float32, as torch has them: a last bit decides which element is taken.
    at = np.floor((np.arange(count, dtype=np.float32) + np.float32(shift)) * np.float32(step))
    indices = np.minimum(at.astype(np.int64), extent - 1)
    times, remainder = divmod(count, extent)
    if not remainder and np.array_equal(indices, np.repeat(np.arange(extent), times)):
        before, after = x.shape[: axis + 1], x.shape[axis + 1 :]
        wide = x.reshape(*before, 1, *after).broadcast_to(*before, times, *after)
        return wide.reshape(*before[:-1], count, *after)
    return picked(x, axis, [indices])


def _weights(extent: int, count: int, step: float, mode: str, aligned: bool) -> np.ndarray:
    """Return how much of each old element is in each new one, [count, extent]."""
    places = np.arange(count, dtype=np.float64)
    at = places * ((extent - 1) / max(count - 1, 1)) if aligned else (places + 0.5) * step - 0.5
    if mode != "bicubic":
        at = np.clip(at, 0.0, extent - 1)
    first = np.floor(at)
    far = at - first
    if mode != "bicubic":
        taps = {0: 1.0 - far, 1: far}
    else:
        taps = {tap: _cubic(np.abs(far - tap)) for tap in (-1, 0, 1, 2)}
    table = np.zeros((count, extent))
    for tap, weight in taps.items():
        indices = np.clip(first + tap, 0, extent - 1).astype(np.int64)
        np.add.at(table, (np.arange(count), indices), weight)
    return table


def _cubic(far: np.ndarray) -> np.ndarray:
    """Return the weight of an element as far away."""
    near = ((_CUBIC + 2.0) * far - (_CUBIC + 3.0)) * far * far + 1.0
    wide = ((_CUBIC * far - 5.0 * _CUBIC) * far + 8.0 * _CUBIC) * far - 4.0 * _CUBIC
    return np.asarray(np.where(far <= 1.0, near, wide))


def _weighed(x: Tensor, axis: int, table: np.ndarray) -> Tensor:
    """Return the product of an axis and a table: one pass over x, and its gradient is another."""
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    shape = (*x.shape[:axis], len(table), *x.shape[axis + 1 :])
    weights, options = table.astype(x.dtype.value), {KEEPS_PRECISION: True}
    if after == 1:
        rows = x.reshape(before, x.shape[axis])
        return apply(MATMUL, rows, as_tensor(weights.T.copy()), **options).reshape(shape)
    parts = x.reshape(before, x.shape[axis], after)
    return apply(MATMUL, as_tensor(weights), parts, **options).reshape(shape)
