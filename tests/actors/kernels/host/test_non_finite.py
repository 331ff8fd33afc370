"""Whether a tensor holds NaN or infinity, by programs that numpy follows and that are C."""

import numpy as np
import pytest


def found(harness, *inputs):
    (flag,) = harness.run("non_finite", {}, inputs, (np.array(7, np.int64),))
    return int(flag)


@pytest.mark.parametrize("shape", [(5, 7), (), (130,), (4, 6, 8)])
def test_nan_and_infinity_are_found_wherever_they_are(shape, path, harness, pieces):
    x, flag = np.ones(shape, np.float32), np.array(7, np.int64)
    launch, _, _ = harness.bind("non_finite", {}, (x,), (flag,))
    for place in range(x.size):
        for value, expected in ((np.nan, 1), (np.inf, 1), (-np.inf, 1), (2.0, 0)):
            x.reshape(-1)[place] = value
            launch()
            assert flag == expected


def test_every_kind_of_nan_is_one_and_the_outermost_numbers_are_none(path, harness):
    bits = np.array([0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFFFFFFF, 0x7F800000], np.uint32)
    for one in bits:
        assert found(harness, np.array([0, one, 0], np.uint32).view(np.float32)) == 1
    for dtype in (np.float16, np.float32, np.float64):
        info = np.finfo(dtype)
        x = np.array([info.max, -info.max, info.tiny, info.smallest_subnormal, -0.0], dtype)
        assert found(harness, x) == 0


@pytest.mark.parametrize("earlier", [0, 1])
def test_what_was_found_earlier_stays_found(earlier, path, harness):
    flag = np.array(earlier, np.int64)
    assert found(harness, np.ones(3), flag) == earlier
    assert found(harness, np.array([1.0, np.inf]), flag) == 1


def test_a_large_tensor_is_searched_to_its_end(with_threads, harness):
    x = np.zeros((900, 701), np.float32)
    for threads in (1, 2):
        assert with_threads(threads, lambda: found(harness, x)) == 0
        x[-1, -1] = np.nan
        assert with_threads(threads, lambda: found(harness, x)) == 1
        x[-1, -1] = 0
