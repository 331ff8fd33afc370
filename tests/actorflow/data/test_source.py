import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.data import ArraySource, DataError, FillsBatches, Tokens, check_batch, from_iterable
from actorflow.data.source import content_hash, items_of, spec_of
from compiler.contract.types import DType, TensorType

SPEC = {"x": TensorType(DType.INT32, (32, 64)), "y": TensorType(DType.FLOAT32, (32,))}
GOOD = {"x": np.zeros((32, 64), np.int32), "y": np.zeros(32, np.float32)}


def refused(batch, where="train.py:41"):
    with raises(DataError):
        check_batch(batch, SPEC, where)


def test_a_batch_of_the_spec_passes():
    check_batch(GOOD, SPEC, "train.py:41")
    check_batch(dict(reversed(GOOD.items())), SPEC)
    check_batch({**GOOD, "y": np.zeros(64, np.float32)[::2]}, SPEC)


def test_a_wrong_element_type_names_entry_both_types_line_and_mend():
    refused({**GOOD, "x": GOOD["x"].astype(np.int64)})


def test_byte_swapped_numbers_are_not_taken_for_plain_ones():
    refused({**GOOD, "x": GOOD["x"].astype(">i4")})


def test_a_short_batch_gets_the_advice_for_short_batches():
    refused({**GOOD, "y": np.zeros(7, np.float32)})


def test_another_shape_gets_the_advice_for_shapes():
    refused({**GOOD, "x": np.zeros((32, 65), np.int32)})


def test_missing_and_unexpected_keys_are_listed():
    refused({"x": GOOD["x"], "z": 1})
    refused({})


@pytest.mark.parametrize("value", [[1], None, 1.5])
def test_a_value_that_is_no_array_is_named_with_its_type(value):
    refused({**GOOD, "y": value})


def test_a_batch_that_is_no_dict_is_refused():
    refused((GOOD["x"], GOOD["y"]))


def test_without_a_line_the_message_has_no_empty_brackets():
    refused({}, where="")


def test_spec_of_reads_the_types_and_refuses_what_no_plan_can_hold():
    assert spec_of(GOOD) == SPEC
    for foreign in (np.zeros(2, complex), np.zeros(2, ">f4"), np.array([None])):
        with raises(DataError):
            spec_of({"x": foreign}, "a.py:1")


def test_progress_counts_what_the_source_declares_or_samples():
    assert items_of(Tokens(np.arange(99), seq=4, batch=3)) == (12, "tokens")
    assert items_of(ArraySource({"x": np.zeros((9, 2))}, batch=3)) == (3, "samples")
    assert items_of(from_iterable(lambda: iter(()), SPEC)) == (32, "samples")
    assert items_of(from_iterable(lambda: iter(()), {"x": TensorType(DType.BOOL, ())}))[0] == 1


def test_only_sources_with_next_into_are_of_the_fast_kind():
    assert isinstance(Tokens(np.arange(99), seq=4, batch=3), FillsBatches)
    assert not isinstance(from_iterable(lambda: iter(()), SPEC), FillsBatches)


def test_a_hash_depends_on_content_type_and_shape_and_not_on_layout():
    array = np.random.default_rng(0).normal(size=(3000, 1000))  # more than one chunk
    changed = array.copy()
    changed[-1, -1] += 1
    assert content_hash(array) == content_hash(np.asfortranarray(array))
    different = [array, changed, array.reshape(1000, 3000), array.view(np.int64), array[:0]]
    assert len({content_hash(one) for one in different}) == len(different)


class Doubled(af.data.ArraySource):
    def __next__(self):
        return {"x": 2 * super().__next__()["x"]}


class Wrapped:
    def __init__(self, inner):
        self.inner = inner

    def __next__(self):
        return {"x": 2 * next(self.inner)["x"]}

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.parametrize("wraps", [False, True])
def test_a_next_of_ones_own_is_not_passed_over(wraps):
    arrays = {"x": np.ones((4, 1), np.float32)}
    source = Doubled(arrays, batch=2)
    if wraps:
        source = Wrapped(af.data.ArraySource(arrays, batch=2))

    @af.job(train=False)
    def read(model, batch):
        return model(batch.x) * 0.0 + batch.x

    (outputs,) = read.stream(nn.Linear(1, 1), source, steps=1)
    assert outputs["output"].ravel().tolist() == [2.0, 2.0]
