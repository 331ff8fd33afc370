import numpy as np
import pytest
from error_texts import raises

from actorflow.tensor.initial_values import initial_value
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, TensorType

LARGE = TensorType(DType.FLOAT32, (400, 300))
NORMAL = (("kind", "normal"), ("std", 0.02))
UNIFORM = (("kind", "uniform"), ("bound", 0.5))


def test_values_depend_on_seed_and_name_and_on_nothing_else():
    first = initial_value("a.weight", LARGE, NORMAL, 7)
    initial_value("other", LARGE, UNIFORM, 1)
    np.testing.assert_array_equal(first, initial_value("a.weight", LARGE, NORMAL, 7))
    assert not np.array_equal(first, initial_value("b.weight", LARGE, NORMAL, 7))
    assert not np.array_equal(first, initial_value("a.weight", LARGE, NORMAL, 8))


def test_distributions_have_the_moments_they_promise():
    normal = initial_value("n", LARGE, NORMAL, 0)
    assert normal.dtype == np.float32
    assert abs(normal.mean()) < 5e-4
    assert normal.std() == pytest.approx(0.02, rel=0.02)
    uniform = initial_value("u", LARGE, UNIFORM, 0)
    assert np.abs(uniform).max() <= 0.5
    assert uniform.std() == pytest.approx(1 / np.sqrt(12), rel=0.02)


def test_constants_and_the_seed():
    small = TensorType(DType.FLOAT32, (2,))
    assert initial_value("z", small, (("kind", "zeros"),), 3).tolist() == [0, 0]
    assert initial_value("o", small, (("kind", "ones"),), 3).tolist() == [1, 1]
    assert initial_value("s", TensorType(DType.INT64, ()), (("kind", "seed"),), 3) == 3


def test_an_unknown_kind_and_a_missing_number_are_errors():
    with raises(CompileError):
        initial_value("w", LARGE, (("kind", "xavier"),), 0)
    with raises(CompileError):
        initial_value("w", LARGE, (("kind", "normal"),), 0)
