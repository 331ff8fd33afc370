import numpy as np
from kernel_calls import needs_of

from actors.kernels.cuda.calls import RunKernel
from actors.kernels.cuda.catalogue import kernels_on
from actors.kernels.cuda.kernel import gpu_named
from compiler.contract.types import DType, TensorType

GPU = gpu_named("h200")
GATHER, GRAD = kernels_on(GPU)["cuda.embedding"], kernels_on(GPU)["cuda.embedding_grad"]


def test_aligned_rows_are_copied_16_bytes_at_a_time_and_odd_ones_by_less(emulated_run):
    out = TensorType(DType.FLOAT32, (3, 8))
    weight, ids = np.zeros((5, 8), np.float32), np.zeros(3, np.int32)
    for offset, unit in ((0, 16), (8, 8), (4, 4)):
        found = emulated_run(GATHER, {}, (weight, ids), (out,), offset_bytes=offset)
        (call,) = found.calls
        assert call.words[-2] == unit


def test_any_id_is_bad_for_a_table_without_rows(emulated_run):
    ids, table = np.array(0), np.zeros((0, 3), np.float32)
    found = emulated_run(GATHER, {}, (table, ids), (TensorType(DType.FLOAT32, (3,)),))
    assert str(found.error) == "id 0 at position () is outside an empty range"
    dy = np.zeros(3, np.float32)
    found = emulated_run(GRAD, {"rows": 0}, (dy, ids), (TensorType(DType.FLOAT32, (0, 3)),))
    assert str(found.error) == "id 0 at position () is outside an empty range"


def test_a_bad_id_is_told_where_a_row_has_no_columns(emulated_run):
    ids, dy = np.array([0, 7]), np.zeros((2, 0), np.float32)
    found = emulated_run(GRAD, {"rows": 3}, (dy, ids), (TensorType(DType.FLOAT32, (3, 0)),))
    assert str(found.error) == "id 7 at position 1 is outside 0..2"


def test_ids_that_are_no_integers_are_not_taken(harness):
    weight, out = np.zeros((4, 6)), np.zeros((3, 6))
    operands = tuple(map(harness.operand, (weight, np.zeros(3), out)))
    assert GATHER.plan({}, operands[:2], operands[2:]) is None
    assert GRAD.plan({"rows": 4}, (operands[2], operands[1]), operands[:1]) is None


def test_a_million_ids_need_a_sixteenth_of_their_rows_and_sixteen_bytes_each_in_scratch(harness):
    rows = TensorType(DType.FLOAT32, (1 << 20, 768))
    dy = harness.operand(np.broadcast_to(np.zeros(768, np.float32), rows.shape))
    ids = harness.operand(np.zeros(1 << 20, np.int32))
    out = harness.operand(np.zeros((8, 768), np.float32))
    needs = needs_of(GRAD, {"rows": 8}, (dy, ids), (out,))
    most = rows.size_bytes // 16 + (17 << 20) + 4096
    assert rows.size_bytes // 16 < needs.workspace_bytes <= most


def test_no_call_asks_for_more_threads_than_a_block_may_have(emulated_run):
    dy, ids = np.zeros((3, 2000), np.float32), np.zeros(3, np.int32)
    out = TensorType(DType.FLOAT32, (4, 2000))
    found = emulated_run(GRAD, {"rows": 4}, (dy, ids), (out,), seeds=(0,))
    for call in found.calls:
        if isinstance(call, RunKernel):
            assert call.num_threads % 32 == 0
            assert call.num_threads <= 1024
