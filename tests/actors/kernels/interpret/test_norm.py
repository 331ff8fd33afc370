import numpy as np
import pytest

SHAPES = [(5, 7), (2, 3, 8), (6,), (3, 1), (40, 5), (0, 4)]


def forward(x, gamma, beta, eps):
    x = x.astype(np.float64)
    mean = x.mean(axis=-1)
    rstd = 1 / np.sqrt(((x - mean[..., None]) ** 2).mean(axis=-1) + eps)
    return (x - mean[..., None]) * rstd[..., None] * gamma + beta, mean, rstd


def backward(dy, x, gamma, mean, rstd):
    dy, x, gamma, mean, rstd = [a.astype(np.float64) for a in (dy, x, gamma, mean, rstd)]
    xhat = (x - mean[..., None]) * rstd[..., None]
    g = dy * gamma
    inner = g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True)
    lead = tuple(range(x.ndim - 1))
    return inner * rstd[..., None], (dy * xhat).sum(lead), dy.sum(lead)


def operands(harness, shape, dtype, kind, offset=0.0):
    rng = np.random.default_rng(len(shape))
    x = harness.strided(rng, shape, dtype, kind, rng.standard_normal(shape) + offset)
    dy = harness.strided(rng, shape, dtype, kind)
    gamma, beta = rng.standard_normal((2, shape[-1])).astype(dtype)
    return x, dy, gamma, beta


@pytest.mark.parametrize("kind", ["dense", "transposed", "sliced", "permuted"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layer_norm_agrees_with_float64(dtype, kind, harness, block_bytes):
    for shape in SHAPES:
        x, _, gamma, beta = operands(harness, shape, dtype, kind, offset=2.0)
        types = ((shape, dtype), (shape[:-1], dtype), (shape[:-1], dtype))
        results = harness.call("layer_norm", {"eps": 1e-5}, (x, gamma, beta), types)
        tolerance = 3e-5 if dtype == "float32" else 1e-10
        for got, expected in zip(results, forward(x, gamma, beta, 1e-5), strict=True):
            np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def test_layer_norm_keeps_its_digits_when_the_mean_is_large(harness):
    x = (np.random.default_rng(1).standard_normal((4, 64)) + 1000).astype(np.float32)
    one, zero = np.ones(64, np.float32), np.zeros(64, np.float32)
    types = (((4, 64), "float32"), ((4,), "float32"), ((4,), "float32"))
    y, _, _ = harness.call("layer_norm", {"eps": 1e-5}, (x, one, zero), types)
    np.testing.assert_allclose(y, forward(x, one, zero, 1e-5)[0], atol=1e-3)


@pytest.mark.parametrize("kind", ["dense", "transposed", "sliced", "permuted", "broadcast"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layer_norm_grad_agrees_with_float64(dtype, kind, harness, block_bytes):
    for shape in SHAPES:
        _, dy, gamma, beta = operands(harness, shape, dtype, kind)
        x = operands(harness, shape, dtype, "dense")[0]
        _, mean, rstd = [a.astype(dtype) for a in forward(x, gamma, beta, 1e-5)]
        types = ((shape, dtype), (shape[-1:], dtype), (shape[-1:], dtype))
        results = harness.call("layer_norm_grad", {}, (dy, x, gamma, mean, rstd), types)
        tolerance = 2e-4 if dtype == "float32" else 1e-10
        for got, want in zip(results, backward(dy, x, gamma, mean, rstd), strict=True):
            scale = max(1.0, float(np.abs(want).max(initial=0)))
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale)


def test_layer_norm_in_place_gives_the_same_bytes(harness, block_bytes):
    x, _, gamma, beta = operands(harness, (11, 6), "float32", "dense")
    types = (((11, 6), "float32"), ((11,), "float32"), ((11,), "float32"))
    expected = harness.call("layer_norm", {"eps": 1e-5}, (x, gamma, beta), types)
    outputs = (x, np.empty(11, np.float32), np.empty(11, np.float32))
    launch, needs, _ = harness.bind("layer_norm", {"eps": 1e-5}, (x, gamma, beta), outputs)
    assert needs.in_place == ((0, 0),)
    launch()
    for got, want in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("index", [0, 1])
def test_layer_norm_grad_in_place_gives_the_same_bytes(index, harness, block_bytes):
    x, dy, gamma, beta = operands(harness, (11, 6), "float32", "dense")
    _, mean, rstd = [a.astype(np.float32) for a in forward(x, gamma, beta, 1e-5)]
    inputs = (dy, x, gamma, mean, rstd)
    types = (((11, 6), "float32"), ((6,), "float32"), ((6,), "float32"))
    expected = harness.call("layer_norm_grad", {}, inputs, types)
    outputs = (inputs[index], np.empty(6, np.float32), np.empty(6, np.float32))
    launch, needs, _ = harness.bind("layer_norm_grad", {}, inputs, outputs)
    assert needs.in_place == ((0, 0), (0, 1))
    launch()
    for got, want in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(got, want)
