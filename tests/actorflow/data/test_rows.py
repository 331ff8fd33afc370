"""Ranks that share a batch: each takes its rows, and together they take what one rank would."""

import numpy as np
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

from actorflow.data import ArraySource, DataError, FillsRows, Tokens, from_arrays, from_iterable
from actorflow.data.source import filler_of
from actorflow.run.ports import DataPort, FedSteps, ReadFields
from actors.machine.errors import SourceExhausted
from compiler.contract.placement import Mesh
from compiler.contract.sbp import shard_slices
from compiler.contract.types import ShardingSpec

ROWS = 7


def table():
    return {"x": np.arange(20 * 3, dtype=np.float32).reshape(20, 3), "y": np.arange(20)}


def arrays(rows=ROWS):
    return ArraySource(table(), batch=rows, seed=3)


def tokens(rows=ROWS):
    return Tokens(np.arange(300), seq=4, batch=rows, seed=3)


def iterable(rows=ROWS):
    whole = arrays(rows)
    return from_iterable(lambda: iter(arrays(rows)), whole.spec())


class Doubled(ArraySource):
    """Says itself what a batch is, so the rows that it inherits are of no use."""

    def __next__(self):
        batch = super().__next__()
        return {"x": 2 * batch["x"], "y": batch["y"]}


def doubled(rows=ROWS):
    return Doubled(table(), batch=rows, seed=3)


SOURCES = [arrays, tokens, iterable, doubled]
HAVE_ROWS = [arrays, tokens]


class Rank:
    """A data port with one slot, as a rank has it; `fetch` takes a batch."""

    def __init__(self, source, mesh=None, rank=0, splits=(), reads=None):
        self.source, types = source, source.spec()
        types = {name: type_ for name, type_ in types.items() if reads is None or name in reads}
        self.parts = {}
        for name, own in dict(splits).items():
            self.parts[name] = shard_slices(ShardingSpec(types[name].shape, own), mesh, rank)
        lines = dict.fromkeys(types, "train.py:1")
        steps = FedSteps(0, None)
        fields = ReadFields(types, lines, self.parts)
        self.port = DataPort(source, fields, steps, lambda: None)
        self.slot = {}
        for name, type_ in types.items():
            part = self.parts.get(name, tuple([slice(0, n) for n in type_.shape]))
            shape = [own.stop - own.start for own in part]
            self.slot[name] = np.full(shape, 77, type_.dtype.value)
        self._fetch = self.port.bind((self.slot,))

    def fetch(self):
        try:
            self._fetch()
        except SourceExhausted:
            if self.port.failure is not None:
                raise self.port.failure from None
            raise
        return {name: array.copy() for name, array in self.slot.items()}


MESHES = [
    (Mesh(("data",), (2,)), {"x": (("data", 0),), "y": (("data", 0),)}),
    (Mesh(("data",), (3,)), {"x": (("data", 0),), "y": (("data", 0),)}),
    (Mesh(("data", "model"), (2, 3)), {"x": (("data", 0), ("model", 0)), "y": (("data", 0),)}),
    (Mesh(("data", "model"), (2, 2)), {"x": (("data", 0),)}),
    (Mesh(("data", "model"), (2, 2)), {"x": (("data", 0), ("model", 1))}),
    (Mesh(("model",), (2,)), {"x": (("model", 1),)}),
]


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize(("mesh", "splits"), MESHES, ids=str)
def test_ranks_have_the_parts_of_the_batches_that_one_rank_has(make, mesh, splits):
    alone = Rank(make())
    ranks = [Rank(make(), mesh, rank, splits) for rank in range(mesh.num_ranks)]
    for _ in range(6):
        whole = alone.fetch()
        for rank in ranks:
            for name, array in rank.fetch().items():
                np.testing.assert_array_equal(array, whole[name][rank.parts.get(name, ...)])
            assert rank.source.state() == alone.source.state()


@pytest.mark.parametrize("make", SOURCES)
@given(before=st.integers(0, 5), wrote=st.integers(1, 4), reads=st.integers(1, 4))
def test_a_position_of_some_ranks_is_one_of_any_other_number(make, before, wrote, reads):
    def of(count):
        mesh = Mesh(("data",), (count,))
        splits = {"x": (("data", 0),), "y": (("data", 0),)}
        return [Rank(make(), mesh, rank, splits) for rank in range(count)]

    ranks = of(wrote)
    for _ in range(before):
        for rank in ranks:
            rank.fetch()
    states = [rank.source.state() for rank in ranks]
    assert all(state == states[0] for state in states)
    resumed, alone = of(reads), make()
    for rank in resumed:
        rank.source.restore(states[0])
    alone.restore(states[0])
    whole, parts = next(alone), [rank.fetch() for rank in resumed]
    for name in "xy":
        joined = np.concatenate([part[name] for part in parts])
        np.testing.assert_array_equal(joined, whole[name])


