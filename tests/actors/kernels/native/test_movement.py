import numpy as np
import pytest

from actors.kernels.native.movement import MOVEMENT_KERNELS

KERNELS = {kernel.op: kernel for kernel in MOVEMENT_KERNELS}


def values(shape, dtype):
    """Distinct elements as far as the type allows."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 120).astype(dtype)


def test_reshape_between_two_strided_layouts_is_left_to_numpy(native, native_call):
    strided = native_call.operand(np.zeros((4, 6), np.float32).T)
    dense = native_call.operand(np.zeros((6, 4), np.float32))
    query = KERNELS["reshape"].query
    assert query({}, (strided,), (strided,)) is None
    assert query({}, (strided,), (dense,)) is not None
    assert query({}, (dense,), (strided,)) is not None


@pytest.mark.parametrize("steps", [(1, 1), (2, 3)])
def test_slice_takes_every_step_and_pad_puts_them_back(steps, native, harness, native_call, pieces):
    x = values((9, 31), "float32") + 1
    bounds = {"starts": (1, 2), "stops": (8, 30), "steps": steps}
    want = x[1 : 8 : steps[0], 2 : 30 : steps[1]]
    (y,) = native_call.call(KERNELS["slice"], bounds, (x,), (np.zeros(want.shape, "f4"),))
    np.testing.assert_array_equal(y, want)
    spans = [(n - 1) * s + 1 for n, s in zip(want.shape, steps, strict=True)]
    attrs = {"low": (1, 2), "high": (8 - spans[0], 29 - spans[1]), "steps": steps}
    mask = np.zeros_like(x)
    mask[1 : 8 : steps[0], 2 : 30 : steps[1]] = 1
    (z,) = native_call.call(KERNELS["pad"], attrs, (y,), (np.zeros_like(x),))
    np.testing.assert_array_equal(z, x * mask)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_concat_undoes_a_split(axis, native, harness, native_call, pieces):
    shape = [4, 6, 12]
    whole = values(shape, "float64")
    parts = [part.copy() for part in np.split(whole, 2, axis)]
    (y,) = native_call.call(KERNELS["concat"], {"axis": axis}, parts, (np.zeros(shape),))
    np.testing.assert_array_equal(y, whole)


def test_large_moves_are_the_same_with_one_thread_and_with_two(with_threads, native_call):
    x = np.random.default_rng(1).standard_normal((1500, 700), dtype=np.float32)
    attrs = {"perm": (1, 0)}

    def moved():
        return native_call.call(KERNELS["transpose"], attrs, (x,), (np.zeros(x.T.shape, "f4"),))

    for num_threads in (1, 2):
        np.testing.assert_array_equal(with_threads(num_threads, moved)[0], x.T)


def test_no_kernel_takes_a_call_while_native_code_is_off(native_call):
    x = native_call.operand(np.zeros(3, np.float32))
    assert all(kernel.query({}, (x,), (x,)) is None for kernel in MOVEMENT_KERNELS)
