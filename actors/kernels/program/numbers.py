"""The numbers of a program that are words of its argument block, and no part of its text.

A mean divides by how many there are, labels end at the number of classes, dropout has another key
in each layer. As text, every batch, width and layer would have a function of its own to compile; as
words, programs that differ in them alone have one. They are the same bits either way.

In the text stays what a compiler makes something of: what max, min and comparisons read decides
about NaN, what pow reads about the way to a power, and a division of integers by a literal is a
product. Where rows are numbered (`row_index`) the division is by a word: it is made once a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compiler.contract.program import FusedProgram
from compiler.contract.types import DType

_READERS = ("add", "sub", "mul", "div")


@dataclass(frozen=True, slots=True)
class Number:
    """Entry `index` of the constants of the instruction that makes a value.

    `member` is that of af_word which has it: "f", "d", or "i".
    """

    value: int
    index: int
    member: str


def numbers_of(program: FusedProgram) -> tuple[Number, ...]:
    """Return the numbers of a program that are words, in their order there. O(instructions)."""
    others: set[int] = set()
    for instruction in program.instructions:
        if instruction.op not in _READERS:
            others.update(instruction.operands)
    numbers: list[Number] = []
    for value, instruction in enumerate(program.instructions, len(program.inputs)):
        op, dtype, constants = instruction.op, instruction.dtype, instruction.constants
        if op == "constant" and dtype.is_float and value not in others:
            # exp and its like have 1 in a register: a gelu takes 2 % longer with a second one.
            if abs(constants[0]) not in (0, 1):
                numbers.append(Number(value, 0, "d" if dtype is DType.FLOAT64 else "f"))
        elif op in ("check_index", "philox"):
            numbers.append(Number(value, 0, "i"))
        elif op == "row_index":
            # By 1 nothing is divided, and 0 says that nothing is repeated.
            is_word = (constants[0] != 1, constants[1] != 0)
            numbers += [Number(value, index, "i") for index in (0, 1) if is_word[index]]
    return tuple(numbers)


def number_words(program: FusedProgram) -> list[int]:
    """Return the words of the numbers of a program: floats by their bits."""
    return [_bits_of(program, number) for number in numbers_of(program)]


def _bits_of(program: FusedProgram, number: Number) -> int:
    value = program.instructions[number.value - len(program.inputs)].constants[number.index]
    if number.member == "i":
        return int(value)
    if number.member == "d":
        return int(np.float64(value).view(np.int64))
    with np.errstate(over="ignore"):  # infinite in float32, as a literal would be
        return int(np.float32(value).view(np.int32))
