"""How numpy walks the space of a fused program: blocks that stay in cache, values in registers.

`Walk` has the extents of a block and where each value is held. `step_calls` and `reduction_calls`
turn one instruction into calls of numpy that write into given arrays.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from actors.kernels.common.host_memory import address
from actors.kernels.common.kernel import Attrs, Operands, Piece, index_pieces, integer
from actors.kernels.common.strides import block_elements
from actors.kernels.program.phases import (
    LoopPhase,
    Schedule,
    held_dtype,
    op_of,
    operands_of,
    schedule,
)
from actors.kernels.program.spaces import (
    LoopSpace,
    ScheduledProgram,
    is_plain,
    scheduled_program,
    space_of,
)
from actors.kernels.reference.reduce import WIDE
from actors.machine.protocol import Array, Arrays, Launch
from compiler.contract.program import UFUNCS, FusedProgram, Instruction, Kind, erf, erfc
from compiler.contract.types import DType, numpy_dtype

# Registers hold the FULL values of a block in as few arrays as will do.
#
# A *register* is scratch of one block. A value has one from the instruction that makes it to the
# last that reads it, and may take over that of an operand which ends there: numpy reads an element
# before it writes the one in the same place. What is an output is made where it will lie. So the
# blocks of a long program stay in the second-level cache (linear scan: Poletto & Sarkar 1999).

Register = tuple[np.dtype[Any], int]


def takes_several_calls(program: FusedProgram, value: int) -> bool:
    """Whether a value is written before its operands are read for the last time.

    A choice that is the same for all elements is a copy.
    """
    if op_of(program, value) != "select":
        return False
    return program.kind_of(operands_of(program, value)[0]) is not Kind.SCALAR


class BlockBuffers:
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
                # A value that is stored twice is made in its first output and copied to the others.
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
        output = self._program.outputs[position]
        is_early = self.direct.get(output) == position
        write = self._made[output] if is_early else self._stored[position]
        last = self._last_read[value]
        # numpy reads an element before it writes the one in its place, but only within one call.
        return last < write or (last == write and not takes_several_calls(self._program, output))

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
        register_of: dict[int, Register] = {}
        ending: dict[int, list[int]] = {}
        for operand, last in reads.items():
            ending.setdefault(last, []).append(operand)

        def release(now: int) -> None:
            for dead in ending.get(now, ()):
                if dead in register_of:
                    dtype, number = register_of[dead]
                    free[dtype].append(number)

        for now, value in order:
            # Such a value is written while operands are still read, so it may not take their
            # registers.
            is_late = value is not None and takes_several_calls(self._program, value)
            if not is_late:
                release(now)
            if value is not None and self._needs_one(value, elsewhere):
                register_of[value] = self._taken(value, free)
            if is_late:
                release(now)
        return register_of

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


_REDUCTIONS: dict[str, np.ufunc] = {
    "row_sum": np.add,
    "row_max": np.maximum,
    "row_min": np.minimum,
}
BYTE = np.dtype(np.uint8)
_OF_OURS = {"erf": erf, "erfc": erfc}
_ROUNDINGS = ("floor", "ceil", "round")
_BY_SERIES = frozenset(
    ("exp", "expm1", "log", "log1p", "log2", "log10", "tanh", "sin", "cos", "pow", "atan2")
)
"""What numpy computes by one series for vectors and by another for numbers, with other bits."""


def step_calls(
    instruction: Instruction, operands: Arrays, out: Array, mask: Array | None = None
) -> list[Launch]:
    """Return the calls of an elementwise instruction, `cast` or `constant`.

    `mask` is scratch, for `select`: bytes of as many elements as those of the result.
    """
    op = instruction.op
    if op == "constant":
        return [partial(np.copyto, out, np.array(instruction.constants[0], out.dtype))]
    if op == "cast" or (op in _ROUNDINGS and instruction.dtype.is_integer):
        return [partial(np.copyto, out, operands[0], casting="unsafe")]
    if op == "select":
        return _select(operands, out, mask)
    if op == "rsqrt":
        return [partial(np.sqrt, operands[0], out=out), partial(np.reciprocal, out, out=out)]
    if op in _OF_OURS:
        return [partial(_copy_made, _OF_OURS[op], operands[0], out)]
    if op in _BY_SERIES and out.dtype.kind == "f" and any([_touch(x, out) for x in operands]):
        return _in_halves(UFUNCS[op], operands, out)
    return [partial(UFUNCS[op], *operands, out=out)]


def _touch(x: Array, out: Array) -> bool:
    """Whether one begins where the other ends: numpy 1.26 takes that for an overlap.

    Then it goes from number to number: bits would depend on where a plan puts things.
    """
    return address(x) + x.nbytes == address(out) or address(out) + out.nbytes == address(x)


def _in_halves(function: Callable[..., Array], operands: Arrays, out: Array) -> list[Launch]:
    """Return calls for parts of arrays that touch, which do not."""
    axis = 0 if out.shape[0] > 1 else out.ndim - 1
    half = out.shape[axis] // 2

    def cut(x: Array, part: slice) -> Array:
        is_repeated = x.ndim <= axis or x.shape[axis] == 1
        return x if is_repeated else x[(slice(None),) * axis + (part,)]

    return [
        partial(function, *[cut(x, part) for x in operands], out=cut(out, part))
        for part in (slice(half), slice(half, None))
    ]


def _select(operands: Arrays, out: Array, mask: Array | None) -> list[Launch]:
    """Choose by the bits, all of them or none: numpy's masked copy branches at each element.

    Measured on 32,768 float32: masked copy 157 us, four passes over bits 16 us.
    """
    condition, first, second = operands
    if condition.size == 1:  # nothing to choose for each element
        return [partial(_choose, condition, first, second, out)]
    is_short = out.dtype not in (first.dtype, second.dtype)  # in memory, and float32 here
    is_mixed = first.dtype != second.dtype
    if mask is None or mask.size < out.nbytes or is_short or is_mixed:
        return [partial(np.copyto, out, second), partial(np.copyto, out, first, where=condition)]
    int_type = np.dtype(f"int{8 * out.itemsize}")
    bitmask = mask.reshape(-1)[: out.size * int_type.itemsize].view(int_type).reshape(out.shape)
    bits = out.view(int_type)
    return [
        partial(np.copyto, bitmask, condition, casting="unsafe"),
        # 1 becomes -1, all bits set; then b ^ ((a ^ b) & mask) is a where chosen, else b.
        partial(np.negative, bitmask, out=bitmask),
        partial(np.bitwise_xor, first.view(int_type), second.view(int_type), out=bits),
        partial(np.bitwise_and, bits, bitmask, out=bits),
        partial(np.bitwise_xor, bits, second.view(int_type), out=bits),
    ]


def _choose(condition: Array, first: Array, second: Array, out: Array) -> None:
    np.copyto(out, first if condition.item() else second)


def reduction_start(op: str, out: Array) -> Launch:
    """Return the call that begins a row reduction of several blocks."""
    return partial(out.fill, _start(op, out.dtype))


def reduction_calls(op: str, x: Array, out: Array, part: Array | None) -> list[Launch]:
    """Return the calls that take a block into a row reduction; the only block without `part`."""
    function = _REDUCTIONS[op]
    if part is None:
        return [partial(function.reduce, x, axis=1, out=out[:, 0])]
    return [
        partial(function.reduce, x, axis=1, out=part[:, 0]),
        partial(function, out, part, out=out),
    ]


def _start(op: str, dtype: np.dtype[Any]) -> float:
    if op == "row_sum":
        return 0
    is_most = op == "row_max"
    if dtype.kind == "f":
        return -math.inf if is_most else math.inf
    if dtype.kind == "b":
        return not is_most
    # Integers have no infinity: the reduction begins at the other end of their range.
    limits = np.iinfo(dtype)
    return int(limits.min if is_most else limits.max)


def _copy_made(function: Callable[[Array], Array], x: Array, out: Array) -> None:
    """Compute a function that numpy has not; what it needs in between is small."""
    np.copyto(out, function(x), casting="unsafe")


_BLOCKS = 8
"""More registers than these leave the second-level cache: then blocks are smaller."""


def walk_of(attrs: Attrs, layouts: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Walk | None:
    """Return how the space of a program with such operands is walked; None where it cannot be."""
    scheduled = scheduled_program(attrs)
    rows, columns = integer(attrs, "rows"), integer(attrs, "columns")
    space = space_of(scheduled.program, scheduled.schedule, rows, columns, tuple(layouts))
    return None if space is None else _walk(scheduled, space, rows)


@functools.lru_cache(maxsize=1024)
def _walk(made: ScheduledProgram, space: LoopSpace, rows: int) -> Walk:
    return Walk(made, space, rows)


@functools.lru_cache(maxsize=1024)
def _plan_of(made: ScheduledProgram, *, is_one_block: bool) -> tuple[Schedule, BlockBuffers]:
    # In one block values live on in registers, so nothing has to be computed again.
    plan = schedule(made.program, keep_above=0) if is_one_block else made.schedule
    return plan, BlockBuffers(made.program, plan, is_one_block=is_one_block)


class Walk:
    """How a space is walked: the extents of a block, and where every value is held."""

    def __init__(self, made: ScheduledProgram, space: LoopSpace, num_rows: int) -> None:
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
        count = self.registers.counts.total()
        return block_elements(4) if count <= _BLOCKS else block_elements(4) * _BLOCKS // count

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
                sum_dtype = held_dtype(program.dtype_of(v))
                added_in = sum_dtype if program.dtype_of(v).is_integer else WIDE
                self._add("value", v, 1, self.space.columns)
                self.places["total", v] = ((1, self.space.columns), added_in)
                self.places["part", v] = ((1, self.columns), added_in)
                self.places["trees", v] = ((self.rows // 8 * 4, self.columns), sum_dtype)
        sizes = [
            held_dtype(program.dtype_of(v)).itemsize
            for v in range(program.num_values)
            if takes_several_calls(program, v)
        ]
        if sizes:
            self.places["mask", 0] = ((1, self.rows * self.columns * max(sizes)), BYTE)
        for dtype, count in self.registers.counts.items():
            for number in range(count):
                self.places[f"register {dtype}", number] = ((self.rows, self.columns), dtype)
        for v in plan.late:
            self._add("late", v, 1, self.space.columns)

    def _add(self, what: str, value: int, rows: int, columns: int) -> None:
        self.places[what, value] = ((rows, columns), held_dtype(self.program.dtype_of(value)))

    def _own_rows(self, value: int) -> int:
        """Return how many indices are checked at once: all that are given, or a block's."""
        index = operands_of(self.program, value)[0]
        if index >= len(self.program.inputs):
            return self.rows
        entry = self.program.inputs[index]
        return entry.count or -(-self.space.rows // entry.every)
