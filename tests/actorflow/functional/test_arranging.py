"""Pads, joins and stacks of any number of axes are numpy's, wherever a plan writes their parts."""

import itertools

import numpy as np
import pytest

import actorflow as af
from actorflow import nn

pytestmark = pytest.mark.thinned(3)  # a case on each device in turn


def computed(function, device, *arrays):
    names = [f"x{i}" for i in range(len(arrays))]

    @af.job(train=False, **device)
    def job(model, b):
        return {"y": function(*[b[name] for name in names])}

    return job.step(nn.Module(), dict(zip(names, arrays, strict=True)))["y"]


def counted(*shape, dtype="float32"):
    made = np.arange(int(np.prod(shape))).reshape(shape)
    return made % 2 == 0 if dtype == "bool" else made.astype(dtype)


def padded(x, pads, value=0, mode="constant"):
    """Return numpy's pad of what negative widths leave of x."""
    pairs = [(0, 0)] * x.ndim
    for number in range(len(pads) // 2):
        pairs[x.ndim - 1 - number] = (pads[2 * number], pads[2 * number + 1])
    around = [(max(low, 0), max(high, 0)) for low, high in pairs]
    inside = [
        slice(max(-low, 0), n + min(high, 0)) for n, (low, high) in zip(x.shape, pairs, strict=True)
    ]
    if mode == "constant":
        return np.pad(x[tuple(inside)], around, constant_values=value)
    name = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[mode]
    ends = [(max(-low, 0), max(-high, 0)) for low, high in pairs]
    wide = np.pad(x, around, mode=name)
    return wide[tuple([slice(a, n - b) for n, (a, b) in zip(wide.shape, ends, strict=True)])]


SIDES = [(0, 1), (1, 0), (2, 1), (0, 0)]
PADS = [
    *[list(sum(pairs, ())) for pairs in itertools.product(SIDES[:2], repeat=3)],
    [0, 1, 1, 0, 0, 2],
    [2, 1, 2, 1, 2, 1],
    [0, 1, 0, 0, 0, 1],
    [0, 1, 0, 1, 0, 1, 0, 1],
    [1, 2, 0, 1, 1, 0, 2, 2],
    [1, -1, 0, 1, -1, 1],
    [-1, 1, 2, 2, 1, -1, 0, 1],
    [0, 1],
    [0, 0, 0, 1],
]


@pytest.mark.parametrize("value", [0, 1.0, -2.5])
@pytest.mark.parametrize("pads", PADS, ids=str)
def test_a_pad_of_any_axes_is_numpys(pads, value, device):
    x = counted(2, 3, 2, 2)[0] if len(pads) <= 6 else counted(2, 3, 2, 2)
    made = computed(lambda x: af.pad(x, pads, value=value), device, x)
    np.testing.assert_array_equal(made, padded(x, pads, value))
    turned = computed(lambda x: af.pad(x.T * 2.0, pads, value=value), device, x)
    np.testing.assert_array_equal(turned, padded(x.T * 2, pads, value))


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "int32", "int8", "uint8", "bool"])
def test_a_pad_of_three_axes_is_of_any_dtype(dtype, device):
    x = counted(2, 2, 3, dtype=dtype)
    made = computed(lambda x: af.pad(x, [1, 0, 0, 2, 1, 1], value=1), device, x)
    assert made.dtype == x.dtype
    np.testing.assert_array_equal(made, padded(x, [1, 0, 0, 2, 1, 1], 1))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("pads", [[0, 1], [1, 2, 0, 1], [2, 1, 1, 1, 1, 0], [1, -1, -1, 2, 1, 1]])
def test_a_pad_of_the_edges_is_numpys(mode, pads, device):
    x = counted(3, 4, 5)
    made = computed(lambda x: af.pad(x, pads, mode=mode), device, x)
    np.testing.assert_array_equal(made, padded(x, pads, mode=mode))


def test_the_slope_of_a_pad_is_that_of_what_it_surrounds(device):
    x = counted(2, 2, 2)

    @af.job(train=False, **device)
    def job(model, b):
        y = af.pad(b.x * 3.0, [0, 1, 1, 0, 0, 2], value=1.5)
        weights = np.arange(3 * 3 * 4, dtype=np.float32).reshape(4, 3, 3)
        return {"y": y, "x": af.grad(y, [b.x], weights)[0]}

    made = job.step(nn.Module(), {"x": x})
    np.testing.assert_array_equal(made["y"], padded(x * 3, [0, 1, 1, 0, 0, 2], 1.5))
    weights = np.arange(36, dtype=np.float32).reshape(4, 3, 3)
    np.testing.assert_array_equal(made["x"], 3 * weights[:2, 1:, :2])


AXES = [axes for n in (2, 3, 4) for axes in itertools.permutations(range(3), min(n, 3))][:12]


@pytest.mark.parametrize("axes", [*AXES, (0, 1, 2, 0), (2, 1, 0, 1, 2), (1, 1, 2, 0)], ids=str)
def test_joins_inside_of_joins_are_numpys(axes, device):
    def joined(x, module, name):
        for number, axis in enumerate(axes):
            side = x * 0 + number
            parts = [x * 2.0, side] if number % 2 else [side, x + 1.0]
            x = getattr(module, name)(parts, axis)
        return x

    x = counted(2, 1, 3)
    made = computed(lambda x: joined(x, af, "concat"), device, x)
    np.testing.assert_array_equal(made, joined(x, np, "concatenate"))


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1, 0), (1, 1, 1), (-1, 0, -2), (0, 3, 1)])
def test_stacks_of_stacks_are_numpys(axes, device):
    def stacked(x, module):
        for axis in axes:
            x = module.stack([x, x * 2.0, x + 1.0], axis)
        return x

    x = counted(2, 3)
    np.testing.assert_array_equal(computed(lambda x: stacked(x, af), device, x), stacked(x, np))
