import math

import numpy as np
import pytest

MASK = (1 << 64) - 1


def scalar(value):
    return np.array(value, np.int64)


def philox(counter, key):
    """Philox4x64-10 after Salmon et al. (2011), on Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(second >> 64) ^ c[1] ^ k[0], second & MASK, (first >> 64) ^ c[3] ^ k[1], first & MASK]
        k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
    return c


def keeps(seed, step, key, p, element):
    words = philox((1 + element // 8, 0, step & MASK, 0), (seed & MASK, key & MASK))
    half = words[element % 8 // 2] >> (32 if element % 2 else 0) & 0xFFFFFFFF
    return half >> 8 >= math.ceil(p * 2**24)


def dropout(harness, x, seed=1, step=2, p=0.25, key=3):
    inputs = (x, scalar(seed), scalar(step))
    (y,) = harness.call("dropout", {"p": p, "key": key}, inputs, ((x.shape, x.dtype.name),))
    return y


@pytest.mark.parametrize(("seed", "step", "key"), [(1, 2, 3), (-5, 0, 2**40), (2**62, 10**9, 0)])
def test_the_mask_is_the_documented_function_of_philox(seed, step, key, harness, pieces):
    x = np.ones((7, 9), np.float32)
    y = dropout(harness, x, seed, step, 0.3, key)
    expected = [keeps(seed, step, key, 0.3, e) for e in range(x.size)]
    np.testing.assert_array_equal(y.ravel() != 0, expected)
    np.testing.assert_allclose(y[y != 0], 1 / 0.7, rtol=1e-6)


def test_the_mask_depends_neither_on_layout_nor_on_dtype(harness, pieces):
    base = dropout(harness, np.ones((5, 11), np.float32)) != 0
    np.testing.assert_array_equal(dropout(harness, np.ones((11, 5), np.float32).T) != 0, base)
    np.testing.assert_array_equal(dropout(harness, np.ones((5, 11))) != 0, base)
    np.testing.assert_array_equal(dropout(harness, np.ones(55, np.float32)) != 0, base.ravel())


def test_each_of_seed_step_and_key_changes_the_mask_and_the_same_ones_replay_it(harness):
    x = np.ones(500, np.float32)
    base = dropout(harness, x)
    np.testing.assert_array_equal(dropout(harness, x), base)
    for change in ({"seed": 2}, {"step": 3}, {"key": 4}):
        assert (dropout(harness, x, **change) != base).any()


def test_a_bound_launch_reads_the_step_each_time(harness):
    x, step = np.ones(200, np.float32), scalar(0)
    y = np.empty_like(x)
    launch, _, _ = harness.bind("dropout", {"p": 0.5, "key": 1}, (x, scalar(7), step), (y,))
    masks = []
    for now in (0, 1, 0):
        step[...] = now
        launch()
        masks.append(y.copy())
    np.testing.assert_array_equal(masks[0], masks[2])
    assert (masks[0] != masks[1]).any()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_rate_of_zeros_is_p_and_the_mean_is_kept(p, harness):
    n = 200_000
    y = dropout(harness, np.ones(n, np.float32), p=p)
    deviation = math.sqrt(p * (1 - p) / n)
    assert (y == 0).mean() == pytest.approx(p, abs=5 * deviation)
    assert y.mean() == pytest.approx(1.0, abs=5 * deviation / (1 - p) + 1e-6)


def test_dropout_in_place_gives_the_same_bytes(harness, pieces):
    x = np.random.default_rng(1).standard_normal((9, 7), dtype=np.float32)
    expected = dropout(harness, x)
    attrs = {"p": 0.25, "key": 3}
    launch, needs, _ = harness.bind("dropout", attrs, (x, scalar(1), scalar(2)), (x,))
    assert needs.in_place == ((0, 0),)
    launch()
    np.testing.assert_array_equal(x, expected)


def test_dropout_of_scalars_and_of_nothing_works(harness):
    assert float(dropout(harness, np.array(3, np.float32))) in (0.0, 4.0)
    assert dropout(harness, np.zeros((0, 3), np.float32)).shape == (0, 3)
