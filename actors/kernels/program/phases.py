"""How a program is walked: its loops over a row, the values between them, and pieces for threads.

A row reduction must be complete before what depends on it begins, so a row is walked in *phases*,
one loop over its columns each. A FULL value of an earlier phase that a later one needs is, in this
order: read back from where it was stored as an output; computed again, when that is cheap; kept in
a buffer of one row. What a phase stores is stored in the first phase that can: so an input over
which an output lies is safe when it is read no later than the output is stored.

Nothing here knows a language: a generator for another machine begins with the same schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from compiler.contract.program import COLUMN_REDUCTIONS, ROW_REDUCTIONS, FusedProgram, Kind
from compiler.contract.types import HALVES, DType, numpy_dtype

KEEP_ABOVE = 8
"""A value whose instructions weigh more is kept for the next phase instead of computed again."""

_WEIGHTS = {
    op: number
    for number, ops in (
        (4, ("div", "reciprocal")),
        (6, ("sqrt", "rsqrt")),
        (12, ("exp", "log", "tanh")),
        (25, ("erf", "sin", "cos", "mod", "philox", "floordiv", "log2", "log10")),
        (60, ("pow", "erfc", "expm1", "log1p", "atan2")),
    )
    for op in ops
}


@dataclass(frozen=True, slots=True)
class LoopPhase:
    """One loop over the columns of a row. Values are numbered as in the program.

    `loads` are FULL and COLUMN inputs; `read_back` pairs (value, output position) and `kept` are
    values of earlier phases; `body` are the instructions computed, in order; `keeps` go to row
    buffers, `stores` are output positions; `reductions` and `column_sums` end here.
    """

    loads: tuple[int, ...]
    read_back: tuple[tuple[int, int], ...]
    kept: tuple[int, ...]
    body: tuple[int, ...]
    keeps: tuple[int, ...]
    stores: tuple[int, ...]
    reductions: tuple[int, ...]
    column_sums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a program is walked.

    `scalars`: instructions once per launch; `rows[p]`: ROW values (inputs too) once per row, before
    phase p, the last entry behind the last phase; `phases`; `late`: COLUMN instructions that follow
    from column sums or are outputs, once per column at the end; `buffers`: the values kept in row
    buffers; `column_sums`: all of them.
    """

    scalars: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    phases: tuple[LoopPhase, ...]
    late: tuple[int, ...]
    buffers: tuple[int, ...]
    column_sums: tuple[int, ...]


def schedule(program: FusedProgram, keep_above: int = KEEP_ABOVE) -> Schedule:
    """Return the phases of a program, and what is computed around them."""
    return _Scheduler(program, keep_above).run()


def weight(program: FusedProgram) -> int:
    """Return about how many additions an element of the space costs."""
    return sum([_weight(program, v) for v in range(len(program.inputs), program.num_values)])


def last_reads(plan: Schedule, program: FusedProgram) -> dict[int, int]:
    """Return the last phase that reads each FULL input; -1 for one that no instruction reads."""
    operands = {value for instruction in program.instructions for value in instruction.operands}
    unread = [v for v in range(len(program.inputs)) if program.is_full(v) and v not in operands]
    return dict.fromkeys(unread, -1) | {
        value: index
        for index, phase in enumerate(plan.phases)
        for value in phase.loads
        if program.kind_of(value) is Kind.FULL
    }


def store_phases(plan: Schedule) -> dict[int, int]:
    """Return the phase that stores each FULL output, by the output's position."""
    return {out: index for index, phase in enumerate(plan.phases) for out in phase.stores}


def operands_of(program: FusedProgram, value: int) -> tuple[int, ...]:
    """Return what a value is computed from; nothing for an input."""
    index = value - len(program.inputs)
    return () if index < 0 else program.instructions[index].operands


def op_of(program: FusedProgram, value: int) -> str:
    """Return the op of a value; "" for an input."""
    index = value - len(program.inputs)
    return "" if index < 0 else program.instructions[index].op


def _weight(program: FusedProgram, value: int) -> int:
    if program.kind_of(value) is not Kind.FULL:
        return 0
    op = op_of(program, value)
    return 0 if not op else _WEIGHTS.get(op, 1)


