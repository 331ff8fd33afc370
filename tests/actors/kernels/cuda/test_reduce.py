"""Sums, means and maxima on a GPU, over any axes of any layout, against float64."""

import itertools
import math

import numpy as np
import pytest

from actors.kernels.cuda import nvrtc, reduce
from actors.kernels.cuda.kernel import gpu_named
from actors.kernels.cuda.reduce import reduce_kernels
from compiler.contract.types import DType, TensorType, from_bits, to_bits

GPU = gpu_named("h200")
KERNELS = {kernel.op: kernel for kernel in reduce_kernels(GPU)}
KINDS = ("dense", "transposed", "sliced", "permuted", "broadcast")
FLOATS = ("float16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
ORACLES = {"sum": np.sum, "mean": np.mean, "max": np.max}
CASES = [
    *[
        (shape, axes)
        for shape in ((3, 4, 5), (6,), ())
        for count in range(len(shape) + 1)
        for axes in itertools.combinations(range(len(shape)), count)
    ],
    ((3, 517), (0,)),
    ((3, 517), (1,)),
    ((300, 7), (0,)),
    ((40, 3, 7), (1,)),
    ((40, 3, 7), (0, 2)),
    ((2, 5, 1, 60), (0, 1)),
    ((2, 5, 3, 4), (1, 3)),
    ((2, 5, 3, 4), (0, 1, 2, 3)),
]
EMPTY = [((0, 3), (0,)), ((3, 0), (0,)), ((3, 0), (1,))]


def reduced(emulated_run, op, x, axes, keepdims=False, dtype=None, **more):
    dtype = DType(x.dtype.name) if dtype is None else dtype
    shape = np.sum(x, axis=axes, keepdims=keepdims).shape
    attrs = {"axes": axes, "keepdims": keepdims}
    types = (TensorType(dtype, shape),)
    return emulated_run(KERNELS[op], attrs, (x,), types, dtypes=[dtype], **more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (op, dtype)
        for op in ORACLES
        for dtype in (*FLOATS, "int32")
        if op != "mean" or dtype in FLOATS
    ],
)
def test_reductions_over_any_axes_agree_with_float64(op, dtype, kind, emulated_run, harness):
    rng = np.random.default_rng(1)
    limit = {"float16": 6e-4, "float32": 1e-7, "float64": 1e-15}.get(dtype, 0)
    for shape, axes in CASES + (EMPTY if op == "sum" else []):
        x = harness.strided(rng, shape, dtype, kind, rng.standard_normal(shape) * 9)
        want = ORACLES[op](x.astype(np.float64), axis=axes)
        size = ORACLES[op](np.abs(x.astype(np.float64)), axis=axes)
        for keepdims in (False, True):
            (got,) = reduced(emulated_run, op, x, axes, keepdims, seeds=(3,)).outputs
            error = np.abs(got.reshape(want.shape).astype(np.float64) - want)
            assert (error <= limit * size).all(), (shape, axes)


def test_bfloat16_is_added_in_float64_and_rounded_once(emulated_run):
    x = to_bits(np.random.default_rng(2).standard_normal((5, 700)).astype(np.float32))
    for op, axes in itertools.product(ORACLES, ((0,), (1,), (0, 1))):
        (got,) = reduced(emulated_run, op, x, axes, dtype=DType.BFLOAT16).outputs
        want = ORACLES[op](from_bits(x).astype(np.float64), axis=axes)
        np.testing.assert_array_equal(got, to_bits(want.astype(np.float32)))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_summed_exactly_and_wrap_around_as_those_of_numpy(dtype, emulated_run):
    limits = np.iinfo(dtype)
    x = np.random.default_rng(4).integers(limits.min, limits.max, (50, 3), dtype, endpoint=True)
    for axes in ((0,), (1,), (0, 1)):
        want = np.add.reduce(x, axis=axes, dtype=dtype)
        np.testing.assert_array_equal(reduced(emulated_run, "sum", x, axes).outputs[0], want)
        np.testing.assert_array_equal(reduced(emulated_run, "max", x, axes).outputs[0], x.max(axes))


LONG = [
    ((20_000,), (0,)), ((30_000, 3), (0,)), ((2, 9_000, 3), (1,)), ((200, 3, 50), (0, 2)),
    ((170, 100), (0, 1)), ((100, 90, 9), (0, 1)), ((3, 12_345), (1,)),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["dense", "sliced", "transposed"])
@pytest.mark.parametrize(("shape", "axes"), LONG)
def test_few_long_results_are_made_in_two_stages_of_the_same_bits(
    shape, axes, layout, emulated_run, harness
):
    x = harness.strided(None, shape, np.float32, layout, np.random.default_rng(3).random(shape))
    for op in ORACLES:
        found = reduced(emulated_run, op, x, axes)
        assert len(found.calls) == 2
        want = ORACLES[op](x.astype(np.float64), axes)
        np.testing.assert_allclose(found.outputs[0], want, rtol=1e-7)
    x = np.asarray(x * 1e6).astype(np.int32)
    np.testing.assert_array_equal(
        reduced(emulated_run, "sum", x, axes).outputs[0], np.add.reduce(x, axes, np.int32)
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_a_nan_is_the_maximum_wherever_it_stands(axes, dtype, emulated_run):
    for shape, places in (((7, 40), ((0, 0), (3, 20), (6, 39))), ((4, 9_000), ((2, 8_999),))):
        for place in places:
            x = np.random.default_rng(3).standard_normal(shape).astype(dtype)
            x[place] = np.nan
            (got,) = reduced(emulated_run, "max", x, axes, seeds=(1,)).outputs
            np.testing.assert_array_equal(got, x.max(axes))
        x[...] = -np.inf
        np.testing.assert_array_equal(reduced(emulated_run, "max", x, axes).outputs[0], -np.inf)


def test_what_has_no_answer_is_refused(harness):
    def query(op, x, out):
        operands = harness.operand(x), harness.operand(out)
        return KERNELS[op].query({"axes": (0,), "keepdims": False}, operands[:1], operands[1:])

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
        return KERNELS["sum"].query({"axes": axes, "keepdims": False}, operands[:1], operands[1:])

    many = needs((1 << 16, 1 << 14), (1,))
    assert many.workspace_bytes == 0
    assert many.duration_ns == pytest.approx(1400 + 4 * ((1 << 30) + (1 << 16)) / 4300)
    few = needs((1 << 30,), (0,))
    assert 0 < few.workspace_bytes <= 8 * 1024
    assert few.duration_ns == pytest.approx(2800 + 4 * (1 << 30) / 4300, rel=1e-6)


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
