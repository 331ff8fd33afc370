"""The kernel "c.chunked": a region as one table of C calls, every one of them with all threads.

Per chunk of rows the table has the region's steps: products by a library, the generated function of
a fused program on the chunk's rows, and sums of columns. Gradients of what every chunk reads whole
are added up in their own bytes by the product itself; the first chunk writes them. Scratch is the
wide values of one chunk, and what library and programs need.

Which library multiplies follows from types alone: a plan has no room to name one for each product,
and bits must not depend on what was measured.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import region as region_of
from actors.kernels.codegen import arguments as words
from actors.kernels.codegen.chunks import MAX_PIECES, Chunks
from actors.kernels.codegen.fused_kernel import (
    argument_words,
    explain_index,
    pieces_of,
    program_work,
)
from actors.kernels.codegen.held import HeldBuffers, buffers_of, made_of_step, program_attrs
from actors.kernels.codegen.programs import function_of
from actors.kernels.codegen.spaces import LoopSpace, row_strides
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace
from actors.kernels.library.gemm_onednn import OneDnn
from actors.kernels.native import runtime
from actors.kernels.native.chain import JoinedLaunches
from actors.kernels.native.gemm import Gemm, MatrixView, gemm_of, views_of
from actors.kernels.native.gemm_launch import Library, gemm_launch, workspace_bytes
from actors.kernels.native.gemm_products import OpenBlas
from actors.kernels.native.launch import NativeLaunch, address, native_launch
from actors.kernels.native.matmul import product_work
from actors.kernels.native.runtime import CFunction
from actors.kernels.scratch import ALIGNMENT_BYTES, Piece
from actors.kernels.work import Work
from actors.protocol import Array, Arrays
from compiler.errors import InternalError
from compiler.fusion.program import Kind
from compiler.fusion.region import Region, Step, StepKind, check_region
from compiler.types import DType, numpy_dtype

LIBRARIES: tuple[Library, ...] = (OneDnn(), OpenBlas())
"""In tiles: with 256 rows of 50,257 columns the fastest, or within 5 % of it, for all three
products (88, 84 and 92 GFLOP/s; in whole rows 75, 57 and 96; two cores, float32)."""

_SUMMED = (DType.FLOAT32, DType.FLOAT64)


@dataclass(frozen=True, slots=True)
class _ChunkCall:
    """A region on operands of known layout; `views` are those of inputs, then of outputs."""

    region: Region
    views: tuple[MatrixView, ...]
    buffers: HeldBuffers

    def row_step(self, value: int) -> int:
        """Return how far the rows of a wide value are apart: each begins at a cache line."""
        item = self.region.held[value - self.region.num_inputs].dtype.itemsize
        per_line = ALIGNMENT_BYTES // item
        return -(-self.region.columns // per_line) * per_line

    def view(self, value: int, rows: int, width: int) -> MatrixView:
        """Return some rows of a value that lies by rows; an input keeps its strides."""
        region, held = self.region, self.region.held_at(value)
        if held is not None:
            return MatrixView(held.dtype, (rows, region.columns), (self.row_step(value), 1))
        view = self._outer(value)
        if value < region.num_inputs:
            return replace(view, shape=(rows, view.shape[1]))
        return MatrixView(view.dtype, (rows, width), (width, 1))

    def gemm(self, step: Step, rows: int, *, adds: bool) -> Gemm | None:
        """Return the product of a step on some rows."""
        a, b = [self.view(v, rows, 0) for v in step.reads]
        if step.kind is StepKind.PRODUCT:
            b = self._outer(step.reads[1])
            return gemm_of(a, b, self.view(step.makes[0], rows, b.shape[1]))
        across = MatrixView(a.dtype, a.shape[::-1], a.strides[::-1])
        extents = (across.shape[0], b.shape[1])
        out = MatrixView(self._outer(step.makes[0]).dtype, extents, (extents[1], 1))
        found = gemm_of(across, b, out)
        return None if found is None else replace(found, adds=adds)

    def gemms(self) -> Iterator[Gemm | None]:
        """Yield the products of every chunk that is unlike the one before."""
        for step in self.region.steps:
            if step.kind in (StepKind.PRODUCT, StepKind.SUM_OF_PRODUCTS):
                chunks = self.region.chunks()
                kinds = dict.fromkeys([(end - row, row > 0) for row, end in chunks])
                yield from [self.gemm(step, rows, adds=adds) for rows, adds in kinds]

    def strides(self, step: Step) -> list[int] | None:
        """Return the step from row to row of the operands of a program."""
        region = self.region
        layouts = []
        for value in (*step.reads, *step.makes):
            held = region.held_at(value)
            if held is None:
                view = self._outer(value)
                layouts.append((view.shape, view.strides))
            elif held.kind is Kind.FULL:
                layouts.append(((region.rows, region.columns), (self.row_step(value), 1)))
            else:
                layouts.append(((region.rows,), (1,)))
        return row_strides(made_of_step(step).program, region.columns, tuple(layouts))

    def space(self, step: Step, rows: int) -> LoopSpace | None:
        """Return the space of a program, cut for a chunk of some rows."""
        strides = self.strides(step)
        piece = -(-rows // MAX_PIECES)
        cut = Chunks(piece, -(-rows // piece), self.region.columns, 0)
        region = self.region
        return (
            None if strides is None else LoopSpace(region.rows, region.columns, tuple(strides), cut)
        )

    def pieces(self, num_workers: int) -> tuple[Piece, ...]:
        """Return scratch: of libraries, of programs, then wide values, values by rows, sums."""
        region, byte = self.region, np.dtype(np.uint8)
        libraries = [_workspace_bytes(gemm) or 0 for gemm in self.gemms() if gemm is not None]
        programs = [
            scratch.size_bytes(pieces_of(made_of_step(step), space, num_workers))
            for step in _programs(region)
            for space in (self.space(step, region.chunk_rows),)
            if space is not None
        ]
        by_buffer = {place: v for v, place in self.buffers.of_value.items()}
        return (
            Piece((max(libraries, default=0),), byte),
            Piece((max(programs, default=0),), byte),
            *[
                Piece((region.chunk_rows, self.row_step(by_buffer[place])), dtype)
                for place, dtype in enumerate(self.buffers.dtypes)
            ],
            *[
                Piece((region.rows,), numpy_dtype(held.dtype))
                for held in region.held
                if held.kind is Kind.ROW
            ],
            *[Piece((region.columns,), np.dtype(np.float64)) for _ in _column_sums(region)],
        )

    def _outer(self, value: int) -> MatrixView:
        """Return the view of an input or an output."""
        region = self.region
        return self.views[value if value < region.num_inputs else value - len(region.held)]


@dataclass(frozen=True, slots=True)
class ChunkedKernel:
    """`chunked`: the operands of a region in order."""

    name: str = "c.chunked"
    op: str = "chunked"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take regions with C for every program and a library for every product."""
        region = region_of(attrs, "region")
        check_region(region, tuple([x.type for x in inputs]))
        known = views_of((*inputs, *outputs))
        if not runtime.is_on() or known is None:
            return None
        call = _ChunkCall(region, known, buffers_of(region))
        if not _is_taken(call) or not all([x.is_dense for x in outputs]):
            return None
        size = scratch.size_bytes(call.pieces(runtime.num_threads()))
        return cost.needs(inputs, outputs, _work(call), size)

    def functions(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> tuple[CFunction, ...]:
        """Return the functions of the programs."""
        found = [_function(step) for step in _programs(region_of(attrs, "region"))]
        return tuple([function for function in found if function is not None])

    def bind(
        self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace
    ) -> NativeLaunch:
        """Return the launch. Raises CompilerError when the compiler refuses a program."""
        region = region_of(attrs, "region")
        known = views_of((*inputs, *outputs))
        if known is None:
            raise InternalError(f"{self.name} is bound to arrays that it does not take")
        call = _ChunkCall(region, known, buffers_of(region))
        workers, given = runtime.num_threads(), 0 if workspace is None else workspace.size
        while workers > 1 and scratch.size_bytes(call.pieces(workers)) > given:
            workers -= 1
        binding = _NativeChunkBinding(call, workers, inputs, outputs, workspace)
        launches = tuple(
            [
                binding.launch(step, first, last)
                for first, last in region.chunks()
                for step in region.steps
            ]
        )
        joined = JoinedLaunches(launches)
        return NativeLaunch(
            runtime.chain_runner(),
            joined.address,
            (joined, inputs, outputs, workspace),
            functools.partial(_explain, joined),
        )


class _NativeChunkBinding:
    """The arrays of a call, and the launches on them."""

    def __init__(
        self, call: _ChunkCall, workers: int, inputs: Arrays, outputs: Arrays, workspace: Workspace
    ) -> None:
        self.call, self.workers = call, workers
        region = call.region
        own = iter(scratch.carve(workspace, call.pieces(workers)))
        self.library, self.program = next(own), next(own)
        buffers = [next(own) for _ in call.buffers.dtypes]
        self.arrays: dict[int, Array] = dict(enumerate(inputs))
        for number, held in enumerate(region.held, region.num_inputs):
            if held.kind is Kind.FULL:
                buffer = buffers[call.buffers.of_value[number]]
                self.arrays[number] = buffer[:, : region.columns]
            else:
                self.arrays[number] = next(own)
        self.arrays.update(enumerate(outputs, region.first_output))
        self.totals = {v: next(own) for v in _column_sums(region)}

    def launch(self, step: Step, first: int, last: int) -> NativeLaunch:
        """Return the launch of a step on the rows from `first` to `last`."""
        if step.kind is StepKind.PROGRAM:
            return self._program(step, first, last)
        if step.kind is StepKind.COLUMN_SUM:
            return self._column_sums(step, first, last)
        gemm = self.call.gemm(step, last - first, adds=first > 0)
        library = None if gemm is None else _library_for(gemm)
        if gemm is None or library is None:
            raise InternalError(f"no library takes a product of a region: {gemm}")
        a, b = [self._rows(v, first, last) for v in step.reads]
        if step.kind is StepKind.PRODUCT:
            b = self.arrays[step.reads[1]]
            made = self.arrays[step.makes[0]]
            is_inside = self.call.region.is_wide(step.makes[0])
            made = made if is_inside else made.reshape(self.call.region.rows, -1)[first:last]
        else:
            a, made = a.T, self.arrays[step.makes[0]]
        operands = (b, a, made) if gemm.is_swapped else (a, b, made)
        return gemm_launch(library, gemm, operands, self.library, None, self.workers)

    def _rows(self, value: int, first: int, last: int) -> Array:
        array = self.arrays[value]
        return array[: last - first] if self.call.region.is_wide(value) else array[first:last]

    def _program(self, step: Step, first: int, last: int) -> NativeLaunch:
        """Return the launch of a program; wide values are addressed as if all rows were there."""
        region, made, function = self.call.region, made_of_step(step), _function(step)
        space = self.call.space(step, last - first)
        if space is None or function is None:
            raise InternalError("a program of a region is bound that the kernel does not take")
        arrays = tuple([self.arrays[v] for v in (*step.reads, *step.makes)])
        block, kept = argument_words(made, space, region.rows, arrays, self.program)
        for position, value in enumerate((*step.reads, *step.makes)):
            if region.is_wide(value):
                block[words.operand(position)] -= first * arrays[position].strides[0]
        rows = runtime.address_of(function, "_rows")
        given = [rows, ctypes.addressof(block), words.STATUS, first, last]
        return native_launch(
            runtime.address_in("chunked.c", "af_chunk_program"),
            [*given, space.chunks.rows, min(self.workers, int(block[words.MAX_WORKERS]))],
            (block, kept, arrays),
            functools.partial(explain_index, made.program, arrays[: len(step.reads)]),
        )

    def _column_sums(self, step: Step, first: int, last: int) -> NativeLaunch:
        (value,), (total,) = step.reads, step.makes
        x, out = self._rows(value, first, last), self.arrays[total]
        is_last = last == self.call.region.rows
        return native_launch(
            runtime.address_in("chunked.c", f"af_column_sums_{x.dtype.name}"),
            [
                *(address(x), last - first, self.call.region.columns, self.call.row_step(value)),
                *(address(self.totals[total]), address(out) if is_last else 0, int(first == 0)),
                self.workers,
            ],
            (x, out, self.totals[total]),
        )


def _programs(region: Region) -> list[Step]:
    return [step for step in region.steps if step.kind is StepKind.PROGRAM]


def _column_sums(region: Region) -> list[int]:
    return [step.makes[0] for step in region.steps if step.kind is StepKind.COLUMN_SUM]


def _function(step: Step) -> CFunction | None:
    return function_of(program_attrs(step))


def _library_for(gemm: Gemm) -> Library | None:
    return next((x for x in LIBRARIES if workspace_bytes(x, gemm) is not None), None)


def _workspace_bytes(gemm: Gemm) -> int | None:
    library = _library_for(gemm)
    return None if library is None else workspace_bytes(library, gemm)


def _is_taken(call: _ChunkCall) -> bool:
    functions = [_function(step) for step in _programs(call.region)]
    if any([function is None or runtime.is_broken(function) for function in functions]):
        return False
    if any([call.space(step, 1) is None for step in _programs(call.region)]):
        return False
    sums = [step for step in call.region.steps if step.kind is StepKind.COLUMN_SUM]
    dtypes = [call.view(step.reads[0], 1, 0).dtype for step in sums]
    is_summed = all([dtype in _SUMMED for dtype in dtypes])
    return is_summed and all(
        [gemm is not None and _library_for(gemm) is not None for gemm in call.gemms()]
    )


def _work(call: _ChunkCall) -> Work:
    region, work = call.region, Work(0.0)
    for step in region.steps:
        if step.kind is StepKind.PROGRAM:
            own = program_work(made_of_step(step).program, region.rows, region.columns)
        elif step.kind is StepKind.COLUMN_SUM:
            continue
        else:
            gemm = call.gemm(step, region.rows, adds=False)
            own = Work(0.0) if gemm is None else product_work(gemm)
        work = work.then(own)
    return work


def _explain(joined: JoinedLaunches, status: int) -> str:
    """Say what the step that failed says. Raises what it raises."""
    return str(joined.launches[joined.running].error(status))


CHUNKED_KERNELS = (ChunkedKernel(),)
