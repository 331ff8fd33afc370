"""How numpy walks the space of a fused program: blocks that stay in cache, and who is where."""

from __future__ import annotations

import functools

import numpy as np

from actors.kernels.attributes import integer
from actors.kernels.codegen.phases import Schedule, op_of, operands_of, schedule
from actors.kernels.codegen.programs import Made, made_of
from actors.kernels.codegen.spaces import LoopSpace, is_plain, space_of
from actors.kernels.indices import index_pieces
from actors.kernels.interpret.blocks import block_elements
from actors.kernels.interpret.registers import Registers, takes_several_calls
from actors.kernels.interpret.steps import (
    BYTE,
    held_dtype,
)
from actors.kernels.interpret.sums import WIDE
from actors.kernels.kernel import Attrs, Operands
from actors.kernels.scratch import Piece
from compiler.fusion.program import Kind
from compiler.types import DType

_BLOCKS = 8
"""More registers than these leave the second-level cache: then blocks are smaller."""


def walk_of(attrs: Attrs, layouts: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Walk | None:
    """Return how the space of a program with such operands is walked; None where it cannot be."""
    made = made_of(attrs)
    rows, columns = integer(attrs, "rows"), integer(attrs, "columns")
    space = space_of(made.program, made.schedule, rows, columns, tuple(layouts))
    return None if space is None else _walk(made, space, rows)


@functools.lru_cache(maxsize=1024)
def _walk(made: Made, space: LoopSpace, rows: int) -> Walk:
    return Walk(made, space, rows)


@functools.lru_cache(maxsize=1024)
def _plan_of(made: Made, *, is_one_block: bool) -> tuple[Schedule, Registers]:
    plan = schedule(made.program, keep_above=0) if is_one_block else made.schedule
    return plan, Registers(made.program, plan, is_one_block=is_one_block)


class Walk:
    """How a space is walked: the extents of a block, and where every value is held."""

    def __init__(self, made: Made, space: LoopSpace, num_rows: int) -> None:
        self.program, self.space, self._num_rows = made.program, space, num_rows
        self.plan, self.registers = _plan_of(made, is_one_block=True)
        limit = self._limit()
        self.is_one_block = space.columns <= limit
        if not self.is_one_block:
            self.plan, self.registers = _plan_of(made, is_one_block=False)
            limit = self._limit()
        self.columns = min(space.columns, limit)
        self.rows = max(1, min(space.rows, limit // max(1, space.columns)))
        self.places: dict[tuple[str, int], tuple[tuple[int, int], np.dtype[np.generic]]] = {}
        self._place()

    def _limit(self) -> int:
        """Return the elements of a block, such that all registers stay in cache."""
        held = self.registers.counts.total()
        return block_elements(4) if held <= _BLOCKS else block_elements(4) * _BLOCKS // held

    def in_place_pairs(self, inputs: Operands, outputs: Operands) -> tuple[tuple[int, int], ...]:
        """Return pairs (output, input): the one may lie over the other."""
        return tuple(
            [
                (out, index)
                for out, y in enumerate(outputs)
                for index, x in enumerate(inputs)
                if (x.type.dtype, x.type.num_elements) == (y.type.dtype, y.type.num_elements)
                and x.is_dense
                and y.is_dense
                and is_plain(self.program, index, self._num_rows)
                and self.registers.may_lie_over(out, index)
            ]
        )

    def pieces(self) -> tuple[Piece, ...]:
        """Return the scratch, in the order of `places`."""
        return tuple([Piece(shape, dtype) for shape, dtype in self.places.values()])

    def is_gathered(self, value: int) -> bool:
        """Return whether rows of an input are copied: repeated ones, and halves to float32."""
        if self.program.dtype_of(value) is DType.FLOAT16:
            return True
        return not is_plain(self.program, value, self.space.rows)

    def _place(self) -> None:
        program, plan = self.program, self.plan
        for v in plan.scalars:
            self._add("value", v, 1, 1)
        for v in [v for stage in plan.rows for v in stage]:
            if v >= len(program.inputs) or self.is_gathered(v):
                self._add("value", v, self.rows, 1)
            if op_of(program, v) == "check_index":
                for n, piece in enumerate(index_pieces(self._own_rows(v))):
                    self.places["indices" if n == 0 else "extremes", v] = (
                        (1, piece.shape[0]),
                        piece.dtype,
                    )
        for phase in plan.phases:
            for v in phase.body:
                if program.kind_of(v) is Kind.COLUMN:
                    self._add("value", v, 1, self.columns)
                if op_of(program, v) == "philox":
                    shape = (self.rows, self.columns)
                    self.places["uniform", v] = (shape, np.dtype(np.float32))
                    if len(operands_of(program, v)) > 2:
                        self.places["line", v] = ((1, self.columns + 8), np.dtype(np.float32))
            for v in phase.loads:
                if self.is_gathered(v):
                    self._add("value", v, self.rows, self.columns)
            for v in phase.keeps if not self.is_one_block else ():
                self._add("kept", v, self.rows, self.space.columns)
            for v in phase.reductions:
                self._add("value", v, self.rows, 1)
                self._add("part", v, self.rows, 1)
            for v in phase.column_sums:
                own = held_dtype(program.dtype_of(v))
                added_in = own if program.dtype_of(v).is_integer else WIDE
                self._add("value", v, 1, self.space.columns)
                self.places["total", v] = ((1, self.space.columns), added_in)
                self.places["part", v] = ((1, self.columns), added_in)
                self.places["trees", v] = ((self.rows // 8 * 4, self.columns), own)
        wide = [
            held_dtype(program.dtype_of(v)).itemsize
            for v in range(program.num_values)
            if takes_several_calls(program, v)
        ]
        if wide:
            self.places["mask", 0] = ((1, self.rows * self.columns * max(wide)), BYTE)
        for dtype, count in self.registers.counts.items():
            for number in range(count):
                self.places[f"register {dtype}", number] = ((self.rows, self.columns), dtype)
        for v in plan.late:
            self._add("late", v, 1, self.space.columns)

    def _add(self, what: str, value: int, rows: int, columns: int) -> None:
        self.places[what, value] = ((rows, columns), held_dtype(self.program.dtype_of(value)))

    def _own_rows(self, value: int) -> int:
        """Return how many indices are checked at once: all that are given, or a block's."""
        given = operands_of(self.program, value)[0]
        if given >= len(self.program.inputs):
            return self.rows
        entry = self.program.inputs[given]
        return entry.count or -(-self.space.rows // entry.every)
