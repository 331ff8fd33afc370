import numpy as np
import pytest


def test_ids_may_be_strided(harness, pieces):
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
