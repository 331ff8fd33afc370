"""Passes of a source: how many batches they are, and a source that starts again at its end."""

import itertools
import json
from fractions import Fraction

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow.data.epochs import EpochSource, epochs_of
from actorflow.data.source import EndlessSource, as_source

TABLE = {"x": np.arange(20, dtype=np.float32)}
SPEC = {"x": af.TensorType(af.DType.FLOAT32, (4,))}


def drawn(source, count=None):
    return [batch["x"].tolist() for batch in itertools.islice(source, count)]


def counting(batches):
    return lambda: iter([{"x": np.full(4, n, np.float32)} for n in range(batches)])


@pytest.mark.parametrize(
    ("make", "batches"),
    [
        (lambda: af.data.ArraySource(TABLE, batch=6), 3),
        (lambda: af.data.ArraySource(TABLE, batch=6, epochs=1), 3),
        (lambda: af.data.ArraySource(TABLE, batch=4, epochs=2), 10),
        (lambda: af.data.ArraySource(TABLE, batch=6, drop_last=False), Fraction(10, 3)),
        (lambda: af.data.Tokens(np.arange(33), seq=4, batch=3), Fraction(7, 3)),
        (lambda: af.data.from_arrays(TABLE).shuffle(1).batch(6), 3),
        (lambda: af.data.from_arrays(TABLE).repeat().batch(6), 3),
        (lambda: af.data.from_arrays(TABLE).repeat(2).batch(6), 6),
        (lambda: af.data.from_arrays(TABLE).repeat().batch(6, drop_last=False), Fraction(10, 3)),
        (lambda: af.data.from_arrays(TABLE).batch(5, drop_last=False, mask="rows"), 4),
        (lambda: af.data.from_arrays(TABLE).sample(weights=range(20)).batch(6), Fraction(10, 3)),
        (lambda: af.data.mix([af.data.from_arrays(TABLE)], [1]).batch(6), Fraction(10, 3)),
    ],
)
def test_passes_of_a_source_that_knows_them_go_on_where_it_would(make, batches):
    epochs = epochs_of(make(), 3)
    assert epochs.batches == 3 * batches
    count = int(epochs.batches)
    whole = drawn(epochs.source, count)
    # Those of a source that was made with so many epochs, and another order in each.
    alone = drawn(make(), min(count, int(batches)))
    assert whole[: len(alone)] == alone
    if "shuffle=True" in epochs.source.fingerprint() and batches == 3:
        assert whole[:3] != whole[3:6]
    for number in (1, 2, 5):
        assert epochs_of(make(), number).source.fingerprint() == epochs.source.fingerprint()
    per_epoch = epochs.batches / 3
    assert [epochs.epoch_of(b + 1) for b in range(count)] == [
        min(3, -(-(b + 1) // per_epoch)) for b in range(count)
    ]


@pytest.mark.parametrize(("length", "notes"), [(3, 0), (2, 2), (4, 2)])
def test_a_length_that_is_none_is_told(length, notes, caplog):
    class Loader:
        def __len__(self):
            return length

        def __iter__(self):
            return counting(3)()

    epochs = epochs_of(as_source(Loader()), 2)
    assert epochs.batches == 2 * length
    assert len(drawn(epochs.source)) == 6
    assert caplog.text.count(f"had 3 batches, and its length is {length}") == notes


def test_passes_begin_where_the_source_stands():
    source = af.data.ArraySource(TABLE, batch=5, epochs=1)
    first = drawn(source, 2)
    whole = drawn(af.data.ArraySource(TABLE, batch=5), 8)
    assert first + drawn(epochs_of(source, 2).source, 6) == whole


def test_a_source_that_ends_is_started_again_and_told_which_epoch_comes():
    told = []
    source = af.data.from_iterable(counting(3), SPEC)
    source.set_epoch = told.append
    epochs = epochs_of(source, 3)
    assert epochs.batches is None
    assert [row[0] for row in drawn(epochs.source)] == [0, 1, 2] * 3
    assert told == [1, 2]
    assert [epochs.epoch_of(batch) for batch in range(1, 10)] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert (
        epochs_of(af.data.from_iterable(TABLE["x"][:12].reshape(3, 1, 4), names=["x"]), 2).batches
        == 6
    )


@pytest.mark.parametrize("done", range(10))
def test_a_source_goes_on_in_the_midst_of_an_epoch_and_after_its_last(done):
    source = EpochSource(af.data.from_iterable(counting(3), SPEC), 3)
    drawn(source, done)
    state = json.loads(json.dumps(source.state()))
    other = EpochSource(af.data.from_iterable(counting(3), SPEC), 4)
    other.restore(state)
    assert [row[0] for row in drawn(other)] == ([0.0, 1.0, 2.0] * 4)[done:]
    assert [other.epoch_of(batch) for batch in (1, 12)] == [1, 4]
    assert other.fingerprint() == source.fingerprint()


def test_an_empty_source_has_no_passes():
    source = EpochSource(af.data.from_iterable(counting(0), SPEC), 3)
    assert drawn(source) == []


def test_a_source_without_an_end_and_a_state_of_another_kind_are_errors():
    class Endless(EpochSource):
        def __len__(self):
            raise EndlessSource("this one never ends")

    source = af.data.from_iterable(counting(3), SPEC)
    with raises(af.DataError):
        epochs_of(Endless(source, 1), 2)
    with raises(af.DataError):
        EpochSource(source, 2).restore(source.state())


@pytest.mark.parametrize(
    "damage",
    [
        {"ends": 3},
        {"ends": ["3"]},
        {"ends": [4, 3]},
        {"batches": None},
        {"batches": 2},
        {"source": None},
    ],
    ids=["number", "texts", "order", "none", "earlier", "no source"],
)
def test_a_damaged_state_is_an_error(damage):
    source = EpochSource(af.data.from_iterable(counting(3), SPEC), 3)
    drawn(source, 5)
    assert source.state()["ends"] == [3]
    with raises(af.DataError):
        source.restore(source.state() | damage)
