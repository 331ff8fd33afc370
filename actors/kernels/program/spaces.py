"""Where the operands of a program, and the arrays of a region, lie in the space that is walked.

The operands of a program have a step from row to row (`LoopSpace`). A region has the operands of
its steps and the held values of a chunk of rows (`RegionArrays`). The program of a launch is
checked and scheduled once (`scheduled_program`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from actors.kernels.common.gemm import MatrixView
from actors.kernels.common.kernel import (
    ALIGNMENT_BYTES,
    CALLS_PER_PRODUCT,
    Attrs,
    MatrixProduct,
    Operand,
    Operands,
    Piece,
    Work,
    fused_program,
    item_weight,
)
from actors.kernels.program.phases import Chunks, Schedule, cut, last_reads, schedule, store_phases
from actors.machine.protocol import Array, Arrays
from compiler.contract.program import ROW_REDUCTIONS, FusedProgram, Kind, check_program
from compiler.contract.region import PRODUCTS, TiledLoop, TileStep, TileStepKind, check_region
from compiler.contract.spaces import row_stride
from compiler.contract.types import contiguous_strides, numpy_dtype

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Extents and strides in elements of an operand."""


@dataclass(frozen=True, slots=True)
class LoopSpace:
    """The space a launch walks: that of the program, or the same elements in fewer rows."""

    rows: int
    columns: int
    strides: tuple[int, ...]
    """Elements from row to row, of the inputs and then the outputs."""
    chunks: Chunks
    """Where rows are cut, its columns are the program's, also where a walked row has more."""

    @property
    def is_joined(self) -> bool:
        """Whether a walked row is several rows of the program, one behind the other."""
        return not self.chunks.num_columns and self.chunks.columns < self.columns


def space_of(
    program: FusedProgram, plan: Schedule, rows: int, columns: int, layouts: tuple[Layout, ...]
) -> LoopSpace | None:
    """Return how operands (inputs, then outputs) lie; None where one's rows are not evenly spaced.

    Where nothing depends on rows and columns, and all is dense, the space is walked as one row.
    """
    layout = joined_rows(program, rows, columns, layouts)
    if layout is None:
        return None
    rows, columns, strides = layout
    return LoopSpace(rows, columns, strides, cut(program, rows, columns, bool(plan.column_sums)))


def joined_rows(
    program: FusedProgram, rows: int, columns: int, layouts: tuple[Layout, ...]
) -> tuple[int, int, tuple[int, ...]] | None:
    """Return rows, columns and strides of a walk, of one row where that gives the same elements.

    None where the rows of an operand are not evenly spaced.
    """
    kinds = [program.kind_of(v) for v in (*range(len(program.inputs)), *program.outputs)]
    strides = row_strides(program, columns, layouts)
    if strides is None:
        return None
    if (
        rows != 1
        and _is_flat(program, rows)
        and all([s == columns for s, kind in zip(strides, kinds, strict=True) if kind is Kind.FULL])
    ):
        rows, columns = 1, rows * columns
        # One row only, whose step is never taken; 0 is that of numbers.
        strides = [columns if kind is Kind.FULL else 0 for kind in kinds]
    return rows, columns, tuple(strides)


def row_strides(
    program: FusedProgram, columns: int, layouts: tuple[Layout, ...]
) -> list[int] | None:
    """Return the step from row to row of every operand; None where one's rows are uneven."""
    kinds = [program.kind_of(v) for v in (*range(len(program.inputs)), *program.outputs)]
    strides = [
        row_stride(kind, columns, *layout) for kind, layout in zip(kinds, layouts, strict=True)
    ]
    even = [stride for stride in strides if stride is not None]
    return even if len(even) == len(strides) else None


