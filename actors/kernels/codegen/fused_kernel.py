"""The kernel "c.fused": a program as one generated function.

Its scratch: a row buffer per kept value and thread, a partial row per column sum and piece, and the
partial reductions of the pieces of a long row. The plan has them for the threads there are when it
is made; with less, fewer threads take part.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import integer
from actors.kernels.codegen import arguments as words
from actors.kernels.codegen.chunks import duration_ns
from actors.kernels.codegen.loops import num_rows_at_once
from actors.kernels.codegen.programs import Made, function_of, made_of, split_skip
from actors.kernels.codegen.spaces import LoopSpace, in_place_pairs, space_of
from actors.kernels.indices import INDEX, checked
from actors.kernels.interpret.steps import held_dtype
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace
from actors.kernels.native import runtime
from actors.kernels.native.gemm import MatrixView, views_of
from actors.kernels.native.launch import NativeLaunch, address, argument_block
from actors.kernels.native.runtime import CFunction
from actors.kernels.scratch import ALIGNMENT_BYTES, Piece
from actors.kernels.work import NATIVE_CALLS, BytePass, CWork, Work
from actors.protocol import Array, Arrays
from compiler.fusion.program import COLUMN_REDUCTIONS, ROW_REDUCTIONS, FusedProgram, Kind
from compiler.types import DType

_REFERENCE_NS_PER_BYTE = 0.025
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """`fused`: attrs program, rows, columns; operands in the order of the program.

    An update, whose outputs lie over inputs, may have one more input `skip` [] int64, and is left
    out where that is not 0.
    """

    name: str = "c.fused"
    op: str = "fused"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take programs with C for every instruction, on evenly spaced rows of dense columns."""
        if not runtime.is_on():
            return None
        made, function = made_of(attrs), function_of(attrs)
        if function is None or runtime.is_broken(function):
            return None
        inputs = inputs[: len(made.program.inputs)]
        views = views_of((*inputs, *outputs))
        space = None if views is None else _space(attrs, made, views)
        if views is None or space is None:
            return None
        size = scratch.size_bytes(pieces_of(made, space, runtime.num_threads()))
        work = program_work(made.program, space)
        pairs = in_place_pairs(made.program, made.schedule, integer(attrs, "rows"), views)
        return cost.needs(inputs, outputs, work, size, pairs)

    def functions(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> tuple[CFunction, ...]:
        """Return the one function of the program."""
        function = function_of(attrs)
        return () if function is None else (function,)

    def bind(
        self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace
    ) -> NativeLaunch:
        """Return the launch. Raises CompilerError when the compiler refuses the function."""
        made, function = made_of(attrs), function_of(attrs)
        if function is None:
            raise ValueError("there is no C for this program; `query` declines it")
        inputs, skip = split_skip(made.program, inputs)
        arrays = (*inputs, *outputs)
        views = views_of(arrays)
        space = None if views is None else _space(attrs, made, views)
        if space is None:
            raise ValueError(f"operands of shapes {[x.shape for x in arrays]} are not in rows")
        block, keep = argument_words(made, space, integer(attrs, "rows"), arrays, workspace)
        block[words.SKIP], where = address(skip), ctypes.addressof(block)
        first = [words.operand(i) for i in range(len(arrays) if skip is None else 0)]
        return NativeLaunch(
            runtime.address_of(function),
            where,
            (block, arrays, keep, skip),
            functools.partial(explain_index, made.program, inputs),
            tuple([where + _WORD_BYTES * word for word in first]),
        )


def _space(attrs: Attrs, made: Made, views: tuple[MatrixView, ...]) -> LoopSpace | None:
    rows, columns = integer(attrs, "rows"), integer(attrs, "columns")
    layouts = tuple([(view.shape, view.strides) for view in views])
    return space_of(made.program, made.schedule, rows, columns, layouts)


def pieces_of(made: Made, space: LoopSpace, num_workers: int) -> tuple[Piece, ...]:
    """Return the scratch: partial reductions, column sums by partial, row buffers by thread."""
    program, chunks = made.program, space.chunks
    most = max([len(phase.reductions) for phase in made.schedule.phases], default=0)
    return (
        Piece((chunks.num_columns * most,), np.dtype(np.float64)),
        *[
            Piece((chunks.num_partials, _padded(space.columns)), _sum_dtype(program.dtype_of(v)))
            for v in made.schedule.column_sums
        ],
        *[
            Piece((num_workers, _held(program, space)), held_dtype(program.dtype_of(v)))
            for v in made.schedule.buffers
        ],
    )


def _padded(columns: int) -> int:
    """Return elements per row such that every row begins at a cache line."""
    return -(-columns // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _held(program: FusedProgram, space: LoopSpace) -> int:
    """Return elements of a row buffer of one thread: the rows that a loop takes at once."""
    return _padded(space.columns * (1 if space.chunks.num_columns else num_rows_at_once(program)))


def _sum_dtype(dtype: DType) -> np.dtype[np.generic]:
    return np.dtype(np.int64 if dtype.is_integer else np.float64)


def program_work(program: FusedProgram, space: LoopSpace) -> Work:
    """Return the work of two threads, as bytes at the rate of a plain pass."""
    size = duration_ns(program, space.rows, space.columns) / 2 / _REFERENCE_NS_PER_BYTE
    passes = ((BytePass.SIMPLE, float(int(size))),)
    return Work(NATIVE_CALLS, 0.0, passes, in_c=partial(program_in_c, program, space))


def program_in_c(program: FusedProgram, space: LoopSpace) -> CWork:
    """Return what C does of a program: the bytes of its operands, and every instruction."""
    elements, chunks = space.rows * space.columns, space.chunks
    size = dict.fromkeys(BytePass, 0.0)
    for value in (*range(len(program.inputs)), *program.outputs):
        if program.kind_of(value) is Kind.FULL:
            size[BytePass.SIMPLE] += elements * program.dtype_of(value).itemsize
    for instruction in program.instructions:
        is_sum = instruction.op in (*ROW_REDUCTIONS, *COLUMN_REDUCTIONS)
        if is_sum or instruction.kind is Kind.FULL:
            sort = BytePass.REDUCE if is_sum else C_SORTS.get(instruction.op, BytePass.PLAIN)
            size[sort] += elements * _ITEM_BYTES
    passes = tuple([(sort, count) for sort, count in size.items() if count])
    reduces_rows = any([i.op in ROW_REDUCTIONS for i in program.instructions])
    pieces = chunks.num_rows * max(1, chunks.num_columns)
    return CWork(passes, pieces=pieces, reduces_rows=reduces_rows)


C_SORTS = {
    op: sort
    for sort, ops in (
        (BytePass.DIVIDE, ("div", "reciprocal")),
        (BytePass.ROOT, ("sqrt", "rsqrt")),
        (BytePass.EXP, ("exp", "log")),
        (BytePass.TANH, ("tanh", "erf", "mod", "floordiv", "log2", "log10")),
        (BytePass.POWER, ("pow", "sin", "cos", "erfc", "expm1", "log1p", "atan2")),
        (BytePass.RANDOM, ("philox",)),
    )
    for op in ops
}
"""Instructions that take longer than an addition, by the sort of their pass."""

_ITEM_BYTES = 4
"""Rates of instructions are those of float32."""


def argument_words(
    made: Made, space: LoopSpace, rows: int, arrays: Arrays, workspace: Workspace
) -> tuple[ctypes.Array[ctypes.c_int64], Arrays]:
    """Return the argument block of a launch in a space, and the arrays of scratch in it.

    `rows` are those of the program, also where the space is walked as one row.
    """
    program = made.program
    pieces = functools.partial(pieces_of, made, space)
    workers = scratch.workers_for(pieces, workspace, runtime.num_threads())
    held = scratch.carve(workspace, pieces(workers))
    num_sums = len(made.schedule.column_sums)
    block = [0] * words.column_sum(program, len(made.schedule.buffers), num_sums)
    _fill_header(block, space, workers, held[0])
    for position, array in enumerate(arrays):
        block[words.operand(position)] = address(array)
        block[words.operand(position, words.STRIDE)] = space.strides[position]
        entry = program.inputs[position] if position < len(program.inputs) else None
        block[words.operand(position, words.EVERY)] = entry.every if entry else 1
        block[words.operand(position, words.COUNT)] = (entry.count if entry else 0) or rows
    for index, piece in enumerate(held[1 : 1 + num_sums]):
        place = words.column_sum(program, len(made.schedule.buffers), index)
        block[place : place + 2] = [address(piece), _padded(space.columns)]
    for index, piece in enumerate(held[1 + num_sums :]):
        place = words.buffer(program, index)
        block[place : place + 2] = [address(piece), _held(program, space)]
    return argument_block(block), held


def _fill_header(block: list[int], space: LoopSpace, workers: int, partials: Array) -> None:
    block[words.ROWS], block[words.COLUMNS] = space.rows, space.columns
    block[words.CHUNK_ROWS], block[words.NUM_CHUNKS] = space.chunks.rows, space.chunks.num_rows
    block[words.CHUNK_COLUMNS] = space.chunks.columns
    block[words.NUM_COLUMN_CHUNKS] = space.chunks.num_columns
    block[words.MAX_WORKERS] = workers
    block[words.PARTIALS] = address(partials)


def explain_index(program: FusedProgram, inputs: Arrays, status: int) -> str:
    """Say which label is out of its range, with the IndexError of the numpy kernels."""
    for instruction in program.instructions:
        if instruction.op == "check_index" and instruction.operands[0] < len(inputs):
            labels = inputs[instruction.operands[0]].reshape(-1)
            extent = int(instruction.constants[0])
            checked("label", labels, extent, np.empty(labels.size, INDEX), np.empty(2, INDEX))()
    raise IndexError("a label is out of its range")  # computed by the kernel, or overwritten by now


FUSED_KERNELS = (FusedKernel(),)
