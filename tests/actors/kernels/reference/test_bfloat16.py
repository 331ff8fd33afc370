"""Casts to and from bfloat16 on the bits, and kernels upcast to float32."""

import tracemalloc

import numpy as np
import pytest
from kernel_calls import bind_kernel, chosen, low_operand, needs_of, operand

from actors.kernels.host import catalogue
from compiler.contract.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.contract.types import DType

EVERY = np.arange(1 << 16, dtype=np.uint16)


def up(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def down(x):
    """Round by comparing with both neighbours in float64: slow, and no relation of the kernel's."""
    x = np.asarray(x, np.float32)
    toward_zero = (x.view(np.uint32) >> 16).astype(np.uint16)
    finite = np.isfinite(x)
    with np.errstate(invalid="ignore", over="ignore"):
        low = up(toward_zero).astype(np.float64)
        high = np.where(
            toward_zero & 0x7FFF == 0x7F7F,
            np.copysign(2.0**128, x.astype(np.float64)),
            up(toward_zero + np.uint16(1)),
        )
        exact = x.astype(np.float64)
        below, above = np.abs(exact - low), np.abs(high - exact)
        is_up = (above < below) | ((above == below) & (toward_zero % 2 == 1))
    found = np.where(finite & is_up, toward_zero + 1, toward_zero).astype(np.uint16)
    return np.where(np.isnan(x), found | 0x40, found).astype(np.uint16)


def run(op, attrs, inputs, outputs):
    """Run the kernel that is chosen, with uint16 as bfloat16, twice; return its name."""
    kernel, _ = chosen(op, attrs, inputs, outputs, low_operand)
    launch, _, check = bind_kernel(kernel, attrs, inputs, outputs, low_operand)
    launch()
    launch()
    check()
    return kernel.name


def cast_call(x, out):
    """Return the attributes of a fused kernel that is a cast."""
    types = [low_operand(array).type.dtype for array in (x, out)]
    given, made = ProgramInput(types[0], Kind.FULL), Instruction("cast", (0,), types[1], Kind.FULL)
    return {"program": FusedProgram((given,), (made,), (1,)), "rows": 1, "columns": x.size}


def cast(x, out):
    assert run("fused", cast_call(x, out), (x,), (out,)) == "numpy.fused.upcast"
    return out


def test_every_value_goes_up_exactly():
    np.testing.assert_array_equal(
        cast(EVERY, np.empty(1 << 16, np.float32)).view(np.uint32), EVERY.astype(np.uint32) << 16
    )


def test_numbers_go_down_to_the_nearest_in_every_block():
    rng = np.random.default_rng(3)
    x = rng.integers(0, 1 << 32, (3, 40_000), dtype=np.uint64).astype(np.uint32)
    x[0, ::7] = (x[0, ::7] & 0xFFFF0000) | 0x8000
    x[1, :5] = 0x7F7F8000, 0xFF7FFFFF, 0x7F800001, 0xFFFFFFFF, 0x00008000
    x = x.view(np.float32)
    np.testing.assert_array_equal(cast(x, np.empty(x.shape, np.uint16)), down(x))


def test_a_nan_stays_one_with_its_sign():
    x = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC00000], np.uint32).view(np.float32)
    found = cast(x, np.empty(4, np.uint16))
    assert np.isnan(up(found)).all()
    np.testing.assert_array_equal(found >> 15, [0, 1, 0, 1])


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "int8", "bool"])
def test_casts_with_other_types_go_by_way_of_float32(dtype):
    x = np.array([0, 1, 1, 0] if dtype == "bool" else [-3, 100, 77, 5]).astype(dtype)
    expected = down(x.astype(np.float32))
    np.testing.assert_array_equal(cast(x, np.empty(4, np.uint16)), expected)
    np.testing.assert_array_equal(cast(expected, np.empty(4, dtype)), x)


def floats(*shape, seed=0):
    return down(np.random.default_rng(seed + len(shape)).normal(size=shape))


MOVEMENT = {
    *("reshape", "transpose", "broadcast_to", "slice", "pad", "concat", "copy"),
    *("stop_gradient", "embedding", "copy_block", "carry"),
}
"""Ops whose kernels move the bytes of any type."""

WITH_PROGRAMS = ("fused", "region", "embedding_update", "scan", "cond", "while")


def test_no_kernel_of_arithmetic_takes_bfloat16_but_widened_or_its_own():
    """Their arithmetic would be that of uint16."""
    x, square = low_operand(floats(4)), low_operand(floats(4, 4))
    scalar, ids = low_operand(floats()), operand(np.zeros(4, np.int64))
    attrs = {
        "axes": (0,), "axis": 0, "keepdims": False, "scale": 1.0, "causal": False, "eps": 0.1,
        "p": 0.5, "key": 1, "every": 2, "rows": 4, "weight_decay": 0.0, "momentum": 0.9,
        "nesterov": False, "beta1": 0.9, "beta2": 0.9, "chunk_rows": 2,
        "dx": True, "dweight": True, "dbias": False,
    }  # fmt: skip
    calls = {
        1: ((x,), (square,)),
        2: ((x, x), (square, square), (square, ids)),
        3: ((x, x, x), (square, square, ids), (x, x, scalar)),
        4: ((x, x, x, scalar),),
        6: ((x, x, x, x, scalar, ids),),
    }
    asked = 0
    for kernel in catalogue.HOST_KERNELS:
        if kernel.op in MOVEMENT or not kernel.name.startswith("numpy."):
            continue
        if kernel.name.endswith(".upcast") or kernel.op in WITH_PROGRAMS:
            continue
        for inputs in [call for calls_of_size in calls.values() for call in calls_of_size]:
            for outputs in ((inputs[0],), (scalar,), (inputs[0],) * 3):
                try:
                    needs = needs_of(kernel, attrs, inputs, outputs)
                except (ValueError, IndexError):  # not so many operands
                    continue
                asked += 1
                assert needs is None, f"{kernel.name} takes {inputs}"
    assert asked > 60


def test_true_uint16_is_never_taken_for_bfloat16():
    x = np.zeros((4, 4), np.uint16)
    low = low_operand(x)
    upcast = catalogue.kernels_by_name()["numpy.embedding.upcast"]
    indices = [operand(x[0], DType.UINT16), operand(x[0].astype(np.int32))]
    assert [upcast.plan({}, (low, i), (low,)) is None for i in indices] == [True, False]


@pytest.mark.parametrize("case", ["down", "up", "matmul"])
def test_launches_allocate_nothing(case):
    x, low = np.ones((300, 400), np.float32), floats(300, 400)
    call = ("matmul", {}, (low, low.T), (np.empty((300, 300), np.uint16),))
    if case != "matmul":
        operands = (x, low) if case == "down" else (low, x)
        call = ("fused", cast_call(*operands), operands[:1], operands[1:])
    launch = bind_kernel(chosen(*call, low_operand)[0], *call[1:], low_operand)[0]
    launch()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        launch()
        assert tracemalloc.get_traced_memory()[1] - before < 16 * 1024
    finally:
        tracemalloc.stop()
