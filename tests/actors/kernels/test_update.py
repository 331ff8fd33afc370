"""What updates and sums of batches do not take, and that threads change no bit of them."""

import numpy as np
import pytest

from actors.kernels.native.update import NATIVE_UPDATE_KERNELS

NATIVE = {kernel.op: kernel for kernel in NATIVE_UPDATE_KERNELS}
ADAMW = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def tensors(count, shape, dtype, seed=1):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape)).astype(dtype) for _ in range(count)]


def test_a_sum_of_integers_has_no_kernel(harness):
    total = np.zeros(3, np.int32)
    with pytest.raises(LookupError, match="accumulate"):
        harness.bind("accumulate", {"every": 2}, (total, total, np.array(0, np.int64)), (total,))


def test_what_these_kernels_do_not_do_is_left_to_numpy(native, native_call):
    def query(p, g):
        operands = tuple(map(native_call.operand, (p, g, np.zeros((), p.dtype))))
        return NATIVE["sgd_update"].query({"weight_decay": 0.0}, operands, operands[:1])

    half, cube = np.zeros((2, 3), np.float16), np.zeros((2, 3, 4))
    assert query(half, half) is None
    assert query(cube.transpose(2, 0, 1), cube.transpose(2, 0, 1)) is None
    assert query(np.zeros((4, 3, 2)), cube.transpose(2, 1, 0)) is None
    assert query(cube, cube) is not None


def test_updates_have_the_same_bits_with_one_thread_and_with_two(with_threads, native_call):
    p, m, v, g = tensors(4, (900, 700), "float32")
    v, lr, step = np.abs(v), np.array(0.01, np.float32), np.array(4, np.int64)
    attrs = {**ADAMW, "weight_decay": 0.1}

    def updated():
        inputs = (p, g, m, v, lr, step)
        return native_call.call(NATIVE["adamw_update"], attrs, inputs, (p, m, v))

    alone, both = with_threads(1, updated), with_threads(2, updated)
    for one, other in zip(alone, both, strict=True):
        np.testing.assert_array_equal(one, other)
