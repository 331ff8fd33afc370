import numpy as np

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
