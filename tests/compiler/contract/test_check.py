"""The rules of a fused program, each broken once."""

from dataclasses import replace

import msgpack
import pytest
from error_texts import raises

from compiler.contract.codec import DecodeError, from_row, to_msgpack, to_row
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
    "value",
    [
        {},
        {"other": ()},
        {"fused_program": ()},
        {"fused_program": ((), ((),), ())},
        {"fused_program": ((), (), (-1,))},
        {"fused_program": ((), (), ({"fused_program": ()},))},
        ({"fused_program": ()},),
    ],
)
def test_a_file_with_anything_but_a_program_in_its_place_is_refused(value):
    row = ("c.fused", "fused", (("program", value),), (), (), None, "", 0, 0.0, "forward", (), ())
    with raises(DecodeError):
        from_row(Launch, row)


@pytest.mark.parametrize(
    "program",
    [
        changed(0, op="mul; abort()"),
        changed(0, operands=(0, 3)),
        changed(0, operands=(0,)),
        changed(0, operands=(0, 2)),
        changed(0, dtype=DType.FLOAT64),
        changed(0, kind=COLUMN),
        changed(0, constants=(1,)),
        changed(1, kind=FULL),
        changed(2, constants=(-1,)),
        changed(2, constants=(2.0,)),
        changed(2, operands=(4,)),
        changed(3, dtype=F32),
        changed(4, dtype=I32),
        changed(5, constants=()),
        changed(5, dtype=I32),
        changed(5, dtype=DType.INT8, constants=(128,)),
        changed(5, dtype=BOOL, constants=(2,)),
        changed(6, operands=(3, 8, 3)),
        changed(8, constants=(0, 3)),
        changed(8, constants=(1, -3)),
        changed(10, op="row_max", kind=ROW),
        changed(10, op="not"),
        replace(PROGRAM, outputs=(14,)),
        replace(PROGRAM, outputs=()),
    ],
)
def test_a_broken_rule_is_named(program):
    with raises(ProgramError):
        check_program(program)


def test_random_bits_need_a_seed_a_step_and_a_share():
    inputs = (ProgramInput(I64, SCALAR), ProgramInput(I64, SCALAR))
    good = Instruction("philox", (0, 1), BOOL, FULL, (7, 0.5))
    check_program(FusedProgram(inputs, (good,), (2,)))
    for constants in ((7, 1.0), (7, float("nan")), (7.5, 0.5), (2**64, 0.5)):
        with raises(ProgramError):
            check_program(FusedProgram(inputs, (replace(good, constants=constants),), (2,)))
    with raises(ProgramError):
        check_program(FusedProgram((ProgramInput(I64, ROW), inputs[1]), (good,), (2,)))
    placed = replace(good, operands=(0, 1, 2))
    for kind in (SCALAR, ROW):
        check_program(FusedProgram((*inputs, ProgramInput(I64, kind)), (placed,), (3,)))
    for first in (ProgramInput(I64, FULL), ProgramInput(I32, ROW)):
        with raises(ProgramError):
            check_program(FusedProgram((*inputs, first), (placed,), (3,)))
