"""Variances and what is normalised keep their digits, wherever the mean lies."""

import numpy as np
import pytest

import actorflow as af
from actorflow import nn

pytestmark = pytest.mark.thinned(3)  # a case on each device in turn

MEANS = np.array([0, -1e3, 1e5, -1e6, 1e7])
DTYPES = [
    pytest.param(name, marks=pytest.mark.thinned(2))  # the types in turn
    for name in ("float32", "float64")
]


def around_means(dtype, axis, *others):
    """Return numbers with one mean for each place on an axis."""
    shape = [*others]
    shape.insert(axis, len(MEANS))
    own = np.random.default_rng(len(shape)).normal(size=shape)
    along = MEANS.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return (own * (1 + 1e-6 * abs(along)) + along).astype(dtype)


def computed(function, device, x):
    """Return what a function gives, and the gradient of its sum times 1, 2, 3, ..."""

    @af.job(train=False, **device)
    def job(model, b):
        y = function(b.x)
        weights = np.arange(1, 1 + np.prod(y.shape, dtype=int), dtype=y.dtype.value)
        return {"y": y, "x": af.grad(y, [b.x], weights.reshape(y.shape))[0]}

    return job.step(nn.Module(), {"x": x})


def weights_of(shape):
    return np.arange(1.0, 1 + np.prod(shape, dtype=int)).reshape(shape)


def variance(x, axes, correction):
    """Return the variance, and the gradient of its weighed sum, in long doubles."""
    x = x.astype(np.longdouble)
    difference = x - x.mean(axes, keepdims=True)
    made = (difference**2).sum(axes, keepdims=True)
    divisor = x.size / made.size - correction
    dy = weights_of(made.shape)
    return made / divisor, 2 * difference / divisor * dy


STATISTICS = {
    "rows": (lambda x: af.var(x, 1, keepdim=True), 0, (40,), (1,), 1),
    "columns": (lambda x: af.var(x, 0, keepdim=True), 1, (37,), (0,), 1),
    "columns, biased": (lambda x: x.var(0, correction=0, keepdim=True), 1, (64,), (0,), 0),
    "channels": (lambda x: x.var((0, 2), keepdim=True), 1, (6, 9), (0, 2), 1),
    "the middle": (lambda x: x.var(1, keepdim=True), 2, (3, 20), (1,), 1),
    "wide rows": (lambda x: x.var(-1, correction=2, keepdim=True), 0, (5000,), (1,), 2),
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ["var", "std"])
@pytest.mark.parametrize("name", STATISTICS)
def test_a_variance_has_its_digits_wherever_the_mean_is(name, function, dtype, device):
    of, axis, others, axes, correction = STATISTICS[name]
    x = around_means(dtype, axis, *others)
    expected, gradient = variance(x, axes, correction)
    if function == "std":
        expected = np.sqrt(expected)
        gradient = gradient / (2 * expected)
    made = computed(of if function == "var" else lambda x: of(x).sqrt(), device, x)
    if function == "std":
        again = computed(lambda x: af.std(x, axes, correction=correction, keepdim=True), device, x)
        np.testing.assert_allclose(again["y"], made["y"], rtol=1e-6)
    near = 2e-6 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(made["y"], expected, rtol=near)
    size = abs(gradient).max(axes, keepdims=True)
    np.testing.assert_allclose(made["x"] / size, gradient / size, atol=near)


@pytest.mark.parametrize("number", [0.1, 1e5 + 0.1, 3e7, 1e20, -7e30, 0.0])
@pytest.mark.parametrize("count", [7, 100, 5000])
def test_equal_numbers_vary_by_no_more_than_a_rounding(number, count, device):
    x = np.full((2, count), number, np.float32)
    made = computed(lambda x: af.std(x, 1), device, x)
    assert (made["y"] >= 0).all()
    assert (made["y"] <= 2e-7 * abs(number)).all()
    assert np.isfinite(made["x"]).all()


def test_squares_that_overflow_make_a_variance_infinite_and_its_gradient_not(device):
    x = np.random.default_rng(1).normal(size=(3, 50)).astype(np.float32) * np.float32(1e30)
    made = computed(lambda x: af.var(x, 1, keepdim=True), device, x)
    assert (made["y"] == np.inf).all()
    gradient = variance(x, (1,), 1)[1]
    np.testing.assert_allclose(made["x"] / 1e30, gradient / 1e30, atol=1e-4)


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm", "instance_norm"])
def test_what_is_normalised_is_0_where_its_variance_overflows(name, device):
    of, _, others, _ = NORMS[name]
    x = np.random.default_rng(2).normal(size=(5, *others)).astype(np.float32) * np.float32(1e30)
    made = computed(of, device, x)
    np.testing.assert_array_equal(made["y"], 0)
    np.testing.assert_array_equal(made["x"], 0)


