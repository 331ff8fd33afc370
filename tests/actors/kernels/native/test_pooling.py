"""Pools in C: what the price says of how lanes lie, and pools of bfloat16."""

import ctypes
from itertools import product

import numpy as np
import pytest
from emulated_run import loaded, stored
from kernel_calls import GUARD, garbage, guarded, low_operand

from actors.kernels.common.kernel import operands_of
from actors.kernels.native.convolution import NATIVE_POOLING_KERNELS, _are_adjacent, _block
from compiler.contract.attrs import Attrs
from compiler.graph.registry import find_op, reference


def channels_last(array):
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("is_last", [False, True])
def test_lanes_are_adjacent_where_each_lies_one_element_after_the_last(is_last):
    """Against the places of all lanes, counted one by one as C does."""
    answers = set()
    for channels, width, windows, stride in product(
        (1, 2, 6, 64, 200), (1, 8, 20), (1, 3, 7), (1, 2, 3)
    ):
        dense = np.zeros((2, channels, 4, width), np.float32)
        for x in (channels_last(dense) if is_last else dense, dense[..., ::2]):
            lies_last, group, at_once = _block(x, windows)
            lanes = [(c, w) for w in range(at_once) for c in range(group)]
            lanes = lanes if lies_last else sorted(lanes)
            places = [c * x.strides[1] + w * stride * x.strides[3] for c, w in lanes]
            expected = places == [i * x.itemsize for i in range(len(lanes))]
            assert _are_adjacent(x, windows, stride) == expected, (x.shape, windows, stride)
            answers.add(expected)
    assert answers == {False, True}


@pytest.mark.parametrize("kernel", NATIVE_POOLING_KERNELS, ids=lambda kernel: kernel.op)
def test_a_pool_takes_longer_the_more_its_windows_overlap_and_where_lanes_lie_apart(native, kernel):
    def duration_ns(size, layout):
        attrs = {"kernel": (size, size), "strides": (2, 2), "dilation": (1, 1), "low": (0, 0)}
        spatial = (20 + size, 20 + size)
        x = layout(np.zeros((2, 64, *spatial), np.float32))
        y, taps = [layout(np.zeros((2, 64, 11, 11), dtype)) for dtype in (np.float32, np.uint8)]
        inputs, outputs = {
            "max_pool": ((x,), (y, taps)),
            "max_pool_pick": ((x, taps), (y,)),
            "max_pool_grad": ((y, taps), (x,)),
        }[kernel.op]
        attrs |= {"spatial": spatial} if kernel.op == "max_pool_grad" else {}
        plan = kernel.plan(attrs, operands_of(inputs), operands_of(outputs))
        return plan.needs.duration_ns

    few, many = [duration_ns(size, channels_last) for size in (2, 4)]
    assert 3 < many / few < 4
    assert duration_ns(2, lambda array: array) > 2 * few


WINDOWS = {
    "tiles": {"kernel": (2, 2), "strides": (2, 2)},
    "wide tiles": {"kernel": (11, 9), "strides": (11, 9)},
    "overlap": {"kernel": (3, 3), "strides": (2, 2), "low": (1, 1), "high": (1, 1)},
    "dilated": {"kernel": (2, 3), "strides": (1, 2), "dilation": (3, 2), "low": (1, 2)},
    "wide taps": {"kernel": (17, 16), "strides": (3, 1), "low": (8, 8), "high": (8, 8)},
    "apart": {"kernel": (1, 2), "strides": (3, 4)},
}
NONE = {"strides": (1, 1), "dilation": (1, 1), "low": (0, 0), "high": (0, 0)}


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("layout", [channels_last, lambda array: array], ids=["last", "first"])
@pytest.mark.parametrize("channels", [3, 80, 130])
def test_bfloat16_is_pooled_as_float32_and_its_gradient_is_rounded_once(
    native, windows, layout, channels
):
    """Against the definitions of the ops in float64, of which the sums are rounded."""
    rng = np.random.default_rng(channels)
    attrs = NONE | WINDOWS[windows]
    images = 1 if channels == 80 else 3  # of one the channels are shared out
    x = stored(rng.standard_normal((images, channels, 22, 18)), "bfloat16")
    x.reshape(-1)[::97], x.reshape(-1)[::89] = stored(np.array([np.nan, -np.inf]), "bfloat16")
    y, taps = reference.get(find_op("max_pool"))(Attrs(attrs), loaded(x))
    dy = stored(rng.standard_normal(y.shape), "bfloat16")
    spatial = attrs | {"spatial": x.shape[2:]}
    dx = reference.get(find_op("max_pool_grad"))(Attrs(spatial), loaded(dy), taps)
    picked = reference.get(find_op("max_pool_pick"))(Attrs(attrs), loaded(x), taps)
    calls = {
        "max_pool": (attrs, (x,), (y, taps)),
        "max_pool_pick": (attrs, (x, taps), picked),
        "max_pool_grad": (spatial, (dy, taps), dx),
    }
    for kernel in NATIVE_POOLING_KERNELS:
        own_attrs, inputs, expected = calls[kernel.op]
        inputs = [layout(array) for array in inputs]
        outs = [layout(e if e.dtype.kind in "iu" else stored(e, "bfloat16")) for e in expected]
        outputs = [guarded(np.full_like(out, 77)) for out in outs]
        operands = [[low_operand(a) for a in some] for some in (inputs, outs)]
        plan = kernel.plan(own_attrs, *operands)
        workspace, behind = garbage(plan.needs.workspace_bytes)
        came = tuple([out for out, _ in outputs])
        launch = plan.bind(tuple(inputs), came, workspace if workspace.size else None)
        # The first words: three addresses, and the units of work that threads share.
        units = (ctypes.c_int64 * 4).from_address(launch.arguments)[3]
        assert units >= 2 or kernel.op == "max_pool_grad"
        launch()
        assert (behind == GUARD).all()
        for (own, check), right in zip(outputs, outs, strict=True):
            check()
            if right.dtype != np.uint16 or kernel.op != "max_pool_grad":
                np.testing.assert_array_equal(own, right)
                continue
            # A sum in float32 may lie on the other side of the middle between two.
            np.testing.assert_allclose(loaded(own), loaded(right), rtol=2**-7, atol=1e-6)
            assert (own == right).mean() > 0.999