def _is_flat(program: FusedProgram, rows: int) -> bool:
    kinds = [program.kind_of(v) for v in range(program.num_values)]
    return (
        all([kind in (Kind.FULL, Kind.SCALAR) for kind in kinds])
        and all([i.op not in ROW_REDUCTIONS for i in program.instructions])
        and all([is_plain(program, v, rows) for v in range(len(program.inputs))])
    )


def is_plain(program: FusedProgram, value: int, rows: int) -> bool:
    """Return whether row r of an input is that of the space."""
    entry = program.inputs[value]
    return entry.every == 1 and entry.count in (0, rows)


def in_place_pairs(
    program: FusedProgram, plan: Schedule, rows: int, operands: Sequence[MatrixView]
) -> tuple[tuple[int, int], ...]:
    """Return pairs (output, input) where the input is read no later than the output is stored."""
    reads, stores = last_reads(plan, program), store_phases(plan)
    inputs, outputs = operands[: len(program.inputs)], operands[len(program.inputs) :]
    return tuple(
        [
            (out, index)
            for out, y in enumerate(outputs)
            for index, x in enumerate(inputs)
            if out in stores
            and index in reads
            and reads[index] <= stores[out]
            and is_plain(program, index, rows)
            and (x.dtype, math.prod(x.shape)) == (y.dtype, math.prod(y.shape))
            and x.is_dense
            and y.is_dense
        ]
    )


@dataclass(frozen=True, slots=True)
class ScheduledProgram:
    """A program, and how it is walked."""

    program: FusedProgram
    schedule: Schedule


def scheduled_program(attrs: Attrs) -> ScheduledProgram:
    """Return the program in the attributes of a launch, with its schedule."""
    return scheduled(fused_program(attrs, "program"))


def split_skip(program: FusedProgram, inputs: Arrays) -> tuple[Arrays, Array | None]:
    """Return the operands of a program, and what says whether to leave out its launch."""
    count = len(program.inputs)
    return inputs[:count], next(iter(inputs[count:]), None)


@functools.lru_cache(maxsize=4096)
def scheduled(program: FusedProgram) -> ScheduledProgram:
    """Return a program with its schedule on the host. Raises ProgramError."""
    check_program(program)  # text and scratch are made of it, and a launch may come from a file
    return ScheduledProgram(program, schedule(program))


# The arrays of a region: wide values take as few buffers as can be: one takes the buffer of a value
# that nobody reads any more; an output of a program also that of an operand which the program reads
# no later than it stores the output.
#
# A plan asks what a region needs before there are bytes. It looks at arrays then that have extents
# and strides and nothing behind them (`meta_arrays`): what is asked for and what is bound are one
# text.


@dataclass(frozen=True, slots=True)
class HeldBuffers:
    """The type of each buffer, and which one a wide value is in."""

    dtypes: tuple[np.dtype[np.generic], ...]
    of_value: dict[int, int]


Over = Mapping[int, int]
NOWHERE: Over = {}
"""Wide values that lie where an output will be, and that output."""


MadeOf = Callable[[TileStep], ScheduledProgram]
"""How a target walks the program of a step: which operand it reads how late follows from that."""


def made_of_step(step: TileStep) -> ScheduledProgram:
    """Return the program of a step with its schedule on the host."""
    return scheduled_program(program_attrs(step))


def buffers_of(
    region: TiledLoop, over: Over = NOWHERE, schedule_of: MadeOf = made_of_step
) -> HeldBuffers:
    """Return the buffers of a region's wide values. O(steps x buffers)."""
    dtypes: list[np.dtype[np.generic]] = []
    of_value: dict[int, int] = {}
    free: list[int] = []
    last = region.last_reads()
    for index, step in enumerate(region.steps):
        reads, makes = [
            [v for v in dict.fromkeys(values) if region.is_wide(v) and v not in over]
            for values in (step.reads, step.makes)
        ]
        # Values that this step reads for the last time: their buffers are free behind it.
        dying = [v for v in reads if last[v] == index]
        for value in makes:
            dtype = numpy_dtype(region.held[value - region.num_inputs].dtype)
            under = next(
                (
                    v
                    for v in dying
                    if dtypes[of_value[v]] == dtype and _may_lie(step, value, v, schedule_of)
                ),
                None,
            )
            # Else a buffer that is free already, and only then a new one.
            place = next((b for b in free if dtypes[b] == dtype), None)
            if under is not None:
                dying.remove(under)
                place = of_value[under]
            elif place is not None:
                free.remove(place)
            else:
                place = len(dtypes)
                dtypes.append(dtype)
            of_value[value] = place
        free += [of_value[v] for v in dying]
        # Made and never read: an output of a program that no step wants.
        free += [of_value[v] for v in makes if v not in last]
    return HeldBuffers(tuple(dtypes), of_value)