@pytest.mark.parametrize("p", [3, 1.5, 5])
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_a_norm_of_any_power_fits_where_its_elements_do(p, size, device):
    x = (np.random.default_rng(3).normal(size=(4, 30)) * size).astype(np.float32)
    made = computed(lambda x: af.norm(x, p, 1), device, x)
    wide = x.astype(np.longdouble)
    norm = (abs(wide) ** p).sum(1) ** (1 / np.longdouble(p))
    np.testing.assert_allclose(made["y"], norm, rtol=1e-6)
    ratio = abs(wide) / norm[:, None]
    gradient = np.sign(wide) * ratio ** (p - 1) * weights_of(4)[:, None]
    np.testing.assert_allclose(made["x"], gradient, atol=1e-5)


def test_a_norm_of_zeros_and_of_nothing_is_0(device):
    made = computed(lambda x: af.norm(x, 3, 1), device, np.zeros((2, 4), np.float32))
    assert not made["y"].any()
    assert not made["x"].any()
    made = computed(lambda x: af.norm(x, 3, 1), device, np.zeros((2, 0), np.float32))
    assert not made["y"].any()


def normalised(x, axes, eps=1e-5):
    """Return what is normalised, and the gradient of its weighed sum, in long doubles."""
    x = x.astype(np.longdouble)
    difference = x - x.mean(axes, keepdims=True)
    rstd = 1 / np.sqrt((difference**2).mean(axes, keepdims=True) + eps)
    y, dy = difference * rstd, weights_of(x.shape)
    rest = dy - dy.mean(axes, keepdims=True) - y * (dy * y).mean(axes, keepdims=True)
    return y, rest * rstd


def ones(n, x):
    return np.ones(n, x.dtype.value)


NORMS = {
    "layer_norm": (lambda x: af.layer_norm(x, 40), 0, (40,), (1,)),
    "layer_norm, affine": (
        lambda x: af.layer_norm(x, 40, ones(40, x), 0 * ones(40, x)),
        0,
        (40,),
        (1,),
    ),
    "layer_norm of several axes": (
        lambda x: af.layer_norm(x, (6, 5), np.ones((6, 5), x.dtype.value)),
        0,
        (6, 5),
        (1, 2),
    ),
    "group_norm": (
        lambda x: af.group_norm(x, 5, ones(10, x), 0 * ones(10, x)),
        1,
        (3, 2, 7),
        (2, 3),
    ),
    "instance_norm": (lambda x: af.instance_norm(x), 1, (3, 30), (2,)),
    "batch_norm": (lambda x: af.batch_norm(x, training=True), 1, (6, 9), (0, 2)),
    "batch_norm of columns": (
        lambda x: af.batch_norm(x, None, None, ones(5, x), 0 * ones(5, x), training=True),
        1,
        (30,),
        (0,),
    ),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_what_is_normalised_has_its_digits_wherever_the_mean_is(name, dtype, device):
    of, axis, others, axes = NORMS[name]
    x = around_means(dtype, axis, *others)
    y, gradient = normalised(x, axes)
    shape = x.shape
    if name == "group_norm":  # [N, groups, 2, S]: groups of two channels
        given = x.reshape(3, 10, 7)
        made = computed(of, device, given)
        made = {key: array.reshape(shape) for key, array in made.items()}
    else:
        made = computed(of, device, x)
    near = 3e-6 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(made["y"], y, atol=near)
    size = abs(gradient).max(axes, keepdims=True)
    np.testing.assert_allclose(made["x"] / size, gradient / size, atol=10 * near)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_running_statistics_follow_the_variance(layer, device):
    class Net(nn.Module):
        def __init__(self):
            options = {"track_running_stats": True} if layer is nn.InstanceNorm1d else {}
            self.norm = layer(len(MEANS), momentum=1.0, **options)
            self.last = nn.Linear(1, 1)

        def __call__(self, x):
            return self.norm(x).mean() + self.last(x[:1, 0, :1]).sum() * 0.0

    @af.job(optimizer=af.optim.SGD(0.0), **device)
    def train(model, b):
        return model(b.x)

    x, model = around_means("float32", 1, 4, 50), Net()
    train.step(model, {"x": x})
    train.close(model)
    state, wide = model.state(), x.astype(np.float64)
    if layer is nn.BatchNorm1d:
        mean, var = wide.mean((0, 2)), wide.var((0, 2), ddof=1)
    else:
        mean, var = wide.mean((0, 2)), wide.var(2, ddof=1).mean(0)
    np.testing.assert_allclose(state["norm.running_mean"], mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(state["norm.running_var"], var, rtol=2e-6)
