import json

import numpy as np
import pytest
import tiers
from error_texts import raises
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from actorflow.data import DataError, Tokens, check_batch

sizes = st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(0, 120))


def made(seq, batch, extra, seed=0):
    """A source whose token ids are their own positions."""
    return Tokens(np.arange(seq * batch + 1 + extra), seq=seq, batch=batch, seed=seed)


def taken(source, count):
    return [{name: array.copy() for name, array in next(source).items()} for _ in range(count)]


def same(left, right):
    return all(
        a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)
        for a, b in zip(left, right, strict=True)
    )


@given(sizes, st.integers(0, 3))
@settings(max_examples=tiers.examples(60))
def test_each_window_of_an_epoch_comes_exactly_once_at_one_phase(size, seed):
    seq, batch, extra = size
    source = made(seq, batch, extra, seed)
    num_tokens = seq * batch + 1 + extra
    num_windows = round(source.batches_per_epoch * batch)
    starts = np.concatenate([b["x"][:, 0] for b in taken(source, num_windows)])  # `batch` epochs
    for epoch in starts.reshape(batch, num_windows):
        phase = epoch.min()
        assert 0 <= phase < seq
        assert sorted(epoch.tolist()) == [phase + w * seq for w in range(num_windows)]
        assert epoch.max() + seq + 1 <= num_tokens
    assert num_windows >= (num_tokens - 1) // seq - 1  # at most one window is given to the phases


@given(sizes)
@settings(max_examples=tiers.examples(30))
def test_x_is_a_run_of_tokens_and_y_is_x_one_token_later(size):
    for batch in taken(made(*size), 5):
        assert np.array_equal(batch["y"], batch["x"] + 1)
        assert np.array_equal(batch["x"], batch["x"][:, :1] + np.arange(size[0]))


@given(sizes, st.integers(0, 12), st.integers(1, 6))
@settings(max_examples=tiers.examples(60))
def test_restore_continues_the_identical_stream(size, before, after):
    source = made(*size)
    taken(source, before)
    state = json.loads(json.dumps(source.state()))
    expected = taken(source, after)
    resumed = made(*size)
    taken(resumed, 3)
    resumed.restore(state)
    assert same(taken(resumed, after), expected)


@given(sizes, st.lists(st.integers(0, 15), min_size=1, max_size=8))
@settings(max_examples=tiers.examples(40))
def test_a_batch_does_not_depend_on_how_it_was_reached(size, visits):
    straight = taken(made(*size), 16)
    source = made(*size)
    for index in visits:
        source.restore({"kind": "tokens", "batches": index})
        assert same([next(source)], [straight[index]])


def test_restore_far_ahead_reads_nothing_between():
    class Counting(np.ndarray):
        reads = 0

        def __getitem__(self, key):
            Counting.reads += 1
            return super().__getitem__(key)

    source = Tokens(np.arange(1000), seq=4, batch=8)
    source._tokens = np.arange(1000).view(Counting)
    source.restore({"kind": "tokens", "batches": 10**15})
    next(source)
    assert Counting.reads == 8
    assert source.state() == {"kind": "tokens", "batches": 10**15 + 1}


def test_epochs_differ_in_order_and_phase():
    source = Tokens(np.arange(16 * 41), seq=16, batch=40, seed=0)
    epochs = [batch["x"][:, 0] for batch in taken(source, 20)]
    assert len({tuple(epoch) for epoch in epochs}) == 20
    assert len({int(epoch.min()) for epoch in epochs}) > 5


def test_another_seed_gives_another_stream():
    assert not same(taken(made(8, 4, 100, seed=0), 3), taken(made(8, 4, 100, seed=1), 3))


def test_next_into_writes_what_next_returns():
    left, right = made(8, 4, 50), made(8, 4, 50)
    out = {name: np.full((4, 8), -1, np.int32) for name in "xy"}
    for batch in taken(left, 6):
        right.next_into(out)
        assert same([out], [batch])
    assert left.state() == right.state()


def test_batches_handed_out_stay_as_they_were():
    source = made(4, 2, 30)
    first = next(source)
    copy = {name: array.copy() for name, array in first.items()}
    next(source)
    assert same([first], [copy])


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64, np.uint64, ">i4"])
def test_every_integer_type_gives_the_same_ids(dtype):
    ids = np.random.default_rng(0).integers(0, 100, 200)
    plain = Tokens(ids.astype(np.int32), seq=5, batch=3)
    other = Tokens(ids.astype(dtype), seq=5, batch=3)
    batch = next(other)
    check_batch(batch, other.spec())
    assert same([batch], [next(plain)])


def test_the_element_type_of_the_batches_can_be_int64():
    source = Tokens(np.arange(100) + 2**40, seq=5, batch=3, dtype=np.int64)
    assert str(source.spec()["x"]) == "int64[3, 5]"
    assert next(source)["x"].min() >= 2**40


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_an_id_that_does_not_fit_is_refused_and_not_wrapped(value):
    ids = np.zeros(16, np.int64)
    ids[:] = value
    source = Tokens(ids, seq=5, batch=3)
    with raises(DataError):
        next(source)
    assert source.state()["batches"] == 0


