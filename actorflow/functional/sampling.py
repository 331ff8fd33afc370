"""Images at places that the job computes: `grid_sample`, and the places of an affine map.

Places are in -1..1 along each axis, x before y before z, as in torch. With `align_corners` -1 and 1
are the middles of the first and the last element, else their outer edges.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actorflow.functional.elementwise import clamp, floor, remainder, where
from actorflow.functional.elementwise import round as rounded
from actorflow.functional.indexing import picked
from actorflow.functional.reduce import sum as summed
from actorflow.functional.shape import stack
from actorflow.tensor.op_math import in_float32
from actorflow.tensor.tensor import Tensor, as_tensor, integers
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError

__all__ = ["affine_grid", "grid_sample"]

MODES = ("bilinear", "nearest", "bicubic")
PADDINGS = ("zeros", "border", "reflection")

_CUBIC = -0.75
"""The parameter of the cubic convolution (Keys, 1981) that torch and OpenCV take."""


@in_float32
def grid_sample(
    x: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
) -> Tensor:
    """Return x [N, C, H, W] at places `grid` [N, h, w, 2]: [N, C, h, w].

    Of volumes x is [N, C, D, H, W], `grid` [N, d, h, w, 3], and "bicubic" is not known. What lies
    outside of x is 0, the nearest element of the border, or its reflection. NaN is outside of all
    elements, which gives 0.
    """
    x, grid = as_tensor(x), as_tensor(grid)
    _check_sampling(x, grid, mode, padding_mode)
    rank = x.ndim - 2
    # x comes first in the grid, and is the last axis of an image.
    places = [
        _element_of(grid[..., rank - 1 - axis], x.shape[2 + axis], align_corners)
        for axis in range(rank)
    ]
    if padding_mode != "zeros" and mode != "bicubic":
        places = [
            _moved_inside(place, extent, padding_mode, align_corners)
            for place, extent in zip(places, x.shape[2:], strict=True)
        ]
    # Rows of channels, which are taken as a whole: [N, D, H, W, C], at [N, d, h, w, *taps].
    table = x.permute(0, *range(2, x.ndim), 1)
    indices: list[Tensor | np.ndarray] = [np.arange(x.shape[0]).reshape(-1, *[1] * 2 * rank)]
    weight = as_tensor(1.0, x.dtype)
    for axis, (place, extent) in enumerate(zip(places, x.shape[2:], strict=True)):
        element, share = _taps(place, mode)
        if padding_mode != "zeros" and mode == "bicubic":
            element = _moved_inside(element, extent, padding_mode, align_corners)
        is_inside = (element >= 0.0) & (element <= float(extent - 1))  # not of NaN
        wide = [*place.shape, *[element.shape[-1] if a == axis else 1 for a in range(rank)]]
        weight = weight * where(is_inside, share, 0.0).reshape(wide)
        indices.append(where(is_inside, element, 0.0).to("int64").reshape(wide))
    terms = picked(table, 0, indices) * weight.to(x.dtype).unsqueeze(-1)
    return summed(terms, tuple(range(-1 - rank, -1))).moveaxis(-1, 1)


def _check_sampling(x: Tensor, grid: Tensor, mode: str, padding_mode: str) -> None:
    if mode not in MODES or padding_mode not in PADDINGS:
        raise CompileError(
            f"{find_source()}: grid_sample has mode {', '.join(MODES)} and padding_mode"
            f" {', '.join(PADDINGS)}; got {mode!r} and {padding_mode!r}"
        )
    rank = x.ndim - 2
    fits = rank in (2, 3) and grid.ndim == x.ndim and grid.shape[-1] == rank
    if not fits or grid.shape[0] != x.shape[0] or not x.dtype.is_float or 0 in x.shape[2:]:
        raise CompileError(
            f"{find_source()}: grid_sample needs floats [N, C, H, W] and places [N, h, w, 2], or"
            f" [N, C, D, H, W] and [N, d, h, w, 3]; got {x.type} and {grid.type}"
        )
    if mode == "bicubic" and rank == 3:
        raise CompileError(f"{find_source()}: grid_sample of volumes has no mode 'bicubic'")


def _element_of(place: Tensor, extent: int, align_corners: bool) -> Tensor:
    """Return places -1..1 as numbers of elements, with a fraction."""
    if align_corners:
        return (place + 1.0) * ((extent - 1) / 2.0)
    return ((place + 1.0) * extent - 1.0) * 0.5


def _moved_inside(place: Tensor, extent: int, padding_mode: str, align_corners: bool) -> Tensor:
    """Return the place on the border, or the reflected one, of one that is outside."""
    if padding_mode == "reflection":
        low, span = (0.0, extent - 1.0) if align_corners else (-0.5, float(extent))
        if not span:
            return place * 0.0
        distance = (place - low).abs()
        turns = floor(distance.detach() / span)
        rest = distance - turns * span
        place = low + where(remainder(turns, 2.0) == 0.0, rest, span - rest)
    return clamp(place, 0.0, extent - 1.0)


def _taps(place: Tensor, mode: str) -> tuple[Tensor, Tensor | float]:
    """Return the elements that a place is made of, [..., taps], as floats, and their weights."""
    if mode == "nearest":
        return rounded(place.detach()).unsqueeze(-1), 1.0
    first = floor(place.detach())
    share = place - first
    weights = [1.0 - share, share] if mode == "bilinear" else _cubic_weights(share)
    offsets = np.arange(len(weights), dtype=np.float32) - (mode == "bicubic")
    return first.unsqueeze(-1) + as_tensor(offsets).to(place.dtype), stack(weights, -1)


def _cubic_weights(t: Tensor) -> list[Tensor]:
    """Return the weights of four neighbours for a share t of the way between the middle two."""

    def near(d: Tensor) -> Tensor:  # up to 1 away
        return ((_CUBIC + 2.0) * d - (_CUBIC + 3.0)) * d * d + 1.0

    def far(d: Tensor) -> Tensor:  # from 1 to 2 away
        return ((_CUBIC * d - 5.0 * _CUBIC) * d + 8.0 * _CUBIC) * d - 4.0 * _CUBIC

    return [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)]


@in_float32
def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool = False) -> Tensor:
    """Return the places that an affine map takes those of an image to, for `grid_sample`.

    theta [N, 2, 3] and size (N, C, H, W) give [N, H, W, 2]; [N, 3, 4] and (N, C, D, H, W) give
    [N, D, H, W, 3].
    """
    theta, extents = as_tensor(theta), integers(size, what="an extent of affine_grid")
    rank = len(extents) - 2
    if rank not in (2, 3) or theta.shape != (extents[0], rank, rank + 1):
        raise CompileError(
            f"{find_source()}: affine_grid needs [N, 2, 3] and a size (N, C, H, W), or [N, 3, 4]"
            f" and (N, C, D, H, W); got {theta.type} and {tuple(extents)}"
        )
    axes = [_middles(extent, align_corners) for extent in extents[2:]]
    # x comes first, and is the last axis.
    meshed = [np.broadcast_to(axis, extents[2:]) for axis in np.meshgrid(*axes, indexing="ij")]
    base = np.stack([*meshed[::-1], np.ones(extents[2:])], -1).reshape(-1, rank + 1)
    places = as_tensor(base).to(theta.dtype) @ theta.swapaxes(-1, -2)
    return places.reshape(extents[0], *extents[2:], rank)


def _middles(extent: int, align_corners: bool) -> np.ndarray:
    """Return the middles of the elements of an axis as places."""
    if extent == 1 or not align_corners:
        return (2.0 * np.arange(extent) + 1.0) / extent - 1.0
    return np.linspace(-1.0, 1.0, extent)
