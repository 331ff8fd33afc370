import numpy as np
import pytest


@pytest.mark.parametrize("kind", ["dense", "transposed", "sliced", "broadcast"])
@pytest.mark.parametrize("label", ["int64", "int32", "uint8"])
def test_embedding_gathers_rows_for_ids_of_any_shape(label, kind, harness):
    rng = np.random.default_rng(1)
    weight = harness.strided(rng, (9, 5), "float32", kind)
    for shape in ((), (4,), (3, 2), (0, 3)):
        ids = rng.integers(0, 9, shape).astype(label)
        (y,) = harness.call("embedding", {}, (weight, ids), (((*shape, 5), "float32"),))
        for index in np.ndindex(shape):
            np.testing.assert_array_equal(y[index], weight[int(ids[index])])


@pytest.mark.parametrize("columns", [1, 2, 5, 6])
@pytest.mark.parametrize("kind", ["dense", "transposed", "sliced", "broadcast"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_embedding_grad_adds_rows_that_share_an_id(dtype, kind, columns, harness, block_bytes):
    rng = np.random.default_rng(2)
    for shape in ((), (30,), (3, 7), (0,)):
        dy = harness.strided(rng, (*shape, columns), dtype, kind)
        ids = rng.integers(0, 6, shape).astype(np.int32)
        types = (((6, columns), dtype),)
        (dw,) = harness.call("embedding_grad", {"rows": 6}, (dy, ids), types)
        expected = np.zeros((6, columns))
        for index in np.ndindex(shape):
            expected[ids[index]] += dy[index]
        np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-5)


def test_ids_may_be_strided(harness, block_bytes):
    ids = np.arange(24).reshape(4, 6).T[::2] % 5
    weight = np.arange(20, dtype=np.float32).reshape(5, 4)
    (y,) = harness.call("embedding", {}, (weight, ids), (((3, 4, 4), "float32"),))
    np.testing.assert_array_equal(y[..., 0], ids * 4)
    (dw,) = harness.call("embedding_grad", {"rows": 5}, (y, ids), (((5, 4), "float32"),))
    np.testing.assert_array_equal(dw[:, 0], [(ids == i).sum() * i * 4 for i in range(5)])


@pytest.mark.parametrize("bad", [5, -1])
def test_an_id_out_of_range_is_named_with_its_position(bad, harness):
    ids = np.zeros((2, 3), np.int64)
    ids[1, 2] = bad
    text = rf"id {bad} at position \(1, 2\) is outside 0\.\.4"
    with pytest.raises(IndexError, match=text):
        harness.call("embedding", {}, (np.zeros((5, 2)), ids), (((2, 3, 2), "float64"),))
    with pytest.raises(IndexError, match=text):
        harness.call(
            "embedding_grad", {"rows": 5}, (np.zeros((2, 3, 2)), ids), (((5, 2), "float64"),)
        )
