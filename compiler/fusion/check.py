"""Check that a fused program is one: what the generators and the kernels take for granted.

A program travels in the attributes of a launch, so it may come from a file. The rules are those of
`compiler.fusion.program`: every operand is an earlier value, types and kinds follow from the
operands, and what is summed over rows feeds nothing that is computed row by row. Behind this check
the text that is generated for a program has no word in it that is not ours.
"""

from __future__ import annotations

from compiler.fusion.program import (
    COLUMN_REDUCTIONS,
    COMPARISONS,
    ELEMENTWISE,
    OTHERS,
    ROW_REDUCTIONS,
    FusedProgram,
    Instruction,
    Kind,
    joined,
)
from compiler.types import DType

_UNARY = (
    *("neg", "abs", "sign", "reciprocal", "exp", "log", "sqrt", "rsqrt", "tanh", "erf"),
    *("sin", "cos", "floor", "ceil", "round", "not"),
    *("log1p", "expm1", "log2", "log10", "erfc"),
)
_LOGIC = ("and", "or", "xor", "not")
_INTEGERS_ONLY = ("floordiv", "shl", "shr")
_FLOATS_ONLY = (
    *("div", "pow", "reciprocal", "exp", "log", "sqrt", "rsqrt", "tanh", "erf", "sin", "cos"),
    *("log1p", "expm1", "log2", "log10", "erfc", "atan2"),
)
_NUM_CONSTANTS = {"constant": 1, "row_index": 2, "check_index": 1, "philox": 2}
_LARGEST = 1 << 48
"""Of rows, columns, extents."""


class ProgramError(ValueError):
    """A program breaks a rule of `compiler.fusion.program`; the message names value and rule."""


def check_program(program: FusedProgram) -> None:
    """Check a program. Raises ProgramError. O(instructions)."""
    is_late = [False] * len(program.inputs)  # comes from sums over all rows
    for number, instruction in enumerate(program.instructions, len(program.inputs)):
        try:
            is_late.append(_check(program, number, instruction, is_late))
        except ProgramError as error:
            raise ProgramError(f"value {number} of the program, {error}") from None
    for value in program.outputs:
        if value >= program.num_values:
            raise ProgramError(f"output {value} of the program is none of its values")
    if not program.outputs:
        raise ProgramError("the program has no outputs")


def _check(
    program: FusedProgram, number: int, instruction: Instruction, is_late: list[bool]
) -> bool:
    """Check one instruction; return whether its value comes from sums over all rows."""
    op, operands = instruction.op, instruction.operands
    if any([value >= number for value in operands]):
        raise ProgramError(f"{op}, reads values {operands}, which are not all before it")
    _expect(op, len(instruction.constants) == _NUM_CONSTANTS.get(op, 0), "another few constants")
    kinds = tuple([program.kind_of(v) for v in operands])
    dtypes = tuple([program.dtype_of(v) for v in operands])
    late = any([is_late[v] for v in operands])
    if op in ELEMENTWISE:
        if dtypes != _operand_dtypes(op, dtypes):
            came = ", ".join([dtype.value for dtype in dtypes])
            raise ProgramError(f"{op}, needs other dtypes than ({came})")
        made = DType.BOOL if op in COMPARISONS else dtypes[-1]
        _expect_result(instruction, made, joined(list(kinds)))
    elif op in ROW_REDUCTIONS + COLUMN_REDUCTIONS:
        _expect(op, len(kinds) == 1, "one operand")
        _expect(op, dtypes[0] is not DType.BOOL, "numbers")
        _expect_result(instruction, dtypes[0], Kind.ROW if op in ROW_REDUCTIONS else Kind.COLUMN)
    elif op in OTHERS:
        _check_other(instruction, dtypes, kinds)
    else:
        raise ProgramError(f"{op!a:.40}, is no instruction")
    late = late or op in COLUMN_REDUCTIONS
    _expect(op, not late or instruction.kind is Kind.COLUMN, "no sum over all rows to read")
    return late


def _operand_dtypes(op: str, dtypes: tuple[DType, ...]) -> tuple[DType, ...] | None:
    """Return what the operands must be, seen from the last of them; None for none at all."""
    arity = 1 if op in _UNARY else 3 if op == "select" else 2
    if len(dtypes) != arity:
        return None
    last = dtypes[-1]
    if op in _FLOATS_ONLY and not last.is_float:
        return None
    if op in _INTEGERS_ONLY and not last.is_integer:
        return None
    if op in _LOGIC:
        last = last if last.is_integer else DType.BOOL
    elif last is DType.BOOL and op not in (*COMPARISONS, "select", "max", "min"):
        return None
    return (DType.BOOL, last, last) if op == "select" else (last,) * arity


def _check_other(
    instruction: Instruction, dtypes: tuple[DType, ...], kinds: tuple[Kind, ...]
) -> None:
    op, constants = instruction.op, instruction.constants
    if op == "cast":
        _expect(op, len(kinds) == 1, "one operand")
        _expect_result(instruction, instruction.dtype, kinds[0])
        return
    if op == "check_index":
        _expect(op, kinds == (Kind.ROW,) and dtypes[0].is_integer, "integers, one per row")
        _expect_whole(op, constants[0], 0, _LARGEST)
        _expect_result(instruction, dtypes[0], Kind.ROW)
        return
    if op == "philox":
        is_state = len(kinds) in (2, 3) and kinds[:2] == (Kind.SCALAR,) * 2
        is_placed = kinds[2:] in ((), (Kind.SCALAR,), (Kind.ROW,))
        is_state = is_state and is_placed and {*dtypes} == {DType.INT64}
        _expect(op, is_state, "seed and step, single numbers of int64, and perhaps a first one")
        _expect_whole(op, constants[0], -(2**63), 2**64 - 1)
        _expect(op, 0 <= constants[1] < 1, "a share to drop from 0 to 1")
        is_bits = instruction.dtype is DType.INT32
        _expect_result(instruction, DType.INT32 if is_bits else DType.BOOL, Kind.FULL)
        return
    _expect(op, not kinds, "no operands")
    if op == "row_index":
        _expect_whole(op, constants[0], 1, _LARGEST)
        _expect_whole(op, constants[1], 0, _LARGEST)
    if op != "constant":
        kind = Kind.ROW if op == "row_index" else Kind.COLUMN
        _expect_result(instruction, DType.INT32, kind)
        return
    _expect_result(instruction, instruction.dtype, Kind.SCALAR)
    if not instruction.dtype.is_float:
        low, high = _range_of(instruction.dtype)
        _expect_whole(op, constants[0], low, high)


def _range_of(dtype: DType) -> tuple[int, int]:
    bits = 1 if dtype is DType.BOOL else 8 * dtype.itemsize
    is_signed = dtype.value.startswith("int")
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if is_signed else (0, (1 << bits) - 1)


def _expect_whole(op: str, number: float, low: int, high: int) -> None:
    if not (isinstance(number, int) and low <= number <= high):
        raise ProgramError(f"{op}, needs a whole number from {low} to {high}, not {number!r}")


def _expect_result(instruction: Instruction, dtype: DType, kind: Kind) -> None:
    if instruction.dtype is not dtype or instruction.kind is not kind:
        raise ProgramError(f"{instruction.op}, needs a result of {dtype}, {kind.value}")


def _expect(op: str, is_so: bool, wanted: str) -> None:
    if not is_so:
        raise ProgramError(f"{op}, needs {wanted}")
