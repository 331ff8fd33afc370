import numpy as np
import pytest
from kernel_calls import guarded, low_operand

from actors.kernels.common.host_memory import SHAPE_KERNELS
from actors.kernels.native.movement import MOVEMENT_KERNELS


def test_no_kernel_reshapes_between_two_strided_layouts(native, native_call):
    strided = native_call.operand(np.zeros((4, 6), np.float32).T)
    dense = native_call.operand(np.zeros((6, 4), np.float32))
    for kernel in [k for k in (*SHAPE_KERNELS, *MOVEMENT_KERNELS) if k.op == "reshape"]:
        assert kernel.plan({}, (strided,), (strided,)) is None
        assert kernel.plan({}, (strided,), (dense,)) is not None
        assert kernel.plan({}, (dense,), (strided,)) is not None


def test_no_kernel_takes_a_call_while_native_code_is_off(native_call):
    x = native_call.operand(np.zeros(3, np.float32))
    assert all(kernel.plan({}, (x,), (x,)) is None for kernel in MOVEMENT_KERNELS)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("extents", [(8, 8), (1, 9), (24, 40), (27, 35), (130, 67), (7, 300)])
def test_turned_tensors_are_copied_whole_and_nothing_beside_them(native, dtype, extents):
    """Elements differ but for bytes; the target lies among guards, its rows with room between."""
    rows, columns = extents
    (kernel,) = [kernel for kernel in MOVEMENT_KERNELS if kernel.op == "copy"]
    elements = np.arange(3 * rows * columns, dtype=dtype).reshape(3, rows, columns)
    wide = np.zeros((3, columns, rows + 5), dtype)[:, :, :rows]
    for source, target in (
        (elements.transpose(0, 2, 1), wide),
        (elements[:, :, ::-1].transpose(2, 0, 1), np.zeros((columns, 3, rows), dtype)),
    ):
        out, check = guarded(target)
        plan = kernel.plan({}, [low_operand(source)], [low_operand(out)])
        plan.bind((source,), (out,), None)()
        np.testing.assert_array_equal(out, source)
        check()
