import numpy as np
import pytest

from actors.kernels.native.movement import MOVEMENT_KERNELS

KERNELS = {kernel.op: kernel for kernel in MOVEMENT_KERNELS}
KINDS = ("dense", "transposed", "sliced", "windowed", "permuted", "broadcast")
DTYPES = ("int8", "float16", "float32", "float64")


def values(shape, dtype):
    """Distinct elements as far as the type allows."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 120).astype(dtype)


def laid_out(harness, shape, dtype, kind):
    return harness.strided(None, shape, dtype, kind, values(shape, dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["copy", "stop_gradient"])
def test_copies_keep_every_element_of_any_layout(
    op, dtype, kind, native, harness, native_call, chunk_bytes
):
    for shape in ((), (5,), (0, 2), (3, 17), (2, 3, 19), (2, 1, 3, 20)):
        x = laid_out(harness, shape, dtype, kind)
        for out_kind in ("dense", "windowed", "transposed"):
            out = harness.strided(None, shape, dtype, out_kind, np.zeros(shape))
            (y,) = native_call.call(KERNELS[op], {}, (x,), (out,))
            np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "perm"),
    [((70, 133), (1, 0)), ((3, 21, 40), (0, 2, 1)), ((2, 9, 3, 24), (0, 2, 1, 3)),
     ((2, 9, 3, 24), (3, 1, 2, 0)), ((16, 8), (1, 0)), ((7, 1, 5), (2, 1, 0))],
)  # fmt: skip
def test_transposes_put_axis_perm_i_at_place_i(
    shape, perm, dtype, native, harness, native_call, chunk_bytes
):
    x = values(shape, dtype)
    want = x.transpose(perm).copy()
    for kind in ("dense", "windowed"):
        out = harness.strided(None, want.shape, dtype, kind, np.zeros(want.shape))
        (y,) = native_call.call(KERNELS["transpose"], {"perm": perm}, (x,), (out,))
        np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize(
    ("shape", "target"),
    [((), (3, 4)), ((5,), (40, 5)), ((5, 1), (5, 40)), ((2, 1, 3), (2, 6, 3)), ((1, 4), (0, 4))],
)
def test_broadcasts_repeat_new_and_unit_axes(shape, target, native, native_call, chunk_bytes):
    x = values(shape, "float32")
    out = np.zeros(target, np.float32)
    (y,) = native_call.call(KERNELS["broadcast_to"], {"shape": target}, (x,), (out,))
    np.testing.assert_array_equal(y, np.broadcast_to(x, target))


@pytest.mark.parametrize("kind", KINDS)
def test_reshape_keeps_row_major_order(kind, native, harness, native_call, chunk_bytes):
    for shape, target in (((2, 3, 4), (6, 4)), ((2, 3, 4), (4, 6)), ((1,), ()), ((), (1, 1))):
        x = laid_out(harness, shape, "float32", kind)
        out = np.zeros(target, np.float32)
        (y,) = native_call.call(KERNELS["reshape"], {"shape": target}, (x,), (out,))
        np.testing.assert_array_equal(y.ravel(), x.ravel())


def test_reshape_between_two_strided_layouts_is_left_to_numpy(native, native_call):
    strided = native_call.operand(np.zeros((4, 6), np.float32).T)
    dense = native_call.operand(np.zeros((6, 4), np.float32))
    query = KERNELS["reshape"].query
    assert query({}, (strided,), (strided,)) is None
    assert query({}, (strided,), (dense,)) is not None
    assert query({}, (dense,), (strided,)) is not None


@pytest.mark.parametrize("steps", [(1, 1), (2, 3)])
def test_slice_takes_every_step_and_pad_puts_them_back(
    steps, native, harness, native_call, chunk_bytes
):
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


def test_pad_of_nothing_is_zeros_and_pad_by_nothing_a_copy(native, native_call):
    attrs = {"low": (2,), "high": (1,), "steps": (1,)}
    (y,) = native_call.call(KERNELS["pad"], attrs, (np.zeros(0, "f4"),), (np.ones(3, "f4"),))
    np.testing.assert_array_equal(y, 0)
    x = values((3,), "float32")
    attrs = {"low": (0,), "high": (0,), "steps": (1,)}
    (y,) = native_call.call(KERNELS["pad"], attrs, (x,), (np.zeros(3, "f4"),))
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_concat_undoes_a_split(axis, native, harness, native_call, chunk_bytes):
    shape = [4, 6, 12]
    whole = values(shape, "float64")
    parts = [part.copy() for part in np.split(whole, 2, axis)]
    (y,) = native_call.call(KERNELS["concat"], {"axis": axis}, parts, (np.zeros(shape),))
    np.testing.assert_array_equal(y, whole)


def test_concat_takes_parts_of_different_extents_and_none(native, native_call, chunk_bytes):
    parts = [values((3, n), "float32") + n for n in (5, 0, 1, 40)]
    (y,) = native_call.call(KERNELS["concat"], {"axis": 1}, parts, (np.zeros((3, 46), "f4"),))
    np.testing.assert_array_equal(y, np.concatenate(parts, 1))


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
