import json
from collections import UserDict

import numpy as np
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

import actorflow as af
from actorflow import nn
from actorflow.data import DataError, from_iterable
from compiler.contract.types import DType, TensorType

SPEC = {"x": TensorType(DType.INT64, (2,))}


def counting(stop):
    def batches():
        for i in range(stop):
            yield {"x": np.array([i, i])}

    return batches


def values(source):
    return [int(batch["x"][0]) for batch in source]


@given(st.integers(0, 12), st.data())
def test_restore_continues_the_identical_stream(stop, data):
    before = data.draw(st.integers(0, stop))
    source = from_iterable(counting(stop), SPEC)
    for _ in range(before):
        next(source)
    state = json.loads(json.dumps(source.state()))
    resumed = from_iterable(counting(stop), SPEC)
    resumed.restore(state)
    assert values(resumed) == values(source) == list(range(before, stop))


def test_the_iteration_starts_when_the_first_batch_is_asked_for():
    started = []

    def batches():
        started.append(1)
        return counting(3)()

    source = from_iterable(batches, SPEC)
    assert source.spec() == SPEC
    assert not started
    next(source)
    next(source)
    assert len(started) == 1


def test_restore_past_the_end_names_both_counts_and_changes_nothing():
    source = from_iterable(counting(3), SPEC)
    next(source)
    with raises(DataError):
        source.restore({"kind": "iterable", "batches": 5})
    assert values(source) == [1, 2]


def test_a_wrong_batch_names_the_line_of_the_users_function():
    def batches():
        yield {"x": np.zeros(3, np.int64)}

    with raises(DataError):
        next(from_iterable(batches, SPEC))


def test_any_mapping_is_a_batch():
    assert values(from_iterable(lambda: iter([UserDict(x=np.array([4, 4]))]), SPEC)) == [4]


def test_a_generator_in_place_of_a_function_is_refused_with_the_way_out():
    with raises(DataError):
        from_iterable(counting(3)(), SPEC)


def test_a_function_that_returns_no_iterator_is_refused():
    with raises(DataError):
        next(from_iterable(lambda: [{"x": np.zeros(2)}], SPEC))


def test_the_fingerprint_is_made_of_spec_and_the_users_own_words():
    one = from_iterable(counting(3), SPEC, fingerprint="v1").fingerprint()
    assert one == from_iterable(counting(9), SPEC, fingerprint="v1").fingerprint()
    assert one != from_iterable(counting(3), SPEC, fingerprint="v2").fingerprint()
    wider = {"x": TensorType(DType.INT64, (3,))}
    assert one != from_iterable(counting(3), wider, fingerprint="v1").fingerprint()


class Loader:
    """Gives batches anew each time, as torch's DataLoader does; and has a length."""

    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


PAIRS = Loader(*[(np.full((4, 3), n, np.float32), np.arange(4)) for n in range(3)])


def test_a_loader_is_a_source_whose_types_are_those_of_its_first_batch():
    source = from_iterable(PAIRS)
    assert {name: str(type_) for name, type_ in source.spec().items()} == {
        "x": "float32[4, 3]",
        "y": "int64[4]",
    }
    assert [batch["x"][0, 0] for batch in source] == [0, 1, 2]
    begun = []
    once = from_iterable(lambda: iter(begun.append(1) or PAIRS.batches))
    once.spec()
    assert [batch["x"][0, 0] for batch in once] == [0, 1, 2]
    assert begun == [1]
    other = from_iterable(PAIRS)
    other.restore({"kind": "iterable", "batches": 2})
    assert next(other)["x"][0, 0] == 2
    triples = from_iterable(Loader((np.ones(1), np.ones(2), np.ones(3))), names="abc")
    assert [len(array) for array in next(triples).values()] == [1, 2, 3]


def test_a_job_takes_a_loader_as_it_is():
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    result = train.fit(nn.Linear(3, 4), PAIRS, steps=3, progress=False)
    assert result.last_step == 3

    @af.job(train=False)
    def mean(model, batch):
        return {"x": batch.x.mean()}

    assert mean.evaluate(nn.Module(), PAIRS) == {"x": 1.0}


@pytest.mark.parametrize("batches", [(), (([1.0], [2.0], [3.0]),)], ids=["none", "three"])
def test_a_loader_whose_first_batch_is_none_is_refused(batches):
    with raises(DataError):
        from_iterable(Loader(*batches)).spec()
