"""A fused program in C: as one generated function ("c.fused"), or behind a product, as one launch.

The scratch of a program: a row buffer per kept value and thread, a partial row per column sum and
piece, and the partial reductions of the pieces of a long row. The plan has them for the threads
there are when it is made; with less, fewer threads take part.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace

import numpy as np

from actors.kernels.common import cost, kernel
from actors.kernels.common.gemm import (
    ROW_STEP,
    Chunk,
    Gemm,
    MatrixView,
    chunks_of,
    gemm_of,
    views_of,
)
from actors.kernels.common.host_memory import address
from actors.kernels.common.kernel import (
    ALIGNMENT_BYTES,
    INDEX,
    Attrs,
    BytePass,
    HostPlan,
    Kernel,
    KernelPlan,
    Operands,
    Piece,
    Work,
    Workspace,
    checked,
    integer,
    native_work,
)
from actors.kernels.common.kernel import (
    region as region_of,
)
from actors.kernels.library import runtime, tuning
from actors.kernels.library.gemm_launch import Epilogue, Library, ProductScratch, gemm_launch
from actors.kernels.library.launch import NativeLaunch, argument_block, native_launch
from actors.kernels.library.runtime import CFunction
from actors.kernels.native.emit import function_of
from actors.kernels.native.loops import num_rows_at_once
from actors.kernels.native.matmul import LIBRARIES, product_work
from actors.kernels.program import values as words
from actors.kernels.program.numbers import number_words
from actors.kernels.program.phases import Chunks, cut, held_dtype, item_bytes, weight
from actors.kernels.program.spaces import (
    LoopSpace,
    ScheduledProgram,
    check_once,
    in_place_pairs,
    is_plain,
    made_of_step,
    program_attrs,
    row_strides,
    scheduled_program,
    shared_bytes,
    space_of,
    split_skip,
)
from actors.machine.protocol import Array, Arrays
from compiler.contract.program import FusedProgram, Kind
from compiler.contract.region import TiledLoop, TileStep, TileStepKind
from compiler.contract.types import DType, TensorType, numpy_dtype

_WORD_BYTES = 8


def _plan_program(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `fused`: attrs program, rows, columns; operands in the order of the program.

    An update, whose outputs lie over inputs, may have one more input `skip` [] int64, and is left
    out where that is not 0.

    It takes programs with C for every instruction, on evenly spaced rows of dense columns.
    """
    if not runtime.is_enabled():
        return None
    scheduled, function = scheduled_program(attrs), function_of(attrs)
    if function is None or runtime.is_broken(function):
        return None
    inputs = inputs[: len(scheduled.program.inputs)]
    views = views_of((*inputs, *outputs))
    rows, columns = integer(attrs, "rows"), integer(attrs, "columns")
    layouts = [(view.shape, view.strides) for view in views or ()]
    space = space_of(scheduled.program, scheduled.schedule, rows, columns, tuple(layouts))
    if views is None or space is None:
        return None
    space = _joined(scheduled, space)

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> NativeLaunch:
        inputs, skip = split_skip(scheduled.program, inputs)
        arrays = (*inputs, *outputs)
        block, keep = argument_words(scheduled, space, rows, arrays, workspace)
        # 0 where there is no such input: C looks at the address first.
        block[words.SKIP], base = address(skip), ctypes.addressof(block)
        # With `skip` a loop cannot move the launch: its address is in a word of another sort.
        first = [words.operand(i) for i in range(len(arrays) if skip is None else 0)]
        return NativeLaunch(
            runtime.address_of(function),
            base,
            (block, arrays, keep, skip),
            functools.partial(explain_index, scheduled.program, inputs),
            tuple([base + _WORD_BYTES * word for word in first]),
        )

    size = kernel.size_bytes(pieces_of(scheduled, space, runtime.num_threads()))
    pairs = in_place_pairs(scheduled.program, scheduled.schedule, rows, views)
    work = program_work(scheduled.program, space)
    return KernelPlan(cost.needs(inputs, outputs, work, size, pairs), bind)


_NARROW = 128
"""Rows of fewer columns are walked together."""

_MOST_JOINED = 1_024
"""Columns of a walked row, at most: what is repeated stays in the first-level cache."""

_VECTOR = 32
"""Walked rows are multiples of it where rows allow that: the widest vector has so many halves."""


