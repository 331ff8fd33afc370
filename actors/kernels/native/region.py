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
from dataclasses import replace

import numpy as np

from actors.kernels.common import cost, kernel
from actors.kernels.common.gemm import Gemm, ThreadCut, gemm_of, views_of
from actors.kernels.common.host_memory import address
from actors.kernels.common.kernel import (
    Attrs,
    HostPlan,
    Kernel,
    KernelPlan,
    Operands,
    Piece,
    Work,
    Workspace,
)
from actors.kernels.common.kernel import region as region_of
from actors.kernels.library import runtime
from actors.kernels.library.gemm_launch import (
    Library,
    Matrices,
    OpenBlas,
    gemm_launch,
    workspace_bytes,
)
from actors.kernels.library.gemm_onednn import OneDnn
from actors.kernels.library.launch import NativeChain, NativeLaunch, native_launch
from actors.kernels.library.runtime import CFunction
from actors.kernels.native.emit import function_of
from actors.kernels.native.fused import argument_words, explain_index, pieces_of, program_work
from actors.kernels.program import values as words
from actors.kernels.program.phases import MAX_PIECES, Chunks
from actors.kernels.program.spaces import (
    LoopSpace,
    RegionArrays,
    check_once,
    made_of_step,
    meta_arrays,
    program_attrs,
    tile_scratch,
)
from actors.machine.protocol import Arrays
from compiler.contract.errors import InternalError
from compiler.contract.region import PRODUCTS, TiledLoop, TileStep, TileStepKind

LIBRARIES: tuple[Library, ...] = (OneDnn(), OpenBlas())
"""In tiles: with 256 rows of 50,257 columns the fastest, or within 5 % of it, for all three
products (88, 84 and 92 GFLOP/s; in whole rows 75, 57 and 96; two cores, float32)."""

WIDENING: tuple[Library, ...] = (OneDnn(ThreadCut.HALVES), *LIBRARIES)
"""Where b lies across and is wider than deep: a call copies all of b that it reads, which a half
does for all its rows at once (427 x 10,000 x 512: 290 GFLOP/s; in tiles 270)."""

_SUMMED = ("float32", "float64")


