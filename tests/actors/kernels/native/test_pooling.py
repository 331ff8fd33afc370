"""The price of a pool in C: what it says of how its lanes lie is how they lie."""

from itertools import product

import numpy as np
import pytest

from actors.kernels.common.kernel import operands_of
from actors.kernels.native.convolution import NATIVE_POOLING_KERNELS, _are_adjacent, _block


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
