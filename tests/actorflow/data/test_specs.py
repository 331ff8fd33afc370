"""Sources that declare batches of several shapes."""

import numpy as np
import pytest
from error_texts import raises

from actorflow.data import DataError, from_iterable, specs_of
from actorflow.data.source import place_of_spec
from compiler.contract.types import DType, TensorType


def spec(length, dtype=DType.INT32):
    return {"x": TensorType(dtype, (2, length)), "n": TensorType(DType.FLOAT32, (2,))}


def batch(length):
    return {"x": np.zeros((2, length), np.int32), "n": np.zeros(2, np.float32)}


class Declared:
    """A source that says nothing but its types."""

    def __init__(self, *specs, first=0):
        self._specs, self._first = specs, first

    def spec(self):
        return self._specs[self._first]

    def specs(self):
        return self._specs


class Plain:
    """A source of one type."""

    def spec(self):
        return spec(4)


def test_a_source_without_specs_has_its_spec_alone():
    assert specs_of(Plain()) == (spec(4),)


def test_all_declared_specs_come_in_their_order():
    assert specs_of(Declared(spec(4), spec(2), first=1)) == (spec(4), spec(2))


@pytest.mark.parametrize("specs", [(spec(4), spec(4)), (spec(4), spec(4, DType.INT64))])
def test_specs_that_are_equal_or_differ_in_more_than_shapes_are_refused(specs):
    with raises(DataError):
        specs_of(Declared(*specs))


@pytest.mark.parametrize("specs", [(spec(4), spec(2)), ()])
def test_a_spec_that_is_not_among_the_specs_is_refused(specs):
    source = Declared(*specs)
    source.spec = lambda: spec(8)
    with raises(DataError):
        specs_of(source)


def test_the_place_of_a_batch_is_that_of_its_shapes():
    specs = (spec(4), spec(2), spec(8))
    assert [place_of_spec(batch(n), specs) for n in (8, 4, 2)] == [2, 0, 1]
    with raises(DataError):
        place_of_spec(batch(3), specs, "train.py:41")


def test_from_iterable_gives_batches_of_several_specs_and_resumes_among_them():
    lengths = [4, 2, 2, 4, 2]
    source = from_iterable(lambda: map(batch, lengths), [spec(4), spec(2)])
    assert specs_of(source) == (spec(4), spec(2))
    assert source.spec() == spec(4)
    first = [next(source)["x"].shape[1] for _ in range(2)]
    state = source.state()
    rest = [b["x"].shape[1] for b in source]
    assert first + rest == lengths
    source.restore(state)
    assert [b["x"].shape[1] for b in source] == rest


def test_the_fingerprint_of_a_source_tells_its_specs_apart():
    one, two, both = (
        from_iterable(lambda: iter(()), specs).fingerprint()
        for specs in (spec(4), spec(2), [spec(4), spec(2)])
    )
    assert len({one, two, both}) == 3


def test_an_undeclared_batch_of_an_iterator_is_refused_with_the_declared_ones():
    source = from_iterable(lambda: iter([batch(3)]), [spec(4), spec(2)])
    with pytest.raises(DataError, match=r"expected one of the types that the source declares"):
        next(source)
    with raises(DataError):
        from_iterable(lambda: iter(()), [])
