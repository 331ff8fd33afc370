"""Rows of different lengths in batches: every row once, in its place, whatever the shapes."""

import json
from collections import Counter

import numpy as np
import pytest
import sample_functions as functions
import tiers
from error_texts import raises
from hypothesis import given, settings
from hypothesis import strategies as st

import actorflow as af
from actorflow.data import DataError, bucket, check_batch, items_of, pack
from actorflow.data.source import filler_of

EDGES = (2, 5, 9)
LENGTHS = [5, 1, 9, 2, 2, 0, 7, 3]


def texts(lengths=LENGTHS):
    """Return rows that tell their own number and place: 100 * row + place."""
    return [100 * (i + 1) + np.arange(n, dtype=np.int32) for i, n in enumerate(lengths)]


def buckets(lengths=LENGTHS, **options):
    rows = {"ids": texts(lengths), "label": np.arange(1, len(lengths) + 1)}
    options = {"edges": EDGES, "batch": 2, "pad": {"ids": -1, "label": -9}, "epochs": 1, **options}
    return bucket(rows, **options)


def rows_of(batch):
    """Return the rows of a batch by number, with checks of what fills it up."""
    found = {}
    fields = ("ids", "ids_lengths", "label", "weights")
    for ids, length, label, weight in zip(*[batch[name] for name in fields], strict=True):
        assert (ids[length:] == -1).all()
        assert weight == (label != -9)
        if weight:
            found[int(label)] = ids[:length].tolist()
        else:
            assert length == 0
    return found


lengths = st.lists(st.integers(0, 9), min_size=1, max_size=30)


