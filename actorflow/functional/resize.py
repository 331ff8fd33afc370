"""Images made larger or smaller, and channels turned into places."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from actorflow.functional.creating import MOST_CONSTANTS
from actorflow.functional.pooling import adaptive_avg_pool
from actorflow.functional.row_numbers import picked
from actorflow.literals import checked_number, checked_size
from actorflow.tensor import Tensor, as_tensor, integers
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError

__all__ = ["channel_shuffle", "interpolate", "pixel_shuffle", "pixel_unshuffle", "upsample"]

_RANKS = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}
"""Modes that are of some number of axes; others are of 1 to 3."""

_CUBIC = -0.75
"""The parameter of the cubic convolution, as torch has it (Keys, 1981)."""


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
    extents, factors = _sizes(x, size, scale_factor)
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


def _sizes(
    x: Tensor, size: int | Sequence[int] | None, scale_factor: float | Sequence[float] | None
) -> tuple[list[int], list[float]]:
    """Return the new extents, and the factors that were given, 0 where none was."""
    rank, old = x.ndim - 2, x.shape[2:]
    if (size is None) == (scale_factor is None):
        raise CompileError(f"{find_source()}: interpolate needs either size or scale_factor")
    if size is not None:
        given = integers(size, what="an extent of size")
        extents, factors = [*given] * (rank if len(given) == 1 else 1), [0.0] * rank
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
    chosen = np.minimum(at.astype(np.int64), extent - 1)
    times, left = divmod(count, extent)
    if not left and np.array_equal(chosen, np.repeat(np.arange(extent), times)):
        before, after = x.shape[: axis + 1], x.shape[axis + 1 :]
        wide = x.reshape(*before, 1, *after).broadcast_to(*before, times, *after)
        return wide.reshape(*before[:-1], count, *after)
    return picked(x, axis, [chosen])


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
        read = np.clip(first + tap, 0, extent - 1).astype(np.int64)
        np.add.at(table, (np.arange(count), read), weight)
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
    own = table.astype(x.dtype.value)
    if after == 1:
        return (x.reshape(before, x.shape[axis]) @ as_tensor(own.T.copy())).reshape(shape)
    parts = x.reshape(before, x.shape[axis], after)
    return (as_tensor(own) @ parts).reshape(shape)
