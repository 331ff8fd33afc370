import json

import numpy as np
import pytest
import tiers
from error_texts import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow.data import ArraySource, DataError, check_batch


def made(samples, batch, **options):
    """A source whose rows tell their own index."""
    index = np.arange(samples)
    return ArraySource(
        {"image": np.stack([index, -index], axis=1).astype(np.float32), "label": index},
        batch=batch,
        **options,
    )


@pytest.mark.parametrize("used", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"epochs": 1}, {"epochs": 1, "shuffle": False}], ids=str)
def test_a_source_is_true_however_many_batches_it_has_left(options, used):
    source = made(8, 4, **options)
    for _ in range(used):
        next(source)
    assert bool(source) is True
    assert (source or None) is source


def labels(source, count):
    return [next(source)["label"].tolist() for _ in range(count)]


shapes = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(shapes, st.integers(0, 4), st.booleans())
@settings(max_examples=tiers.examples(60))
def test_an_epoch_holds_no_sample_twice_and_drops_less_than_a_batch(shape, seed, shuffle):
    samples, batch = shape
    source = made(samples, batch, seed=seed, shuffle=shuffle, epochs=3)
    per_epoch = samples // batch
    assert len(source) == 3 * per_epoch
    rows = [label for b in source for label in b["label"].tolist()]
    for epoch in np.array(rows).reshape(3, -1):
        assert len(set(epoch.tolist())) == per_epoch * batch > samples - batch
    if not shuffle:
        assert rows == list(range(per_epoch * batch)) * 3


@given(shapes, st.integers(0, 4))
@settings(max_examples=tiers.examples(40))
def test_without_drop_last_every_sample_comes_in_every_epoch(shape, seed):
    samples, batch = shape
    source = made(samples, batch, seed=seed, drop_last=False)
    rows = np.concatenate(labels(source, samples))  # `batch` whole epochs
    for epoch in rows.reshape(batch, samples):
        assert sorted(epoch.tolist()) == list(range(samples))


@given(shapes, st.integers(0, 12), st.booleans(), st.booleans())
@settings(max_examples=tiers.examples(60))
def test_restore_continues_the_identical_stream(shape, before, shuffle, drop_last):
    options = {"shuffle": shuffle, "drop_last": drop_last, "seed": 3}
    source = made(*shape, **options)
    labels(source, before)
    state = json.loads(json.dumps(source.state()))
    expected = labels(source, 4)
    resumed = made(*shape, **options)
    resumed.restore(state)
    assert labels(resumed, 4) == expected


def test_rows_of_all_arrays_stay_together():
    for _, batch in zip(range(10), made(20, 3), strict=False):
        assert np.array_equal(batch["image"][:, 0], batch["label"])
        assert np.array_equal(batch["image"][:, 1], -batch["label"])


def test_the_end_is_kept_and_restored():
    source = made(7, 2, epochs=1)
    out = next(source)
    assert [len(batch["label"]) for batch in source] == [2, 2]
    before = {name: array.copy() for name, array in out.items()}
    with pytest.raises(StopIteration):
        source.next_into(out)
    assert all(np.array_equal(out[name], before[name]) for name in out)
    resumed = made(7, 2, epochs=1)
    resumed.restore(source.state())
    assert next(resumed, None) is None


def test_a_state_past_the_end_is_refused():
    with raises(DataError):
        made(7, 2, epochs=1).restore({"kind": "arrays", "batches": 4})


def test_arrays_of_any_layout_give_the_same_batches():
    plain = np.arange(60, dtype=np.float64).reshape(20, 3)
    expected = ArraySource({"x": plain}, batch=4)
    layouts = [np.asfortranarray(plain), np.repeat(plain, 2, axis=0)[::2], plain[::-1][::-1]]
    for layout in layouts:
        source = ArraySource({"x": layout}, batch=4)
        assert source.fingerprint() == expected.fingerprint()
        for left, right in zip(range(7), source, strict=False):
            expected.restore({"kind": "arrays", "batches": left})
            assert np.array_equal(right["x"], next(expected)["x"])


def test_every_batch_is_of_the_spec():
    source = made(9, 4)
    assert {name: str(of) for name, of in source.spec().items()} == {
        "image": "float32[4, 2]",
        "label": "int64[4]",
    }
    check_batch(next(source), source.spec())
    assert source.items_per_batch == 4


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"x": [1, 2, 3]},
        {"x": np.zeros(4), "y": np.zeros(5)},
        {"x": np.zeros(4), "y": np.array(1.0)},
        {"x": np.array(["a", "b"])},
        {"x": np.zeros(1)},
    ],
)
def test_arrays_that_cannot_be_batched_are_refused(arrays):
    with raises(DataError):
        ArraySource(arrays, batch=2)


def test_a_short_last_batch_is_refused_with_the_way_out():
    with raises(DataError):
        made(10, 3, epochs=1, drop_last=False)
    assert len(made(10, 5, epochs=1, drop_last=False)) == 2


def test_an_endless_source_has_no_length():
    with raises(TypeError):
        len(made(10, 3))


def test_the_fingerprint_tells_content_names_and_parameters_apart():
    base = {"x": np.arange(6.0), "y": np.arange(6)}
    one = ArraySource(base, batch=2).fingerprint()
    assert one == ArraySource(dict(reversed(base.items())), batch=2).fingerprint()
    others = [
        ArraySource({"x": np.arange(6.0) + 1, "y": np.arange(6)}, batch=2),
        ArraySource({"x": np.arange(6), "y": np.arange(6.0)}, batch=2),
        ArraySource({"x": np.arange(6.0), "z": np.arange(6)}, batch=2),
        ArraySource({"x": np.arange(6.0).reshape(6, 1), "y": np.arange(6)}, batch=2),
        ArraySource(base, batch=3),
        ArraySource(base, batch=2, seed=1),
        ArraySource(base, batch=2, shuffle=False),
        ArraySource(base, batch=2, epochs=1),
        ArraySource(base, batch=2, drop_last=False),
    ]
    assert len({one, *(other.fingerprint() for other in others)}) == 10
