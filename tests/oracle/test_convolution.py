"""Convolutions, their transposes, and pools, of odd sizes, strides, paddings and groups."""

from __future__ import annotations

import numpy as np
from oracle import Case, floats, seeded

import actorflow as af
from actorflow import nn

NAMES = ("stride", "padding", "dilation", "groups")
WAYS = (
    *((1, 0, 1, 1), (1, 1, 1, 1), (2, 1, 1, 1), (3, 0, 1, 1), (1, 2, 2, 1), (2, 2, 2, 1)),
    *((1, 1, 1, 2), (2, 0, 1, 4), (5, 1, 1, 1), (4, 3, 3, 2)),
)
"""Stride, padding, dilation, groups; strides beyond the kernel among them, and depthwise."""


def extents(rank: int, kernel: int, number: int) -> tuple[int, ...]:
    """Return odd spatial extents, of which each differs."""
    return tuple([kernel + 4 - rank + (number + 2 * axis) % 3 for axis in range(rank)])


def convolutions(rank, is_transposed):
    """Yield x, weight, bias of all ways, with kernels of 1 to 3 and an empty batch."""
    for number, (stride, padding, dilation, groups) in enumerate(WAYS):
        results = 4 * (number + 1)
        for kernel, batch in ((1, 2), (3, 1), (2, 3), (3, 0)):
            shape = extents(rank, kernel * dilation, number)
            rows, columns = (4, results // groups) if is_transposed else (results, 4 // groups)
            if not (is_transposed and (min(shape) - 1) * stride < 2 * padding):
                ends = ((batch, 4, *shape), (rows, columns, *[kernel] * rank), (results,))
                yield floats(*ends, low=-1, high=1, key=(rank, number, kernel))


def way_of(bias):
    """Return the keywords of a way, which is known by its number of results."""
    return dict(zip(NAMES, WAYS[bias.shape[0] // 4 - 1], strict=True))


def conv_cases():
    for name in ("conv", "conv_transpose"):
        for rank in (1, 2, 3):
            yield Case(
                f"{name}{rank}d",
                lambda x, w, b, name=f"{name}{rank}d": getattr(af, name)(x, w, b, **way_of(b)),
                lambda t, x, w, b, name=f"{name}{rank}d": getattr(t.nn.functional, name)(
                    x, w, b, **way_of(b)
                ),
                list(convolutions(rank, name != "conv")),
            )


def whole(shape, key):
    """Return numbers of which many are equal, so that the first of them shows."""
    return (seeded(shape, key).integers(-3, 3, shape).astype(np.float64),)


IMAGES = [
    *[(2, 3, 4 + i % 5, 5 + i % 4) for i in range(12)],
    *[(1, 1, 7, 4), (0, 2, 6, 5), (3, 2, 9, 9), (2, 5, 8), (4, 1, 4, 4), (1, 2, 11, 6)],
    *[(2, 2, 6, 6), (1, 3, 4, 13)],
]
LINES = [(2, 3, 5 + i) for i in range(10)] + [(3, 6 + i) for i in range(10)]
BOXES = [(1 + i % 2, 2, 4 + i % 3, 5, 4 + i % 2) for i in range(20)]
FULL = [*[shape for shape in IMAGES if shape[0]], (1, 4, 3, 9)]
WINDOWS = (
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": (1, 3), "padding": (1, 0), "ceil_mode": True},
    {"kernel_size": 2, "stride": 3, "ceil_mode": True},
)
DILATED = {"kernel_size": 2, "stride": 1, "dilation": (3, 2)}
UNPADDED, DIVIDED = [
    WINDOWS[2] | x for x in ({"count_include_pad": False}, {"divisor_override": 3})
]
LAST = {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}
SIZES = [{"output_size": size} for size in (1, 2, 3, 5)]
SIDES = [*SIZES, {"output_size": (3, 4)}]


def pooled(name, ways, shapes, make=floats):
    """Return the case of a pool in several ways."""
    return Case(
        name,
        lambda x: [getattr(af, name)(x, **own) for own in ways],
        lambda t, x: [getattr(t.nn.functional, name)(x, **own) for own in ways],
        [make(shape, key=i) for i, shape in enumerate(shapes)],
    )


POOLS = [
    pooled("max_pool1d", [LAST], LINES, whole),
    pooled("max_pool2d", [*WINDOWS, DILATED], IMAGES, whole),
    pooled("max_pool3d", [LAST], BOXES, whole),
    pooled("avg_pool1d", [LAST], LINES),
    pooled("avg_pool2d", [*WINDOWS, UNPADDED, DIVIDED], IMAGES),
    pooled("avg_pool3d", [LAST], BOXES),
    pooled("adaptive_avg_pool1d", SIZES, LINES),
    pooled("adaptive_avg_pool2d", SIDES, FULL),
    pooled("adaptive_avg_pool3d", SIZES[::2], BOXES),
    pooled("adaptive_max_pool1d", SIZES, LINES, whole),
    pooled("adaptive_max_pool2d", SIDES, FULL, whole),
    pooled("adaptive_max_pool3d", SIZES[::2], BOXES, whole),
]


def slope_of(af_or_torch, x, w, grad):
    """Return the gradient by w of the sum of the squares of the gradient by x."""
    y = af_or_torch(x, w)
    (dx,) = grad((y * y * y).sum(), [x])
    return grad((dx * dx).sum(), [w, x])


def layered(layer, x, weight):
    """Call a layer with a given weight in place of its own."""
    layer.weight = weight
    return layer(x)


CASES = [
    *conv_cases(),
    *POOLS,
    Case(
        "padding by name",
        lambda x, w: (
            af.conv2d(x, w, padding="same", dilation=(1, 2)), af.conv2d(x, w, padding="valid")
        ),
        lambda t, x, w: (
            t.nn.functional.conv2d(x, w, padding="same", dilation=(1, 2)),
            t.nn.functional.conv2d(x, w, padding="valid"),
        ),
        [
            floats((2, 3, 7, 8), (4, 3, kh, kw), key=(kh, kw, i))
            for kh in (1, 3, 5) for kw in range(1, 5) for i in range(2)
        ],
    ),
    Case(
        "output_padding",
        lambda x, w: af.conv_transpose2d(
            x, w, stride=(2, 3), padding=1, output_padding=(1, 2), dilation=(2, 1)
        ),
        lambda t, x, w: t.nn.functional.conv_transpose2d(
            x, w, stride=(2, 3), padding=1, output_padding=(1, 2), dilation=(2, 1)
        ),
        [floats((n, 3, 4, 5), (3, 2, k, 3), key=(n, k)) for n in range(1, 6) for k in range(1, 5)],
    ),
    Case(
        "output_padding beyond the stride",
        lambda x, w: af.conv_transpose1d(x, w, padding=1, output_padding=1, dilation=2),
        lambda t, x, w: t.nn.functional.conv_transpose1d(
            x, w, padding=1, output_padding=1, dilation=2
        ),
        [floats((n, 3, 6), (3, 2, k), key=(n, k)) for n in range(1, 6) for k in range(2, 6)],
    ),
    Case(
        "where the largest are",
        lambda x: af.max_pool2d(x, 3, 2, 1, return_indices=True),
        lambda t, x: t.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True),
        [whole(shape, i) for i, shape in enumerate(IMAGES)],
    ),
    Case(
        "gradients of gradients",
        lambda x, w: slope_of(lambda x, w: af.conv2d(x, w, stride=2, padding=1), x, w, af.grad),
        lambda t, x, w: slope_of(
            lambda x, w: t.nn.functional.conv2d(x, w, stride=2, padding=1), x, w,
            lambda y, of: t.autograd.grad(y, of, create_graph=True),
        ),
        [floats((n, 2, 5, 6), (3, 2, k, 2), key=(n, k)) for n in range(1, 6) for k in range(1, 5)],
        tolerance=1e-4,
        gradient_tolerance=1e-3,
    ),
    Case(
        "gradients of gradients of pools",
        lambda x, w: slope_of(lambda x, w: af.max_pool2d(x * w, 2), x, w, af.grad),
        lambda t, x, w: slope_of(
            lambda x, w: t.nn.functional.max_pool2d(x * w, 2), x, w,
            lambda y, of: t.autograd.grad(y, of, create_graph=True),
        ),
        [floats((1 + i % 3, 2, 4, 4 + i), (4, 4 + i), key=i) for i in range(20)],
        tolerance=1e-4,
        gradient_tolerance=1e-3,
    ),
    Case(
        "layers",
        lambda x, w: (
            layered(nn.Conv2d(4, 6, 3, 2, 1, groups=2, bias=False), x, w),
            layered(nn.ConvTranspose2d(4, 4, 3, 2, 1, 1, bias=False), x, w[:4]),
            nn.MaxPool2d(3, 2, 1)(x), nn.AvgPool2d(2)(x), nn.AdaptiveAvgPool2d((2, 3))(x),
        ),
        lambda t, x, w: (
            t.nn.functional.conv2d(x, w, None, 2, 1, 1, 2),
            t.nn.functional.conv_transpose2d(x, w[:4], None, 2, 1, 1),
            t.nn.functional.max_pool2d(x, 3, 2, 1), t.nn.functional.avg_pool2d(x, 2),
            t.nn.functional.adaptive_avg_pool2d(x, (2, 3)),
        ),
        [floats((1 + i % 3, 4, 6 + i % 4, 6 + i), (6, 2, 3, 3), key=i) for i in range(20)],
    ),
]  # fmt: skip


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)
