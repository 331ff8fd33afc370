import numpy as np
import pytest

SHAPES = [(5, 7), (2, 3, 4, 9), (6,), (1, 1), (40, 5), (0, 3), (3, 0)]


def softmax(x, scale=1.0, causal=False):
    z = x.astype(np.float64) * scale
    if causal:
        rows, columns = x.shape[-2:]
        for i in range(rows):
            z[..., i, i + columns - rows + 1 :] = -np.inf
    if z.size == 0:
        return z
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("kind", ["dense", "transposed", "sliced", "permuted"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_softmax_agrees_with_float64(dtype, kind, harness, block_bytes):
    rng = np.random.default_rng(1)
    for shape in SHAPES:
        for scale in (1.0, 0.3):
            x = harness.strided(rng, shape, dtype, kind)
            attrs = {"scale": scale, "causal": False}
            (y,) = harness.call("softmax", attrs, (x,), ((shape, dtype),))
            np.testing.assert_allclose(y, softmax(x, scale), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("kind", ["dense", "transposed", "permuted"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_causal_softmax_sees_columns_up_to_the_diagonal(scale, kind, harness, block_bytes):
    rng = np.random.default_rng(2)
    for shape in ((2, 3, 4, 4), (6, 6), (3, 2, 7), (2, 5, 6), (1, 30), (1, 1), (2, 3, 0, 4)):
        x = harness.strided(rng, shape, "float32", kind)
        attrs = {"scale": scale, "causal": True}
        (y,) = harness.call("softmax", attrs, (x,), ((shape, "float32"),))
        np.testing.assert_allclose(y, softmax(x, scale, causal=True), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offset", [-1e4, -120, -60, 60, 120, 1e4])
def test_softmax_is_right_far_from_zero(offset, causal, harness, block_bytes):
    x = np.random.default_rng(3).standard_normal((3, 6, 6)).astype(np.float32)
    x[1] += np.float32(offset)
    x[2, :, 0] += np.float32(offset)
    attrs = {"scale": 1.0, "causal": causal}
    (y,) = harness.call("softmax", attrs, (x,), ((x.shape, "float32"),))
    np.testing.assert_allclose(y, softmax(x, causal=causal), rtol=3e-5, atol=1e-12)


def test_what_the_mask_hides_does_not_matter_even_if_it_is_nan(harness, block_bytes):
    x = np.random.default_rng(4).standard_normal((4, 4)).astype(np.float32)
    attrs = {"scale": 0.5, "causal": True}
    (expected,) = harness.call("softmax", attrs, (x,), (((4, 4), "float32"),))
    for bad in (np.nan, np.inf, 1e30):
        z = np.where(np.tri(4, dtype=bool), x, np.float32(bad))
        (y,) = harness.call("softmax", attrs, (z,), (((4, 4), "float32"),))
        np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_nan_spoils_its_own_row_only(harness):
    x = np.zeros((3, 4), np.float32)
    x[1, 2] = np.nan
    attrs = {"scale": 1.0, "causal": False}
    (y,) = harness.call("softmax", attrs, (x,), (((3, 4), "float32"),))
    assert np.isnan(y[1]).all()
    np.testing.assert_allclose(y[[0, 2]], 0.25)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("kind", ["dense", "transposed", "permuted", "broadcast"])
def test_softmax_grad_agrees_with_float64(kind, scale, harness, block_bytes):
    rng = np.random.default_rng(5)
    for shape in SHAPES:
        dy = harness.strided(rng, shape, "float32", kind)
        y = softmax(rng.standard_normal(shape)).astype(np.float32)
        attrs = {"scale": scale}
        (dx,) = harness.call("softmax_grad", attrs, (dy, y), ((shape, "float32"),))
        g, p = dy.astype(np.float64), y.astype(np.float64)
        expected = scale * p * (g - (g * p).sum(axis=-1, keepdims=True))
        np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("offset", [0, 500])
def test_in_place_softmax_gives_the_same_bytes(offset, scale, causal, harness, block_bytes):
    x = np.random.default_rng(6).standard_normal((3, 5, 5)).astype(np.float32) + offset
    x[0] -= offset
    attrs = {"scale": scale, "causal": causal}
    (expected,) = harness.call("softmax", attrs, (x,), ((x.shape, "float32"),))
    launch, needs, _ = harness.bind("softmax", attrs, (x,), (x,))
    assert needs.in_place == ((0, 0),)
    launch()
    np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("index", [0, 1])
def test_in_place_softmax_grad_gives_the_same_bytes(index, scale, harness, block_bytes):
    rng = np.random.default_rng(7)
    inputs = [rng.standard_normal((9, 5), dtype=np.float32) for _ in range(2)]
    attrs = {"scale": scale}
    (expected,) = harness.call("softmax_grad", attrs, tuple(inputs), (((9, 5), "float32"),))
    launch, needs, _ = harness.bind("softmax_grad", attrs, inputs, (inputs[index],))
    assert (0, index) in needs.in_place
    launch()
    np.testing.assert_array_equal(inputs[index], expected)