def _plan_region(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `region`: those that are cut into chunks, their operands in order.

    It takes regions with C for every program and a library for every product.
    """
    region = region_of(attrs, "region")
    check_once(region, tuple([x.type for x in inputs]))
    if not runtime.is_enabled() or not region.chunk_rows or views_of((*inputs, *outputs)) is None:
        return None
    if not all([x.is_dense for x in outputs]):
        return None
    steps = _NativeSteps(RegionArrays.planned(region, meta_arrays(inputs), meta_arrays(outputs)))
    if not steps.are_taken():
        return None

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> NativeLaunch:
        workers = kernel.workers_for(steps.pieces, workspace, runtime.num_threads())
        library, program, *tiles = kernel.carve(workspace, steps.pieces(workers))
        arrays = RegionArrays(region, inputs, outputs, tuple(tiles))
        bound = _NativeSteps(arrays, workers, library, program)
        launches = [bound.launch(s, *rows) for rows in region.chunks() for s in region.steps]
        chain = NativeChain(tuple(launches))
        return NativeLaunch(
            runtime.chain_runner(),
            chain.address,
            (chain, inputs, outputs, workspace),
            functools.partial(_explain, chain),
        )

    size = kernel.size_bytes(steps.pieces(runtime.num_threads()))
    return KernelPlan(cost.needs(inputs, outputs, steps.work(), size), bind)


class _NativeSteps:
    """The steps of a region on its arrays, for so many workers, with scratch for two."""

    def __init__(
        self,
        bound: RegionArrays,
        workers: int = 1,
        library: Workspace = None,
        program: Workspace = None,
    ) -> None:
        self.bound, self.region = bound, bound.region
        self.workers, self.library, self.program = workers, library, program

    def gemms(self) -> list[Gemm | None]:
        """Return the products of every chunk that is unlike the one before."""
        # A product is told by the rows of its chunk, and by whether it adds to what is there.
        kinds = {(last - first, first > 0): (first, last) for first, last in self.region.chunks()}
        products = [step for step in self.region.steps if step.kind in PRODUCTS]
        return [self._gemm(step, *chunk)[0] for step in products for chunk in kinds.values()]

    def are_taken(self) -> bool:
        """Whether there is C for every program and sum, and a library for every product."""
        for step in _programs(self.region):
            function = _function(step)
            if function is None or runtime.is_broken(function) or self._space(step, 1) is None:
                return False
        sums = [step for step in self.region.steps if step.kind is TileStepKind.COLUMN_SUM]
        if any([self.bound.arrays[s.reads[0]].dtype.name not in _SUMMED for s in sums]):
            return False
        return all([gemm is not None and _library_for(gemm) is not None for gemm in self.gemms()])

    def pieces(self, num_workers: int) -> tuple[Piece, ...]:
        """Return the scratch of libraries, of programs, and of what is held."""
        rows = self.region.chunk_rows
        programs = [
            kernel.size_bytes(pieces_of(made_of_step(step), space, num_workers))
            for step in _programs(self.region)
            for space in (self._space(step, rows),)
            if space is not None
        ]
        libraries = [_workspace_bytes(gemm) or 0 for gemm in self.gemms() if gemm is not None]
        sizes = (max(libraries, default=0), max(programs, default=0))
        call_pieces = [Piece((size,), np.dtype(np.uint8)) for size in sizes]
        return (*call_pieces, *tile_scratch(self.region))

    def work(self) -> Work:
        """Return the work of all chunks."""
        work = replace(self.bound.products_work(), is_native=True)
        for step in _programs(self.region):
            space = self._space(step, self.region.chunk_rows)
            if space is not None:
                work = work.then(program_work(made_of_step(step).program, space))
        return work

    def launch(self, step: TileStep, first: int, last: int) -> NativeLaunch:
        """Return the launch of a step on the rows of a chunk."""
        if step.kind is TileStepKind.PROGRAM:
            return self._program(step, first, last)
        if step.kind is TileStepKind.COLUMN_SUM:
            return self._column_sums(step, first, last)
        gemm, (a, b, out) = self._gemm(step, first, last)
        library = None if gemm is None else _library_for(gemm)
        if gemm is None or library is None:
            raise InternalError(f"no library takes a product of a region: {gemm}")
        operands = (b, a, out) if gemm.is_swapped else (a, b, out)
        return gemm_launch(library, gemm, operands, self.library, None, self.workers)

    def _gemm(self, step: TileStep, first: int, last: int) -> tuple[Gemm | None, Matrices]:
        """Return the product of a step on some rows, and its arrays."""
        arrays = self.bound.product(step, first, last)
        views = views_of(arrays)
        gemm = None if views is None else gemm_of(*views)
        # The first chunk overwrites, so the sum needs no fill with zeros before it.
        adds = step.kind is TileStepKind.SUM_OF_PRODUCTS and first > 0
        return None if gemm is None else replace(gemm, adds=adds), arrays

    def _space(self, step: TileStep, rows: int) -> LoopSpace | None:
        """Return the space of a program, cut for a chunk of some rows."""
        region, strides = self.region, self.bound.strides(step)
        if strides is None:
            return None
        piece = -(-rows // MAX_PIECES)
        cut = Chunks(piece, -(-rows // piece), region.columns, 0)
        return LoopSpace(region.rows, region.columns, tuple(strides), cut)

    def _program(self, step: TileStep, first: int, last: int) -> NativeLaunch:
        """Return the launch of a program; wide values are addressed as if all rows were there."""
        region, scheduled, function = self.region, made_of_step(step), _function(step)
        space = self._space(step, last - first)
        if space is None or function is None:
            raise InternalError("a program of a region is bound that the kernel does not take")
        arrays = self.bound.of((*step.reads, *step.makes))
        block, scratch = argument_words(scheduled, space, region.rows, arrays, self.program)
        for position, value in enumerate((*step.reads, *step.makes)):
            if region.is_wide(value):
                # The buffer holds the chunk's rows only: row `first` of the value is its row 0.
                block[words.operand(position)] -= first * arrays[position].strides[0]
        rows = runtime.address_of(function, "_rows")
        head = [rows, ctypes.addressof(block), words.STATUS, first, last]
        return native_launch(
            runtime.address_in("chunked.c", "af_chunk_program"),
            [*head, space.chunks.rows, min(self.workers, int(block[words.MAX_WORKERS]))],
            (block, scratch, arrays),
            functools.partial(explain_index, scheduled.program, arrays[: len(step.reads)]),
        )

    def _column_sums(self, step: TileStep, first: int, last: int) -> NativeLaunch:
        (value,), (total,) = step.reads, step.makes
        x, out = self.bound.rows(value, first, last), self.bound.arrays[total]
        added, is_last = self.bound.totals[total], last == self.region.rows
        return native_launch(
            runtime.address_in("chunked.c", f"af_column_sums_{x.dtype.name}"),
            [
                *(address(x), last - first, self.region.columns, x.strides[0] // x.itemsize),
                # In float64 until the last chunk, which rounds the sum into the output.
                *(address(added), address(out) if is_last else 0, int(first == 0)),
                self.workers,
            ],
            (x, out, added),
        )


def _programs(region: TiledLoop) -> list[TileStep]:
    return [step for step in region.steps if step.kind is TileStepKind.PROGRAM]


def _function(step: TileStep) -> CFunction | None:
    return function_of(program_attrs(step))


def _library_for(gemm: Gemm) -> Library | None:
    libraries = WIDENING if gemm.n > gemm.k and gemm.b.column != 1 else LIBRARIES
    return next((x for x in libraries if workspace_bytes(x, gemm) is not None), None)


def _workspace_bytes(gemm: Gemm) -> int | None:
    library = _library_for(gemm)
    return None if library is None else workspace_bytes(library, gemm)


def _explain(joined: NativeChain, status: int) -> str:
    """Say what the step that failed says. Raises what it raises."""
    return str(joined.launches[joined.running].error(status))


def functions_of_region(attrs: Attrs) -> tuple[CFunction, ...]:
    """Return the functions of the programs of a region."""
    c_functions = [_function(step) for step in _programs(region_of(attrs, "region"))]
    return tuple([function for function in c_functions if function is not None])


CHUNKED_KERNELS = (Kernel("c.chunked", "region", _plan_region),)
