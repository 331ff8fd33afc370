"""How the text of a program names its values, and where their elements are.

v3 is value 3; of a FULL or ROW value in a loop over several rows, v3_1 is that of the second row.
x3 is where an input lies, y3 where output 3 does, k3 a row buffer, c3 column sums, u3 random bits,
t3 a reduction under way, m3 a stretch of the terms of a sum.
"""

from __future__ import annotations

import math

from actors.kernels.codegen import arguments as words
from actors.kernels.codegen.expressions import (
    expression,
    is_float,
    literal,
    load,
    rounded,
    storage_of,
    sum_type_of,
    type_of,
)
from actors.kernels.codegen.phases import Schedule, op_of, operands_of
from compiler.fusion.program import FusedProgram, Instruction, Kind
from compiler.types import DType


class Values:
    """The values of one program, as C."""

    def __init__(self, program: FusedProgram, plan: Schedule, place: str = "j") -> None:
        """Number the row buffers and column sums of the schedule.

        `place` is where an element's random bits are in u.
        """
        self.program = program
        self.plan = plan
        self._place = place
        self._buffers = {v: i for i, v in enumerate(plan.buffers)}
        self._sums = {v: i for i, v in enumerate(plan.column_sums)}

    def dtype(self, value: int) -> DType:
        """Return the element type."""
        return self.program.dtype_of(value)

    def kind(self, value: int) -> Kind:
        """Return how a value lies in the space."""
        return self.program.kind_of(value)

    def type(self, value: int) -> str:
        """Return the type in which a value is computed."""
        return type_of(self.dtype(value))

    def storage(self, value: int) -> str:
        """Return the type of a value's elements in memory."""
        return storage_of(self.dtype(value))

    def is_float(self, value: int) -> bool:
        """Return whether a value is computed as float or double."""
        return is_float(self.dtype(value))

    def is_input(self, value: int) -> bool:
        """Return whether a value is an operand of the launch."""
        return value < len(self.program.inputs)

    def op(self, value: int) -> str:
        """Return the op of a value; "" for an input."""
        return op_of(self.program, value)

    def instruction(self, value: int) -> Instruction:
        """Return the instruction that makes a value."""
        return self.program.instructions[value - len(self.program.inputs)]

    def constant(self, value: int) -> float | None:
        """Return the number that a value is, or None."""
        is_constant = self.op(value) == "constant"
        return self.instruction(value).constants[0] if is_constant else None

    def name(self, value: int, suffix: str = "") -> str:
        """Return the name of a value; a constant stands for itself."""
        number = self.constant(value)
        if number is not None:
            return literal(number, self.dtype(value))
        has_rows = self.kind(value) in (Kind.FULL, Kind.ROW)
        return f"v{value}{suffix if has_rows else ''}"

    def define(self, value: int, suffix: str = "") -> str:
        """Return what an instruction computes, rounded where it will be read back from memory.

        Raises ValueError where there is no C for it.
        """
        instruction = self.instruction(value)
        special = self._special(instruction, f"u{value}{suffix}", suffix)
        if special is not None:
            return special
        operands = instruction.operands
        text = expression(
            instruction,
            tuple([self.name(v, suffix) for v in operands]),
            tuple([self.dtype(v) for v in operands]),
            tuple([self.constant(v) for v in operands]),
        )
        if text is None:
            raise ValueError(f"there is no C for {instruction}")
        is_output = value in self.program.outputs
        return rounded(instruction.dtype, f"({text})") if is_output else text

    def first_number(self, value: int) -> str:
        """Return the number of the first element of row r among those that random bits are for."""
        rows, places = f"r * a[{words.COLUMNS}].i", self.instruction(value).operands[2:]
        if not places:
            return rows
        name = self.name(places[0])
        return name if self.kind(places[0]) is Kind.ROW else f"({name} + {rows})"

    def _special(self, instruction: Instruction, bits: str, suffix: str) -> str | None:
        """Return what depends on a place in the space; None for other ops."""
        if instruction.op == "column_index":
            return "(int32_t)j"
        if instruction.op == "row_index":
            every, count = instruction.constants
            wrap = f" % {count}" if count else ""
            return f"(int32_t)(r / {every}{wrap})"
        if instruction.op == "check_index":
            return self.name(instruction.operands[0], suffix)
        if instruction.op == "philox":
            least = math.ceil(float(instruction.constants[1]) * 2**24)
            number = f"({bits}[{self._place}] >> 8)"
            is_bits = instruction.dtype is DType.INT32
            return f"(int32_t){number}" if is_bits else f"{number} >= {least}u"
        return None

    def prelude(self, values: tuple[int, ...], suffix: str = "", row: str = "row") -> list[str]:
        """Return ROW and SCALAR operands of instructions, not of `values`, as local constants."""
        wanted = {v for value in values for v in operands_of(self.program, value)} - {*values}
        places = {Kind.ROW: row, Kind.SCALAR: "s"}
        return [
            f"const {self.type(v)} {self.name(v, suffix)} = {places[self.kind(v)]}->v{v};"
            for v in sorted(wanted)
            if self.kind(v) in places and self.constant(v) is None
        ]

    def element(self, value: int, index: str) -> str:
        """Return an element of an input."""
        return load(self.dtype(value), f"({self._operand(value)})[{index}]")

    def pointer(self, value: int, suffix: str = "", row: str = "") -> str:
        """Return the definition of x: where an input lies, or the row of it that belongs to one."""
        offset = f" + {self.own_row(value, row)}" if row else ""
        own = f"const {self.storage(value)} *x{value}{suffix}"
        return f"{own} = {self._operand(value)}{offset};"

    def _operand(self, value: int) -> str:
        return f"(const {self.storage(value)} *)a[{words.operand(value)}].p"

    def own_row(self, value: int, row: str = "r") -> str:
        """Return where the row of an input begins that belongs to a row of the space."""
        return f"{self.row_number(value, row)} * a[{words.operand(value, words.STRIDE)}].i"

    def row_number(self, value: int, row: str = "r") -> str:
        """Return which row of an input belongs to a row of the space."""
        entry = self.program.inputs[value]
        if entry.every != 1:
            row = f"({row} / a[{words.operand(value, words.EVERY)}].i)"
        if entry.count:
            row = f"({row} % a[{words.operand(value, words.COUNT)}].i)"
        return row

    def output_word(self, position: int, word: int = words.POINTER) -> str:
        """Return a word of an output, by its position."""
        return f"a[{words.operand(len(self.program.inputs) + position, word)}]"

    def output(self, position: int) -> str:
        """Return where an output begins, as a pointer to its elements."""
        return f"(({self.storage(self.program.outputs[position])} *){self.output_word(position)}.p)"

    def buffer(self, value: int) -> str:
        """Return the row buffer of a value, of this worker."""
        place, own = words.buffer(self.program, self._buffers[value]), self.type(value)
        return f"({own} *)a[{place}].p + worker * a[{place + 1}].i"

    def partial(self, value: int, slot: str) -> str:
        """Return the definition of c, a column sum's partial row."""
        own = sum_type_of(self.dtype(value))
        return f"{own} *c{value} = {self.partial_place(value, slot)};"

    def partial_place(self, value: int, slot: str) -> str:
        """Return where a partial row of a column sum begins."""
        own, place = sum_type_of(self.dtype(value)), self._sum_word(value)
        return f"({own} *)a[{place}].p + {slot} * a[{place + 1}].i"

    def partial_step(self, value: int) -> str:
        """Return the elements from one partial row of a column sum to the next."""
        return f"a[{self._sum_word(value) + 1}].i"

    def _sum_word(self, value: int) -> int:
        return words.column_sum(self.program, len(self._buffers), self._sums[value])


def indented(lines: list[str], depth: int = 1) -> list[str]:
    """Return lines moved to the right; directives of the compiler stay at the margin."""
    return [line if line.startswith("#") else "    " * depth + line for line in lines]
