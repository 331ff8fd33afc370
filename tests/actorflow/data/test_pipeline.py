"""What a pipeline gives: against batches that the test makes itself, and at any position."""

import itertools
import json

import numpy as np
import pytest
import tiers
from error_texts import raises
from hypothesis import given, settings
from hypothesis import strategies as st

import actorflow as af
from actorflow.data import DataError, Pipeline
from actorflow.data.order import Passes
from actorflow.data.reading import Description
from actorflow.data.samples import Staged
from actorflow.data.source import filler_of


def numbers(length):
    return af.data.from_arrays({"n": np.arange(length), "x": np.arange(length) * 0.5})


def test_samples_come_in_their_order_and_the_rest_of_an_epoch_is_dropped():
    batches = list(numbers(10).repeat(2).batch(4))
    assert [b["n"].tolist() for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    assert [b["x"].tolist() for b in batches[:1]] == [[0.0, 0.5, 1.0, 1.5]]
    assert len(numbers(10).repeat(2).batch(4)) == 4


def test_a_batch_may_be_filled_from_the_next_epoch():
    batches = numbers(10).repeat(2).batch(5, drop_last=False)
    assert [b["n"].tolist() for b in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] * 2
    endless = numbers(3).repeat().batch(4, drop_last=False)
    assert [next(endless)["n"].tolist() for _ in range(2)] == [[0, 1, 2, 0], [1, 2, 0, 1]]


def test_a_mask_tells_samples_from_what_fills_up_the_last_batch():
    batches = list(numbers(7).batch(3, drop_last=False, mask="counts"))
    assert [b["n"].tolist() for b in batches] == [[0, 1, 2], [3, 4, 5], [6, 0, 0]]
    assert [b["counts"].tolist() for b in batches] == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]
    assert batches[0]["counts"].dtype == np.float32
    mean = sum((b["x"] * b["counts"]).sum() for b in batches) / sum(
        b["counts"].sum() for b in batches
    )
    assert mean == (np.arange(7) * 0.5).mean()


