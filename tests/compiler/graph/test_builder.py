import numpy as np
import pytest
from error_texts import raises

from compiler.contract.errors import InternalError
from compiler.contract.program import Kind, ProgramInput, check_program
from compiler.contract.spaces import Space
from compiler.contract.types import DType
from compiler.graph.program_builder import ProgramBuilder
from compiler.ops.language.program_ops import evaluate

F64 = DType.FLOAT64


@pytest.fixture
def p():
    return ProgramBuilder(4, 3)


def test_kinds_follow_from_the_operands(p):
    full, row, column, scalar = (p.input(ProgramInput(F64, kind)) for kind in Kind)
    assert p.kind_of(p.op("add", row, column)) is Kind.FULL
    assert p.kind_of(p.op("add", scalar, full)) is Kind.FULL
    assert p.kind_of(p.op("add", scalar, row)) is Kind.ROW
    assert p.kind_of(p.op("add", column, scalar)) is Kind.COLUMN
    assert p.kind_of(p.op("neg", scalar)) is Kind.SCALAR
    assert p.kind_of(p.reduce("row_sum", full)) is Kind.ROW
    assert p.kind_of(p.reduce("column_sum", full)) is Kind.COLUMN


def test_comparisons_are_bool_and_what_they_select_is_not(p):
    x = p.input(ProgramInput(F64, Kind.FULL))
    is_more = p.op("gt", x, p.constant_like(0, x))
    assert p.dtype_of(is_more) is DType.BOOL
    assert p.dtype_of(p.op("select", is_more, x, x)) is F64


def test_equal_instructions_are_one_but_zeros_of_two_signs_are_two(p):
    x = p.input(ProgramInput(F64, Kind.FULL))
    assert p.op("exp", x) == p.op("exp", x)
    assert p.constant(0.0, F64) != p.constant(-0.0, F64)
    assert p.cast(x, F64) == x


def test_what_no_output_needs_is_left_out_with_its_inputs(p):
    a, b, c = (p.input(ProgramInput(F64, Kind.FULL)) for _ in range(3))
    p.op("exp", b)
    program, kept = p.finish((p.op("sub", c, a),))
    assert kept == (0, 2)
    assert [i.op for i in program.instructions] == ["sub"]
    assert program.instructions[0].operands == (1, 0)


def test_a_check_stays_though_nobody_reads_its_result(p):
    labels = p.input(ProgramInput(DType.INT64, Kind.ROW))
    x = p.input(ProgramInput(F64, Kind.FULL))
    p.check_index(labels, 3)
    program, kept = p.finish((p.op("exp", x),))
    assert kept == (0, 1)
    bad = (np.array([0, 1, 2, 3]), np.zeros((4, 3)))
    with raises(IndexError):
        evaluate(program, Space(4, 3), bad)


def test_a_check_of_one_number_is_one_of_a_row(p):
    label = p.input(ProgramInput(DType.INT64, Kind.SCALAR))
    program, _ = p.finish((p.check_index(label, 3),))
    check_program(program)
    assert evaluate(program, Space(1, 3), (np.array([2]),))[0].tolist() == [[2]]
    with raises(IndexError):
        evaluate(program, Space(1, 3), (np.array([3]),))


@pytest.mark.parametrize("kind", Kind)
def test_a_narrow_value_is_repeated_before_it_is_reduced(p, kind):
    x = np.arange(1.0, 7.0)[: {Kind.FULL: 6, Kind.ROW: 2, Kind.COLUMN: 3, Kind.SCALAR: 1}[kind]]
    value = p.input(ProgramInput(F64, kind))
    outputs = p.reduce("row_sum", value), p.reduce("column_sum", value)
    program, _ = p.finish((*outputs, p.widened(p.copied(value), Kind.FULL)))
    shape = {Kind.FULL: (2, 3), Kind.ROW: (2, 1), Kind.COLUMN: (1, 3), Kind.SCALAR: (1, 1)}[kind]
    wide = np.broadcast_to(x.reshape(shape), (2, 3))
    rows, columns, full = evaluate(program, Space(2, 3), (x,))
    np.testing.assert_array_equal(full, wide)
    np.testing.assert_array_equal(rows, wide.sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(columns, wide.sum(axis=0, keepdims=True))


def test_an_output_that_is_an_input_is_a_bug(p):
    row = p.input(ProgramInput(F64, Kind.ROW))
    with raises(InternalError):
        p.finish((row,))


def test_repeated_rows_and_indices_are_where_the_words_say(p):
    x = p.input(ProgramInput(F64, Kind.FULL, every=2, count=2))
    row = p.cast(p.row_index(2, 0), F64)
    column = p.cast(p.column_index(), F64)
    program, _ = p.finish((p.op("add", x, p.op("add", row, column)),))
    own = np.array([[10.0, 20, 30], [40, 50, 60]])
    (got,) = evaluate(program, Space(4, 3), (own,))
    np.testing.assert_array_equal(got, [[10, 21, 32], [10, 21, 32], [41, 52, 63], [41, 52, 63]])


def test_bfloat16_is_rounded_where_it_is_an_output(p):
    bf16 = DType.BFLOAT16
    x = p.input(ProgramInput(bf16, Kind.FULL))
    third = p.op("div", x, p.constant_like(3, x))
    exact = p.op("mul", third, p.constant_like(3, third))
    inside, _ = p.finish((exact,))
    stored, _ = p.finish((third, exact))
    ones = np.ones((4, 3), np.float32)
    assert evaluate(inside, Space(4, 3), (ones,))[0].max() == 1.0
    rounded, after = evaluate(stored, Space(4, 3), (ones,))
    assert rounded.max() == 0.333984375
    assert after.max() == 1.0  # 1.001953125 rounded
    assert {a.dtype for a in (rounded, after)} == {np.dtype(np.float32)}
