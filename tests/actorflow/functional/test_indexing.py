"""Indices out of range are told as the user wrote them, whoever computes; the last one wins."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn

X = np.arange(60.0, dtype=np.float32).reshape(3, 4, 5)


def computed(function, device=None, **batch):
    """Return what a function of a batch gives in a job."""
    job = af.job(train=False, **(device or {}))(lambda model, batch: {"y": function(batch)})
    model = nn.Module()
    try:
        return job.step(model, batch)["y"]
    finally:
        job.close(model)


@pytest.mark.parametrize(
    ("function", "index"),
    [
        (lambda b: b.x[b.i], [[0, -1], [2, 3]]),
        (lambda b: b.x[:, b.i, b.i], [3, 4]),
        (lambda b: b.x[0, b.i - 2, b.i], [2, 5]),
        (lambda b: b.x.scatter(2, b.i, 1.0), [[[-6]]]),
        (lambda b: b.x.index_add(0, b.i, b.x[:1]), [1 << 40]),
    ],
)
def test_a_bad_index_is_told_as_it_was_given(function, index, device):
    with raises(af.ActorFailed) as caught:
        computed(function, device, x=X, i=np.array(index))
    assert isinstance(caught.value.__cause__, IndexError)


def test_the_last_of_several_for_one_place_wins(device):
    ids = np.random.default_rng(0).integers(-9, 9, 400)
    source = np.arange(400, dtype=np.float32)
    got = computed(
        lambda b: b.x.index_copy(0, b.i, b.y), device, x=X[:1, 0, :1].repeat(9), i=ids, y=source
    )
    expected = X[:1, 0, :1].repeat(9)
    for place, value in zip(ids, source, strict=True):
        expected[place] = value
    np.testing.assert_array_equal(got, expected)


def test_integers_and_bools_are_taken_and_put_too():
    table = np.arange(12).reshape(4, 3).astype(np.int16)
    ids = np.array([3, -4, 1])
    np.testing.assert_array_equal(computed(lambda b: b.x[b.i], x=table, i=ids), table[ids])
    np.testing.assert_array_equal(
        computed(lambda b: (b.x > 5)[:, b.i], x=table, i=ids % 3), (table > 5)[:, ids % 3]
    )
    expected = table.copy()
    expected[ids] = 7
    got = computed(lambda b: b.x.index_fill(0, b.i, 7), x=table, i=ids)
    np.testing.assert_array_equal(got, expected)


def test_an_axis_without_elements_has_no_index():
    with raises(af.CompileError):
        computed(lambda b: b.x[b.i], x=X[:0], i=np.array([0]))


def reduced_one_by_one(x, index, source, reduce, include_self):
    """Return what scatter_reduce along axis 1 says, element after element, in float64."""
    out, seen = x.astype(np.float64), set()
    count = np.full(x.shape, float(include_self))
    step = {"prod": np.multiply, "amax": np.maximum, "amin": np.minimum}.get(reduce, np.add)
    for row, column in np.ndindex(index.shape):
        place = row, index[row, column]
        is_first = not include_self and place not in seen
        out[place] = source[row, column] if is_first else step(out[place], source[row, column])
        seen.add(place)
        count[place] += 1
    return out / np.maximum(count, 1) if reduce == "mean" else out


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_elements_for_one_place_are_combined(reduce, include_self, device):
    rng = np.random.default_rng(0)
    x, source = rng.normal(size=(4, 5)).astype(np.float32), rng.normal(size=(3, 9))
    index = rng.integers(0, 5, (3, 9))
    got = computed(
        lambda b: b.x.scatter_reduce(1, b.i, b.s, reduce, include_self=include_self),
        device,
        x=x,
        i=index,
        s=source.astype(np.float32),
    )
    expected = reduced_one_by_one(x, index, source, reduce, include_self)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_an_unknown_reduction_is_named():
    with raises(af.CompileError):
        computed(lambda b: b.x.scatter_reduce(0, b.i, b.x, "max"), x=X[0, 0], i=np.array([0]))