def _may_lie(step: TileStep, made: int, read: int, schedule_of: MadeOf) -> bool:
    """Whether a program may store an output over an operand."""
    if step.program is None:
        return False
    scheduled = schedule_of(step)
    reads, stores = (
        last_reads(scheduled.schedule, scheduled.program),
        store_phases(scheduled.schedule),
    )
    out = step.makes.index(made)
    places = [place for place, v in enumerate(step.reads) if v == read]
    return all([reads.get(place, -1) <= stores[out] for place in places])


def program_attrs(step: TileStep) -> Attrs:
    """Return the program of a step as the attributes of a launch have it."""
    if step.program is None:
        raise ValueError(f"a step {step.kind.value} has no program")
    return {"program": step.program}


check_once = functools.lru_cache(maxsize=1024)(check_region)
"""Several kernels are asked for one region."""


def meta_arrays(operands: Operands | tuple[Piece, ...]) -> Arrays:
    """Return arrays that lie as operands do, or dense ones, of which no element may be touched."""
    return tuple([_unread(x) for x in operands])


class RegionArrays:
    """The operands of a region, and its held values in `held`: the arrays of `tile_scratch`."""

    def __init__(
        self,
        region: TiledLoop,
        inputs: Arrays,
        outputs: Arrays,
        held: Arrays,
        over: Over = NOWHERE,
        schedule_of: MadeOf = made_of_step,
    ) -> None:
        self.region, self.over = region, over
        buffers, scratch = buffers_of(region, over, schedule_of), iter(held)
        wide = [next(scratch)[:, : region.columns] for _ in buffers.dtypes]
        self.arrays: dict[int, Array] = dict(enumerate(inputs))
        self.arrays.update(enumerate(outputs, region.first_output))
        for value, entry in enumerate(region.held, region.num_inputs):
            if value in over:
                self.arrays[value] = self.arrays[over[value]].reshape(region.rows, region.columns)
            else:
                is_wide = entry.kind is Kind.FULL
                self.arrays[value] = wide[buffers.of_value[value]] if is_wide else next(scratch)
        self.totals = {v: next(scratch) for v in _column_sums(region)}
        """Sums over rows under way, in float64."""

    @staticmethod
    def planned(
        region: TiledLoop,
        inputs: Arrays,
        outputs: Arrays,
        over: Over = NOWHERE,
        schedule_of: MadeOf = made_of_step,
    ) -> RegionArrays:
        """Return the arrays before there is scratch."""
        scratch = meta_arrays(tile_scratch(region, over, schedule_of))
        return RegionArrays(region, inputs, outputs, scratch, over, schedule_of)

    def of(self, values: tuple[int, ...]) -> Arrays:
        """Return the arrays of some values, with all the rows that there are."""
        return tuple([self.arrays[v] for v in values])

    def rows(self, value: int, first: int, last: int) -> Array:
        """Return some rows of a value that lies by rows, as a matrix."""
        array = self.arrays[value]
        if self.region.is_wide(value) and value not in self.over:
            return array[: last - first]
        is_made = value >= self.region.first_output
        return (array.reshape(self.region.rows, -1) if is_made else array)[first:last]

    def strides(self, step: TileStep) -> list[int] | None:
        """Return the step from row to row of a program's operands; None where one's are uneven."""
        layouts = []
        for value in (*step.reads, *step.makes):
            x = self.arrays[value]
            extents = (self.region.rows, self.region.columns)
            shape = extents if self.region.is_wide(value) else x.shape
            layouts.append((shape, tuple([step // x.itemsize for step in x.strides])))
        return row_strides(made_of_step(step).program, self.region.columns, tuple(layouts))

    def product(self, step: TileStep, first: int, last: int) -> tuple[Array, Array, Array]:
        """Return a, b and out of a step that makes, or adds to, out = a @ b for some rows."""
        if step.kind is TileStepKind.PRODUCT:
            (a, b), (out,) = step.reads, step.makes
            return self.rows(a, first, last), self.arrays[b], self.rows(out, first, last)
        left, right = [self.rows(v, first, last) for v in step.reads]
        extents = (left.shape[1], right.shape[1])
        return left.T, right, self.arrays[step.makes[0]].reshape(extents)

    def products_work(self) -> Work:
        """Return the work of all products, every chunk taken for one like the first."""
        chunks = self.region.chunks()
        steps = [step for step in self.region.steps if step.kind in PRODUCTS]
        calls = [self.product(step, *chunks[0]) for step in steps]
        products = [
            MatrixProduct(item_weight(a.itemsize) * len(chunks), len(a), b.shape[1], len(b))
            for a, b, _ in calls
        ]
        return Work(float(CALLS_PER_PRODUCT * len(chunks) * len(calls)), products=tuple(products))


def shared_bytes(
    region: TiledLoop, pairs: Iterable[tuple[TileStep, tuple[tuple[int, int], ...]]]
) -> tuple[Over, tuple[tuple[int, int], ...]]:
    """Return wide values that lie where an output will be, and pairs (output, input) that may.

    `pairs` are programs, each with its outputs and the operands that these may lie over. What
    another step reads too has to stay.
    """
    shared = [
        (step.makes[out], step.reads[operand])
        for step, program_pairs in pairs
        for out, operand in program_pairs
        if step.makes[out] >= region.first_output and region.num_reads(step.reads[operand]) == 1
    ]
    # Reversed, so that the first output that a value may lie in stays.
    over = {value: out for out, value in reversed(shared) if region.is_wide(value)}
    hosts = over.values()
    free = [(out, v) for out, v in shared if v < region.num_inputs and out not in hosts]
    return over, tuple([(out - region.first_output, v) for out, v in free])


def tile_scratch(
    region: TiledLoop, over: Over = NOWHERE, schedule_of: MadeOf = made_of_step
) -> tuple[Piece, ...]:
    """Return the scratch of wide values, each row at a cache line; of values by rows; of sums."""
    pieces = []
    for dtype in buffers_of(region, over, schedule_of).dtypes:
        per_line = ALIGNMENT_BYTES // dtype.itemsize
        pieces.append(Piece((region.chunk_rows, -(-region.columns // per_line) * per_line), dtype))
    by_rows = [value for value in region.held if value.kind is Kind.ROW]
    pieces += [Piece((region.rows,), numpy_dtype(value.dtype)) for value in by_rows]
    sums = len(_column_sums(region))
    return (*pieces, *[Piece((region.columns,), np.dtype(np.float64))] * sums)


def _column_sums(region: TiledLoop) -> list[int]:
    return [step.makes[0] for step in region.steps if step.kind is TileStepKind.COLUMN_SUM]


def _unread(x: Operand | Piece) -> Array:
    dense = contiguous_strides(x.shape, x.dtype.itemsize)
    strides = x.strides_bytes if isinstance(x, Operand) else dense
    # One element stands for all: to touch another one would leave its memory.
    return np.lib.stride_tricks.as_strided(np.empty(1, x.dtype), x.shape, strides)
