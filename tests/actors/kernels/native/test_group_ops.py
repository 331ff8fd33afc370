"""Every op of groups on every type, special values, random programs: against the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from fused_programs import random_program

from actors.kernels.native.emit import is_taken
from actors.kernels.native.fused import FUSED_KERNELS
from actors.kernels.program import phases
from compiler.contract.program import ELEMENTWISE, Kind
from compiler.contract.types import DType, from_bits, to_bits

FULL, ROW, COLUMN, SCALAR = Kind.FULL, Kind.ROW, Kind.COLUMN, Kind.SCALAR
F32, F64, BF16 = DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16
I64, I32, BOOL = DType.INT64, DType.INT32, DType.BOOL
FLOATS = (F32, F64)
(KERNEL,) = FUSED_KERNELS
TWO = ("add", "sub", "mul", "div", "max", "min", "pow", "mod", "floordiv", "atan2", "shl", "shr")
OF_INTEGERS = ("floordiv", "xor", "shl", "shr")
UNARY = tuple(
    [
        op
        for op in ELEMENTWISE
        if op not in (*TWO, "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "select")
    ]
)


def one_op(groups, op, dtype):
    """A program that applies an op to enough inputs; comparisons and the like give bool."""
    b = groups.Builder()
    condition = (b.input(FULL, BOOL),) if op == "select" else ()
    values = (b.input(FULL, dtype), b.input(FULL, dtype))
    return b.program(b.op(op, *condition, *(values[:1] if op in UNARY else values)))


def every_op(groups, dtype):
    """A program with an output for every op there is C for; returns it and the ops."""
    b = groups.Builder()
    condition, x, y = b.input(FULL, BOOL), b.input(FULL, dtype), b.input(FULL, dtype)
    shifts = ("shl", "shr")  # numpy has none by more places than there are: see tests/oracle
    ops = [op for op in ELEMENTWISE if op not in shifts and is_taken(one_op(groups, op, dtype))]
    above = b.op("max", x, b.op("neg", x)) if dtype in FLOATS else x
    outputs = []
    for op in ops:
        first = above if op in ("log", "sqrt", "rsqrt", "pow", "log2", "log10", "log1p") else x
        operands = (first,) if op in UNARY else (first, y)
        outputs.append(b.op(op, condition, x, y) if op == "select" else b.op(op, *operands))
    return b.program(*outputs), ops


def test_every_op_matches_on_every_type_it_takes(kernel, groups):
    dtypes = (*FLOATS, I64, I32, DType.INT8, DType.UINT8, DType.UINT64, BOOL)
    made = {dtype: every_op(groups, dtype) for dtype in dtypes}
    groups.prepare(kernel, [p for p, _ in made.values()])
    for dtype in FLOATS:
        assert set(made[dtype][1]) == set(ELEMENTWISE) - {*OF_INTEGERS, "and", "or", "not"}
    assert {"and", "or", "not", "eq", "select"} <= set(made[BOOL][1])
    for dtype, (program, _) in made.items():
        arrays = groups.operands(program, 9, 21, seed=1, scale=2.0)
        if dtype.value.startswith("int"):
            arrays = [arrays[0], *[x - np.asarray(10, x.dtype) for x in arrays[1:]]]
        got, _ = groups.run(kernel, program, 9, 21, arrays)
        with np.errstate(all="ignore"):
            expected = groups.interpret(program, 9, 21, arrays)
        groups.compare(program, got, expected, 3e-6)


SPECIAL = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, 3e38, -3e38, 0.5, -2.5)
UNARY_REFERENCE = {
    "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "tanh": np.tanh, "sign": np.sign,
    "abs": np.abs, "neg": np.negative, "floor": np.floor, "ceil": np.ceil, "round": np.rint,
    "reciprocal": np.reciprocal,
}  # fmt: skip
BINARY_REFERENCE = {
    "add": np.add, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
    "pow": np.power, "lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


def test_nan_infinities_and_denormals_come_out_as_numpys(kernel, groups):
    b = groups.Builder()
    x, y = b.input(), b.input()
    unary = [b.op(op, x) for op in UNARY_REFERENCE]
    program = b.program(*unary, *[b.op(op, x, y) for op in BINARY_REFERENCE])
    first, second = (np.array(grid, np.float32) for grid in np.meshgrid(SPECIAL, SPECIAL))
    got, _ = groups.run(kernel, program, *first.shape, [first, second])
    with np.errstate(all="ignore"):
        expected = [function(first) for function in UNARY_REFERENCE.values()]
        expected += [function(first, second) for function in BINARY_REFERENCE.values()]
    for op, y, want in zip((*UNARY_REFERENCE, *BINARY_REFERENCE), got, expected, strict=True):
        np.testing.assert_allclose(y, want, rtol=3e-7, atol=0, err_msg=op)
        if want.dtype == np.float32 and op not in ("max", "min"):
            assert ((np.signbit(y) == np.signbit(want)) | np.isnan(want)).all(), op


def test_reductions_pass_nan_on_and_know_infinities(kernel, groups):
    b = groups.Builder()
    x = b.input()
    program = b.program(*[b.reduce(op, x) for op in ("row_max", "row_min", "row_sum")])
    rows = np.array([[1, np.nan, 3], [-np.inf, -np.inf, -np.inf], [np.inf, 1, 2], [1, 2, np.nan]])
    for repeats in (1, 40, 4000):
        values = np.tile(rows, (1, repeats)).astype(np.float32)
        values = np.concatenate([values, values[:, :1]], 1)
        got, _ = groups.run(kernel, program, *values.shape, [values])
        for y, reduce in zip(got, (np.max, np.min, np.sum), strict=True):
            np.testing.assert_array_equal(y, reduce(values, axis=1))


@pytest.mark.parametrize("column", [0, 20_000, 39_999])
def test_a_nan_in_any_piece_of_a_long_row_is_its_greatest_and_least(
    kernel, groups, column, monkeypatch
):
    """Few rows are cut into pieces of columns, whose results are put together afterwards."""
    monkeypatch.setattr(phases, "PIECE_NS", 1000)  # or so little work is one piece
    b = groups.Builder()
    x = b.input()
    program = b.program(*[b.reduce(op, x) for op in ("row_max", "row_min")])
    values = np.zeros((3, 40_000), np.float32)
    values[1] = np.arange(40_000)
    values[2] = -values[1]
    values[1, column] = np.nan
    got, _ = groups.run(kernel, program, *values.shape, [values])
    np.testing.assert_array_equal(got[0], [0, np.nan, 0])
    np.testing.assert_array_equal(got[1], [0, np.nan, -39_999])


def test_casts_give_what_numpys_give(kernel, groups):
    dtypes = (F32, F64, I64, I32, DType.INT8, DType.UINT8, BOOL)
    b = groups.Builder()
    inputs = [b.input(FULL, dtype) for dtype in dtypes]
    pairs = [(v, dtype) for v in inputs for dtype in dtypes]
    program = b.program(*[b.cast(v, dtype) for v, dtype in pairs])
    values = np.array([0, 1, 2, 100, 64, 7, 0, 1, 99]).reshape(3, 3)
    arrays = [(values + 0.75 * (d in FLOATS)).astype(d.value) for d in dtypes]
    got, _ = groups.run(kernel, program, 3, 3, arrays)
    for y, (v, dtype) in zip(got, pairs, strict=True):
        np.testing.assert_array_equal(y, arrays[v].astype(dtype.value))


def test_bfloat16_is_computed_in_float32_and_rounded_where_it_leaves(native, groups):
    b = groups.Builder()
    x, residual, scale = (b.input(kind, BF16) for kind in (FULL, FULL, COLUMN))
    h = b.op("add", x, residual)
    y = b.op("mul", h, scale)
    total = b.reduce("row_sum", b.cast(h, F32))
    program = b.program(h, b.op("tanh", y), total, b.reduce("column_sum", y), b.cast(x, F32))
    arrays = groups.operands(program, 30, 50)
    got, needs = groups.run(KERNEL, program, 30, 50, arrays)
    wide = [from_bits(array) for array in arrays]
    stored = to_bits(wide[0] + wide[1])
    np.testing.assert_array_equal(got[0], stored)
    seen = from_bits(stored)  # those who read h see what is stored
    np.testing.assert_allclose(got[2], seen.sum(1), rtol=1e-5, atol=1e-5)
    product = seen * wide[2]
    np.testing.assert_allclose(from_bits(got[1]), np.tanh(product), rtol=0.004)
    sums = from_bits(got[3])
    np.testing.assert_allclose(sums, product.sum(0), rtol=0.004, atol=1e-5)
    np.testing.assert_array_equal(got[4], wide[0])
    assert {(0, 0), (0, 1)} <= set(needs.in_place)


def test_random_programs_match_the_interpreter(kernel, groups):
    rng = np.random.default_rng(7)
    types = [(F32,), (F64,), (F32, F64)]
    programs = [random_program(rng, types[i % 3]) for i in range(18)]
    groups.prepare(kernel, programs)
    for index, program in enumerate(programs):
        rows, columns = ((6, 19), (12, 5), (1, 40))[index % 3]
        if rows == 1 and any(e.count for e in program.inputs):
            rows = 6
        groups.check(kernel, program, rows, columns)
