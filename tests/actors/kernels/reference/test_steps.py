"""Instructions as calls of numpy: bits do not depend on where the arrays lie."""

import numpy as np
import pytest

from actors.kernels.reference.walk import _BY_SERIES, step_calls
from compiler.contract.program import UFUNCS, Instruction, Kind
from compiler.contract.types import DType


@pytest.mark.parametrize("op", sorted(_BY_SERIES))
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64])
@pytest.mark.parametrize("shape", [(1, 24), (24, 1), (6, 8), (3, 5)])
@pytest.mark.parametrize("places", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_arrays_that_touch_give_the_bits_of_arrays_that_do_not(op, dtype, shape, places):
    count, function = shape[0] * shape[1], UFUNCS[op]
    block = np.random.default_rng(1).uniform(0.1, 3.0, 3 * count).astype(dtype.value)
    held = [block[count * i : count * (i + 1)].reshape(shape) for i in places]
    operands, out = held[: 2 if op in ("pow", "atan2") else 1], held[-1]
    expected = function(*[x.copy() for x in operands])
    instruction = Instruction(op, (0, 1)[: len(operands)], dtype, Kind.FULL)
    for call in step_calls(instruction, tuple(operands), out):
        call()
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtypes", [("float16", "float16"), ("float16", "float32")])
def test_a_choice_takes_short_floats_as_they_lie_in_memory(dtypes):
    first, second = [
        np.arange(4, dtype=dtype)[None] * k for dtype, k in zip(dtypes, (1, -2), strict=True)
    ]
    condition, out = np.tri(4, dtype=bool), np.empty((4, 4), np.float32)
    instruction = Instruction("select", (0, 1, 2), DType.FLOAT16, Kind.FULL)
    for call in step_calls(instruction, (condition, first, second), out, np.empty(64, np.uint8)):
        call()
    np.testing.assert_array_equal(out, np.where(condition, first, second))
