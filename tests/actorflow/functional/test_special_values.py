"""Powers, extremes and places among NaN, infinities and zeros, as IEEE 754 and torch have them."""

import numpy as np
import pytest

import actorflow as af
from actorflow import nn

pytestmark = pytest.mark.thinned(3)  # a case on each device in turn

NAN, INF = np.nan, np.inf
DTYPES = ["float32", "float64"]


def computed(function, device, *arrays):
    """Return what a function gives, and the gradients of its sum."""
    names = [f"x{i}" for i in range(len(arrays))]

    @af.job(train=False, **device)
    def job(model, b):
        inputs = [b[name] for name in names]
        y = function(*inputs)
        grads = af.grad(y.sum(), inputs)
        return {"y": y, **dict(zip(names, grads, strict=True))}

    made = job.step(nn.Module(), dict(zip(names, arrays, strict=True)))
    return made["y"], [made[name] for name in names]


# base, exponent, power, and the slopes in both that torch 2.13 gives for tensors.
POWERS = np.array(
    [
        (0.0, -2.0, INF, -INF, -INF),
        (0.0, -1.0, INF, -INF, -INF),
        (0.0, -0.5, INF, -INF, -INF),
        (0.0, 0.0, 1.0, 0.0, 0.0),
        (0.0, 0.5, 0.0, INF, 0.0),
        (0.0, 1.0, 0.0, 1.0, 0.0),
        (0.0, 2.0, 0.0, 0.0, 0.0),
        (-0.0, -1.0, -INF, -INF, INF),
        (-0.0, 1.0, -0.0, 1.0, 0.0),
        (-0.0, 3.0, -0.0, 0.0, 0.0),
        (-INF, 0.5, INF, 0.0, NAN),
        (-INF, -0.5, 0.0, -0.0, NAN),
        (-INF, 2.0, INF, -INF, NAN),
        (-INF, 3.0, -INF, INF, NAN),
        (-INF, -1.0, -0.0, -0.0, NAN),
        (INF, 0.5, INF, 0.0, INF),
        (INF, 2.0, INF, INF, INF),
        (NAN, 0.0, 1.0, 0.0, NAN),
        (1.0, NAN, 1.0, NAN, 0.0),
        (NAN, 1.0, NAN, 1.0, NAN),
        (0.0, NAN, NAN, NAN, NAN),
        (-2.0, 3.0, -8.0, 12.0, NAN),
        (-2.0, 0.5, NAN, NAN, NAN),
        (4.0, 0.5, 2.0, 0.25, 2.0 * np.log(4.0)),
    ]
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_and_their_slopes_are_those_of_ieee_and_torch(dtype, device):
    x, n, y, dx, dn = POWERS.T.astype(dtype)
    made, (slope_x, slope_n) = computed(af.pow, device, x, n)
    near = {"rtol": 1e-6}
    np.testing.assert_allclose(made, y, **near)
    np.testing.assert_array_equal(np.signbit(made[y == 0]), np.signbit(y[y == 0]))
    np.testing.assert_allclose(slope_x, dx, **near)
    np.testing.assert_allclose(slope_n, dn, **near)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [0.5, -0.5, 1 / 3, 2.0, 3.0, -1.0, -2.0, 2.5, 0.0, 1.0])
def test_a_constant_exponent_changes_no_power(exponent, dtype, device):
    x = np.array([-INF, INF, 0.0, -0.0, NAN, -4.0, 4.0, 0.3], dtype)
    with np.errstate(all="ignore"):
        expected = np.array([np.float_power(v, exponent) for v in x])
    made, _ = computed(lambda x: x**exponent, device, x)
    np.testing.assert_allclose(made, expected, rtol=1e-6)
    by_op, _ = computed(lambda x: _power_in_program(x, exponent=exponent), device, x)
    np.testing.assert_allclose(by_op, expected, rtol=1e-6)
    is_zero = expected == 0
    np.testing.assert_array_equal(np.signbit(made[is_zero]), np.signbit(expected[is_zero]))
    np.testing.assert_array_equal(np.signbit(by_op[is_zero]), np.signbit(expected[is_zero]))


@af.op("x -> y")
def _power_in_program(x, *, exponent: float):
    return x**exponent


