"""Pooling on images whose channels are neighbours, as convolutions of a GPU have them."""

from __future__ import annotations

import numpy as np
import pytest
from emulated_run import loaded, stored
from window_formulas import max_pool, max_pool_grad, max_pool_pick

from actors.kernels.cuda.catalogue import kernels_on
from actors.kernels.cuda.kernel import gpu_named
from compiler.contract.attrs import Attrs
from compiler.contract.types import DType, TensorType

GPU = gpu_named("h200")
WINDOWS = (
    {"kernel": (3, 3), "strides": (2, 2), "low": (1, 1), "high": (1, 1), "dilation": (1, 1)},
    {"kernel": (3, 2), "strides": (1, 3), "low": (0, 2), "high": (2, 0), "dilation": (2, 1)},
    {"kernel": (2, 3), "strides": (3, 1), "low": (-1, 0), "high": (1, -1), "dilation": (1, 3)},
)


def channels_last(x):
    """Return the same array, with its channels next to each other."""
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def last_strides(type_):
    _, c, h, w = type_.shape
    item = type_.dtype.itemsize
    return (h * w * c * item, item, w * c * item, c * item)


@pytest.mark.parametrize("ways", WINDOWS)
@pytest.mark.parametrize("op", ["max_pool", "max_pool_grad", "max_pool_pick"])
def test_channels_that_are_neighbours_are_pooled_as_formulas_say(emulated_run, op, ways):
    rng = np.random.default_rng(4)
    x = np.round(2 * rng.standard_normal((2, 5, 9, 11))).astype(np.float32)  # with equal ones
    y, taps = max_pool(x, **ways)
    dy = rng.standard_normal(y.shape).astype(np.float32)
    attrs = dict(ways)
    match op:
        case "max_pool":
            inputs, wanted = (x,), (y, taps)
        case "max_pool_pick":
            inputs, wanted = (x, taps), (max_pool_pick(x, taps, **ways),)
        case _:
            inputs, wanted = (dy, taps), (max_pool_grad(dy, taps, **ways, spatial=(9, 11)),)
            attrs["spatial"] = (9, 11)
    types = [TensorType(DType.FLOAT32, wanted[0].shape)]
    types += [TensorType(DType.UINT8, array.shape) for array in wanted[1:]]
    made = emulated_run(
        kernels_on(GPU)[f"cuda.{op}"],
        Attrs(attrs),
        [channels_last(array) for array in inputs],
        types,
        output_strides=[last_strides(type_) for type_ in types],
    )
    for got, expected in zip(made.outputs, wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("op", ["max_pool", "max_pool_grad", "max_pool_pick"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("channels", [8, 12])
@pytest.mark.parametrize("ways", WINDOWS)
def test_channels_that_are_moved_together_are_pooled_one_by_one(
    emulated_run, op, dtype, channels, ways
):
    """The oracle are the formulas on the same numbers; 12 channels of 2 bytes go one by one."""
    rng = np.random.default_rng(4)
    x = loaded(stored(np.round(2 * rng.standard_normal((2, channels, 9, 11))), dtype))
    x[0, :, 4, 5] = np.nan
    y, taps = max_pool(x, **ways)
    dy = loaded(stored(rng.standard_normal(y.shape), dtype))
    attrs = dict(ways)
    match op:
        case "max_pool":
            inputs, wanted = (x,), (y, taps)
        case "max_pool_pick":
            inputs, wanted = (x, taps), (max_pool_pick(x, taps, **ways),)
        case _:
            inputs, wanted = (dy, taps), (max_pool_grad(dy, taps, **ways, spatial=(9, 11)),)
            attrs["spatial"] = (9, 11)
    types = [TensorType(DType(dtype), wanted[0].shape)]
    types += [TensorType(DType.UINT8, array.shape) for array in wanted[1:]]
    made = emulated_run(
        kernels_on(GPU)[f"cuda.{op}"],
        Attrs(attrs),
        [channels_last(stored(a, dtype) if a.dtype.kind == "f" else a) for a in inputs],
        types,
        output_strides=[last_strides(type_) for type_ in types],
    )
    (call,) = made.calls
    num_results = wanted[0].size
    at_once = {("float32", 8): 4, ("float32", 12): 4, ("bfloat16", 8): 8}.get((dtype, channels), 1)
    assert call.num_blocks == -(-num_results // at_once // 256)
    exact = 0 if op != "max_pool_grad" else 1e-6 if dtype == "float32" else 2**-8
    for got, expected in zip(made.outputs, wanted, strict=True):
        values = got if got.dtype == np.uint8 else loaded(got)
        np.testing.assert_allclose(values, expected, rtol=exact, atol=exact)