def test_a_memory_mapped_file_is_read_in_place(tmp_path):
    ids = np.arange(500, dtype=np.uint16)
    ids.tofile(tmp_path / "ids.bin")
    mapped = np.memmap(tmp_path / "ids.bin", dtype=np.uint16, mode="r")
    source, plain = Tokens(mapped, seq=7, batch=3), Tokens(ids, seq=7, batch=3)
    assert np.shares_memory(source._tokens, mapped)
    assert same(taken(source, 4), taken(plain, 4))
    assert source.fingerprint() == plain.fingerprint()


def test_exactly_enough_tokens_make_a_batch_and_one_less_does_not():
    assert sorted(next(made(4, 3, 0))["x"][:, 0].tolist()) == [0, 4, 8]
    with raises(DataError):
        Tokens(np.arange(12), seq=4, batch=3)


@given(st.integers(0, 60), st.integers(1, 12), st.integers(1, 12))
def test_data_is_refused_if_and_only_if_one_batch_cannot_be_cut(num_tokens, seq, batch):
    try:
        Tokens(np.arange(num_tokens), seq=seq, batch=batch)
    except DataError:
        assert num_tokens < batch * seq + 1
    else:
        assert num_tokens >= batch * seq + 1


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        "some text",
        np.zeros((3, 4), np.int32),
        np.zeros(9, np.float32),
        np.zeros(9, np.bool_),
    ],
)
def test_what_is_not_a_row_of_integers_is_refused(tokens):
    with raises(DataError):
        Tokens(tokens, seq=1, batch=1)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "4", True])
def test_seq_and_batch_are_integers_above_zero(bad):
    with raises(DataError):
        Tokens(np.arange(50), seq=bad, batch=2)
    with raises(DataError):
        Tokens(np.arange(50), seq=2, batch=bad)


def test_an_element_type_of_the_batches_that_no_index_can_have_is_refused():
    with raises(DataError):
        Tokens(np.arange(50), seq=2, batch=2, dtype=np.float32)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"kind": "arrays", "batches": 1},
        {"kind": "tokens", "batches": -1},
        {"kind": "tokens", "batches": 1.5},
        {"kind": "tokens", "batches": True},
    ],
)
def test_a_foreign_or_damaged_state_is_refused_and_changes_nothing(state):
    source = made(4, 2, 30)
    next(source)
    with raises(DataError):
        source.restore(state)
    assert source.state() == {"kind": "tokens", "batches": 1}


@pytest.mark.parametrize(
    "other",
    [
        Tokens(np.arange(1, 101), seq=4, batch=3),
        Tokens(np.arange(101), seq=4, batch=3),
        Tokens(np.arange(100), seq=5, batch=3),
        Tokens(np.arange(100), seq=4, batch=2),
        Tokens(np.arange(100), seq=4, batch=3, seed=1),
        Tokens(np.arange(100), seq=4, batch=3, dtype=np.int64),
    ],
)
def test_the_fingerprint_tells_content_length_and_parameters_apart(other):
    source = Tokens(np.arange(100), seq=4, batch=3)
    next(source)
    assert source.fingerprint() == Tokens(np.arange(100), seq=4, batch=3).fingerprint()
    assert source.fingerprint() != other.fingerprint()
    assert source.fingerprint().startswith("tokens:100:")


def test_text_and_its_bytes_give_the_same_source():
    text = "to be, or not to be: that is the question"
    left = Tokens.from_text(text, seq=4, batch=3)
    right = Tokens.from_text(text.encode(), seq=4, batch=3)
    assert same(taken(left, 5), taken(right, 5))
    assert bytes(next(left)["x"][0].astype(np.uint8)).decode() in text


def test_a_character_that_is_not_ascii_is_refused_or_left_out():
    text = "na\u00efve " * 20
    with raises(DataError):
        Tokens.from_text(text, seq=4, batch=3)
    ignored = Tokens.from_text(text, seq=4, batch=3, errors="ignore")
    plain = Tokens.from_text("nave " * 20, seq=4, batch=3)
    assert ignored.fingerprint() == plain.fingerprint()
    with raises(DataError):
        Tokens.from_text(text, seq=4, batch=3, errors="replace")


def test_files_are_joined_in_the_order_given(tmp_path):
    first, second = tmp_path / "b.txt", tmp_path / "a.txt"
    first.write_bytes(b"one two three ")
    second.write_bytes(b"four five six")
    joined = Tokens.from_files([first, str(second)], seq=4, batch=3)
    assert (
        joined.fingerprint()
        == Tokens.from_text("one two three four five six", seq=4, batch=3).fingerprint()
    )
    assert Tokens.from_files(first, seq=4, batch=3).spec() == joined.spec()


def test_a_file_that_is_not_ascii_is_named(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xff" * 50)
    with raises(DataError):
        Tokens.from_files([tmp_path / "x.txt"], seq=4, batch=3)


def test_no_files_are_too_few_tokens():
    with raises(DataError):
        Tokens.from_files([], seq=4, batch=3)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5))
def test_every_batch_is_of_the_spec(extra, seq, batch):
    assume(extra > 0)
    source = made(seq, batch, extra)
    check_batch(next(source), source.spec())
    assert source.items_per_batch == seq * batch
    assert iter(source) is source
