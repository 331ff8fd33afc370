"""A parameter or a buffer of one's own: of an array or a shape, with every way to begin."""

import math

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.nn import init
from compiler.contract.errors import CompileError


class Held(nn.Module):
    def __init__(self, held):
        self.held = held


def first(held, seed=0):
    return Held(held).init(seed).state()["held"]


@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer])
@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((np.eye(3, dtype=np.float32),), np.eye(3)),
        ((np.arange(3.0),), [0.0, 1.0, 2.0]),
        ((np.float32(0.07),), np.float32(0.07)),
        (((2, 3),), np.zeros((2, 3))),
        (([2, 3],), np.zeros((2, 3))),
        ((4,), np.zeros(4)),
        (((),), np.zeros(())),
        (((0, 2),), np.zeros((0, 2))),
        (((2,), "ones"), np.ones(2)),
        (((2,), "zeros"), np.zeros(2)),
        (((2,), init.ones_), np.ones(2)),
        (((2, 2), init.eye_), np.eye(2)),
        (((2,), lambda p: init.constant_(p, 3.5)), [3.5, 3.5]),
        (((2,), (("kind", "constant"), ("value", 2.0))), [2.0, 2.0]),
    ],
)
def test_what_is_given_is_what_it_begins_with(kind, args, expected):
    held = kind(*args)
    value = first(held)
    np.testing.assert_array_equal(value, np.asarray(expected, value.dtype))
    is_doubles = isinstance(args[0], np.ndarray) and args[0].dtype == np.float64
    assert value.dtype == (np.float64 if is_doubles else np.float32)
    assert held.shape == np.shape(expected)


@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer])
def test_drawn_values_follow_from_seed_and_path(kind):
    def draw(seed):
        return first(kind((50, 40), lambda p: init.normal_(p, std=0.5)), seed)

    assert abs(draw(0).std() - 0.5) < 4 * 0.5 / math.sqrt(2 * 2000)
    np.testing.assert_array_equal(draw(0), draw(0))
    assert (draw(0) != draw(1)).any()
    orthogonal = first(kind((3, 5), init.orthogonal_))
    np.testing.assert_allclose(orthogonal @ orthogonal.T, np.eye(3), atol=1e-6)


def test_an_array_is_copied_and_a_dtype_casts_it():
    array = np.ones(3)
    held = nn.Parameter(array, dtype="float32")
    array[:] = 7
    np.testing.assert_array_equal(first(held), [1, 1, 1])
    assert first(held).dtype == np.float32
    assert first(nn.Buffer(np.arange(3, dtype=np.int16), dtype="int64")).dtype == np.int64
    assert nn.Parameter((2,), dtype=af.DType.FLOAT64).dtype is af.DType.FLOAT64


@pytest.mark.parametrize("array", [np.full(2, 0.5, np.float32), np.full(2, 0.5)])
def test_a_parameter_of_an_array_is_trained_and_keeps_its_dtype(array, tmp_path):
    def fit(steps):
        model = Held(nn.Parameter(array))
        data = af.data.ArraySource({"x": np.ones((4, 2), array.dtype)}, batch=2)
        job = af.job(lambda m, b: (m.held * b.x).sum(), optimizer=af.optim.SGD(0.25))
        job.fit(model, data, steps=steps, checkpoint=tmp_path, progress=False)
        return model.state()["held"]

    np.testing.assert_array_equal(fit(1), [0, 0])
    assert fit(3).dtype == array.dtype  # from the checkpoint of step 1
    np.testing.assert_array_equal(fit(4), [-1.5, -1.5])


WRONG = {
    "a number": (0.5,),
    "numbers": ([0.5, 0.25],),
    "rows": ([[1, 2], [3, 4]],),
    "a text": ("zeros",),
    "nothing": (None,),
    "a bool": (True,),
    "a negative extent": ((2, -1),),
    "an array and how to begin": (np.ones(2), "zeros"),
    "a masked array": (np.ma.ones(2),),
    "a name of none": ((2,), "normal"),
    "an array to begin with": ((2,), np.ones(2)),
    "numpy's function": ((2,), np.zeros),
    "a function that declares nothing": ((2,), lambda p: p),
    "a function that returns nothing": ((2,), lambda p: None),
    "an infinite start": ((2,), lambda p: init.constant_(p, math.inf)),
    "a dtype of none": ((2,), "zeros", "text"),
    "bfloat16": ((2,), "zeros", "bfloat16"),
    "complex": (np.ones(2, complex),),
    "objects": (np.array([None]),),
}


@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer])
@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_an_error_that_says_what_to_write(kind, case):
    with raises(CompileError):
        kind(*WRONG[case])


@pytest.mark.parametrize("array", [np.arange(3), np.ones(2, bool), np.int64(4)])
def test_a_parameter_of_integers_is_refused_and_a_buffer_of_them_is_not(array):
    with raises(CompileError):
        nn.Parameter(array)
    np.testing.assert_array_equal(first(nn.Buffer(array)), array)
