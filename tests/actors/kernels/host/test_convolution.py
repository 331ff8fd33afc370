"""What convolutions need and hold, and how oneDNN cuts them; numbers: `test_conformance`."""

import itertools

import numpy as np
import pytest
from emulated_run import loaded, stored
from kernel_calls import bind_to, call_kernel, low_operand, needs_of, operand

from actors.kernels.common.convolution_steps import OPS
from actors.kernels.host import catalogue
from actors.kernels.library import onednn
from actors.kernels.reference import convolution as on_numpy
from compiler.contract.attrs import Attrs
from compiler.contract.types import DType
from compiler.graph.registry import find_op, reference


def calls_of(attrs, x, weight, y):
    """Yield op, attributes, inputs of the three convolutions, and of pools of rounded numbers."""
    ways = {name: attrs[name] for name in ("strides", "low", "high", "dilation")}
    conv = ways | {"groups": attrs["groups"]}
    yield "conv", conv, (x, weight)
    yield "conv_input_grad", conv | {"spatial": attrs["spatial"]}, (y, weight)
    yield "conv_weight_grad", conv | {"kernel": attrs["kernel"]}, (x, y)
    pool, ties = ways | {"kernel": attrs["kernel"]}, np.round(2 * x)
    if ties.size:
        ties.flat[0] = np.nan
    _, taps = reference.get(find_op("max_pool"))(Attrs(pool), ties)
    slopes = np.random.default_rng(0).standard_normal(taps.shape).astype(x.dtype)
    yield "max_pool", pool, (ties,)
    yield "max_pool_grad", pool | {"spatial": attrs["spatial"]}, (slopes, taps)
    yield "max_pool_pick", pool, (ties, taps)


def wanted(op, attrs, inputs):
    wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in inputs]
    return reference.get(find_op(op))(Attrs(attrs), *wide)


def as_exact(inputs, dtype):
    """Return inputs in a type, and the numbers that they are then."""
    kept = [stored(a, dtype) if a.dtype.kind == "f" else a for a in inputs]
    return kept, [loaded(a) if a.dtype.kind == "f" or dtype == "bfloat16" else a for a in kept]


def has_products(dtype):
    """Whether the library multiplies matrices of a type here; then it convolves it, too."""
    square = onednn.Matrix(DType(dtype), 64, 64, 64, 1)
    return onednn.is_available() and onednn.matmul(square, square, square) is not None


both_types = pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 1e-2)])


