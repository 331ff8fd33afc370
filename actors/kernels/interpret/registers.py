"""Where the FULL values of a program are while a block is computed: as few arrays as will do.

A *register* is scratch of one block. A value has one from the instruction that makes it to the last
that reads it, and may take over that of an operand which ends there: numpy reads an element before
it writes the one in the same place. What is an output is made where it will lie. So the blocks of a
long program stay in the second-level cache (linear scan: Poletto & Sarkar 1999).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from actors.kernels.codegen.phases import LoopPhase, Schedule, op_of, operands_of
from actors.kernels.interpret.steps import held_dtype
from compiler.fusion.program import FusedProgram, Kind
from compiler.types import numpy_dtype

Register = tuple[np.dtype[Any], int]


def takes_several_calls(program: FusedProgram, value: int) -> bool:
    """Whether a value is written before its operands are read for the last time.

    A choice that is the same for all elements is a copy.
    """
    if op_of(program, value) != "select":
        return False
    return program.kind_of(operands_of(program, value)[0]) is not Kind.SCALAR


class Registers:
    """The registers of a program.

    Where a row is one block, values live on from phase to phase. Else each phase walks over all
    blocks before the next begins, and what a later one needs is kept in buffers of whole rows.
    """

    def __init__(self, program: FusedProgram, plan: Schedule, *, is_one_block: bool) -> None:
        self.counts: Counter[np.dtype[Any]] = Counter()
        self.direct: dict[int, int] = {}
        """Values that are made where an output lies, and its position."""
        self._program = program
        self._of: list[dict[int, Register]] = []
        self._clock = 0
        self._made: dict[int, int] = {}
        self._last_read: dict[int, int] = {}
        self._stored: dict[int, int] = {}
        for position, value in enumerate(program.outputs):
            is_made = value >= len(program.inputs) and program.kind_of(value) is Kind.FULL
            dtype = program.dtype_of(value)
            if is_made and held_dtype(dtype) == numpy_dtype(dtype):
                self.direct.setdefault(value, position)
        if is_one_block:
            self._of += [self._scan(plan.phases, ())] * len(plan.phases)
        else:
            self._of += [self._scan((phase,), phase.keeps) for phase in plan.phases]

    def of(self, phase: int, value: int) -> Register | None:
        """Return the register of a value that a phase computes; None where it needs none."""
        return self._of[phase].get(value)

    def may_lie_over(self, position: int, value: int) -> bool:
        """Whether an output may lie over a FULL input: none of it is read once that is written."""
        if position not in self._stored or not self._program.is_full(value):
            return False
        if value not in self._last_read:
            return not any([value in i.operands for i in self._program.instructions])
        made = self._program.outputs[position]
        is_early = self.direct.get(made) == position
        written = self._made[made] if is_early else self._stored[position]
        last = self._last_read[value]
        return last < written or (last == written and not takes_several_calls(self._program, made))

    def _scan(
        self, phases: tuple[LoopPhase, ...], elsewhere: tuple[int, ...]
    ) -> dict[int, Register]:
        """Give registers to what phases compute one after the other, on one block."""
        reads: dict[int, int] = {}
        order: list[tuple[int, int | None]] = []
        for phase in phases:
            for value in phase.body:
                self._clock += 1
                reads.update(dict.fromkeys(operands_of(self._program, value), self._clock))
                order.append((self._clock, value))
                self._made.setdefault(value, self._clock)
            self._clock += 1
            order.append((self._clock, None))
            reads.update(dict.fromkeys(self._read_at_end(phase), self._clock))
            self._stored.update(dict.fromkeys(phase.stores, self._clock))
        self._last_read.update(reads)
        return self._allocated(order, reads, elsewhere)

    def _read_at_end(self, phase: LoopPhase) -> list[int]:
        """Return what is read behind the instructions of a phase."""
        ends = [*phase.reductions, *phase.column_sums]
        reduced = [operands_of(self._program, value)[0] for value in ends]
        outputs = [(p, self._program.outputs[p]) for p in phase.stores]
        return reduced + [v for position, v in outputs if self.direct.get(v) != position]

    def _allocated(
        self, order: list[tuple[int, int | None]], reads: dict[int, int], elsewhere: tuple[int, ...]
    ) -> dict[int, Register]:
        free = {dtype: list(range(count)) for dtype, count in self.counts.items()}
        found: dict[int, Register] = {}
        ending: dict[int, list[int]] = {}
        for read, last in reads.items():
            ending.setdefault(last, []).append(read)

        def release(now: int) -> None:
            for ended in ending.get(now, ()):
                if ended in found:
                    dtype, number = found[ended]
                    free[dtype].append(number)

        for now, value in order:
            is_late = value is not None and takes_several_calls(self._program, value)
            if not is_late:
                release(now)
            if value is not None and self._needs_one(value, elsewhere):
                found[value] = self._taken(value, free)
            if is_late:
                release(now)
        return found

    def _needs_one(self, value: int, elsewhere: tuple[int, ...]) -> bool:
        is_full = self._program.kind_of(value) is Kind.FULL
        return is_full and value not in self.direct and value not in elsewhere

    def _taken(self, value: int, free: dict[np.dtype[Any], list[int]]) -> Register:
        dtype = held_dtype(self._program.dtype_of(value))
        ready = free.setdefault(dtype, [])
        if not ready:
            ready.append(self.counts[dtype])
            self.counts[dtype] += 1
        return dtype, ready.pop()