X = [1.0, NAN, 3.0, NAN, 3.0]
NUMBERS = [1.0, 3.0, 2.0, 3.0, 0.0]
EXTREMES = {
    "amax": (lambda x: af.amax(x, 0), [NAN] * 5, [0, 0.5, 0, 0.5, 0]),
    "amax of all": (af.amax, [NAN] * 5, [0, 0.5, 0, 0.5, 0]),
    "amin": (lambda x: af.amin(x, 0), [NAN] * 5, [0, 0, 0, 0, 1]),
    "max": (af.max, [0, 0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5, 0]),
    "min": (af.min, [0, 0.5, 0, 0.5, 0], [0, 0, 0, 0, 1]),
    "max along": (lambda x: af.max(x, 0).values, [0, 1, 0, 0, 0], [0, 1, 0, 0, 0]),
    "min along": (lambda x: af.min(x, 0).values, [0, 1, 0, 0, 0], [0, 0, 0, 0, 1]),
    "rows": (lambda x: af.amax(x.reshape(1, 5), 1), [NAN] * 5, [0, 0.5, 0, 0.5, 0]),
    "columns": (
        lambda x: af.amax(x.reshape(5, 1).broadcast_to(5, 2), 0) * 0.5,
        [NAN] * 5,
        [0, 0.5, 0, 0.5, 0],
    ),
    "max pool": (lambda x: af.max_pool1d(x.reshape(1, 1, 5), 5), [0, 0, 0, 1, 0], [0, 1, 0, 0, 0]),
    "adaptive max pool": (
        lambda x: af.adaptive_max_pool1d(x[:4].reshape(1, 1, 4), 2),
        [0, 1, 0, 1, 0],
        [0, 1, 0, 1, 0],
    ),
    "relu": (af.relu, [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]),
    "hardtanh": (lambda x: af.hardtanh(x, -9.0, 2.5), [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]),
    "clamp": (lambda x: af.clamp(x, 1.0, 2.0), [1, 0, 0, 0, 0], [1, 0, 1, 0, 0]),
    "clamp from below": (lambda x: af.clamp(x, min=1.0), [1, 0, 1, 0, 1], [1, 1, 1, 1, 0]),
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXTREMES)
def test_the_slope_of_an_extreme_is_torchs_beside_nan_and_among_numbers(name, dtype, device):
    function, beside_nan, among_numbers = EXTREMES[name]
    for numbers, expected in ((X, beside_nan), (NUMBERS, among_numbers)):
        _, (slope,) = computed(function, device, np.array(numbers, dtype))
        np.testing.assert_array_equal(slope, np.array(expected, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [af.maximum, af.minimum])
def test_beside_nan_both_of_two_have_the_slope(function, dtype, device):
    a = np.array([NAN, 1, NAN, 1, 2, 3], dtype)
    b = np.array([1, NAN, NAN, 1, 3, 2], dtype)
    y, slopes = computed(function, device, a, b)
    np.testing.assert_array_equal(y[:3], [NAN] * 3)
    wins = np.array([0, 1.0]) if function is af.maximum else np.array([1.0, 0])
    np.testing.assert_array_equal(slopes[0], [1, 1, 1, 0.5, *wins])
    np.testing.assert_array_equal(slopes[1], [1, 1, 1, 0.5, *wins[::-1]])


SEQUENCES = [[1, 2, 3], [-INF, 0, INF], [1, 2, NAN, NAN], [NAN], [0.5, 0.5, 2]]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
@pytest.mark.parametrize("edges", SEQUENCES)
def test_nan_lies_behind_all_numbers_of_a_sorted_sequence(edges, dtype, device):
    edges, values = np.array(edges), np.array([NAN, 0, 1.5, 9, INF, -INF, 1, 2, 0.5])
    if dtype == "int32":
        edges = np.sort(np.nan_to_num(edges, nan=9, posinf=8, neginf=-8).astype(dtype))
        values = np.nan_to_num(values, nan=9, posinf=8, neginf=-8)
    edges, values = edges.astype(dtype), values.astype(dtype)

    @af.job(train=False, **device)
    def job(model, b):
        rows = b.e.reshape(1, -1).broadcast_to(3, b.e.shape[0])
        return {
            "left": af.searchsorted(b.e, b.v),
            "right": af.searchsorted(b.e, b.v, right=True),
            "rows": af.searchsorted(rows, b.v.reshape(3, 3)),
            "bucketize": af.bucketize(b.v, b.e),
            "bucketize right": af.bucketize(b.v, b.e, right=True),
        }

    made = job.step(nn.Module(), {"e": edges, "v": values})
    left, right = [np.searchsorted(edges, values, side) for side in ("left", "right")]
    np.testing.assert_array_equal(made["left"], left)
    np.testing.assert_array_equal(made["rows"], left.reshape(3, 3))
    np.testing.assert_array_equal(made["bucketize"], left)
    np.testing.assert_array_equal(made["right"], right)
    np.testing.assert_array_equal(made["bucketize right"], right)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_powers_of_integers_are_exact_and_wrap_around(dtype):
    low = 0 if dtype == "uint8" else -9
    rng = np.random.default_rng(0)
    base, exponent = rng.integers(low, 10, 100), rng.integers(0, 40, 100)
    job = af.job(train=False)(lambda model, b: b.x**b.n)
    batch = {"x": base.astype(dtype), "n": exponent.astype(dtype)}
    expected = [(int(x) ** int(n)) % (1 << 64) for x, n in zip(base, exponent, strict=True)]
    got = job.step(nn.Module(), batch)["output"]
    np.testing.assert_array_equal(got, np.array(expected, np.uint64).astype(dtype))


def test_negative_powers_of_integers_are_quotients_of_one():
    job = af.job(train=False)(lambda model, b: b.x**b.n)
    batch = {
        "x": np.array([2, 1, -1, -1, 0], np.int8),
        "n": np.array([-1, -3, -3, -2, -1], np.int8),
    }
    assert job.step(nn.Module(), batch)["output"].tolist() == [0, 1, -1, 1, 0]


def test_extremes_of_bools_are_or_and_and():
    table = np.array([[True, False], [False, False], [True, True]])
    job = af.job(train=False)(lambda model, b: {"max": b.x.amax(1), "min": b.x.amin(1)})
    made = job.step(nn.Module(), {"x": table})
    np.testing.assert_array_equal(made["max"], table.any(1))
    np.testing.assert_array_equal(made["min"], table.all(1))
