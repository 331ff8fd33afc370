"""What reductions on the host take; their numbers: `test_conformance`."""

import numpy as np
from error_texts import raises
from kernel_calls import needs_of

from actors.kernels.host import catalogue
from actors.kernels.native.reduce import NATIVE_REDUCE_KERNELS
from actors.kernels.reference.reduce import REDUCE_KERNELS

KERNELS = {
    "numpy": {kernel.op: kernel for kernel in REDUCE_KERNELS},
    "native": {kernel.op: kernel for kernel in NATIVE_REDUCE_KERNELS},
}
NATIVE = KERNELS["native"]


def test_reductions_over_nothing_give_zero_for_sums_and_are_refused_for_maxima(harness):
    x = np.zeros((3, 0), np.float32)
    attrs = {"axes": (1,), "keepdims": False}
    (y,) = harness.call("sum", attrs, (x,), (((3,), "float32"),))
    np.testing.assert_array_equal(y, 0)
    operands = harness.operand(x), harness.operand(y)
    with raises(LookupError):
        catalogue.select_kernel("max", attrs, operands[:1], operands[1:])


def test_what_these_kernels_do_not_do_is_left_to_numpy(native, native_call):
    def query(op, x, out, **attrs):
        operands = native_call.operand(x), native_call.operand(out)
        return needs_of(NATIVE[op], attrs, operands[:1], operands[1:])

    over = {"axes": (0,), "keepdims": False}
    apart = {"axes": (0, 2), "keepdims": False}
    assert query("sum", np.zeros((2, 3, 4)), np.zeros(3), **apart) is None
    assert query("sum", np.zeros((2, 3, 4))[..., ::2], np.zeros((3, 2)), **over) is None
    assert query("sum", np.zeros((2, 3, 1)), np.zeros(3), **apart) is not None
    assert query("sum", np.zeros((2, 3), np.int8), np.zeros(3, np.int8), **over) is None
    assert query("mean", np.zeros((2, 3), np.int64), np.zeros(3, np.int64), **over) is None
    assert query("max", np.zeros((0, 3)), np.zeros(3), **over) is None
