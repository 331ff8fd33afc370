"""Sums of long float32 lose less than a millionth, in every kernel of numpy that has them."""

import numpy as np
import pytest

MARK = 1e-6
COUNT = 200_000


def terms(shape, kind):
    """Return terms of one sign: equal ones, whose errors add up, or random ones."""
    if kind == "equal":
        return np.full(shape, 0.1, np.float32)
    return np.random.default_rng(1).random(shape, np.float32) + np.float32(0.5)


CASES = [
    ((COUNT,), (0,)),
    ((COUNT, 1), (0,)),
    ((COUNT, 3), (0,)),
    ((2, COUNT), (1,)),
    ((2, COUNT, 3), (1,)),
    ((COUNT // 10, 3, 10), (0, 2)),
    ((COUNT // 10, 10, 3), (0, 1)),
    ((2, 20_000), (0,)),
]


@pytest.mark.parametrize("layout", ["dense", "sliced", "transposed"])
@pytest.mark.parametrize("kind", ["equal", "random"])
@pytest.mark.parametrize(("shape", "axes"), CASES)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_sums_and_means_over_any_axes(op, shape, axes, kind, layout, harness):
    rng = np.random.default_rng(1)
    x = harness.strided(rng, shape, np.float32, layout, terms(shape, kind))
    want = getattr(np, op)(x.astype(np.float64), axes)
    attrs = {"axes": axes, "keepdims": False}
    (got,) = harness.run(op, attrs, (x,), (np.empty(want.shape, np.float32),), launches=1)
    np.testing.assert_allclose(got, want, rtol=MARK)


@pytest.mark.parametrize("kind", ["equal", "random"])
def test_denominators_of_long_rows(kind, harness):
    x = terms((2, COUNT), kind)
    wide = np.exp(x.astype(np.float64))
    attrs = {"scale": 1.0, "causal": False}
    (y,) = harness.call("softmax", attrs, (x,), ((x.shape, np.float32),))
    np.testing.assert_allclose(y, wide / wide.sum(1, keepdims=True), rtol=MARK)


@pytest.mark.parametrize("kind", ["equal", "random"])
def test_means_of_long_rows_in_layer_norms(kind, harness):
    x = terms((2, COUNT), kind)
    gamma = np.ones(COUNT, np.float32)
    types = [(x.shape, np.float32), ((2,), np.float32), ((2,), np.float32)]
    _, mean, _ = harness.call("layer_norm", {"eps": 1e-5}, (x, gamma, gamma), types)
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(1), rtol=MARK)


def test_many_rows_of_one_id(harness):
    dy, ids = terms((COUNT, 2), "equal"), np.ones(COUNT, np.int64)
    (got,) = harness.call("embedding_grad", {"rows": 2}, (dy, ids), (((2, 2), np.float32),))
    np.testing.assert_allclose(got[1], dy.astype(np.float64).sum(0), rtol=MARK)
