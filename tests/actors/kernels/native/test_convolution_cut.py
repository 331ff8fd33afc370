"""Convolutions of few images, which are cut into runs of rows, against the definition of the op."""

import itertools

import numpy as np
import pytest
from kernel_calls import GUARD, garbage, guarded

from actors.kernels.common.kernel import operands_of
from actors.kernels.library import onednn
from actors.kernels.native.convolution import NATIVE_CONVOLUTION_KERNELS
from actors.kernels.native.convolution_cut import cut_of
from compiler.contract.attrs import Attrs
from compiler.graph.registry import find_op, reference

KERNELS = {kernel.op: kernel for kernel in NATIVE_CONVOLUTION_KERNELS}
FORMS = [
    ((3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
    ((1, 1), (1, 1), (1, 1), (0, 0), (0, 0)),
    ((5, 2), (1, 2), (1, 1), (0, 1), (3, 0)),
    ((3, 3), (2, 1), (1, 2), (2, 0), (0, 4)),
    ((2, 3), (3, 3), (1, 1), (1, 1), (1, 1)),  # rows of x that no window sees
    ((3, 1), (1, 1), (7, 1), (9, 0), (9, 0)),
    ((3, 3), (1, 1), (1, 1), (12, 1), (0, 1)),  # windows that see nothing but padding
]
"""Kernel, strides, dilation, and padding at both ends."""


@pytest.mark.parametrize("layout", ["channels last", "channels first"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("images", [1, 3, 7])
def test_rows_of_few_images_are_those_of_the_whole(native, images, form, layout):
    if not onednn.is_available():
        pytest.skip("oneDNN is not installed")
    attrs = dict(zip(("strides", "dilation", "low", "high"), form[1:], strict=True))
    attrs["groups"] = 1
    rng = np.random.default_rng(images)

    def laid(array):
        last = np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        return last if layout == "channels last" else array

    # Small integers: every order of a sum is exact.
    x = laid(rng.integers(-4, 5, (images, 16, 126, 11)).astype(np.float32))
    weight = rng.integers(-4, 5, (32, 16, *form[0])).astype(np.float32)
    (y,) = reference.get(find_op("conv"))(Attrs(attrs), x, weight)
    y = laid(y)
    spread = attrs | {"spatial": x.shape[2:]}
    (dx,) = reference.get(find_op("conv_input_grad"))(Attrs(spread), y, weight)
    for op, own, inputs, expected in (
        ("conv", attrs, (x, weight), y),
        ("conv_input_grad", spread, (y, weight), laid(dx)),
    ):
        out, check = guarded(np.full_like(expected, 77))
        plan = KERNELS[op].plan(own, *[operands_of(some) for some in (inputs, (out,))])
        workspace, behind = garbage(plan.needs.workspace_bytes)
        plan.bind(inputs, (out,), workspace if workspace.size else None)()
        np.testing.assert_array_equal(out, expected)
        check()
        assert (behind == GUARD).all()


def test_how_many_rows_a_run_has_and_where_there_are_none(native):
    if not onednn.is_available():
        pytest.skip("oneDNN is not installed")
    attrs = {"strides": (1, 1), "dilation": (1, 1), "low": (1, 1), "high": (1, 1), "groups": 1}
    counts = {}
    for images, rows in itertools.product((1, 2, 7, 8), (16, 32, 70)):
        x, y = [np.zeros((images, rows, rows, 16), np.float32).transpose(0, 3, 1, 2)] * 2
        roles = (x, np.zeros((16, 16, 3, 3), np.float32), y)
        chunks = cut_of("conv", attrs, roles).chunks
        of_rows = [chunk for chunk in chunks if chunk.roles[2].shape[2] < rows]
        counts[images, rows] = len(of_rows)
        assert all([chunk.roles[2].shape[2] >= 5 for chunk in of_rows])
    assert counts == {
        (1, 16): 0, (1, 32): 0, (1, 70): 14, (2, 16): 0, (2, 32): 12, (2, 70): 14,
        (7, 16): 14, (7, 32): 14, (7, 70): 14, (8, 16): 0, (8, 32): 0, (8, 70): 0,
    }  # fmt: skip
