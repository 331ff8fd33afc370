import numpy as np
import pytest

SHAPES = [(5, 7), (), (130,), (0, 2), (4, 6, 8)]
KINDS = ("dense", "transposed", "sliced", "permuted")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_nan_and_infinity_are_found_wherever_they_are(dtype, shape, kind, harness, block_bytes):
    x = harness.strided(np.random.default_rng(1), shape, np.dtype(dtype), kind)
    flag = np.array(7, np.int64)
    launch, _, _ = harness.bind("non_finite", {}, (x,), (flag,))
    for place in [None, *range(x.size)]:
        for value in (np.nan, np.inf, -np.inf):
            index = None if place is None else np.unravel_index(place, shape)
            if index is not None:
                kept, x[index] = x[index], value
            launch()
            assert flag == (index is not None)
            if index is not None:
                x[index] = kept


@pytest.mark.parametrize("earlier", [0, 1])
def test_what_was_found_earlier_stays_found(earlier, harness):
    for last, expected in ((1.0, earlier), (np.nan, 1)):
        inputs = (np.array([0.0, last], np.float32), np.array(earlier, np.int64))
        (flag,) = harness.call("non_finite", {}, inputs, (((), "int64"),))
        assert flag == expected


def test_the_largest_and_smallest_numbers_are_finite(harness):
    for dtype in (np.float16, np.float32, np.float64):
        info = np.finfo(dtype)
        x = np.array([info.max, -info.max, info.tiny, info.smallest_subnormal, 0.0], dtype)
        (flag,) = harness.call("non_finite", {}, (x,), (((), "int64"),))
        assert flag == 0