@both_types
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize(
    ("images", "channels", "results", "extent", "stride", "taps"),
    [
        *((1, 64, 96, 5, 1, 3), (3, 40, 128, 4, 2, 3), (9, 3, 32, 12, 1, 3), (5, 128, 64, 3, 1, 3)),
        *(
            (2, 300, 256, 5, 1, 1),
            (3, 64, 260, 4, 2, 1),
            (2, 64, 256, 5, 2, 1),
            (1, 96, 256, 1, 1, 1),
        ),
    ],
)
def test_slices_of_channels_agree_with_float64(
    is_last, images, channels, results, extent, stride, taps, dtype, limit, native
):
    rng, kernels = np.random.default_rng(images), catalogue.kernels_by_name()
    ways = dict.fromkeys(("low", "high"), (taps // 2, taps // 2))
    ways |= {"dilation": (1, 1), "strides": (stride, stride)}
    attrs = ways | {"kernel": (taps, taps), "spatial": (extent, extent), "groups": 1}
    positions = (extent - 1) // stride + 1
    shapes = ((images, channels, extent, extent), (images, results, positions, positions))
    x, y = [lying(rng.standard_normal(s).astype("f4"), is_last=is_last) for s in shapes]
    weight = rng.standard_normal((results, channels, taps, taps)).astype("f4")
    for op, own, exact in itertools.islice(calls_of(attrs, x, weight, y), 3):
        inputs, exact = as_exact(exact, dtype)
        (right,) = wanted(op, own, exact)
        shape, most = right.shape, np.abs(right).max()
        out = lying(np.zeros(shape, inputs[0].dtype), is_last=is_last and "weight" not in op)
        kernel = kernels[f"onednn.{op}"]
        if kernel.plan(own, tuple(map(low_operand, inputs)), (low_operand(out),)) is None:
            assert not has_products(dtype)
            continue
        (made,) = call_kernel(kernel, own, inputs, (out,), of=low_operand)
        np.testing.assert_allclose(loaded(made) / most, right / most, limit, limit)
        with native.at_most_threads(1):
            (alone,) = call_kernel(kernel, own, inputs, (out,), of=low_operand)
        assert alone.tobytes() == made.tobytes()


def lying(array, *, is_last):
    """Return an array as a dense one, with the second axis innermost."""
    if not is_last:
        return np.array(array, order="C")
    return np.moveaxis(np.array(np.moveaxis(array, 1, -1), order="C"), -1, 1)


def test_columns_of_one_element_are_the_input_itself():
    x, y = np.zeros((2, 8, 5, 5), np.float32), np.zeros((2, 4, 5, 5), np.float32)
    ways = {"strides": (1, 1), "low": (0, 0), "high": (0, 0), "dilation": (1, 1), "groups": 1}
    for kernel, scratch in ((1, 0), (3, 2 * 72 * 25 * 4)):
        pad = ways | dict.fromkeys(("low", "high"), (kernel // 2,) * 2)
        weight = np.zeros((4, 8, kernel, kernel), np.float32)
        kernels = catalogue.kernels_by_name()
        needs = needs_of(kernels["numpy.conv"], pad, (operand(x), operand(weight)), (operand(y),))
        assert (needs.workspace_bytes > scratch) == (kernel > 1)


def test_scratch_of_columns_is_no_more_than_a_chunk_and_what_is_padded():
    x = np.broadcast_to(np.float32(0), (64, 64, 112, 112))
    weight = np.zeros((64, 64, 3, 3), np.float32)
    ways = {"strides": (1, 1), "low": (1, 1), "high": (1, 1), "dilation": (1, 1), "groups": 1}
    padded = 64 * 114 * 114 * 4
    for op, attrs, inputs, out in (
        ("conv", ways, (x, weight), x),
        ("conv_input_grad", ways | {"spatial": (112, 112)}, (x, weight), x),
        ("conv_weight_grad", ways | {"kernel": (3, 3)}, (x, x), weight),
    ):
        kernel = catalogue.kernels_by_name()[f"numpy.{op}"]
        out = np.empty(out.shape, np.float32)
        needs = needs_of(kernel, attrs, tuple(map(operand, inputs)), (operand(out),))
        most = on_numpy.CHUNK_BYTES + padded + 2 * weight.nbytes + 64 * 112 * 112 * 4
        assert 0 < needs.workspace_bytes <= most
    assert {*OPS} == {"conv", "conv_input_grad", "conv_weight_grad"}


@pytest.mark.skipif(not onednn.is_available(), reason="oneDNN is not installed")
def test_weights_that_are_held_give_the_same_rows_until_they_are_others(native):
    """A picture is cut into rows: strides, dilations and paddings at both ends of each run."""
    rng, kernel = np.random.default_rng(4), catalogue.kernels_by_name()["onednn.conv"]
    ways = itertools.product((15, 30), (1, 2), ((0, 0), (1, 3), (2, 0)), (1, 2), (1, 2), (1, 3))
    for rows, stride, (low, high), dilation, groups, images in ways:
        x = rng.standard_normal((images, 16 * groups, rows, 5)).astype(np.float32)
        weight = rng.standard_normal((32 * groups, 16, 3, 2)).astype(np.float32)
        attrs = {"strides": (stride, 1), "dilation": (dilation, 1), "groups": groups}
        attrs |= {"low": (low, 0), "high": (high, 1)}
        right = reference.get(find_op("conv"))(Attrs(attrs), x, weight)[0]
        given = attrs | {"held": True}
        out = np.empty_like(right)
        needs = needs_of(kernel, given, *[tuple(map(operand, a)) for a in ((x, weight), (out,))])
        assert needs.prepacked_input == 1
        raw = np.zeros(needs.workspace_bytes + 64, np.uint8)
        kept = raw[-raw.ctypes.data % 64 :][: needs.workspace_bytes]
        launch = bind_to(kernel, given, (x, weight), (out,), kept)
        for factor in (1, 1, 2):
            if factor > 1:
                weight *= factor
                kept[...] = 0
            out[...] = 0
            launch()
            np.testing.assert_allclose(out, factor * right, rtol=1e-4, atol=2e-4)
