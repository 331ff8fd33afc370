"""The kernel "numpy.fused": a program followed instruction by instruction.

It takes the calls that generated code does not: where there is no C compiler, or where the compiler
refused a text. The walk is the generated code's (`program.phases`), over blocks that stay in cache.
Every value of a block has a register (`walk.BlockBuffers`), or lies in the output that it is. A row
that is no longer than a block is computed at once, each value a single time.

bfloat16 is computed in float32, and so are the operands that a program calls bfloat16: casting them
is left to whoever calls (`bfloat16.upcast`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol, cast

import numpy as np

from actors.kernels.common import cost, kernel
from actors.kernels.common.kernel import (
    Attrs,
    BytePass,
    HostPlan,
    Kernel,
    KernelPlan,
    Operand,
    Operands,
    Work,
    Workspace,
    checked,
    in_sequence,
    integer,
    over_blocks,
)
from actors.kernels.program.phases import op_of, operands_of
from actors.kernels.program.spaces import scheduled_program, split_skip
from actors.kernels.reference.reduce import column_sums
from actors.kernels.reference.walk import (
    Walk,
    reduction_calls,
    reduction_start,
    step_calls,
    takes_several_calls,
    walk_of,
)
from actors.machine.protocol import Array, Arrays, Launch
from compiler.contract.program import COLUMN_REDUCTIONS, ROW_REDUCTIONS, Kind
from compiler.contract.types import DType

# Dropout whose mask is a pure function of (seed, step, key, element index).
#
# The mapping, so that another device can reproduce it. Philox4x64-10 (Salmon et al. 2011, "Parallel
# random numbers: as easy as 1, 2, 3") with
#
#     key     = (seed mod 2^64, key attribute mod 2^64)
#     counter = (1 + e div 8, 0, step mod 2^64, 0)        for element e in row-major order
#
# gives four 64-bit words; element e takes word (e mod 8) div 2, its low half when e is even, its
# high half when odd. With r the top 24 bits of that half, the element is kept when r >= ceil(p *
# 2^24). A kept element is multiplied by 1 / (1 - p), rounded to the tensor's type. Elements are
# numbered over the whole tensor, so neither blocks nor the dtype change the mask. It is numpy's own
# stream (`Generator.random` in float32 from `Philox`), which counts up before it draws: hence the
# 1.

_WORD = (1 << 64) - 1


class Rewind(Protocol):
    """Sets a generator to an element of a step, a multiple of 8."""

    def __call__(self, element: int = 0) -> None:
        """Set it."""


def rewound_generator(seed: Array, step: Array, key: int) -> tuple[Rewind, np.random.Generator]:
    """Return a generator and what sets it to an element of a step."""
    bits = np.random.Philox(key=0)
    state = bits.state
    counter, keys = state["state"]["counter"], state["state"]["key"]
    counter[:] = 0
    keys[1] = key & _WORD

    def rewind(element: int = 0) -> None:
        # A counter gives four words of 64 bits, which are eight numbers.
        counter[0] = element // 8
        keys[0] = int(seed) & _WORD
        counter[2] = int(step) & _WORD
        bits.state = state

    return rewind, np.random.Generator(bits)


def draw_rows(
    rewind: Rewind,
    generator: np.random.Generator,
    out: Array,
    firsts: Array,
    step: int,
    first: int,
    line: Array,
) -> None:
    """Draw the numbers of a block of rows, each of which begins anywhere in a tensor.

    Args:
        rewind: What sets the generator.
        generator: What draws.
        out: The block.
        firsts: The element that each row begins at, or the first of them alone.
        step: The elements from row to row that are added to that.
        first: What is added throughout.
        line: Scratch of a row and 8 elements.
    """
    count = out.shape[1]
    for row, target in enumerate(out):
        element = int(firsts[row % len(firsts)]) + row * step + first
        num_skipped = element % 8
        rewind(element - num_skipped)
        numbers: Any = line[: num_skipped + count]
        generator.random(dtype=np.float32, out=numbers)
        target[...] = numbers[num_skipped:]


_LOOPS_PER_RESULT = 4
"""Inner loops whose time numpy takes to begin a row of a reduction."""

_CALLS = {"rsqrt": 2}
_CHOICE = 5
"""Calls of a choice for each element."""
_SORTS = {
    op: sort
    for sort, ops in (
        (BytePass.DIVIDE, ("div", "reciprocal", "mod", "floordiv")),
        (BytePass.ROOT, ("sqrt", "rsqrt")),
        (BytePass.EXP, ("exp", "log", "log2", "log10", "log1p", "expm1")),
        (BytePass.TANH, ("tanh",)),
        (BytePass.POWER, ("pow", "sin", "cos", "erf", "erfc", "atan2")),
        (BytePass.RANDOM, ("philox",)),
    )
    for op in ops
}
"""Instructions that are slower than an addition."""


def _plan_program(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan a call of "numpy.fused", as "c.fused" has it, instruction by instruction.

    It takes every program on evenly spaced rows of dense columns.
    """
    inputs = inputs[: len(scheduled_program(attrs).program.inputs)]
    walk = walk_of(attrs, [(x.shape, _steps(x)) for x in (*inputs, *outputs)])
    has_bits = DType.BFLOAT16 in [x.type.dtype for x in (*inputs, *outputs)]
    # numpy holds bfloat16 as uint16 and would compute on the bits.
    if walk is None or has_bits:
        return None
    program, rows, columns = walk.program, integer(attrs, "rows"), integer(attrs, "columns")
    is_copied = any([v < len(program.inputs) for v in program.outputs])
    needs = cost.needs(
        inputs,
        outputs,
        _work(walk, rows, columns),
        kernel.size_bytes(walk.pieces()),
        () if is_copied else walk.in_place_pairs(inputs, outputs),
    )
    return KernelPlan(needs, functools.partial(_bind, walk))