@given(lengths, st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.booleans())
@settings(max_examples=tiers.examples(60))
def test_every_row_comes_once_in_an_epoch_in_the_bucket_of_its_length(
    lengths, batch, group, seed, shuffle
):
    source = buckets(lengths, batch=batch, group=group, seed=seed, shuffle=shuffle, epochs=2)
    epochs = [[next(source) for _ in range(len(source) // 2)] for _ in range(2)]
    with pytest.raises(StopIteration):
        next(source)
    shapes = [spec["ids"].shape for spec in source.specs()]
    assert len(set(shapes)) == len(shapes) <= len(EDGES)
    assert source.spec()["ids"].shape == max(shapes)
    for epoch in epochs:
        rows = {}
        for number, one in enumerate(epoch):
            check_batch(one, source.specs()[shapes.index(one["ids"].shape)])
            assert one["ids"].shape == epoch[number - number % group]["ids"].shape
            own = rows_of(one)
            assert not rows.keys() & own.keys()
            rows |= own
            edge = one["ids"].shape[1]
            assert all(max([e for e in (0, *EDGES) if e < edge]) < len(r) or edge == 2
                       for r in own.values())  # fmt: skip
        assert rows == {i: row.tolist() for i, row in enumerate(texts(lengths), 1)}
    if not shuffle:
        assert [one["ids"].tolist() for one in epochs[0]] == [o["ids"].tolist() for o in epochs[1]]


def test_the_last_batch_of_a_bucket_alone_is_filled_up():
    found = Counter()
    for batch in buckets(LENGTHS * 5, batch=3):
        found[batch["ids"].shape[1]] += batch["weights"].sum() < 3
    assert all(count <= 1 for count in found.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: buckets(LENGTHS * 3, group=2, **o),
        lambda **o: pack(texts([n + 1 for n in LENGTHS] * 3), length=12, batch=2, **o),
    ],
)  # fmt: skip
def test_a_source_goes_on_where_another_stood_with_the_same_bytes(make):
    whole = list(make(epochs=3, seed=1))
    for after in (0, 3, len(whole) - 1, len(whole)):
        source, other = make(epochs=3, seed=1), make(epochs=3, seed=1)
        for _ in range(after):
            next(source)
        other.restore(json.loads(json.dumps(source.state())))
        rest = list(other)
        assert len(rest) == len(whole) - after
        for one, expected in zip(rest, whole[after:], strict=True):
            assert {n: a.tobytes() for n, a in one.items()} == {
                n: a.tobytes() for n, a in expected.items()
            }
    orders = {b"".join([b["ids"].tobytes() for b in make(epochs=1, seed=s)]) for s in range(4)}
    assert len(orders) == 4
    size = len(whole) // 3
    assert any((a["ids"] != b["ids"]).any() for a, b in zip(whole, whole[size:], strict=False)
               if a["ids"].shape == b["ids"].shape)  # fmt: skip


def test_a_fingerprint_tells_rows_order_and_shapes_apart():
    changed = texts()
    changed[3] = changed[3] + 1
    options = [{}, {"seed": 1}, {"group": 2}, {"batch": 3}, {"edges": (2, 6, 9)}, {"epochs": 2}]
    marks = [buckets(**option).fingerprint() for option in options]
    marks.append(bucket({"ids": changed}, edges=EDGES, batch=2, epochs=1).fingerprint())
    marks.append(bucket({"ids": texts()}, edges=EDGES, batch=2, epochs=1).fingerprint())
    assert len(set(marks)) == len(marks)
    assert buckets().fingerprint() == marks[0]


def test_several_entries_share_a_bucket_by_the_longest():
    source = bucket(
        {"a": texts([1, 4]), "b": [[1.0, 2.0, 3.0], [4.0]]}, edges=(3, 4), batch=(2, 1), epochs=1,
        shuffle=False,
    )  # fmt: skip
    first, second = source
    assert first["a"].tolist() == [[100, 0, 0], [0, 0, 0]]
    assert first["b"].tolist() == [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]
    assert (first["a_lengths"].tolist(), first["b_lengths"].tolist()) == ([1, 0], [3, 0])
    assert second["a"].tolist() == [[200, 201, 202, 203]]
    assert items_of(source) == (1, "samples")


def test_rows_of_one_length_have_a_last_batch_too():
    source = bucket({"x": np.arange(5.0), "y": np.arange(5)}, batch=2, epochs=1, shuffle=False)
    assert [b["weights"].tolist() for b in source] == [[1, 1], [1, 1], [1, 0]]
    assert source.specs() == (source.spec(),)
    assert source
    assert len(source) == 3


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 3), st.booleans())
@settings(max_examples=tiers.examples(60))
def test_every_row_is_packed_once_and_whole(lengths, batch, shuffle):
    source, found = pack(texts(lengths), length=9, batch=batch, epochs=1, shuffle=shuffle), []
    (spec,) = source.specs()
    for one in source:
        check_batch(one, spec)
        for ids, labels, positions, segments, weights in zip(
            *[one[n] for n in ("ids", "labels", "positions", "segments", "weights")], strict=True
        ):
            size = int((segments > 0).sum())
            assert not segments[size:].any()
            assert not ids[size:].any()
            assert not weights[size:].any()
            assert (weights == (labels != -100)).all()
            for number in range(1, segments.max() + 1):
                (own,) = np.nonzero(segments == number)
                assert (np.diff(own) == 1).all()
                assert positions[own].tolist() == list(range(len(own)))
                assert labels[own].tolist() == [*ids[own][1:].tolist(), -100]
                found.append(ids[own].tolist())
    assert sorted(found) == [row.tolist() for row in texts(lengths)]
    # No two lines that would fit into one: else the first fit would have had less space.
    lines = [int((line > 0).sum()) for o in pack(texts(lengths), length=9, batch=1, epochs=1)
             for line in o["segments"]]  # fmt: skip
    assert sum(sorted(lines)[:2]) > 9 or len(lines) == 1


def test_a_pack_takes_labels_and_other_entries_of_each_id():
    rows = {
        "ids": texts([2, 3]),
        "labels": [[7, 8], [-100, 9, 9]],
        "score": [np.ones((n, 2)) for n in (2, 3)],
    }
    (one,) = pack(rows, length=6, batch=1, pad={"score": 0.5}, epochs=1)
    assert one["ids"].tolist() == [[200, 201, 202, 100, 101, 0]]
    assert one["labels"].tolist() == [[-100, 9, 9, 7, 8, -100]]
    assert one["weights"].tolist() == [[0, 1, 1, 1, 1, 0]]
    assert one["score"].shape == (1, 6, 2)
    assert one["score"][0, 5].tolist() == [0.5, 0.5]
    source = pack(texts([5, 4]), length=9, batch=2)
    assert items_of(source) == (2, "samples")
    with pytest.raises(TypeError, match="never ends"):
        len(source)


