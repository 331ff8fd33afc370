import json
from collections import UserDict

import numpy as np
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

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