def _bind(walk: Walk, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
    """Return the steps of every block in order."""
    inputs, skip = split_skip(walk.program, inputs)
    scratch = kernel.carve(workspace, walk.pieces())
    launch = in_sequence(_Binding(walk, inputs, outputs, scratch).calls())
    return launch if skip is None else functools.partial(_unless, skip, launch)


def _unless(skip: Array, launch: Launch) -> None:
    if not skip.item():
        launch()


def _steps(operand: Operand) -> tuple[int, ...]:
    return tuple([step // operand.dtype.itemsize for step in operand.strides_bytes])


def _work(walk: Walk, rows: int, columns: int) -> Work:
    """Return the passes over the space, and the loops that rows and columns in it cost."""
    program, passes, small, loops = walk.program, Counter[BytePass](), 0, 0
    for value, instruction in enumerate(program.instructions, len(program.inputs)):
        kinds = [program.kind_of(v) for v in instruction.operands]
        if instruction.op in ROW_REDUCTIONS:
            passes[BytePass.REDUCE] += 1
            loops += _LOOPS_PER_RESULT * rows
        elif instruction.op in COLUMN_REDUCTIONS:
            passes[BytePass.PLAIN] += 1
        elif program.kind_of(value) is not Kind.FULL:
            small += 1
        else:
            several = len(instruction.operands) - kinds.count(Kind.SCALAR) > 1
            plain = BytePass.PLAIN if several else BytePass.SIMPLE
            is_choice = takes_several_calls(program, value)
            calls = _CHOICE if is_choice else _CALLS.get(instruction.op, 1)
            passes[_SORTS.get(instruction.op, plain)] += calls
            loops += rows if Kind.ROW in kinds or Kind.COLUMN in kinds else 0
    copied = [p for p, v in enumerate(program.outputs) if walk.registers.direct.get(v) != p]
    passes[BytePass.SIMPLE] += len(
        [p for p in copied if program.kind_of(program.outputs[p]) is Kind.FULL]
    )
    swept = {sort: float(count) for sort, count in passes.items() if count}
    return over_blocks(rows * columns, 4, swept, small_calls=small, loops=loops)


class _Binding:
    """The calls of a walk on given arrays. Every value is an array of two axes."""

    def __init__(self, walk: Walk, inputs: Arrays, outputs: Arrays, held: Arrays) -> None:
        self.walk, self.program, self.plan = walk, walk.program, walk.plan
        self.held = dict(zip(walk.places, held, strict=True))
        kinds = [self.program.kind_of(v) for v in (*range(len(inputs)), *self.program.outputs)]
        views = [
            self._in_space(x, kind, step)
            for x, kind, step in zip((*inputs, *outputs), kinds, walk.space.strides, strict=True)
        ]
        self.inputs, self.outputs = views[: len(inputs)], views[len(inputs) :]
        self.values: dict[int, Array] = {}
        self.rewinds: dict[int, Rewind] = {}
        self.generators: dict[int, np.random.Generator] = {}
        self.launches: list[Launch] = []

    def calls(self) -> list[Launch]:
        space = self.walk.space
        self._start()
        for r0 in range(0, space.rows, self.walk.rows):
            r1 = min(r0 + self.walk.rows, space.rows)
            self._row_stage(0, r0, r1)
            for index in range(len(self.plan.phases)):
                self._phase(index, r0, r1)
                self._row_stage(index + 1, r0, r1)
            for position in self._outputs(Kind.ROW):
                self._store(position, self.outputs[position][r0:r1])
        self._finish()
        return self.launches

    def _in_space(self, array: Array, kind: Kind, step: int) -> Array:
        width = self.walk.space.columns
        if kind is Kind.SCALAR or array.size == 0:
            return array.reshape((1, 1) if array.size else (0, width))
        if kind is Kind.COLUMN:
            return array.reshape(1, -1)
        width = width if kind is Kind.FULL else 1
        item = array.itemsize
        shape, strides = (array.size // width, width), (step * item, item)
        return np.lib.stride_tricks.as_strided(array, shape, strides)

    def _outputs(self, kind: Kind) -> list[int]:
        outputs = enumerate(self.program.outputs)
        return [position for position, v in outputs if self.program.kind_of(v) is kind]

    def _call(self, function: Callable[..., object], *operands: object, **options: object) -> None:
        self.launches.append(cast("Launch", functools.partial(function, *operands, **options)))

    def _store(self, position: int, out: Array) -> None:
        value = self.values[self.program.outputs[position]]
        self._call(np.copyto, out, value, casting="unsafe")

    def _start(self) -> None:
        """Compute what is the same for all rows, and set sums and generators back."""
        program = self.program
        for v, entry in enumerate(program.inputs):
            if entry.kind is Kind.SCALAR:
                self.values[v] = self.inputs[v]
        for v in self.plan.scalars:
            self._compute(v, self.held["value", v])
        for v in self.plan.column_sums:
            self._call(self.held["total", v].fill, 0)
        for phase in self.plan.phases:
            for v in [v for v in phase.body if op_of(program, v) == "philox"]:
                seed, step = [self.values[x].reshape(()) for x in operands_of(program, v)[:2]]
                key = int(program.instructions[v - len(program.inputs)].constants[0])
                self.rewinds[v], self.generators[v] = rewound_generator(seed, step, key)
                # Each run of the launch draws the numbers of its step from element 0 on.
                self.launches.append(self.rewinds[v])
        for v in [v for v in self.plan.rows[0] if op_of(program, v) == "check_index"]:
            operand = operands_of(program, v)[0]
            if operand < len(program.inputs):
                self._check(v, self.inputs[operand].reshape(-1))

    def _check(self, value: int, labels: Array, first: int = 0) -> None:
        """Add the call that refuses what is out of range; `first` is the row of labels[0]."""
        extent = int(self.program.instructions[value - len(self.program.inputs)].constants[0])
        dense, extremes = self.held["indices", value][0], self.held["extremes", value][0]
        dense = dense[: labels.size]
        self.launches.append(checked("label", labels, extent, dense, extremes, first=first))

    def _compute(self, value: int, out: Array) -> None:
        """Add the calls of an elementwise instruction; its operands are in `values`."""
        instruction = self.program.instructions[value - len(self.program.inputs)]
        operands = tuple([self.values[v] for v in instruction.operands])
        self.launches += step_calls(instruction, operands, out, self.held.get(("mask", 0)))
        self.values[value] = out

    def _row_stage(self, level: int, r0: int, r1: int) -> None:
        for v in self.plan.rows[level]:
            if v < len(self.program.inputs):
                self._load(v, r0, r1, slice(None))
                continue
            instruction = self.program.instructions[v - len(self.program.inputs)]
            out = self.held["value", v][: r1 - r0]
            if instruction.op == "row_index":
                every, count = [int(n) for n in instruction.constants]
                rows = np.arange(r0, r1, dtype=np.int32)[:, None] // every
                self.values[v] = rows % count if count else rows
            elif instruction.op == "check_index":
                (operand,) = instruction.operands
                self.values[v] = self.values[operand]
                if operand >= len(self.program.inputs):
                    self._check(v, self.values[v].reshape(-1), r0)
            else:
                self._compute(v, out)

    def _load(self, value: int, r0: int, r1: int, columns: slice) -> None:
        """Make the rows of an input that belong to rows r0 .. r1 a value."""
        source = self.inputs[value]
        if self.program.kind_of(value) is Kind.COLUMN:
            self.values[value] = source[:, columns]
            return
        if not self.walk.is_gathered(value):
            self.values[value] = source[r0:r1, columns]
            return
        entry = self.program.inputs[value]
        rows = np.arange(r0, r1) // entry.every
        rows = rows % entry.count if entry.count else rows
        width = source[:1, columns].shape[1]
        out = kernel.window(self.held["value", value].reshape(-1), (r1 - r0, width))
        # Rows that follow one another, or are one and the same, are one copy.
        ends = np.flatnonzero(np.diff(rows) != (entry.every == 1)) + 1
        for begin, end in pairwise([0, *ends.tolist(), len(rows)]):
            self._call(np.copyto, out[begin:end], source[rows[begin] : rows[end - 1] + 1, columns])
        self.values[value] = out

    def _phase(self, index: int, r0: int, r1: int) -> None:
        phase, program = self.plan.phases[index], self.program
        for v in phase.reductions:
            self.values[v] = self.held["value", v][: r1 - r0]
            if not self.walk.is_one_block:
                self.launches.append(reduction_start(op_of(program, v), self.values[v]))
        for c0 in range(0, self.walk.space.columns, max(1, self.walk.columns)):
            c1 = min(c0 + self.walk.columns, self.walk.space.columns)
            self._block(index, (r0, r1), (c0, c1))

    def _block(self, index: int, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        """Add the calls of a phase on one block."""
        phase, program = self.plan.phases[index], self.program
        (r0, r1), (c0, c1) = rows, columns
        shape, cut = (r1 - r0, c1 - c0), slice(c0, c1)
        for v in phase.loads:
            self._load(v, r0, r1, cut)
        if not self.walk.is_one_block:
            for v, position in phase.read_back:
                self.values[v] = self.outputs[position][r0:r1, cut]
            for v in phase.kept:
                self.values[v] = self._kept(v, r1 - r0)[:, cut]
        for v in phase.body:
            self._in_block(v, self._home(index, v, (r0, r1), cut), r0, c0)
        for v in phase.reductions:
            x = np.broadcast_to(self.values[operands_of(program, v)[0]], shape)
            part = None if self.walk.is_one_block else self.held["part", v][: shape[0]]
            self.launches += reduction_calls(op_of(program, v), x, self.values[v], part)
        for v in phase.column_sums:
            self._add_columns(
                v, np.broadcast_to(self.values[operands_of(program, v)[0]], shape), cut
            )
        for position in phase.stores:
            if self.walk.registers.direct.get(program.outputs[position]) != position:
                self._store(position, self.outputs[position][r0:r1, cut])

    def _home(self, phase: int, value: int, rows: tuple[int, int], columns: slice) -> Array:
        """Return where a phase makes a value of a block."""
        (r0, r1), walk = rows, self.walk
        shape = (r1 - r0, columns.stop - columns.start)
        register = walk.registers.of(phase, value)
        if register is not None:
            dtype, number = register
            return kernel.window(self.held[f"register {dtype}", number].reshape(-1), shape)
        if value in walk.registers.direct:
            return self.outputs[walk.registers.direct[value]][r0:r1, columns]
        if ("kept", value) in self.held:
            return self._kept(value, shape[0])[:, columns]
        return kernel.window(self.held["value", value].reshape(-1), (1, shape[1]))

    def _add_columns(self, value: int, x: Array, columns: slice) -> None:
        names = ("total", "part", "trees")
        total, part, trees = [self.held[name, value].reshape(-1) for name in names]
        self.launches += column_sums(x, total[columns], part[: x.shape[1]], trees)

    def _kept(self, value: int, num_rows: int) -> Array:
        return self.held["kept", value][:num_rows]

    def _in_block(self, value: int, out: Array, r0: int, c0: int) -> None:
        instruction = self.program.instructions[value - len(self.program.inputs)]
        if instruction.op == "column_index":
            self.values[value] = np.arange(c0, c0 + out.shape[1], dtype=np.int32)[None]
        elif instruction.op == "philox":
            uniform = kernel.window(self.held["uniform", value].reshape(-1), out.shape)
            # Exact in float32: a multiple of 2^-24, as the drawn numbers are.
            p = np.array(np.ceil(float(instruction.constants[1]) * 2**24) * 2.0**-24, np.float32)
            self._draw(value, uniform, r0, c0)
            if instruction.dtype is DType.BOOL:
                self._call(np.greater_equal, uniform, p, out=out)
            else:  # the bits again
                self._call(np.multiply, uniform, np.float32(2**24), out=uniform)
                self._call(np.copyto, out, uniform, casting="unsafe")
            self.values[value] = out
        else:
            self._compute(value, out)

    def _draw(self, value: int, uniform: Array, r0: int, c0: int) -> None:
        """Add the call that draws for a block, whose rows and columns begin at r0 and c0."""
        places = operands_of(self.program, value)[2:]
        generator = self.generators[value]
        if not places:
            # Blocks follow row-major order, so drawing on continues the numbering of elements.
            self._call(generator.random, out=uniform, dtype=np.float32)
            return
        is_by_row, columns = self.program.kind_of(places[0]) is Kind.ROW, self.walk.space.columns
        step, first = (0, c0) if is_by_row else (columns, r0 * columns + c0)
        line = self.held["line", value].reshape(-1)
        firsts = self.values[places[0]].reshape(-1)
        rewind = self.rewinds[value]
        self._call(draw_rows, rewind, generator, uniform, firsts, step, first, line)

    def _finish(self) -> None:
        """Add the calls behind all rows: COLUMN and SCALAR outputs."""
        for v, entry in enumerate(self.program.inputs):
            if entry.kind is Kind.COLUMN:
                self.values[v] = self.inputs[v]
        for v in self.plan.column_sums:
            self.values[v] = self.held["value", v]
            # The one rounding of a sum: from double to its own type.
            self._call(np.copyto, self.values[v], self.held["total", v], casting="unsafe")
        for v in self.plan.late:
            if op_of(self.program, v) == "column_index":
                self.values[v] = np.arange(self.walk.space.columns, dtype=np.int32)[None]
            else:
                self._compute(v, self.held["late", v])
        for kind in (Kind.COLUMN, Kind.SCALAR):
            for position in self._outputs(kind):
                self._store(position, self.outputs[position])


NUMPY_FUSED_KERNELS = (Kernel("numpy.fused", "fused", _plan_program),)
