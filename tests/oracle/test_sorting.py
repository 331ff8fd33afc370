"""Order along an axis, and sums, products and extremes of all elements up to each one."""

import numpy as np
import pytest
from error_texts import raises
from oracle import Case, floats, seeded

import actorflow as af

SHAPES = (
    *((5,), (1,), (0,), (3, 4), (1, 7), (4, 1), (33,), (2, 3, 4), (2, 0, 3), (2, 1, 5)),
    *(
        (6, 65),
        (129,),
        (3, 0),
        (2, 3, 1, 4),
        (3, 300),
        (1, 40),
        (40, 1),
        (5, 3, 17),
        (64,),
        (2, 32),
    ),
)
FIRST = [floats(s, key=n) for n, s in enumerate(SHAPES)]
FULL = [floats(s if s and 0 not in s else (3, 2), key=n) for n, s in enumerate(SHAPES)]


def with_zeros(arrays, key):
    """Return arrays in which some elements are 0."""
    (x,) = arrays
    return (np.where(seeded("zeros", x.shape, key).uniform(size=x.shape) < 0.2, 0.0, x) / 2,)


def with_ties(arrays):
    return (np.round(arrays[0]),)


SORTED = [
    (np.sort(floats((7,), key=n)[0]), floats((n % 5, 1 + n % 3), key=n)[0].round(1))
    for n in range(20)
]

CASES = [
    Case("sort", lambda x: x.sort(), lambda t, x: x.sort(stable=True), FIRST),
    Case(
        "sort downwards along the first axis",
        lambda x: [*af.sort(x, 0, True), af.argsort(x, 0)],
        lambda t, x: [*t.sort(x, dim=0, descending=True, stable=True), t.argsort(x, 0)],
        FULL,
    ),
    Case(
        "sort of ties",
        lambda x: [x.argsort(), x.argsort(descending=True), x.to("int32").argsort()],
        lambda t, x: [
            t.argsort(x, stable=True),
            t.argsort(x, descending=True, stable=True),
            t.argsort(x.int(), stable=True),
        ],
        [with_ties(x) for x in FULL],
    ),
    Case(
        "topk",
        lambda x: [*x.topk(1), *x.topk(x.shape[0], 0, largest=False)],
        lambda t, x: [*x.topk(1), *x.topk(x.shape[0], 0, largest=False)],
        FULL,
    ),
    Case(
        "kthvalue and median",
        lambda x: [*x.kthvalue(1), *x.median(0), *x.median(-1, keepdim=True), x.median()],
        lambda t, x: [*x.kthvalue(1), *x.median(0), *x.median(-1, keepdim=True), x.median()],
        FULL,
    ),
    Case(
        "searchsorted",
        lambda x, v: [af.searchsorted(x, v), af.bucketize(v, x, right=True)],
        lambda t, x, v: [t.searchsorted(x.detach(), v.detach()), t.bucketize(v, x, right=True)],
        SORTED,
        has_gradient=False,
    ),
    Case("cumsum", lambda x: x.cumsum(-1), lambda t, x: x.cumsum(-1), FIRST),
    Case("cumsum along the first axis", lambda x: x.cumsum(0), lambda t, x: x.cumsum(0), FULL),
    Case(
        "cumprod",
        lambda x: x.cumprod(-1),
        lambda t, x: x.cumprod(-1),
        [with_zeros((x[..., :20],), n) for n, (x,) in enumerate(FIRST)],
    ),
    Case(
        "cummax and cummin",
        lambda x: [*x.cummax(-1), *x.cummin(0)],
        lambda t, x: [*x.cummax(-1), *x.cummin(0)],
        FULL,
    ),
    Case("logcumsumexp", lambda x: x.logcumsumexp(-1), lambda t, x: x.logcumsumexp(-1), FULL),
]


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)


def computed(function, **batch):
    job = af.job(train=False)(lambda model, batch: {"y": function(batch)})
    model = af.nn.Module()
    try:
        return job.step(model, batch)["y"]
    finally:
        job.close(model)


def test_nan_is_larger_than_all_and_stays():
    x = np.array([[2, np.nan, -np.inf, np.inf, -0.0, 0.0]], np.float32)
    got = computed(lambda b: b.x.argsort(), x=x)
    np.testing.assert_array_equal(got, [[2, 4, 5, 0, 3, 1]])
    got = computed(lambda b: b.x.argsort(descending=True), x=x)
    np.testing.assert_array_equal(got, [[1, 3, 0, 4, 5, 2]])
    assert np.isnan(computed(lambda b: b.x.median(), x=x))
    np.testing.assert_array_equal(
        computed(lambda b: b.x.cummax(1).values, x=x), [[2, *[np.nan] * 5]]
    )


def test_a_gradient_of_a_gradient_of_a_product_with_zeros():
    x = np.array([2.0, 0.0, 3.0, 0.0], np.float64)

    def second(b):
        (slope,) = af.grad(b.x.cumprod(0).sum(), [b.x])
        (bend,) = af.grad((slope * slope).sum(), [b.x])
        return af.stack([slope, bend])

    slope, bend = computed(second, x=x)
    np.testing.assert_allclose(slope, [1, 8, 0, 0], atol=1e-12)

    def total(v):
        out = np.zeros(4)
        for k in range(4):
            out[k] = sum(np.prod(np.delete(v[: i + 1], k)) for i in range(k, 4))
        return (out**2).sum()

    expected = [(total(x + e) - total(x - e)) / 2e-5 for e in np.eye(4) * 1e-5]
    np.testing.assert_allclose(bend, expected, atol=1e-5)


def test_an_order_by_chance_has_every_number_once():
    got = computed(lambda b: af.randperm(1000) + b.x * 0, x=np.zeros(1, np.int64))
    assert sorted(got.tolist()) == [*range(1000)]
    assert got.tolist() != [*range(1000)]


@pytest.mark.parametrize(
    "function",
    [lambda b: af.unique(b.x), lambda b: b.x.topk(9).values, lambda b: b.x.kthvalue(0).values],
)
def test_what_cannot_be_is_told(function):
    with raises(af.CompileError):
        computed(function, x=np.ones((2, 3), np.float32))