class _Scheduler:
    """The analysis: levels by forward recursion, then phases from the last to the first."""

    def __init__(self, program: FusedProgram, keep_above: int) -> None:
        self.program = program
        self.keep_above = keep_above
        self.live = _live(program)
        live = sorted(self.live)
        self.of_kind = {kind: [v for v in live if program.kind_of(v) is kind] for kind in Kind}
        ends = (*ROW_REDUCTIONS, *COLUMN_REDUCTIONS)
        self.reductions = [v for v in live if op_of(program, v) in ends]
        self.late = _late(program, self.live)
        self.levels = _levels(program)
        # Reversed, so that a value that is stored twice is read back from its first output.
        self.stored = {v: out for out, v in reversed(tuple(enumerate(program.outputs)))}
        self.num_phases = 1 + max([self.levels[v] for v in self._roots()], default=0)
        self.keeps: list[set[int]] = [set() for _ in range(self.num_phases)]

    def run(self) -> Schedule:
        # From the last: a later phase decides which values earlier ones must keep.
        phases = [self._phase(index) for index in reversed(range(self.num_phases))]
        phases.reverse()
        return Schedule(
            tuple([v for v in self.of_kind[Kind.SCALAR] if op_of(self.program, v)]),
            tuple([self._rows(level) for level in range(self.num_phases + 1)]),
            tuple(phases),
            tuple([v for v in self.of_kind[Kind.COLUMN] if v in self.late]),
            tuple(sorted({v for values in self.keeps for v in values})),
            tuple([v for v in self.of_kind[Kind.COLUMN] if self._is_column_sum(v)]),
        )

    def _rows(self, level: int) -> tuple[int, ...]:
        reductions = ROW_REDUCTIONS
        return tuple(
            [
                v
                for v in self.of_kind[Kind.ROW]
                if self.levels[v] == level and op_of(self.program, v) not in reductions
            ]
        )

    def _is_column_sum(self, value: int) -> bool:
        return op_of(self.program, value) in COLUMN_REDUCTIONS

    def _roots(self) -> list[int]:
        """Return every value that some phase must have: reduced, or stored."""
        reduced = [operands_of(self.program, v)[0] for v in self.reductions]
        outputs = [v for v in self.program.outputs if self.program.kind_of(v) is Kind.FULL]
        return [*reduced, *outputs]

    def _phase(self, index: int) -> LoopPhase:
        program, levels = self.program, self.levels
        ends = [v for v in self.reductions if levels[operands_of(program, v)[0]] == index]
        stores = [
            out
            for out, v in enumerate(program.outputs)
            if program.kind_of(v) is Kind.FULL and levels[v] == index
        ]
        walk = _PhaseWalk(self, index)
        roots = [operands_of(program, v)[0] for v in ends]
        for value in (*roots, *[program.outputs[out] for out in stores], *self.keeps[index]):
            walk.visit(value)
        return LoopPhase(
            loads=tuple(sorted(walk.loads)),
            read_back=tuple(sorted(walk.read_back.items())),
            kept=tuple(sorted(walk.kept)),
            body=tuple(sorted(walk.body)),
            keeps=tuple(sorted(self.keeps[index])),
            stores=tuple(stores),
            reductions=tuple([v for v in ends if not self._is_column_sum(v)]),
            column_sums=tuple([v for v in ends if self._is_column_sum(v)]),
        )


class _PhaseWalk:
    """What one phase needs for its roots."""

    def __init__(self, scheduler: _Scheduler, index: int) -> None:
        self.scheduler = scheduler
        self.program = scheduler.program
        self.index = index
        self.loads: set[int] = set()
        self.read_back: dict[int, int] = {}
        self.kept: set[int] = set()
        self.body: set[int] = set()

    def visit(self, value: int) -> None:
        kind = self.program.kind_of(value)
        if kind is Kind.SCALAR or kind is Kind.ROW:
            return
        if value < len(self.program.inputs):
            self.loads.add(value)
            return
        if kind is Kind.FULL and self.scheduler.levels[value] < self.index:
            # It lies in an output already: reading it is cheaper than any computation.
            if value in self.scheduler.stored:
                self.read_back[value] = self.scheduler.stored[value]
                return
            if self._weight_again(value) > self.scheduler.keep_above:
                self.kept.add(value)
                self.scheduler.keeps[self.scheduler.levels[value]].add(value)
                return
        if value not in self.body:
            self.body.add(value)
            for operand in operands_of(self.program, value):
                self.visit(operand)

    def _weight_again(self, value: int) -> int:
        """Return the weight of what must be computed to have an earlier value again."""
        seen: set[int] = set()
        pending = [value]
        while pending:
            v = pending.pop()
            if v in seen or self.program.kind_of(v) is not Kind.FULL:
                continue
            if v != value and v in self.scheduler.stored:
                continue
            seen.add(v)
            pending.extend(operands_of(self.program, v))
        return sum([_weight(self.program, v) for v in seen])


