"""The rules of a fused program, each broken once."""

from dataclasses import replace

import msgpack
import pytest

from compiler.contract.codec import from_row, to_msgpack, to_row
from compiler.contract.errors import PlanFormatError
from compiler.contract.plan_tables import Launch
from compiler.contract.program import (
    FusedProgram,
    Instruction,
    Kind,
    ProgramError,
    ProgramInput,
    check_program,
)
from compiler.contract.types import DType

FULL, ROW, COLUMN, SCALAR = Kind.FULL, Kind.ROW, Kind.COLUMN, Kind.SCALAR
F32, I32, I64, BOOL = DType.FLOAT32, DType.INT32, DType.INT64, DType.BOOL

INPUTS = (ProgramInput(F32, FULL), ProgramInput(F32, COLUMN), ProgramInput(I32, ROW))
INSTRUCTIONS = (
    Instruction("mul", (0, 1), F32, FULL),
    Instruction("row_sum", (3,), F32, ROW),
    Instruction("check_index", (2,), I32, ROW, (5,)),
    Instruction("column_index", (), I32, COLUMN),
    Instruction("eq", (6, 5), BOOL, FULL),
    Instruction("constant", (), F32, SCALAR, (float("nan"),)),
    Instruction("select", (7, 8, 3), F32, FULL),
    Instruction("column_sum", (9,), F32, COLUMN),
    Instruction("row_index", (), I32, ROW, (2, 3)),
    Instruction("cast", (11,), F32, ROW),
    Instruction("exp", (10,), F32, COLUMN),
)
PROGRAM = FusedProgram(INPUTS, INSTRUCTIONS, (4, 9, 13))


def changed(index, **changes):
    instructions = list(INSTRUCTIONS)
    instructions[index] = replace(instructions[index], **changes)
    return replace(PROGRAM, instructions=tuple(instructions))


def test_a_program_that_keeps_the_rules_is_taken():
    check_program(PROGRAM)


def as_in_a_file(program):
    return msgpack.unpackb(to_msgpack(to_row(program)), use_list=False)


def test_a_program_comes_back_equal_from_a_file_and_nan_is_itself():
    back = from_row(FusedProgram, as_in_a_file(PROGRAM))
    assert back == PROGRAM
    assert hash(back) == hash(PROGRAM)


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, 1.0), (1, True)])
def test_programs_whose_numbers_differ_in_bits_are_two(one, other):
    programs = [changed(5, constants=(number,)) for number in (one, other)]
    assert programs[0] != programs[1]
    assert len({*programs, *[changed(5, constants=(number,)) for number in (one, other)]}) == 2


def test_attributes_hold_a_program_as_itself_and_a_file_as_rows():
    program = changed(5, constants=(-0.0,))
    launch = Launch("c.fused", "fused", (("program", program),), (), (), None, "", 0, 0.0)
    row = as_in_a_file(launch)
    assert row[2] == (("program", {"fused_program": as_in_a_file(program)}),)
    assert from_row(Launch, row) == launch


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, r"attrs\[0\]\[1\] is a mapping of 0, expected a structure of a kind .*fused_program"),
        ({"other": ()}, r"attrs\[0\]\[1\] is a mapping of 1, expected a structure"),
        ({"fused_program": ()}, r"attrs\[0\]\[1\] is a sequence of 0, expected a row of 3 fields"),
        ({"fused_program": ((), ((),), ())}, r"attrs\[0\]\[1\]\.instructions\[0\] is a sequence"),
        ({"fused_program": ((), (), (-1,))}, r"\.outputs\[0\] is -1, expected a whole number"),
        ({"fused_program": ((), (), ({"fused_program": ()},))}, r"\.outputs\[0\] is a mapping"),
        (({"fused_program": ()},), "is a mapping of 1, expected a number"),
    ],
)
def test_a_file_with_anything_but_a_program_in_its_place_is_refused(value, message):
    row = ("c.fused", "fused", (("program", value),), (), (), None, "", 0, 0.0, "forward", (), ())
    with pytest.raises(PlanFormatError, match=message):
        from_row(Launch, row)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (changed(0, op="mul; abort()"), "is no instruction"),
        (changed(0, operands=(0, 3)), "not all before it"),
        (changed(0, operands=(0,)), "other dtypes"),
        (changed(0, operands=(0, 2)), "other dtypes"),
        (changed(0, dtype=DType.FLOAT64), "a result of float32, full"),
        (changed(0, kind=COLUMN), "a result of float32, full"),
        (changed(0, constants=(1,)), "constants"),
        (changed(1, kind=FULL), "a result of float32, row"),
        (changed(2, constants=(-1,)), "a whole number from 0"),
        (changed(2, constants=(2.0,)), "a whole number from 0"),
        (changed(2, operands=(4,)), "integers, one per row"),
        (changed(3, dtype=F32), "a result of int32, column"),
        (changed(4, dtype=I32), "a result of bool, full"),
        (changed(5, constants=()), "constants"),
        (changed(5, dtype=I32), "a whole number from"),
        (changed(5, dtype=DType.INT8, constants=(128,)), "from -128 to 127"),
        (changed(5, dtype=BOOL, constants=(2,)), "from 0 to 1"),
        (changed(6, operands=(3, 8, 3)), "other dtypes"),
        (changed(8, constants=(0, 3)), "a whole number from 1"),
        (changed(8, constants=(1, -3)), "a whole number from 0"),
        (changed(10, op="row_max", kind=ROW), "no sum over all rows"),
        (changed(10, op="not"), "other dtypes"),
        (replace(PROGRAM, outputs=(14,)), "none of its values"),
        (replace(PROGRAM, outputs=()), "no outputs"),
    ],
)
def test_a_broken_rule_is_named(program, message):
    with pytest.raises(ProgramError, match=message):
        check_program(program)


def test_random_bits_need_a_seed_a_step_and_a_share():
    inputs = (ProgramInput(I64, SCALAR), ProgramInput(I64, SCALAR))
    good = Instruction("philox", (0, 1), BOOL, FULL, (7, 0.5))
    check_program(FusedProgram(inputs, (good,), (2,)))
    for constants in ((7, 1.0), (7, float("nan")), (7.5, 0.5), (2**64, 0.5)):
        with pytest.raises(ProgramError, match="philox"):
            check_program(FusedProgram(inputs, (replace(good, constants=constants),), (2,)))
    with pytest.raises(ProgramError, match="seed and step"):
        check_program(FusedProgram((ProgramInput(I64, ROW), inputs[1]), (good,), (2,)))
    placed = replace(good, operands=(0, 1, 2))
    for kind in (SCALAR, ROW):
        check_program(FusedProgram((*inputs, ProgramInput(I64, kind)), (placed,), (3,)))
    for first in (ProgramInput(I64, FULL), ProgramInput(I32, ROW)):
        with pytest.raises(ProgramError, match="perhaps a first one"):
            check_program(FusedProgram((*inputs, first), (placed,), (3,)))
