"""A fused program: elementwise, broadcast and row-reduction ops as one straight line.

It works on a *space* of rows and columns. Every value is one of four kinds: FULL [rows, columns],
ROW [rows], COLUMN [columns], SCALAR []. It is in single assignment form: values are numbered,
inputs first, then one per instruction; the outputs name values. It says what is computed and
nothing of how: the host's generator makes loops in C of it, a device's generator a kernel, and
numpy can follow it instruction by instruction.

The program is an attribute of a node and of its launch, and in the file of the plan too. One that
comes from a file has its types right; whether it makes sense says `compiler.fusion.check`.

**Where the elements of an input are.** The program sees shapes [rows, columns] or [rows]; a FULL or
ROW input may be smaller than the space and be repeated: the element of row r is that of its own
row (r // every) % count.

**Arithmetic.** Floats compute in their own type (bfloat16 in float32). A bfloat16 value is rounded
where it is an output, and for all that read it then; inside the program it keeps the digits of
float32. Sums add in an order of the generator's choice, one for each shape, whatever the number of
threads; a million float32 of one sign lose at most 1e-6 of their sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from compiler.row_values import Bounds
from compiler.rows import Structure, structure
from compiler.types import DType, Extent

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
`compiler.ops.random.dropout_mask` has it, over the row-major index row * columns + column; or int32
FULL: the number of 24 bits that this is decided by. With a third operand, an int64, the index is of
a whole tensor that this is a part of: SCALAR, it is that of the first element, to which is added
what it is without; ROW, that of the first one of the row."""


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """An operand of the launch as the program sees it; see the module's docstring."""

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


@structure("fused_program")
@dataclass(frozen=True, slots=True, eq=False)
class FusedProgram(Structure):
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
    is_random = any([i.op == "philox" for i in program.instructions])
    return kinds <= {Kind.FULL, Kind.SCALAR} and not is_random


def joined(kinds: list[Kind]) -> Kind:
    """Return the kind of an elementwise result: operands of lesser kinds are broadcast."""
    if Kind.FULL in kinds or (Kind.ROW in kinds and Kind.COLUMN in kinds):
        return Kind.FULL
    if Kind.ROW in kinds:
        return Kind.ROW
    return Kind.COLUMN if Kind.COLUMN in kinds else Kind.SCALAR
