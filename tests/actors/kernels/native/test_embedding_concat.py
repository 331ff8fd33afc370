import numpy as np
import pytest

from actors.kernels.interpret.embedding_concat import EMBEDDING_CONCAT_KERNELS
from actors.kernels.native.embedding_concat import NATIVE_EMBEDDING_CONCAT_KERNELS

KERNELS = (*NATIVE_EMBEDDING_CONCAT_KERNELS, *EMBEDDING_CONCAT_KERNELS)


def case(harness, shape, dtype, seed=1):
    """Parts of several widths, laid out in several ways; returns (attrs, inputs, expected)."""
    rng = np.random.default_rng(seed)
    all_ids = rng.integers(0, 20, (*shape, 3)).astype(np.int32)
    wide = harness.strided(rng, (20, 16), dtype, "windowed")
    narrow = rng.standard_normal((40, 1)).astype(dtype)
    plain = harness.strided(rng, (*shape, 5), dtype, "permuted")
    row = harness.strided(rng, (*shape, 32), dtype, "windowed")
    inputs = (wide, all_ids[..., 0], plain, narrow, all_ids[..., 2], row, wide, all_ids[..., 1])
    parts = (wide[all_ids[..., 0]], plain, narrow[all_ids[..., 2]], row, wide[all_ids[..., 1]])
    return {"picked": (1, 0, 1, 0, 1)}, inputs, np.concatenate(parts, -1)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (300,), (4, 90), (0, 3)])
def test_parts_stand_side_by_side(shape, dtype, kernel, native, harness, native_call, chunk_bytes):
    attrs, inputs, want = case(harness, shape, dtype)
    (got,) = native_call.call(kernel, attrs, inputs, (np.zeros(want.shape, dtype),))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_bad_id_of_any_part_is_named(kernel, native, harness, native_call):
    attrs, inputs, want = case(harness, (9,), "float32")
    inputs[4][7] = 40
    with pytest.raises(IndexError, match=r"^id 40 at position 7 is outside 0\.\.39$"):
        native_call.call(kernel, attrs, inputs, (want,))


def test_many_rows_are_the_same_with_one_thread_and_with_two(with_threads, harness, native_call):
    attrs, inputs, want = case(harness, (20_000,), "float32")

    def joined():
        return native_call.call(KERNELS[0], attrs, inputs, (np.zeros_like(want),))[0]

    for num_threads in (1, 2):
        np.testing.assert_array_equal(with_threads(num_threads, joined), want)