def _joined(made: ScheduledProgram, space: LoopSpace) -> LoopSpace:
    """Return a space of narrow rows with several of them in one row of the walk, else itself.

    Rows of some columns leave the vectors of the processor half empty, and a row costs some ten
    nanoseconds beside what it computes. What is the same for all rows is repeated for the walk.
    Sums over rows are added up row by row: their order, and so their bits, are those of any layout.
    """
    program, columns, rows = made.program, space.columns, space.rows
    kinds = [program.kind_of(v) for v in (*range(len(program.inputs)), *program.outputs)]
    full = [s for s, kind in zip(space.strides, kinds, strict=True) if kind is Kind.FULL]
    has_columns = any([program.kind_of(v) is Kind.COLUMN for v in program.outputs])
    if (
        not 0 < columns < _NARROW
        or has_columns
        or made.schedule.column_sums
        or any([program.kind_of(v) is Kind.ROW for v in range(program.num_values)])
        or any([i.op == "column_index" for i in program.instructions])
        or not all([is_plain(program, v, rows) for v in range(len(program.inputs))])
        or any([stride != columns for stride in full])
    ):
        return space
    counts = [k for k in range(2, _MOST_JOINED // columns + 1) if rows % k == 0]
    if not counts:
        return space
    count = max(counts, key=lambda k: (k * columns % _VECTOR == 0, k))
    chunks = cut(program, rows // count, count * columns, has_column_sums=False)
    if chunks.num_columns:
        return space
    strides = tuple([count * stride for stride in space.strides])
    own = replace(chunks, columns=columns)
    return LoopSpace(rows // count, count * columns, strides, own)


def pieces_of(made: ScheduledProgram, space: LoopSpace, num_workers: int) -> tuple[Piece, ...]:
    """Return the scratch.

    They are partial reductions, column sums by partial, row buffers by thread, and inputs of kind
    COLUMN as often as a row of the walk has them.
    """
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
        *[
            Piece((space.columns if space.is_joined else 0,), numpy_dtype(entry.dtype))
            for entry in program.inputs
            if entry.kind is Kind.COLUMN
        ],
    )


def _padded(columns: int) -> int:
    """Return elements per row such that every row begins at a cache line."""
    # In elements: a multiple of 64 of any size is whole cache lines.
    return -(-columns // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _held(program: FusedProgram, space: LoopSpace) -> int:
    """Return elements of a row buffer of one thread: the rows that a loop takes at once."""
    return _padded(space.columns * (1 if space.chunks.num_columns else num_rows_at_once(program)))


def _sum_dtype(dtype: DType) -> np.dtype[np.generic]:
    return np.dtype(np.int64 if dtype.is_integer else np.float64)


def program_work(program: FusedProgram, space: LoopSpace) -> Work:
    """Return the work of a program: a loop for each row, its operands, and its instructions."""
    elements = float(space.rows * space.columns)
    return native_work(
        (BytePass.MOVE, elements * item_bytes(program)),
        (BytePass.ADD, elements * _ADDITION_BYTES * weight(program)),
        rows=space.rows - 1,  # the first is a part of the call
    )


_ADDITION_BYTES = 4
"""Weights of instructions are those of float32."""


def argument_words(
    made: ScheduledProgram, space: LoopSpace, rows: int, arrays: Arrays, workspace: Workspace
) -> tuple[ctypes.Array[ctypes.c_int64], Arrays]:
    """Return the argument block of a launch in a space, and the arrays of scratch in it.

    `rows` are those of the program, also where the space is walked as one row.
    """
    program = made.program
    pieces = functools.partial(pieces_of, made, space)
    workers = kernel.workers_for(pieces, workspace, runtime.num_threads())
    scratch = kernel.carve(workspace, pieces(workers))
    num_sums, num_buffers = len(made.schedule.column_sums), len(made.schedule.buffers)
    block = [0] * words.numbers_begin(program, made.schedule)
    _fill_header(block, space, workers, scratch[0])
    addresses = [address(array) for array in arrays]
    operands = words.operand_words(program, addresses, space.strides, rows)
    block[words.operand(0) : words.operand(len(arrays))] = operands
    for index, piece in enumerate(scratch[1 : 1 + num_sums]):
        place = words.column_sum(program, num_buffers, index)
        block[place : place + 2] = [address(piece), _padded(space.columns)]
    for index, piece in enumerate(scratch[1 + num_sums : 1 + num_sums + num_buffers]):
        place = words.buffer(program, index)
        block[place : place + 2] = [address(piece), _held(program, space)]
    columns = [v for v, entry in enumerate(program.inputs) if entry.kind is Kind.COLUMN]
    for value, piece in zip(columns, scratch[1 + num_sums + num_buffers :], strict=True):
        place = words.repeated(program, made.schedule, value)
        block[place] = address(piece) if space.is_joined else 0
    return argument_block([*block, *number_words(program)]), scratch


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
            # The status says only that some index is bad: the numpy check finds it and raises.
            labels = inputs[instruction.operands[0]].reshape(-1)
            extent = int(instruction.constants[0])
            checked("label", labels, extent, np.empty(labels.size, INDEX), np.empty(2, INDEX))()
    raise IndexError("a label is out of its range")  # computed by the kernel, or overwritten by now


def functions_of_program(attrs: Attrs) -> tuple[CFunction, ...]:
    """Return the one function of a program."""
    function = function_of(attrs)
    return () if function is None else (function,)


FUSED_KERNELS = (Kernel("c.fused", "fused", _plan_program),)


# A product and the program that reads it: a chunk works on its rows while cached. The product is
# written where an output of the program will be, if it reads each element of the product no later
# than it stores that output; else into the workspace. The chunks are those of the product; where it
# is cut across rows, as one of few rows is, they are blocks of rows that come when all of it is
# there. The program's partial sums are one per chunk.

_BLOCK_BYTES = 64 << 10
"""Of the product in a block of rows behind it: some 10 us of a program."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that is taken: the product with its chunks, and the program's space.

    `pairs` are outputs and inputs of the region that may share bytes; the product goes to output
    `target`, or with -1 to the workspace.
    """

    region: TiledLoop
    made: ScheduledProgram
    function: CFunction
    gemm: Gemm
    chunks: tuple[Chunk, ...]
    scratch: ProductScratch
    space: LoopSpace
    pairs: tuple[tuple[int, int], ...]
    target: int

    def pieces(self, num_workers: int) -> tuple[Piece, ...]:
        """Return the workspace: of library and program, and the product without a target."""
        size = self.scratch.size_bytes(min(num_workers, len(self.chunks)))
        # Where an output can hold the product until it is overwritten, no scratch is needed.
        product = 0 if self.target >= 0 else self.gemm.m * self.gemm.n
        itemsize = self.gemm.out_dtype.itemsize
        return (
            Piece((size,), np.dtype(np.uint8)),
            Piece((kernel.size_bytes(self.program_pieces(num_workers)),), np.dtype(np.uint8)),
            Piece((product * itemsize,), np.dtype(np.uint8)),
        )

    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Return the first row of each chunk of the program, and the one behind its last."""
        step, end = self.space.chunks.rows, self.gemm.m
        return tuple([(row, min(row + step, end)) for row in range(0, end, step)])

    def program_pieces(self, num_workers: int) -> tuple[Piece, ...]:
        """Return the scratch of the program."""
        return pieces_of(self.made, self.space, num_workers)


def _plan_product(
    library: Library, attrs: Attrs, inputs: Operands, outputs: Operands
) -> HostPlan | None:
    """Plan `region` of a product and a program, by one library that cuts products into whole rows.

    It takes the products that this library can compute, with C for the program.
    """
    call = _taken(library, attrs, inputs, outputs)
    if call is None:
        return None
    program, product = program_work(call.made.program, call.space), product_work(call.gemm)
    # The program finds the product's rows in cache.
    work = replace(product, loops=program.loops, passes=program.passes)
    size = kernel.size_bytes(call.pieces(runtime.num_threads()))
    needs = cost.needs(inputs, outputs, work, size, call.pairs)

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> NativeLaunch:
        workers = kernel.workers_for(call.pieces, workspace, runtime.num_threads())
        library_space, program_space, buffer = kernel.carve(workspace, call.pieces(workers))
        extents = (call.gemm.m, call.gemm.n)
        if call.target >= 0:
            product = outputs[call.target].reshape(extents)
        else:
            product = buffer.view(np.dtype(_ITEMS[call.gemm.out_dtype.itemsize])).reshape(extents)
        values = (*inputs, product, *outputs)
        first, second = call.region.steps
        reads = tuple([values[v] for v in second.reads])
        arrays = (*reads, *[values[v] for v in second.makes])
        block, scratch = argument_words(call.made, call.space, extents[0], arrays, program_space)
        rows, finish = [runtime.address_of(call.function, x) for x in ("_rows", "_finish")]
        blocks = () if library.cut.has_whole_rows else call.blocks()
        epilogue = Epilogue(rows, ctypes.addressof(block), (block, scratch, arrays), blocks)
        operands = (values[first.reads[0]], values[first.reads[1]], product)
        gemm = gemm_launch(library, call.gemm, operands, library_space, epilogue, workers)
        return native_launch(
            runtime.address_in("fused_product.c", "af_fused_product"),
            [gemm.function, gemm.arguments, finish, ctypes.addressof(block), words.STATUS],
            (gemm, block, scratch, arrays),
            functools.partial(_explain, call.made.program, reads, block, gemm),
        )

    return KernelPlan(needs, bind)


def _taken(library: Library, attrs: Attrs, inputs: Operands, outputs: Operands) -> _Call | None:
    if not runtime.is_enabled():
        return None
    call = _call_of(library, attrs, views_of((*inputs, *outputs)))
    return None if call is None or runtime.is_broken(call.function) else call


_ITEMS = {2: np.uint16, 4: np.float32, 8: np.float64}


def _steps_of(region: TiledLoop) -> tuple[TileStep, TileStep] | None:
    """Return the product and the program of a region that has nothing else."""
    kinds = [step.kind for step in region.steps]
    if (
        region.chunk_rows
        or kinds != [TileStepKind.PRODUCT, TileStepKind.PROGRAM]
        or len(region.held) != 1
    ):
        return None
    first, second = region.steps
    return (first, second) if region.num_reads(region.num_inputs) == 1 else None


def _function(attrs: Attrs, program: TileStep) -> CFunction | None:
    return function_of({**attrs, **program_attrs(program)})


def _call_of(library: Library, attrs: Attrs, known: tuple[MatrixView, ...] | None) -> _Call | None:
    """Return what a call comes to; None for one that is not taken."""
    region = region_of(attrs, "region")
    steps = _steps_of(region)
    if steps is None or known is None:
        return None
    check_once(region, tuple([TensorType(x.dtype, x.shape) for x in known[: region.num_inputs]]))
    (first, second), (rows, columns) = steps, (region.rows, region.columns)
    scheduled, function = made_of_step(second), _function(attrs, second)
    product = MatrixView(region.held[0].dtype, (rows, columns), (columns, 1))
    views = (*known[: region.num_inputs], product, *known[region.num_inputs :])
    gemm = gemm_of(views[first.reads[0]], views[first.reads[1]], product)
    if function is None or gemm is None:
        return None
    # Chunks must be whole rows of the program's space: a swapped product is cut by its columns.
    if gemm.batch or gemm.is_swapped or (gemm.m, gemm.n) != (rows, columns):
        return None
    operands = [views[v] for v in (*second.reads, *second.makes)]
    strides = row_strides(
        scheduled.program, columns, tuple([(x.shape, x.strides) for x in operands])
    )
    chunks = chunks_of(gemm, library.cut)
    scratch = library.scratch(gemm, chunks)
    if strides is None or scratch is None:
        return None
    # The program's chunks are the product's: each works on rows that its thread has just made.
    block_rows = chunks[0].rows
    if not library.cut.has_whole_rows:
        row_bytes = columns * gemm.out_dtype.itemsize
        block_rows = ROW_STEP * max(1, _BLOCK_BYTES // (ROW_STEP * row_bytes))
    blocks = Chunks(block_rows, -(-rows // block_rows), columns, 0)
    space = LoopSpace(rows, columns, tuple(strides), blocks)
    in_place = in_place_pairs(scheduled.program, scheduled.schedule, rows, operands)
    over, pairs = shared_bytes(region, [(second, in_place)])
    target = over[region.num_inputs] - region.first_output if over else -1
    return _Call(region, scheduled, function, gemm, chunks, scratch, space, pairs, target)


def _explain(
    program: FusedProgram,
    inputs: Arrays,
    block: ctypes.Array[ctypes.c_int64],
    gemm: NativeLaunch,
    status: int,
) -> str:
    """Tell an index out of its range from a status of the library."""
    if block[words.STATUS]:
        return explain_index(program, inputs, status)
    return f"in the product, {gemm.error(status)}"


def _is_fastest(library: Library, attrs: Attrs, inputs: Operands, outputs: Operands) -> bool:
    call = _taken(library, attrs, inputs, outputs)
    best = call and tuning.library_for(call.gemm, LIBRARIES, has_epilogue=True)
    return best == library.name


def functions_of_product(attrs: Attrs) -> tuple[CFunction, ...]:
    """Return the one function of the program behind a product."""
    steps = _steps_of(region_of(attrs, "region"))
    function = None if steps is None else _function(attrs, steps[1])
    return () if function is None else (function,)


FUSED_PRODUCT_KERNELS = tuple(
    [
        Kernel(
            f"{library.name}.fused_product",
            "region",
            functools.partial(_plan_product, library),
            functools.partial(_is_fastest, library),
        )
        for library in LIBRARIES
    ]
)
