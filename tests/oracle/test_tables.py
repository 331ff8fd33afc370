"""Rows of tables by integers, in bags too, and products of two vectors with a table of matrices."""

import numpy as np
import pytest
from error_texts import raises
from oracle import Case, floats, seeded

import actorflow as af
from actorflow import nn

TABLES = [(5, 3), (1, 1), (7, 4), (4, 1), (9, 17)]


def ids(shape, rows, key):
    return seeded("bags", shape, rows, key).integers(0, rows, shape)


MATRICES = [
    (*floats(table, key=(n, table)), ids((n % 4, 1 + n), table[0], n))
    for n in range(4)
    for table in TABLES
]
"""A table, and bags of equal length."""

OFFSETS = ([0], [0, 2], [0, 0, 3], [0, 4, 4, 5])
VECTORS = [
    (*floats(table, key=(n, table)), ids((6,), table[0], n), np.array(offsets))
    for n, offsets in enumerate(OFFSETS)
    for table in TABLES
]
"""A table, ids one after the other, and where bags begin, some of which are empty."""

WEIGHED = [(*given[:2], *floats(given[1].shape, key=n)) for n, given in enumerate(MATRICES)]
WEIGHED_VECTORS = [
    (w, i, np.append(o, 6), *floats((6,), key=n)) for n, (w, i, o) in enumerate(VECTORS)
]
BILINEAR = [
    floats((*lead, a), (*lead, b), (out, a, b), (out,), key=lead)
    for lead in ((), (3,), (2, 1), (0,), (4, 2))
    for a, b, out in ((2, 3, 4), (1, 1, 1), (5, 1, 2), (1, 6, 1))
]


def bags(name, sets, call):
    """Return a case of `embedding_bag`; torch's is called with the ids first as well."""
    return Case(
        name,
        lambda *given: call(af.embedding_bag, *given),
        lambda t, *given: call(t.nn.functional.embedding_bag, *given),
        sets,
    )


CASES = [
    Case(
        "embedding",
        lambda w, i: af.embedding(i, w),
        lambda t, w, i: t.nn.functional.embedding(i, w),
        MATRICES,
    ),
    Case(
        "embedding with padding",
        lambda w, i: af.embedding(i, w, padding_idx=-1),
        lambda t, w, i: t.nn.functional.embedding(i, w, padding_idx=-1),
        MATRICES,
    ),
    *[
        case
        for mode in ("sum", "mean", "max")
        for case in (
            bags(f"{mode} of bags", MATRICES, lambda f, w, i, m=mode: f(i, w, mode=m)),
            bags(
                f"{mode} of bags with padding",
                MATRICES,
                lambda f, w, i, m=mode: f(i, w, mode=m, padding_idx=0),
            ),
            bags(f"{mode} by offsets", VECTORS, lambda f, w, i, o, m=mode: f(i, w, o, mode=m)),
            bags(
                f"{mode} by offsets with padding",
                VECTORS,
                lambda f, w, i, o, m=mode: f(i, w, o, mode=m, padding_idx=0),
            ),
        )
    ],
    bags(
        "weighed bags",
        WEIGHED,
        lambda f, w, i, s: f(i, w, mode="sum", per_sample_weights=s),
    ),
    bags(
        "weighed by offsets",
        WEIGHED_VECTORS,
        lambda f, w, i, o, s: f(
            i, w, o, mode="sum", per_sample_weights=s, include_last_offset=True
        ),
    ),
    Case(
        "bilinear",
        af.bilinear,
        lambda t, *given: t.nn.functional.bilinear(*given),
        BILINEAR,
    ),
]


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, i: af.embedding(x, i),
        lambda x, i: af.embedding_bag(x, i),
        lambda x, i: af.embedding(i, x, 4),
        lambda x, i: af.embedding_bag(i, x, mode="min"),
        lambda x, i: af.embedding_bag(i, x, i[0]),
        lambda x, i: af.embedding_bag(i[0], x),
        lambda x, i: af.embedding_bag(i, x, per_sample_weights=x),
        lambda x, i: af.bilinear(x, x, x),
    ],
)
def test_what_does_not_fit_is_an_error_on_the_users_line(call):
    job = af.job(train=False)(lambda model, batch: call(batch.x, batch.i))
    given = {"x": np.ones((3, 4), np.float32), "i": np.zeros((2, 2), np.int64)}
    with raises(af.CompileError):
        job.step(nn.Module(), given)


def test_layers_begin_as_torchs_and_keep_their_padding():
    class Model(nn.Module):
        def __init__(self):
            self.one = nn.Embedding(6, 3, padding_idx=-2)
            self.bag = nn.EmbeddingBag(6, 3, mode="max", padding_idx=1)
            self.pair = nn.Bilinear(4, 3, 5)

        def __call__(self, i):
            return self.pair(af.ones((4, 4)), self.one(i[0])) + self.bag(i).sum()

    model = Model()
    train = af.job(optimizer=af.optim.SGD(0.1))(lambda model, batch: model(batch.i).sum())
    train.step(model, {"i": np.array([[4, 1, 0, 2], [1, 1, 1, 1]])})
    one, bag = model.one.weight.data, model.bag.weight.data
    assert not one[4].any()
    assert not bag[1].any()
    assert one[[0, 1, 2, 3, 5]].all()
    assert model.pair.weight.shape == (5, 4, 3)
    assert np.abs(model.pair.bias.data).max() < 0.5 + 0.1 * 4