def _live(program: FusedProgram) -> frozenset[int]:
    """Return the values that some output needs."""
    live: set[int] = set()
    pending = list(program.outputs)
    while pending:
        value = pending.pop()
        if value not in live:
            live.add(value)
            pending.extend(operands_of(program, value))
    return frozenset(live)


def _late(program: FusedProgram, live: frozenset[int]) -> frozenset[int]:
    """Return COLUMN values computed at the end.

    They are outputs, what follows from column sums, and what those need of instructions.
    """
    columns = [
        v
        for v in range(len(program.inputs), program.num_values)
        if v in live
        and program.kind_of(v) is Kind.COLUMN
        and op_of(program, v) not in COLUMN_REDUCTIONS
    ]
    late = {v for v in columns if v in program.outputs}
    sums = {v for v in live if op_of(program, v) in COLUMN_REDUCTIONS}
    for v in columns:
        if any([operand in late or operand in sums for operand in operands_of(program, v)]):
            late.add(v)
    # Backwards: what late values need of instructions comes before them.
    for v in reversed(columns):
        if any([v in operands_of(program, user) for user in sorted(late)]):
            late.add(v)
    return frozenset(late)


def _levels(program: FusedProgram) -> tuple[int, ...]:
    """Return how many phases must be complete before each value can be had."""
    levels = [0] * len(program.inputs)
    for instruction in program.instructions:
        level = max([levels[operand] for operand in instruction.operands], default=0)
        # A reduction of a row is known only when its phase has ended: one level more.
        levels.append(level + (instruction.op in ROW_REDUCTIONS))
    return tuple(levels)


# Pieces for threads follow from the extents and the program of a space alone: they decide the order
# in which sums are added up, so they must not depend on the number of threads. There are more
# pieces than threads, because a thread of a shared machine may come late, and none is shorter than
# what a call of the pool costs many times over.

PIECE_NS = 20_000
MAX_PIECES = 32
MAX_SUM_PIECES = 16
"""With column sums every piece has a partial row of its own."""

MAX_WIDE_ROWS = 8
MIN_WIDE_COLUMNS = 8_192
"""Spaces of few and long rows are cut along the columns."""

_NS_PER_BYTE = 0.03
_NS_PER_WEIGHT = 0.04
_COLUMN_STEP = 64
"""Pieces of a row begin at multiples of this: no cache line of an output has two writers."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The pieces of a space; `num_columns` is 0 where rows are cut, and then `columns` is all."""

    rows: int
    num_rows: int
    columns: int
    num_columns: int

    @property
    def num_partials(self) -> int:
        """Partial rows of a column sum; at least one."""
        return 1 if self.num_columns else max(1, self.num_rows)


def item_bytes(program: FusedProgram) -> int:
    """Return the bytes that an element of the space reads and writes."""
    values = (*range(len(program.inputs)), *program.outputs)
    return sum([program.dtype_of(v).itemsize for v in values if program.kind_of(v) is Kind.FULL])


def cut(program: FusedProgram, rows: int, columns: int, has_column_sums: bool) -> Chunks:
    """Return the pieces of a space."""
    item_ns = item_bytes(program) * _NS_PER_BYTE + weight(program) * _NS_PER_WEIGHT
    total_ns = rows * columns * item_ns
    if rows <= MAX_WIDE_ROWS and columns >= MIN_WIDE_COLUMNS and total_ns >= 2 * PIECE_NS:
        pieces = _count(total_ns / rows, MAX_PIECES)
        step = -(-columns // (pieces * _COLUMN_STEP)) * _COLUMN_STEP
        return Chunks(max(rows, 1), 1, step, -(-columns // step))
    pieces = _count(total_ns, MAX_SUM_PIECES if has_column_sums else MAX_PIECES)
    step = max(1, -(-rows // pieces))
    return Chunks(step, -(-rows // step), columns, 0)


def _count(total_ns: float, most: int) -> int:
    return max(1, min(most, int(total_ns / PIECE_NS)))


def held_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the type in which values are computed: short floats in float32."""
    return np.dtype(np.float32) if dtype in HALVES else numpy_dtype(dtype)