def test_a_pipeline_is_a_value_that_no_method_changes():
    base = numbers(12)
    halves = base.map(lambda s: {"n": s["n"] // 2}).batch(4)
    odd = base.filter(lambda s: s["n"] % 2).batch(4)
    assert next(base.batch(4))["n"].tolist() == [0, 1, 2, 3]
    assert next(halves)["n"].tolist() == [0, 0, 1, 1]
    assert next(odd)["n"].tolist() == [1, 3, 5, 7]
    assert next(halves)["n"].tolist() == [2, 2, 3, 3]


def test_numbers_of_python_become_arrays_that_jobs_take():
    items = [{"f": 0.5 * n, "i": n, "b": n > 1, "a": np.ones(2, np.float16)} for n in range(4)]
    batch = next(af.data.from_dataset(items).batch(4))
    kinds = {name: str(array.dtype) for name, array in batch.items()}
    assert kinds == {"f": "float32", "i": "int64", "b": "bool", "a": "float16"}
    assert batch["a"].shape == (4, 2)


def test_bfloat16_is_a_number_like_others():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    own = np.arange(8).reshape(4, 2).astype(bfloat16)
    batch = next(af.data.from_arrays({"x": own}).map(dict).batch(4))
    assert (batch["x"].dtype, batch["x"].tolist()) == (bfloat16, own.tolist())
    rows = af.data.from_arrays({"x": list(own)})
    assert next(rows.batch(4, pad={"x": 3}))["x"][:, :2].tolist() == own.tolist()


def test_an_array_may_have_objects_of_which_a_map_makes_numbers():
    def make(*texts):
        return af.data.from_arrays({"t": np.array(texts, object)}).map(
            lambda s: {"n": len(str(s["t"]))}
        )

    data = make("a", None, "bb", 3.5).batch(4)
    assert next(data)["n"].tolist() == [1, 4, 2, 3]
    assert data.fingerprint() == make("a", None, "bb", 3.5).batch(4).fingerprint()
    assert data.fingerprint() != make("a", None, "bc", 3.5).batch(4).fingerprint()


def test_a_tuple_of_two_is_x_and_y_and_other_ones_need_names():
    pairs = [(np.full(2, n, np.float32), n) for n in range(4)]
    assert next(af.data.from_dataset(pairs).batch(4))["y"].tolist() == [0, 1, 2, 3]
    triples = [(n, n, n) for n in range(4)]
    assert next(af.data.from_dataset(triples, names="abc").batch(2)).keys() == set("abc")
    with raises(DataError):
        next(af.data.from_dataset(triples).batch(2))


def doubled(sample):
    sample["x"] *= 2
    return sample


def rows_doubled(rows):
    return {"x": np.stack([doubled(row)["x"] for row in rows])}


ROWS = np.arange(6.0).reshape(3, 2)
WRITTEN_TO = {
    "arrays": lambda own: af.data.from_arrays({"x": own}).map(doubled),
    "rows": lambda own: af.data.from_arrays({"x": list(own)}).map(doubled),
    "dicts": lambda own: af.data.from_dataset([{"x": row} for row in own]).map(doubled),
    "tuples": lambda own: af.data.from_dataset([(r, 1) for r in own]).map(doubled),
    "items": lambda own: af.data.from_dataset(own, names=["x"]).map(doubled),
    "filter": lambda own: af.data.from_arrays({"x": own}).filter(doubled).map(doubled),
    "mixture": lambda own: af.data.mix([af.data.from_arrays({"x": own})], [1]).map(doubled),
}


@pytest.mark.parametrize("kind", WRITTEN_TO)
def test_a_function_may_write_into_its_sample_and_the_data_stay(kind):
    own = ROWS.copy()
    found = list(WRITTEN_TO[kind](own).repeat(2).batch(3))
    factor = 4 if kind == "filter" else 2
    assert [b["x"].tolist() for b in found] == [(factor * ROWS).tolist()] * 2
    found = list(af.data.from_arrays({"x": own}).repeat(2).batch(3, collate=rows_doubled))
    assert [b["x"].tolist() for b in found] == [(2 * ROWS).tolist()] * 2
    assert own.tolist() == ROWS.tolist()


@given(
    length=st.integers(1, 60), size=st.integers(1, 12), epochs=st.integers(1, 4),
    seed=st.none() | st.integers(0, 9), buffer=st.none() | st.integers(1, 20),
    drop_last=st.booleans(), keeps=st.none() | st.integers(2, 5), data=st.data(),
)  # fmt: skip
@settings(max_examples=tiers.examples(150), deadline=None)
def test_a_restored_pipeline_repeats_no_sample_and_leaves_none_out(
    length, size, epochs, seed, buffer, drop_last, keeps, data
):
    def make():
        made = numbers(length) if seed is None else numbers(length).shuffle(seed, buffer=buffer)
        made = made if keeps is None else made.filter(lambda s: s["n"] % keeps)
        mask = "" if drop_last else "mask"
        return made.repeat(epochs).batch(size, drop_last=drop_last, mask=mask)

    left = [n for n in range(length) if keeps is None or n % keeps]
    needed = size if drop_last else 1
    if len(left) < needed:
        with pytest.raises(DataError, match="a batch of"):
            next(make())
        return
    batches = list(make())
    seen = [n for b in batches for n in b["n"][b.get("mask", np.ones(size)) > 0].tolist()]
    if drop_last:
        per_epoch = len(left) // size * size
        chunks = [seen[i : i + per_epoch] for i in range(0, len(seen), per_epoch)]
        assert len(chunks) == epochs
        assert all(len(set(c)) == per_epoch and set(c) <= set(left) for c in chunks)
    else:
        chunks = [seen[i : i + len(left)] for i in range(0, len(seen), len(left))]
        assert [sorted(chunk) for chunk in chunks] == [left] * epochs
    first, second = make(), make()
    cut = data.draw(st.integers(0, len(batches)))
    head = list(itertools.islice(first, cut))
    second.restore(json.loads(json.dumps(first.state())))
    again = [b["n"].tolist() for b in [*head, *second]]
    assert again == [b["n"].tolist() for b in batches]


def test_random_numbers_of_a_map_are_those_of_the_sample_and_the_epoch():
    def noisy(sample, rng):
        return {"n": sample["n"], "r": rng.random()}

    first = {
        int(n): r
        for b in numbers(8).map(noisy).batch(4)
        for n, r in zip(b["n"], b["r"], strict=True)
    }
    shuffled = numbers(8).shuffle(5).map(noisy).batch(2)
    assert {int(n): r for b in shuffled for n, r in zip(b["n"], b["r"], strict=True)} == first
    assert len(set(first.values())) == 8
    two_epochs = [b["r"].tolist() for b in numbers(8).map(noisy).repeat(2).batch(8)]
    assert not set(two_epochs[0]) & set(two_epochs[1])
    reseeded = [b["r"].tolist() for b in numbers(8).map(noisy, seed=1).batch(8)]
    twice = numbers(8).map(noisy).map(lambda s, rng: {"r": s["r"], "q": rng.random()}).batch(8)
    batch = next(twice)
    assert not set(reseeded[0]) & set(two_epochs[0])
    assert not set(batch["q"]) & set(batch["r"])


def test_a_map_behind_batches_works_on_batches_with_numbers_of_its_own():
    def mixed(batch, rng):
        return {"n": batch["n"][::-1], "r": rng.random(2).astype(np.float32)}

    batches = list(numbers(6).batch(2).map(mixed))
    assert [b["n"].tolist() for b in batches] == [[1, 0], [3, 2], [5, 4]]
    assert len({float(b["r"][0]) for b in batches}) == 3
    kept = list(numbers(6).filter(lambda s: True).batch(2).map(mixed))
    assert [b["r"].tolist() for b in kept] == [b["r"].tolist() for b in batches]


def test_samples_that_cannot_be_read_are_named_and_skipped(caplog):
    def risky(sample):
        if sample["n"] in (3, 4):
            raise ValueError("broken")
        return sample

    data = numbers(10).map(risky).on_error("skip", limit=2).batch(4)
    assert [b["n"].tolist() for b in data] == [[0, 1, 2, 5], [6, 7, 8, 9]]
    assert data.num_skipped == 2
    lines = [record.getMessage() for record in caplog.records]
    assert [line.startswith("skipped sample") for line in lines] == [True, True]
    assert "row 3 of the arrays: map" in lines[0]
    assert "raised ValueError: broken" in lines[0]
    with raises(DataError):
        list(numbers(10).map(risky).on_error("skip", limit=1).batch(4))
    with raises(DataError):
        list(numbers(10).map(risky).batch(4))


def test_the_limit_of_what_is_skipped_holds_within_a_batch():
    read = []

    def broken(sample):
        read.append(int(sample["n"]))
        raise ValueError("broken")

    with raises(DataError):
        numbers(10_000).map(broken).on_error("skip", limit=3).batch(5_000).spec()
    assert read[-1] <= 5_000, "no further batch was read"


def test_a_batch_of_another_type_is_refused_again_and_not_passed_over():
    data = af.data.from_dataset([{"x": np.ones(1 + (n >= 4))} for n in range(8)]).batch(2)
    assert [next(data)["x"].shape for _ in range(2)] == [(2, 1), (2, 1)]
    for _ in range(2):
        with raises(DataError):
            next(data)
    assert data.state()["batches"] == 2


def test_an_error_of_a_function_of_ours_names_the_sample():
    photos = [{"image": np.zeros((4 + n, 9, 3), np.uint8)} for n in range(2)]
    with raises(DataError):
        next(af.data.from_dataset(photos).map(af.data.augment.CenterCrop(5)).batch(2))


class Blocks:
    """Samples in blocks, which notes how many of them are to be kept."""

    blocks = (10,) * 20
    kept = 0

    def keep_blocks(self, count):
        self.kept = max(self.kept, count)

    def __len__(self):
        return 200


@pytest.mark.parametrize(("buffer", "kept"), [(None, 5), (100, 11), (7, 2)])
def test_a_reader_keeps_the_blocks_among_which_the_next_sample_lies(buffer, kept):
    samples = Blocks()
    staged = Staged(Staged(samples, dict, is_filter=False), bool, is_filter=True)
    order = Passes(200, samples.blocks)
    Pipeline(Description(staged, order)).shuffle(0, buffer=buffer)
    assert samples.kept == kept


def test_a_restored_pipeline_goes_on_counting_what_it_skips():
    def risky(sample):
        if sample["n"] % 5 == 0:
            raise ValueError("broken")
        return sample

    make = lambda: numbers(40).map(risky).on_error("skip").batch(4)  # noqa: E731
    first, second = make(), make()
    head = [next(first)["n"].tolist() for _ in range(3)]
    second.restore(first.state())
    rest = [b["n"].tolist() for b in second]
    assert [n for batch in [*head, *rest] for n in batch] == [n for n in range(40) if n % 5]
    assert second.num_skipped == 8


def test_weights_and_classes_say_how_often_a_sample_is_drawn():
    labels = np.array([0] * 90 + [1] * 10)
    data = af.data.from_arrays({"label": labels})
    drawn = np.concatenate([b["label"] for b in data.sample(balanced=labels).repeat(40).batch(100)])
    assert 0.48 < drawn.mean() < 0.52  # 4,000 draws: 2.5 standard deviations
    only = data.sample(weights=np.where(np.arange(100) == 7, 1.0, 0.0))
    assert all((b["label"] == labels[7]).all() for b in only.batch(10))
    with raises(DataError):
        data.sample(weights=[1, 2, 3])
    with raises(DataError):
        data.sample()
    with raises(DataError):
        data.sample(balanced=[0, 1])


def test_a_mixture_keeps_its_proportion_and_each_part_its_order():
    one = af.data.from_arrays({"n": np.arange(7)})
    other = af.data.from_arrays({"n": np.arange(100, 150)}).shuffle(3)
    mixture = af.data.mix([one, other], [1, 3], seed=2).batch(64)
    seen = np.concatenate([next(mixture)["n"] for _ in range(16)])
    assert ((seen < 100).reshape(4, 256).sum(1) == 64).all()
    assert seen[seen < 100].tolist() == [n % 7 for n in range(256)]
    others = seen[seen >= 100]
    assert sorted(others[:50]) == sorted(others[50:100]) == list(range(100, 150))
    assert others[:50].tolist() != others[50:100].tolist()
    again = af.data.mix([one, other], [1, 3], seed=2).batch(64)
    again.restore({"kind": "pipeline", "batches": 15})
    assert next(again)["n"].tolist() == seen[-64:].tolist()


def test_rows_of_a_batch_are_read_alone_where_nothing_works_on_all_of_it():
    read = []

    def noted(sample):
        read.append(int(sample["n"]))
        return sample

    data = numbers(16).map(noted).batch(8)
    data.spec()
    read.clear()
    out = {"n": np.empty(4, np.int64), "x": np.empty(4)}
    fill = filler_of(data, {"n": (slice(4, 8),), "x": (slice(4, 8),)})
    fill(out)
    fill(out)
    assert (out["n"].tolist(), read) == ([12, 13, 14, 15], [4, 5, 6, 7, 12, 13, 14, 15])
    assert data.state()["batches"] == 2
    turned = numbers(16).batch(8).map(lambda b: {"n": b["n"][::-1], "x": b["x"]})
    turned.next_rows_into(out, {"n": slice(4, 8), "x": slice(4, 8)})
    assert out["n"].tolist() == [3, 2, 1, 0]


def test_a_rank_reads_its_rows_of_a_batch_with_a_mask():
    read = []

    def noted(sample):
        read.append(int(sample["n"]))
        return sample

    data = numbers(22).map(noted).batch(8, drop_last=False, mask="counts")
    whole = list(data)
    for rows in (slice(0, 4), slice(4, 8)):
        data.restore({"kind": "pipeline", "batches": 0})
        out = {name: np.empty(4, array.dtype) for name, array in whole[0].items()}
        fill = filler_of(data, dict.fromkeys(out, (rows,)))
        read.clear()
        for batch in whole:  # of the last one two rows are padding
            fill(out)
            assert {n: a.tolist() for n, a in out.items()} == {
                n: a[rows].tolist() for n, a in batch.items()
            }
        assert read == [n for n in range(22) if rows.start <= n % 8 < rows.stop]
        with pytest.raises(StopIteration):
            fill(out)


REFUSED = {
    "no batch": next,
    "order of batches": lambda d: d.batch(2).shuffle(),
    "two batches": lambda d: d.batch(2).batch(2),
    "no size": lambda d: d.batch(0),
    "too few": lambda d: d.batch(99).spec(),
    "short last one": lambda d: d.batch(4, drop_last=False).spec(),
    "mask of nothing": lambda d: d.batch(4, mask="m"),
    "taken name": lambda d: next(d.batch(4, drop_last=False, mask="n")),
    "no function": lambda d: d.map(3),
    "no sample": lambda d: next(d.map(len).batch(2)),
    "nothing left": lambda d: d.filter(lambda s: False).repeat().batch(2).spec(),
    "policy": lambda d: d.on_error("ignore"),
    "workers": lambda d: d.workers(-1),
    "a mask without a name": lambda d: d.batch(4, drop_last=False, mask=True),
    "lengths of nothing": lambda d: next(d.batch(4, pad={"z": 3})),
    "no dict of a collation": lambda d: next(d.batch(4, collate=np.stack)),
    "a list of a collation": lambda d: next(d.batch(4, collate=list)),
    "an empty dict of a map": lambda d: next(d.map(lambda s: {}).batch(4)),
    "an empty dict of a batch": lambda d: next(d.batch(4).map(lambda b: {})),
    "empty samples": lambda d: next(
        af.data.from_dataset([{}, {}]).batch(2, drop_last=False, mask="m")
    ),
    "numbers in a list": lambda d: af.data.from_arrays({"y": [0, 1, 2]}),
    "weights that are none": lambda d: d.sample(weights=[0, 1, float("nan"), -1, 2, 3]),
    "weights of texts": lambda d: d.sample(weights="abcdef"),
    "weights beyond all sums": lambda d: d.sample(weights=[1e308] * 6),
    "weights of nothing": lambda d: d.sample(weights=[0] * 6),
    "seed": lambda d: d.shuffle(-1),
    "seed of a window": lambda d: d.shuffle(1 << 63, buffer=2),
    "seed of draws": lambda d: d.sample(weights=range(6), seed=1.5),
    "seed of a map": lambda d: d.map(dict, seed="1"),
    "seed of a mixture": lambda d: af.data.mix([d], [1], seed=None),
    "order of draws": lambda d: d.sample(weights=np.ones(6)).shuffle(),
    "mixed batches": lambda d: af.data.mix([d.batch(2)], [1]),
    "mixed arrays": lambda d: af.data.mix([{"n": np.arange(6)}, d], [1, 1]),
    "one name for two": lambda d: next(af.data.from_dataset([(1, 2)], names="xx").batch(1)),
    "order of turns": lambda d: af.data.mix([d], [1]).shuffle(),
    "state": lambda d: d.batch(2).restore({"kind": "arrays", "batches": 1}),
    "text": lambda d: next(d.map(lambda s: {"t": "text"}).batch(2)),
    "no array": lambda d: af.data.from_arrays({}),
    "lengths": lambda d: af.data.from_arrays({"a": np.ones(2), "b": np.ones(3)}),
    "scalar": lambda d: af.data.from_arrays({"a": np.float32(2)}),
    "iterator": lambda d: af.data.from_dataset(iter([])),
    "empty": lambda d: af.data.from_dataset([]).batch(1).spec(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_means_nothing_is_refused(name):
    with raises(DataError):
        REFUSED[name](numbers(6))


def test_samples_that_are_not_alike_are_named():
    ragged = af.data.from_dataset([{"x": np.arange(n + 1)} for n in range(6)])
    with raises(DataError):
        next(ragged.batch(3))
    padded = next(ragged.batch(3, pad={"x": 4}))["x"]
    assert padded.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 2, 0]]
    with raises(DataError):
        list(ragged.batch(3, pad={"x": 4}))
    items = [{"x": 1}, {"x": 1}, {"y": 1}, {"y": 1}]
    with raises(DataError):
        list(af.data.from_dataset(items).batch(2))
    with raises(DataError):
        next(af.data.from_dataset(items).batch(4))


def test_a_length_that_nobody_knows_is_no_length():
    assert len(numbers(10).batch(3)) == 3
    for endless in (numbers(10).repeat().batch(3), numbers(10).filter(bool).batch(3)):
        assert endless
        with pytest.raises(TypeError, match="has no length"):
            len(endless)


def test_equal_pipelines_have_one_fingerprint_and_others_another():
    def make(**changes):
        asked = {"seed": 1, "size": 4, "epochs": None} | changes
        return numbers(20).shuffle(asked["seed"]).repeat(asked["epochs"]).batch(asked["size"])

    prints = [make(**c).fingerprint() for c in ({}, {"seed": 2}, {"size": 5}, {"epochs": 2})]
    for change in (af.data.augment.Flip(0.1), af.data.augment.Flip(0.9)):
        prints.append(numbers(20).map(change).batch(4).fingerprint())
    prints += [numbers(20).map(dict).batch(4).fingerprint(), numbers(19).batch(4).fingerprint()]
    assert len(set(prints)) == 8
    assert make().fingerprint() == make().workers(3).fingerprint() == prints[0]


@pytest.mark.parametrize(
    "call", [next, lambda data: data.restore(data.state())], ids=["next", "restore"]
)
def test_a_pipeline_that_is_read_while_it_is_read_is_refused(call):
    pipeline = None

    def reads(sample):
        if sample["n"] == 2:  # behind the batch that types are read of
            call(pipeline)
        return sample

    pipeline = numbers(8).map(reads).batch(2)
    next(pipeline)
    with raises(DataError):
        next(pipeline)
