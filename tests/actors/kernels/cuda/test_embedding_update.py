import numpy as np
import pytest

from actors.kernels.cuda.catalogue import kernels_on
from actors.kernels.cuda.kernel import gpu_named
from compiler.contract.types import DType, TensorType

GPU = gpu_named("h200")
UPDATE = kernels_on(GPU)["cuda.embedding_update"]
NO_DECAY = {"weight_decay": 0.0}


@pytest.fixture
def update(emulated_run, harness):
    """Return a function that updates picked rows of a table on the emulated device."""

    def run(inputs, **more):
        attrs = harness.fused("embedding_sgd_update", NO_DECAY, inputs)[1]
        table = TensorType(DType(inputs[0].dtype.name), inputs[0].shape)
        return emulated_run(UPDATE, attrs, inputs, (table,), in_place=((0, 0),), **more)

    return run


def test_a_step_that_is_skipped_leaves_the_table_as_it_was(update):
    table, dy = np.ones((5, 2), np.float32), np.ones((3, 2), np.float32)
    given = (table, dy, np.array([0, 4, 0]), np.array(1, np.float32))
    for skip, first in ((0, -1), (1, 1)):
        found = update((*given, np.array(skip)))
        np.testing.assert_array_equal(found.outputs[0][0], first)


def test_a_table_that_is_not_dense_is_not_taken(harness):
    table, dy, ids = np.zeros((4, 6)).T, np.zeros((3, 4)), np.zeros(3, int)
    inputs = (table, dy, ids, np.array(1.0))
    attrs = harness.fused("embedding_sgd_update", NO_DECAY, inputs)[1]
    operands = tuple(map(harness.operand, inputs))
    assert UPDATE.plan(attrs, operands, operands[:1]) is None
