"""Norms of vectors of zeros, and what divides by them, have torch's slopes, and none is NaN."""

import numpy as np
import pytest

import actorflow as af
from actorflow import nn

pytestmark = pytest.mark.thinned(3)  # a case on each device in turn

DTYPES = ["float32", "float64"]
X = np.array([[0, 0, 0], [1, 2, 2], [0, 3, 0]])
OTHER = np.array([[1, 1, 1], [0, 0, 0], [0, 1, 0]])
MASK = np.array([0, 1, 1])
THIRD, TWO_THIRDS = 1 / 3, 2 / 3
ZERO = [0.0] * 3


def slopes(function, device, dtype, *arrays, mask=None):
    """Return the gradients of the sum of a function of tensors, each row times its mask."""
    names = [f"x{i}" for i in range(len(arrays))]

    @af.job(train=False, **device)
    def job(model, b):
        inputs = [b[name] for name in names]
        y = function(*inputs)
        weights = np.ones(len(X)) if mask is None else mask
        y = y * weights.reshape([-1] + [1] * (y.ndim - 1)).astype(dtype)
        return dict(zip(names, af.grad(y.sum(), inputs), strict=True))

    made = job.step(nn.Module(), {n: a.astype(dtype) for n, a in zip(names, arrays, strict=True)})
    return [made[name] for name in names]


def distance(p):
    return lambda x: af.pairwise_distance(x, 0.0 * x.detach(), p, 0.0)


NORMS = {
    1: [ZERO, [1, 1, 1], [0, 1, 0]],
    2: [ZERO, [THIRD, TWO_THIRDS, TWO_THIRDS], [0, 1, 0]],
    3: [ZERO, [0.15125185, 0.60500741, 0.60500741], [0, 1, 0]],
    1.5: [ZERO, [0.53159022, 0.75178212, 0.75178212], [0, 1, 0]],
    0.5: [ZERO, [3.82842712, 2.70710678, 2.70710678], [0, 1, 0]],
    np.inf: [ZERO, [0, 0.5, 0.5], [0, 1, 0]],
}
"""Torch's slopes of norms of the rows of X."""


@pytest.mark.thinned(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", NORMS)
def test_a_norm_of_zeros_has_no_slope(p, dtype, device):
    for function in (lambda x: af.norm(x, p, 1), distance(p)):
        (slope,) = slopes(function, device, dtype, X)
        np.testing.assert_allclose(slope, NORMS[p], rtol=2e-6, atol=1e-12)


NORMALISED = {
    1: [ZERO, [1 / 3, 0, 1 / 3]],
    2: [[4 / 27, -1 / 27, -1 / 27], [1 / 3, 0, 1 / 3]],
    3: [[0.27452549, -0.06863135, -0.06863135], [1 / 3, 0, 1 / 3]],
    1.5: [[0.07033463, -0.01758367, -0.01758367], [1 / 3, 0, 1 / 3]],
    np.inf: [[0.5, -0.125, -0.125], [1 / 3, 0, 1 / 3]],
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", NORMALISED)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_vector_of_zeros_is_normalised_by_eps_alone(dim, p, dtype, device):
    def function(x):
        return af.normalize(x, p, 1) if dim else af.normalize(x.T, p, 0).T

    (slope,) = slopes(function, device, dtype, X)
    np.testing.assert_allclose(slope[0], [1e12] * 3, rtol=1e-6)
    np.testing.assert_allclose(slope[1:], NORMALISED[p], rtol=1e-5, atol=1e-6)
    (masked,) = slopes(function, device, dtype, X, mask=MASK)
    np.testing.assert_array_equal(masked[0], 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cosine_of_zeros_has_the_slope_of_eps(dtype, device):
    first, second = slopes(af.cosine_similarity, device, dtype, X, OTHER)
    np.testing.assert_allclose(first[0], [1e8 / 3**0.5] * 3, rtol=1e-6)
    np.testing.assert_allclose(second[1], np.array([1, 2, 2]) * 1e8 / 3, rtol=1e-6)
    np.testing.assert_allclose(first[1:], 0, atol=1e-6)
    np.testing.assert_allclose(second[[0, 2]], 0, atol=1e-6)
    for slope in slopes(af.cosine_similarity, device, dtype, X, OTHER, mask=np.array([0, 0, 1])):
        np.testing.assert_array_equal(slope[:2], 0)


OF_ZEROS = {
    "std": lambda x: af.std(x, 1),
    "std of columns": lambda x: af.std(x.T, 0),
    "hypot": lambda x: af.hypot(x, x),
    "cosine_embedding_loss": lambda x: af.cosine_embedding_loss(
        x, x, np.ones(3, x.dtype.value), reduction="none"
    ),
    "triplet_margin_loss": lambda x: af.triplet_margin_loss(
        x, x.detach(), x.detach(), eps=0.0, reduction="none"
    ),
    "rms_norm": lambda x: af.rms_norm(x, 3),
    "layer_norm": lambda x: af.layer_norm(x, 3),
    "local_response_norm": lambda x: af.local_response_norm(x.reshape(3, 3, 1), 2),
    "by hand": lambda x: x / af.norm(x, dim=1, keepdim=True).clamp(min=1e-12),
}


@pytest.mark.parametrize("name", OF_ZEROS)
def test_a_row_of_zeros_that_is_masked_has_no_slope(name, device):
    (slope,) = slopes(OF_ZEROS[name], device, "float32", X, mask=MASK)
    np.testing.assert_array_equal(slope[0], 0)
    assert np.isfinite(slope).all()


def test_the_cosine_of_vectors_whose_norm_overflows_is_0_and_no_nan(device):
    huge = np.full((3, 3), 1e30)
    for slope in slopes(af.cosine_similarity, device, "float32", huge, huge):
        np.testing.assert_array_equal(slope, 0)
