import numpy as np
import pytest

from actors.kernels.native.embedding import EMBEDDING_UPDATE_KERNELS, NATIVE_EMBEDDING_KERNELS
from actors.kernels.native.fused import FUSED_KERNELS

OF_ROWS = (*NATIVE_EMBEDDING_KERNELS, *EMBEDDING_UPDATE_KERNELS)
NATIVE = {k.op: k for k in (*OF_ROWS, *FUSED_KERNELS)}
NO_DECAY = {"weight_decay": 0.0}


@pytest.fixture
def descent(harness):
    """Return a function from the inputs of plain descent to its attributes in a plan."""
    return lambda inputs, op="embedding_sgd_update": harness.fused(op, NO_DECAY, inputs)[1]


def test_a_bad_id_leaves_the_table_as_it_was_and_the_next_batch_runs(native, native_call, descent):
    table, dy, lr = np.ones((5, 2)), np.ones((3, 2)), np.array(1.0)
    ids = np.array([0, 9, 1])
    inputs = (table, dy, ids, lr)
    kernel, attrs = NATIVE["embedding_update"], descent(inputs)
    launch, _, _ = native_call.bind(kernel, attrs, inputs, (table,))
    with pytest.raises(IndexError):
        launch()
    np.testing.assert_array_equal(table, 1)
    ids[1] = 0
    launch()
    np.testing.assert_array_equal(table[:, 0], [-1, 0, 1, 1, 1])


def test_rows_that_are_not_dense_are_left_to_numpy(native, native_call):
    weight, ids, out = np.zeros((4, 6)).T, np.zeros(3, int), np.zeros((3, 4))
    operands = tuple(map(native_call.operand, (weight, ids, out)))
    assert NATIVE["embedding"].plan({}, operands[:2], operands[2:]) is None
