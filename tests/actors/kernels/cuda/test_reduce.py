"""What reductions on a GPU take and need; their numbers: `test_conformance`."""

import itertools
import math

import numpy as np
import pytest
from kernel_calls import needs_of

from actors.kernels.cuda import nvrtc, reduce
from actors.kernels.cuda.catalogue import kernels_on
from actors.kernels.cuda.kernel import gpu_named
from compiler.contract.types import DType

GPU = gpu_named("h200")
KERNELS = {op: kernels_on(GPU)[f"cuda.{op}"] for op in ("sum", "mean", "max")}


def test_what_has_no_answer_is_refused(harness):
    def query(op, x, out):
        operands = harness.operand(x), harness.operand(out)
        return needs_of(KERNELS[op], {"axes": (0,), "keepdims": False}, operands[:1], operands[1:])

    assert query("max", np.zeros((0, 3)), np.zeros(3)) is None
    assert query("max", np.zeros((0, 0)), np.zeros(0)) is not None
    assert query("mean", np.zeros((2, 3), int), np.zeros(3, int)) is None
    assert query("sum", np.zeros((2, 3), bool), np.zeros(3, bool)) is None


def test_scratch_and_time_follow_from_the_shapes(harness):
    def needs(shape, axes):
        x = np.broadcast_to(np.float32(0), shape)
        dense = np.lib.stride_tricks.as_strided(
            x, shape, [4 * math.prod(shape[i + 1 :]) for i in range(len(shape))]
        )
        out = np.broadcast_to(np.float32(0), [n for i, n in enumerate(shape) if i not in axes])
        operands = harness.operand(dense), harness.operand(out)
        return needs_of(
            KERNELS["sum"], {"axes": axes, "keepdims": False}, operands[:1], operands[1:]
        )

    many = needs((1 << 16, 1 << 14), (1,))
    assert many.workspace_bytes == 0
    assert many.duration_ns == pytest.approx(
        GPU.call_ns + 4 * ((1 << 30) + (1 << 16)) / GPU.bytes_per_ns
    )
    few = needs((1 << 30,), (0,))
    assert 0 < few.workspace_bytes <= 8 * 1024
    assert few.duration_ns == pytest.approx(
        2 * GPU.call_ns + 4 * (1 << 30) / GPU.bytes_per_ns, rel=1e-6
    )


@pytest.mark.cuda
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_texts_are_built_for_every_gpu_and_spill_nothing(arch):
    if not nvrtc.is_here():
        pytest.skip("NVRTC is not installed")
    wide = {True: DType.FLOAT64}
    some = DType.FLOAT32, DType.BFLOAT16, DType.INT32
    for dtype, is_maximum in itertools.product(some, (False, True)):
        stage = wide.get(dtype.is_float, DType.INT64)
        for of, to in {(dtype, dtype), (dtype, stage), (stage, dtype)}:
            (usage,) = nvrtc.usage(reduce._reduce_text(is_maximum, of, to), arch).values()
            assert usage.spilled_bytes == 0
            assert usage.registers <= 80