@pytest.mark.parametrize("make", SOURCES)
def test_only_sources_that_say_so_are_asked_for_rows(make):
    (rows, columns), own = make().spec()["x"].shape, slice(1, 3)
    is_asked = filler_of(make(), {"x": (own, slice(0, columns))}) is not None
    assert is_asked == (make in HAVE_ROWS)
    assert filler_of(make(), {"x": (slice(0, rows), own)}) is None
    assert filler_of(make(), {"z": (own,)}) is None


def test_rows_of_others_are_not_read():
    ids = np.arange(5 * 8 + 1)
    ids[0] = 2**40
    ranks = [Rank(Tokens(ids, seq=5, batch=8), Mesh(("data",), (4,)), rank,
                  {"x": (("data", 0),), "y": (("data", 0),)}) for rank in range(4)]  # fmt: skip
    errors = [error for rank in ranks if (error := raised(rank.fetch)) is not None]
    (error,) = errors
    assert "ids that fit into int32, came 1099511627776" in str(error)


def pipeline(rows=ROWS):
    return from_arrays(table()).shuffle(3).repeat().batch(rows)


@pytest.mark.parametrize("make", [arrays, tokens, pipeline])
@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_that_reads_one_of_two_arrays_has_it_filled_in(make, name, ranks):
    whole, mesh = make(), Mesh(("data",), (ranks,))
    splits = {name: (("data", 0),)} if ranks > 1 else {}
    some = [Rank(make(), mesh, rank, splits, (name,)) for rank in range(ranks)]
    for rank in some:
        rank.source.__class__ = type("Counted", (type(rank.source),), {"__next__": never})
    for _ in range(3):
        joined = np.concatenate([rank.fetch()[name] for rank in some])
        np.testing.assert_array_equal(joined, next(whole)[name])


def never(source):
    raise AssertionError("the whole batch was asked for")


def raised(fetch):
    try:
        fetch()
    except DataError as error:
        return error


def test_the_rows_of_an_array_of_any_layout_are_its_rows():
    plain = np.arange(60, dtype=np.float64).reshape(20, 3)
    for layout in (plain, np.asfortranarray(plain), np.repeat(plain, 2, axis=0)[::2]):
        source, whole = [ArraySource({"x": layout}, batch=7, seed=1) for _ in range(2)]
        out = {"x": np.empty((3, 3))}
        source.next_rows_into(out, {"x": slice(4, 7)})
        np.testing.assert_array_equal(out["x"], next(whole)["x"][4:7])


def test_the_end_of_the_data_is_the_same_for_rows():
    source = ArraySource({"x": np.zeros((4, 2), np.float32)}, batch=4, epochs=1)
    out = {"x": np.ones((2, 2), np.float32)}
    source.next_rows_into(out, {"x": slice(2, 4)})
    out["x"][...] = 5
    with pytest.raises(StopIteration):
        source.next_rows_into(out, {"x": slice(2, 4)})
    assert (out["x"] == 5).all()


@pytest.mark.parametrize("make", HAVE_ROWS)
def test_sources_with_rows_are_known_by_their_method(make):
    assert isinstance(make(), FillsRows)


def test_a_wrong_batch_is_told_of_the_whole_that_was_expected():
    short = [{"x": np.zeros((4, 3), np.float32), "y": np.zeros(4, np.int64)}]
    source = from_iterable(lambda: iter(short), arrays().spec())
    rank = Rank(source, Mesh(("data",), (2,)), 0, {"x": (("data", 0),), "y": (("data", 0),)})
    with raises(DataError):
        rank.fetch()


class Unchecked:
    """A user's own source, which does not check what it gives."""

    def __init__(self, batch):
        self.batch = batch

    def spec(self):
        return arrays().spec()

    def state(self):
        return {}

    def __next__(self):
        return self.batch


def test_a_part_is_no_batch():
    part = {"x": np.zeros((4, 3), np.float32), "y": np.zeros(4, np.int64)}
    rank = Rank(Unchecked(part), Mesh(("data",), (2,)), 0, {"x": (("data", 0),)})
    with raises(DataError):
        rank.fetch()
