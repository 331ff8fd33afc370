"""A fused program: elementwise, broadcast and row-reduction ops as one straight line.

It works on a *space* of rows and columns. Every value is one of four kinds: FULL [rows, columns],
ROW [rows], COLUMN [columns], SCALAR []. It is in single assignment form: values are numbered,
inputs first, then one per instruction; the outputs name values. It says what is computed and
nothing of how: the host's generator makes loops in C of it, a device's generator a kernel, and
numpy can follow it instruction by instruction.

The program is an attribute of a node and of its launch, and in the file of the plan too. One that
comes from a file has its types right; whether it makes sense says `check_program`. `UFUNCS`, `erf`
and `erfc` are the instructions in numpy, for the reference and for numpy's kernels.

**Where the elements of an input are.** The program sees shapes [rows, columns] or [rows]; a FULL or
ROW input may be smaller than the space and be repeated: the element of row r is that of its own
row (r // every) % count.

**Arithmetic.** Floats compute in their own type (bfloat16 in float32). A bfloat16 value is rounded
where it is an output, and for all that read it then; inside the program it keeps the digits of
float32. Sums add in an order of the generator's choice, one for each shape, whatever the number of
threads; a million float32 of one sign lose at most 1e-6 of their sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import numpy as np

from compiler.contract.codec import Bounds, PlanAttribute, register_attribute
from compiler.contract.types import DType, Extent

Place = Annotated[int, Bounds(0, (1 << 31) - 1)]
"""The number of a value."""

Repeats = Annotated[int, Bounds(1, 1 << 48)]


GRADIENT = 1
"""The place of the gradient among the operands of an optimizer's update. In that of picked rows
their gradient and their ids stand for it."""


class Kind(Enum):
    """How a value lies in the space."""

    FULL = "full"
    ROW = "row"
    COLUMN = "column"
    SCALAR = "scalar"

    __hash__ = object.__hash__  # a member is equal to itself alone; Enum's own is not in C


ELEMENTWISE = (
    *("add", "sub", "mul", "div", "max", "min", "pow", "mod"),
    *("neg", "abs", "sign", "reciprocal", "exp", "log", "sqrt", "rsqrt", "tanh", "erf"),
    *("sin", "cos", "floor", "ceil", "round"),
    *("log1p", "expm1", "log2", "log10", "erfc", "atan2", "floordiv", "xor", "shl", "shr"),
    *("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "select"),
)
"""Ops of one element. Operands are of one dtype, which is the result's too, except that comparisons
give bool, and `select` takes (bool, a, b). Operands of lesser kinds are broadcast: the kind of the
result is FULL where any operand is or one is ROW and one COLUMN, else ROW, else COLUMN, else
SCALAR. max and min pass NaN on, as numpy's maximum and minimum do; mod has the sign of the divisor,
and is 0 for an integer divisor 0, as floordiv is, which is of integers and rounds down; and, or,
xor, not are of bools or of the bits of integers; shl and shr shift those, by any number of places
from 0 on: by as many as there are bits, only the sign is left to the right."""

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
"""Instructions that give bool whatever they read."""

ROW_REDUCTIONS = ("row_sum", "row_max", "row_min")
"""FULL -> ROW."""

COLUMN_REDUCTIONS = ("column_sum",)
"""FULL -> COLUMN: over all rows. The result may be an output, or feed COLUMN values that are."""

OTHERS = ("constant", "cast", "column_index", "row_index", "check_index", "philox")
"""`constant` (number) -> SCALAR; `cast` to another dtype; `column_index` -> the column's number, an
int32 (kind COLUMN); `row_index` (every, count) -> (row // every) % count, or row // every where
count is 0, an int32 (kind ROW); `check_index` (extent; operand an integer ROW: labels) -> the
operand, and the launch fails where one is not in [0, extent); `philox` (operands seed, step: int64
SCALAR; constants key, p) -> bool FULL: whether dropout keeps the element, as
`compiler.ops.primitives.sources.dropout_mask` has it, over the row-major index row * columns +
column; or int32 FULL: the number of 24 bits that this is decided by. With a third operand, an
int64, the index is of a whole tensor that this is a part of: SCALAR, it is that of the first
element, to which is added what it is without; ROW, that of the first one of the row."""


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """An operand of the launch as the program sees it; `every` and `count` say where it repeats."""

    dtype: DType
    kind: Kind
    every: Repeats = 1
    count: Extent = 0
    """Rows of its own; 0: as many as the space."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step: an op on earlier values. `constants` are what the op has besides operands."""

    op: str
    operands: tuple[Place, ...]
    dtype: DType
    kind: Kind
    constants: tuple[int | float, ...] = ()


@register_attribute("fused_program")
@dataclass(frozen=True, slots=True, eq=False)
class FusedProgram(PlanAttribute):
    """A program: value v is input v, or instruction v - len(inputs). `outputs` name values."""

    inputs: tuple[ProgramInput, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Place, ...]

    @property
    def num_values(self) -> int:
        """Inputs and results."""
        return len(self.inputs) + len(self.instructions)

    def dtype_of(self, value: int) -> DType:
        """Return the element type of a value."""
        num = len(self.inputs)
        return self.inputs[value].dtype if value < num else self.instructions[value - num].dtype

    def kind_of(self, value: int) -> Kind:
        """Return how a value lies in the space."""
        num = len(self.inputs)
        return self.inputs[value].kind if value < num else self.instructions[value - num].kind

    def is_full(self, value: int) -> bool:
        """Whether a value has an element for each of the space."""
        return self.kind_of(value) is Kind.FULL


def is_by_elements(program: FusedProgram) -> bool:
    """Whether a program makes each element of numbers and of elements at the same place."""
    kinds = {program.kind_of(v) for v in range(program.num_values)}
    # philox reads the index of the element in the whole, so equal operands do not suffice.
    is_random = any([i.op == "philox" for i in program.instructions])
    return kinds <= {Kind.FULL, Kind.SCALAR} and not is_random


def joined(kinds: list[Kind]) -> Kind:
    """Return the kind of an elementwise result: operands of lesser kinds are broadcast."""
    # A ROW and a COLUMN together vary along both axes.
    if Kind.FULL in kinds or (Kind.ROW in kinds and Kind.COLUMN in kinds):
        return Kind.FULL
    if Kind.ROW in kinds:
        return Kind.ROW
    return Kind.COLUMN if Kind.COLUMN in kinds else Kind.SCALAR


# The rules that generators and kernels take for granted: every operand is an earlier value, types
# and kinds follow from the operands, and what is summed over rows feeds nothing that is computed
# row by row. Behind this check the text that is generated for a program has no word in it that is
# not ours.

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
"""The most rows, columns or labels of a program."""


class ProgramError(ValueError):
    """A program breaks a rule of `check_program`; the message names value and rule."""


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
    # A place from a file is not negative: `Place` has bounds.
    if any([value >= number for value in operands]):
        raise ProgramError(f"{op}, reads values {operands}, which are not all before it")
    _expect(op, len(instruction.constants) == _NUM_CONSTANTS.get(op, 0), "another few constants")
    kinds = tuple([program.kind_of(v) for v in operands])
    dtypes = tuple([program.dtype_of(v) for v in operands])
    is_sum = any([is_late[v] for v in operands])
    if op in ELEMENTWISE:
        if dtypes != _operand_dtypes(op, dtypes):
            names = ", ".join([dtype.value for dtype in dtypes])
            raise ProgramError(f"{op}, needs other dtypes than ({names})")
        expected = DType.BOOL if op in COMPARISONS else dtypes[-1]
        _expect_result(instruction, expected, joined(list(kinds)))
    elif op in ROW_REDUCTIONS + COLUMN_REDUCTIONS:
        _expect(op, len(kinds) == 1, "one operand")
        _expect(op, dtypes[0] is not DType.BOOL, "numbers")
        _expect_result(instruction, dtypes[0], Kind.ROW if op in ROW_REDUCTIONS else Kind.COLUMN)
    elif op in OTHERS:
        _check_other(instruction, dtypes, kinds)
    else:
        raise ProgramError(f"{op!a:.40}, is no instruction")
    # Sums over all rows are complete after the last row: only COLUMN values can still be computed.
    is_sum = is_sum or op in COLUMN_REDUCTIONS
    _expect(op, not is_sum or instruction.kind is Kind.COLUMN, "no sum over all rows to read")
    return is_sum


def _operand_dtypes(op: str, dtypes: tuple[DType, ...]) -> tuple[DType, ...] | None:
    """Return what the operands must be, seen from the last of them; None for none at all."""
    arity = 1 if op in _UNARY else 3 if op == "select" else 2
    if len(dtypes) != arity:
        return None
    # `select` begins with a bool, so the last operand has the type of the result.
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
        # A key of 64 bits, written as a signed or as an unsigned number.
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
    # A bool is 0 or 1, although a byte holds it.
    bits = 1 if dtype is DType.BOOL else 8 * dtype.itemsize
    is_signed = dtype.value.startswith("int")
    # Minus binds before the shift: 1 << (bits - 1).
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


# erf and erfc of arrays: numpy has neither, and one number at a time takes 75 ns each.
#
# Near 0 erf(x) is x, and x times a polynomial in x^2. Farther out erfc(x) is e^(-x^2) q(t) / (x +
# k) with t = (x - k) / (x + k), which takes half a line to a short interval, where q is smooth.
# Both polynomials are minimax fits of the relative error by Remez's exchange, from values of 60
# digits; coefficients begin with that of the highest power.

Array = np.ndarray[Any, np.dtype[Any]]

_CENTRE = 4.0
"""k above: of several that were tried the one with the best fit from 1/2 to 28."""

_LAST = 28.0
"""From here on erfc is 0 in float64."""

_PIECE = 8192
"""Elements that are computed at once, so that what is in between stays in cache."""

# fmt: off
_NEAR_32 = (
    7.853835495539904e-05, -0.0008010188531042216, 0.005188327486832986, -0.026853812092448005,
    0.11283585161917879, -0.3761262582714644, 0.12837916572745942,
)
_FAR_32 = (
    -0.0393984075189, 0.0648371705998, -0.179422218816, 0.329436391268, -0.541055067672,
    0.773194696634, -0.976549097574, 1.09599565943,
)
"""Errors below 2e-9 of erf up to 1, and of erfc from there to 4."""

_NEAR_64 = (
    -4.2229105899430914e-12, 8.703799471284827e-11, -1.2163044786350328e-09,
    1.4792146255071003e-08, -1.6364614478828258e-07, 1.6462043412267344e-06,
    -1.4925647465360613e-05, 0.0001205533289936709, -0.0008548327021853435,
    0.005223977625422089, -0.026866170645129733, 0.11283791670955119, -0.37612638903183754,
    0.1283791670955126,
)
_FAR_64 = (
    -1.1783255664327547e-08, 1.3425717122226045e-09, 1.1845807371034735e-07,
    -7.616476690583856e-08, -8.413426940275824e-07, 1.4246307454137077e-06,
    4.691887769705821e-06, -1.886105797142463e-05, -3.6343361734268207e-06,
    0.00017681285780097642, -0.00045505286049883756, -0.0002809588706335152,
    0.006112055678972859, -0.02637005333998395, 0.0763815149075123, -0.17401093723994204,
    0.3308515878780833, -0.5408538313132353, 0.7732087022652356, -0.976548729080882,
    1.095995661000491,
)
"""Errors below 1e-20 of erf up to 1, and 3e-18 of erfc from 1/2 on."""


def erf(x: Array) -> Array:
    """Return the error function of floats in their dtype, at most 2 units in the last place off."""
    return _by_pieces(_erf, x, np.float64 if x.dtype.itemsize == 8 else np.float32)


def erfc(x: Array) -> Array:
    """Return what erf lacks to 1, in the dtype of x; small numbers, too, at most 8 units off."""
    return _by_pieces(_erfc, x, np.float64)


def _by_pieces(function: Callable[[Array], Array], x: Array, width: type) -> Array:
    flat, out = np.ravel(x), np.empty(x.size, x.dtype)
    # NaN and infinities pass through, and lanes that `where` discards may overflow.
    with np.errstate(all="ignore"):
        for first in range(0, x.size, _PIECE):
            part = slice(first, first + _PIECE)
            out[part] = function(flat[part].astype(width, copy=False))
    return np.asarray(out.reshape(x.shape))


def _erf(x: Array) -> Array:
    is_wide = x.dtype == np.float64
    near, far, one = (_NEAR_64, _FAR_64, 6.0) if is_wide else (_NEAR_32, _FAR_32, 4.0)
    # The far fit ends at `one`; beyond it erf rounds to 1.
    size = np.minimum(np.abs(x), x.dtype.type(one))
    tail = np.copysign(1 - np.exp(-size * size) * _far(far, size), x)
    return np.asarray(np.where(size < 1, x + x * _polynomial(near, x * x), tail))


def _erfc(x: Array) -> Array:
    size = np.minimum(np.abs(x), _LAST)
    # A square that is rounded costs e^-x^2 up to 9 bits: that of half of the digits is exact.
    # Without the low 27 of its 52 stored bits, `high` has 26, so that high * high is exact.
    high = (size.view(np.int64) & ~np.int64(0x7FFFFFF)).view(np.float64)
    # x^2 = high^2 + (x - high)(x + high).
    tail = np.exp(-high * high) * np.exp((high - size) * (high + size)) * _far(_FAR_64, size)
    # erfc(-x) = 2 - erfc(x).
    tail = np.where(x < 0, 2 - tail, tail)
    return np.asarray(np.where(size < 0.5, 1 - (x + x * _polynomial(_NEAR_64, x * x)), tail))


def _far(coefficients: tuple[float, ...], x: Array) -> Array:
    """Return e^(x^2) erfc(x) from 1/2 on."""
    share = 1 / (x + x.dtype.type(_CENTRE))
    y: Array = _polynomial(coefficients, (x - x.dtype.type(_CENTRE)) * share) * share
    return y


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    first, second, *others = [x.dtype.type(c) for c in coefficients]
    # Horner's rule in place: one temporary for all terms.
    y: Array = x * first
    y += second
    for coefficient in others:
        y *= x
        y += coefficient
    return y


def power(x: Array, n: Array, out: Array | None = None) -> Array:
    """Return x to the power of n in their dtype, as IEEE 754 has it.

    numpy takes the root where the exponent is one number, 0.5: NaN of -inf, and -0.0 of -0.0.
    """
    is_limit = (n == 0.5) & ((x == 0) | (x == -np.inf))
    if not is_limit.any():
        return np.asarray(np.power(x, n, out=out))
    limits = np.abs(x)  # before it is written over
    powers = np.asarray(np.power(x, n, out=out))
    np.copyto(powers, limits, where=is_limit)
    return powers


UFUNCS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "pow": power,
    "mod": np.remainder,
    "neg": np.negative,
    "abs": np.absolute,
    "sign": np.sign,
    "reciprocal": np.reciprocal,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "log2": np.log2,
    "log10": np.log10,
    "atan2": np.arctan2,
    "floordiv": np.floor_divide,
    "xor": np.bitwise_xor,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
}
"""Functions of arrays with `out`. `select`, `rsqrt`, `erf` and `erfc` are none of numpy's."""
