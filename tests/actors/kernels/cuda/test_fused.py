"""What kernels of programs do on a GPU alone; what all kernels of programs do, `codegen` tests."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from fused_programs import Builder, compare, cross_entropy, interpret, known, operands, results_of
from kernel_calls import needs_of
from program_texts import texts_of

from actors.kernels.common.kernel import Operand
from actors.kernels.cuda.catalogue import kernels_on
from actors.kernels.cuda.kernel import gpu_named
from compiler.contract.program import (
    COLUMN_REDUCTIONS,
    ELEMENTWISE,
    ROW_REDUCTIONS,
    Kind,
    ProgramError,
    check_program,
)
from compiler.contract.types import DType, TensorType, contiguous_strides

GPU = gpu_named("h200")
KERNEL = kernels_on(GPU)["cuda.fused"]
F32, I64 = DType.FLOAT32, DType.INT64
SHAPES = ((40, 3), (2100, 6), (3, 31), (1, 32), (3, 257), (2, 1000), (1, 5000))


def run(emulated_run, program, rows, columns, arrays, **more):
    attrs = {"program": program, "rows": rows, "columns": columns}
    dtypes = [entry.dtype for entry in program.inputs] + [I64] * (len(arrays) > len(program.inputs))
    results = results_of(program, rows, columns)
    return emulated_run(KERNEL, attrs, tuple(arrays), tuple(results), dtypes=dtypes, **more)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_known_programs_match_in_teams_of_every_size(emulated_run, rows, columns):
    for program in known(rows, columns).values():
        arrays = operands(program, rows, columns)
        found = run(emulated_run, program, rows, columns, arrays)
        compare(program, found.outputs, interpret(program, rows, columns, arrays), 1e-4)


def test_of_several_bad_indices_the_first_is_reported_in_the_words_of_the_host(emulated_run):
    x, labels = np.zeros((4, 5), np.float32), np.array([0, -1, 7, 1])
    found = run(emulated_run, cross_entropy(5), 4, 5, [x, labels])
    assert str(found.error) == "label -1 at position 1 is outside 0..4"
    assert isinstance(found.error, IndexError)
    found = run(emulated_run, cross_entropy(5), 4, 5, [x, labels % 5])
    assert found.error is None


def test_a_bad_index_among_long_rows_is_reported_too(emulated_run):
    x, labels = np.zeros((2, 20_000), np.float32), np.array([3, 2**40])
    found = run(emulated_run, cross_entropy(20_000), 2, 20_000, [x, labels], seeds=(0,))
    assert str(found.error) == f"label {2**40} at position 1 is outside 0..19999"


def test_a_bad_index_of_an_unsigned_type_is_said_without_a_sign(emulated_run):
    b = Builder()
    labels = b.input(Kind.ROW, DType.UINT64)
    program = b.program(b.op("check_index", labels, constants=(5,)))
    found = run(emulated_run, program, 3, 4, [np.array([1, 2**64 - 1, 4], np.uint64)])
    assert str(found.error) == f"label {2**64 - 1} at position 1 is outside 0..4"
    np.testing.assert_array_equal(found.outputs[0], [1, 0, 4])


@pytest.mark.parametrize("shape", [(6, 50), (2, 17_000)])
def test_an_update_is_left_out_where_it_is_told_to_skip(emulated_run, shape):
    b = Builder()
    p, g = b.input(), b.input()
    program = b.program(b.op("sub", p, b.op("mul", g, b.reduce("row_max", g))))
    arrays = operands(program, *shape)
    made = {}
    for skip in (0, 1):
        given = [*[x.copy() for x in arrays], np.array(skip)]
        found = run(emulated_run, program, *shape, given, in_place=((0, 0),), seeds=(0,))
        made[skip] = found.outputs[0]
    expected = interpret(program, *shape, arrays)[0]
    np.testing.assert_allclose(made[0], expected, 1e-5, 1e-6)
    np.testing.assert_array_equal(made[1], arrays[0])


def test_halves_of_both_kinds_are_computed_in_single_precision_and_rounded_once(emulated_run):
    rng = np.random.default_rng(5)
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        b = Builder()
        x, scale = b.input(Kind.FULL, dtype), b.input(Kind.COLUMN, dtype)
        program = b.program(b.op("mul", b.op("add", x, x), scale))
        given = [rng.integers(0, 1 << 16, s).astype(np.uint16) for s in ((9, 70), (70,))]
        if dtype is DType.FLOAT16:
            given = [bits.view(np.float16) for bits in given]
        wide = [_widened(v, dtype) for v in given]
        with np.errstate(all="ignore"):
            expected = (wide[0] + wide[0]) * wide[1]
            expected = expected.astype(np.float16) if dtype is DType.FLOAT16 else expected
        made = _widened(run(emulated_run, program, 9, 70, given).outputs[0], dtype)
        tolerance = 0 if dtype is DType.FLOAT16 else 2**-8
        np.testing.assert_allclose(made, expected.astype(np.float32), tolerance, 1e-40)


def _widened(x, dtype):
    if dtype is DType.BFLOAT16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


UNARY = (*ELEMENTWISE[ELEMENTWISE.index("neg") : ELEMENTWISE.index("lt")], "not")


def one_op(op, dtype):
    b = Builder()
    condition = (b.input(Kind.FULL, DType.BOOL),) if op == "select" else ()
    values = (b.input(Kind.FULL, dtype), b.input(Kind.FULL, dtype))
    if op in (*ROW_REDUCTIONS, *COLUMN_REDUCTIONS):
        return b.program(b.reduce(op, values[0]))
    return b.program(b.op(op, *condition, *(values[:1] if op in UNARY else values)))


def test_there_are_kernels_for_whatever_the_check_of_programs_lets_pass():
    passed = 0
    for dtype in DType:
        for op in (*ELEMENTWISE, *ROW_REDUCTIONS, *COLUMN_REDUCTIONS):
            program = one_op(op, dtype)
            with contextlib.suppress(ProgramError):
                check_program(program)
                passed += 1
                for is_cut in (False, True):
                    assert all([text.kernels for text in texts_of(program, is_cut=is_cut)])
    assert passed > 300


SINGLE = (F32, DType.BFLOAT16, DType.FLOAT16)
WHOLE = tuple([dtype for dtype in DType if dtype not in (*SINGLE, DType.BOOL)])


@pytest.mark.parametrize("shape", [(7, 40), (2, 16_500)])
@pytest.mark.parametrize(("dtypes", "tolerance"), [(SINGLE, 1e-3), (WHOLE, 1e-4)])
def test_reductions_of_every_type_match(emulated_run, shape, dtypes, tolerance):
    b = Builder()
    inputs = [b.input(Kind.FULL, dtype) for dtype in dtypes]
    names = (*ROW_REDUCTIONS, *COLUMN_REDUCTIONS)
    program = b.program(*[b.reduce(name, x) for x in inputs for name in names])
    check_program(program)
    arrays = operands(program, *shape)
    found = run(emulated_run, program, *shape, arrays, seeds=(0,))
    compare(program, found.outputs, interpret(program, *shape, arrays), tolerance)


def test_programs_with_many_random_bits_are_taken(emulated_run):
    b = Builder()
    seed, step = b.input(Kind.SCALAR, I64), b.input(Kind.SCALAR, I64)
    kept = [
        b.op("philox", seed, step, dtype=DType.BOOL, kind=Kind.FULL, constants=(key, 0.5))
        for key in range(9)
    ]
    program, given = b.program(*kept), [np.array(-5), np.array(10**9)]
    for shape in ((3, 37), (1, 80)):
        found = run(emulated_run, program, *shape, given)
        compare(program, found.outputs, interpret(program, *shape, given), 0)


def test_random_bits_and_sums_over_rows_go_together(emulated_run):
    b = Builder()
    x, seed, step = b.input(), b.input(Kind.SCALAR, I64), b.input(Kind.SCALAR, I64)
    constants = (2**40, 0.3)
    kept = b.op("philox", seed, step, dtype=DType.BOOL, kind=Kind.FULL, constants=constants)
    y = b.op("select", kept, x, b.constant(0.0))
    program = b.program(y, b.reduce("column_sum", y), b.reduce("row_sum", y))
    for shape in ((50, 37), (3, 17_000)):
        arrays = operands(program, *shape)
        found = run(emulated_run, program, *shape, arrays)
        compare(program, found.outputs, interpret(program, *shape, arrays), 3e-5)


def test_time_grows_with_bytes_and_small_launches_cost_their_calls():
    program = known(1, 1)["gelu gradient"]
    times = [_needs(program, 64, columns).duration_ns for columns in (8, 4096, 1 << 20)]
    assert times[0] < times[1] < times[2]
    assert times[0] >= 2 * GPU.call_ns
    moved = 64 * (1 << 20) * 4 * 2
    assert moved / GPU.bytes_per_ns < times[2] < 3 * moved / GPU.bytes_per_ns


def _needs(program, rows, columns):
    shapes = {Kind.FULL: (rows, columns), Kind.COLUMN: (columns,)}
    types = [TensorType(entry.dtype, shapes[entry.kind]) for entry in program.inputs]
    attrs = {"program": program, "rows": rows, "columns": columns}
    results = results_of(program, rows, columns)
    return needs_of(KERNEL, attrs, tuple(map(_operand, types)), tuple(map(_operand, results)))


def _operand(type_):
    return Operand(type_, 0, contiguous_strides(type_.shape, type_.dtype.itemsize))