def lined(kind, data):
    """Return one of both kinds of batches of a pipeline of `words`."""
    if kind == "bucket":
        return data.bucket((3, 2), by="ids", edges=(4, 9), pad=-1, group=2)
    return data.pack(12, batch=2, pad=-1)


def samples_of(batch):
    """Return the ids of each sample in a batch, by its number."""
    if "segments" not in batch:
        pairs = zip(batch["ids"], batch["ids_lengths"], strict=True)
        rows = [row[:length] for row, length in pairs if length]
    else:
        rows = [
            ids[segments == s]
            for ids, segments in zip(batch["ids"], batch["segments"], strict=True)
            for s in range(1, segments.max() + 1)
        ]
    return {int(row[0]) // 100: row.tolist() for row in rows}


@pytest.mark.parametrize("kind", ["bucket", "pack"])
def test_lines_of_a_pipeline_have_what_filters_leave_once_in_an_epoch(kind):
    def risky(sample):
        if sample["n"] == 11:
            raise ValueError("broken")
        return functions.words(sample)

    def make():
        data = af.data.from_arrays({"n": np.arange(50)}).shuffle(2).filter(functions.is_kept)
        return lined(kind, data.map(risky).on_error("skip", limit=1).repeat(2))

    expected = {n: functions.words({"n": n})["ids"].tolist() for n in range(50) if n % 3}
    del expected[11]
    source = make()
    batches = list(source)
    assert len(batches) == len(source) == len(make())
    assert source.num_skipped == 1
    for half in (batches[: len(batches) // 2], batches[len(batches) // 2 :]):
        rows = [row for batch in half for row in samples_of(batch).items()]
        assert dict(rows) == expected
        assert len(rows) == len(expected)
    assert source.state() == {"kind": "pipeline", "batches": len(batches)}


@pytest.mark.parametrize("kind", ["bucket", "pack"])
def test_workers_make_the_same_lines_from_any_position(kind):
    data = af.data.from_arrays({"n": np.arange(40)}).shuffle(1).map(functions.words).repeat()
    alone, workers = lined(kind, data), lined(kind, data).workers(2)
    try:
        for after in (0, 5):
            alone.restore({"kind": "pipeline", "batches": after})
            workers.restore(alone.state())
            for _ in range(4):
                one, other = next(alone), next(workers)
                assert {n: (a.dtype, a.tolist()) for n, a in one.items()} == {
                    n: (a.dtype, a.tolist()) for n, a in other.items()
                }
    finally:
        workers.end_workers()


def test_a_function_may_give_the_batches_of_all_buckets_one_type():
    def lengths(batch):
        return {"n": batch["ids_lengths"]}

    data = af.data.from_arrays({"n": np.arange(20)}).map(functions.words)
    source = data.bucket(4, by="ids", edges=(4, 9)).map(lengths)
    assert source.specs() == (source.spec(),)
    assert sum([int(batch["n"].sum()) for batch in source]) == sum(1 + n * 7 % 9 for n in range(20))


def test_a_rank_reads_the_samples_of_its_own_sequences_alone():
    read = []

    def noted(sample):
        read.append(int(sample["n"]))
        return functions.words(sample)

    data = af.data.from_arrays({"n": np.arange(30)}).map(noted).pack(9, batch=8)
    whole = list(data)
    assert (whole[-1]["segments"][4:] == 0).all(), "its second half is padding"
    data.restore({"kind": "pipeline", "batches": 0})
    read.clear()
    out = {name: np.empty((4, *a.shape[1:]), a.dtype) for name, a in whole[0].items()}
    fill = filler_of(data, {name: (slice(4, 8), slice(0, 9)) for name in whole[0]})
    own = []
    for batch in whole:
        fill(out)
        assert {n: a.tolist() for n, a in out.items()} == {
            n: a[4:].tolist() for n, a in batch.items()
        }
        own += samples_of(out)
    # And one whose types the padding of the last batch has.
    assert Counter(read) - Counter(own) == Counter(read[-1:])


def test_lengths_that_are_given_are_not_read():
    read = []

    def noted(sample):
        read.append(int(sample["n"]))
        return functions.words(sample)

    data, lengths = af.data.from_arrays({"n": np.arange(30)}).map(noted), 1 + np.arange(30) * 7 % 9
    source, other = (data.pack(12, batch=2, lengths=given) for given in (lengths, None))
    assert len(source) == len(other)
    assert len(read) == 30
    assert [b["ids"].tolist() for b in source] == [b["ids"].tolist() for b in other]
    assert source.fingerprint() != other.fingerprint()


def once(sample, rng):
    """Keep a sample in some epochs."""
    return {"n": sample["n"], "coin": rng.random()}


def numbers():
    return af.data.from_arrays({"n": np.arange(9)}).map(functions.words)


WRONG = {
    "an order of draws": lambda: numbers().sample(weights=np.ones(9)).pack(9, batch=2),
    "a buffer": lambda: numbers().shuffle(0, buffer=4).pack(9, batch=2),
    "lengths of others": lambda: numbers().pack(9, batch=2, lengths=[1, 2]),
    "lengths of dropped ones": lambda: len(
        numbers().filter(bool).pack(9, batch=2, lengths=np.ones(9, int))
    ),
    "lengths that are less": lambda: next(numbers().pack(9, batch=1, lengths=np.ones(9, int))),
    "edges that are less": lambda: next(
        numbers().bucket(2, by="ids", edges=(2,), lengths=np.ones(9, int))
    ),
    "nothing to go by": lambda: len(numbers().bucket(2, by="words", edges=(9,))),
    "a number to go by": lambda: len(
        af.data.from_arrays({"n": np.arange(9)}).bucket(2, by="n", edges=(9,))
    ),
    "other samples in each epoch": lambda: list(
        af.data.from_arrays({"n": np.arange(9)})
        .map(once)
        .filter(lambda s: s["coin"] < 0.5)
        .map(functions.words)
        .repeat(3)
        .pack(9, batch=2)
    ),
    "a row too long": lambda: buckets(edges=(2, 5)),
    "no edges": lambda: buckets(edges=()),
    "edges that fall": lambda: buckets(edges=(9, 5)),
    "batches of two edges": lambda: buckets(batch=(2, 2)),
    "no rows": lambda: bucket({}, batch=2),
    "no dict": lambda: bucket(texts(), batch=2),
    "an empty list": lambda: bucket({"ids": []}, edges=EDGES, batch=2),
    "rows and numbers": lambda: bucket({"ids": [np.arange(2), 3]}, edges=EDGES, batch=2),
    "two types": lambda: bucket({"ids": [np.arange(2), np.arange(2.0)]}, edges=EDGES, batch=2),
    "two counts": lambda: bucket({"ids": texts(), "label": np.arange(3)}, edges=EDGES, batch=2),
    "a scalar": lambda: bucket({"x": np.array(3.0)}, batch=2),
    "a name that is taken": lambda: bucket({"weights": np.arange(3)}, batch=2),
    "a pad of another type": lambda: bucket({"x": np.arange(3)}, batch=2, pad=0.5),
    "a pad for nobody": lambda: bucket({"x": np.arange(3)}, batch=2, pad={"ids": 1}),
    "a group of none": lambda: buckets(group=0),
    "a state of another source": lambda: buckets().restore({"kind": "pack", "batches": 1}),
    "a state past the end": lambda: buckets().restore({"kind": "pipeline", "batches": 99}),
    "a row longer than a sequence": lambda: pack(texts([3, 5]), length=4, batch=1),
    "an empty row": lambda: pack(texts([3, 0]), length=4, batch=1),
    "labels of another length": lambda: pack(
        {"ids": texts([3]), "labels": [[1]]}, length=4, batch=1
    ),
    "labels of floats": lambda: pack({"ids": texts([1]), "labels": [[1.0]]}, length=4, batch=1),
    "an array for each row": lambda: pack({"ids": texts([1]), "n": np.ones(1)}, length=4, batch=1),
    "no ids": lambda: pack({"x": texts([3])}, length=4, batch=1),
    "nothing to pack": lambda: pack([], length=4, batch=1),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_said(name):
    with raises(DataError):
        WRONG[name]()
