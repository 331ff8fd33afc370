"""A product and the program that reads it as one launch: a chunk works on its rows while cached.

The product is written where an output of the program will be, if it reads each element of the
product no later than it stores that output; else into the workspace. The chunks are those of the
product, whole rows, and the program's partial sums are one per chunk.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import region as region_of
from actors.kernels.codegen import arguments as words
from actors.kernels.codegen.chunks import Chunks
from actors.kernels.codegen.fused_kernel import (
    argument_words,
    explain_index,
    pieces_of,
    program_in_c,
    program_work,
)
from actors.kernels.codegen.programs import Made, function_of
from actors.kernels.codegen.region_arrays import (
    check_once,
    made_of_step,
    program_attrs,
    shared_bytes,
)
from actors.kernels.codegen.spaces import LoopSpace, in_place_pairs, row_strides
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace
from actors.kernels.library import tuning
from actors.kernels.native import runtime
from actors.kernels.native.gemm import (
    Chunk,
    Gemm,
    MatrixView,
    chunks_of,
    gemm_of,
    views_of,
)
from actors.kernels.native.gemm_launch import Epilogue, Library, ProductScratch, gemm_launch
from actors.kernels.native.launch import NativeLaunch, native_launch
from actors.kernels.native.matmul import LIBRARIES, product_in_c, product_work
from actors.kernels.native.runtime import CFunction
from actors.kernels.scratch import Piece
from actors.kernels.work import CWork
from actors.protocol import Arrays
from compiler.errors import InternalError
from compiler.fusion.program import FusedProgram
from compiler.fusion.region import Region, Step, StepKind
from compiler.types import TensorType


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that is taken: the product with its chunks, and the program's space.

    `pairs` are outputs and inputs of the region that may share bytes; the product goes to output
    `target`, or with -1 to the workspace.
    """

    region: Region
    made: Made
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
        product = 0 if self.target >= 0 else self.gemm.m * self.gemm.n
        itemsize = self.gemm.out_dtype.itemsize
        return (
            Piece((size,), np.dtype(np.uint8)),
            Piece((scratch.size_bytes(self.program_pieces(num_workers)),), np.dtype(np.uint8)),
            Piece((product * itemsize,), np.dtype(np.uint8)),
        )

    def program_pieces(self, num_workers: int) -> tuple[Piece, ...]:
        """Return the scratch of the program."""
        return pieces_of(self.made, self.space, num_workers)


@dataclass(frozen=True, slots=True)
class FusedProductKernel:
    """`region` of a product and a program, by one library that cuts products into whole rows."""

    library: Library
    op: str = "region"

    @property
    def name(self) -> str:
        """Name in the plan: "onednn.rows.fused_product"."""
        return f"{self.library.name}.fused_product"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take the products that this library is chosen for, with C for the program."""
        call = self._call(attrs, inputs, outputs)
        if call is None:
            return None
        if tuning.library_for(call.gemm, LIBRARIES, whole_rows=True) != self.library.name:
            return None
        return self._needs(call, inputs, outputs)

    def needs(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Return what a call needs whose product this library can compute."""
        call = self._call(attrs, inputs, outputs)
        return None if call is None else self._needs(call, inputs, outputs)

    def _call(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> _Call | None:
        if not runtime.is_on():
            return None
        call = _call_of(self.library, attrs, views_of((*inputs, *outputs)))
        return None if call is None or runtime.is_broken(call.function) else call

    def _needs(self, call: _Call, inputs: Operands, outputs: Operands) -> KernelNeeds:
        own = program_work(call.made.program, call.space)
        product = product_work(call.gemm, self.library)
        work = replace(product, passes=own.passes, in_c=partial(_in_c, call, self.library))
        size = scratch.size_bytes(call.pieces(runtime.num_threads()))
        return cost.needs(inputs, outputs, work, size, call.pairs)

    def functions(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> tuple[CFunction, ...]:
        """Return the one function of the program."""
        steps = _steps_of(region_of(attrs, "region"))
        function = None if steps is None else _function(attrs, steps[1])
        return () if function is None else (function,)

    def bind(
        self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace
    ) -> NativeLaunch:
        """Return the launch. Raises CompilerError when the compiler refuses the program."""
        views = views_of((*inputs, *outputs))
        call = _call_of(self.library, attrs, views)
        if call is None:
            raise InternalError(f"{self.name} is bound to arrays that it does not take: {views}")
        workers = scratch.workers_for(call.pieces, workspace, runtime.num_threads())
        own, scratched, made = scratch.carve(workspace, call.pieces(workers))
        extents = (call.gemm.m, call.gemm.n)
        if call.target >= 0:
            product = outputs[call.target].reshape(extents)
        else:
            product = made.view(np.dtype(_ITEMS[call.gemm.out_dtype.itemsize])).reshape(extents)
        values = (*inputs, product, *outputs)
        first, second = call.region.steps
        read = tuple([values[v] for v in second.reads])
        arrays = (*read, *[values[v] for v in second.makes])
        block, kept = argument_words(call.made, call.space, extents[0], arrays, scratched)
        rows, finish = [runtime.address_of(call.function, x) for x in ("_rows", "_finish")]
        epilogue = Epilogue(rows, ctypes.addressof(block), (block, kept, arrays))
        operands = (values[first.reads[0]], values[first.reads[1]], product)
        gemm = gemm_launch(self.library, call.gemm, operands, own, epilogue, workers)
        return native_launch(
            runtime.address_in("fused_product.c", "af_fused_product"),
            [gemm.function, gemm.arguments, finish, ctypes.addressof(block), words.STATUS],
            (gemm, block, kept, arrays),
            functools.partial(_explain, call.made.program, read, block, gemm),
        )


_ITEMS = {2: np.uint16, 4: np.float32, 8: np.float64}


def _in_c(call: _Call, library: Library) -> CWork:
    """Return what C does: the program finds the product's rows in cache, and opens no pool."""
    product, own = product_in_c(call.gemm, library), program_in_c(call.made.program, call.space)
    return replace(product.then(own), openings=product.openings, pieces=product.pieces)


def _steps_of(region: Region) -> tuple[Step, Step] | None:
    """Return the product and the program of a region that has nothing else."""
    kinds = [step.kind for step in region.steps]
    if region.chunk_rows or kinds != [StepKind.PRODUCT, StepKind.PROGRAM] or len(region.held) != 1:
        return None
    first, second = region.steps
    return (first, second) if region.num_reads(region.num_inputs) == 1 else None


def _function(attrs: Attrs, program: Step) -> CFunction | None:
    return function_of({**attrs, **program_attrs(program)})


def _call_of(library: Library, attrs: Attrs, known: tuple[MatrixView, ...] | None) -> _Call | None:
    """Return what a call comes to; None for one that is not taken."""
    region = region_of(attrs, "region")
    steps = _steps_of(region)
    if steps is None or known is None:
        return None
    check_once(region, tuple([TensorType(x.dtype, x.shape) for x in known[: region.num_inputs]]))
    (first, second), (rows, columns) = steps, (region.rows, region.columns)
    made, function = made_of_step(second), _function(attrs, second)
    product = MatrixView(region.held[0].dtype, (rows, columns), (columns, 1))
    views = (*known[: region.num_inputs], product, *known[region.num_inputs :])
    gemm = gemm_of(views[first.reads[0]], views[first.reads[1]], product)
    if function is None or gemm is None:
        return None
    if gemm.batch or gemm.is_swapped or (gemm.m, gemm.n) != (rows, columns):
        return None
    own = [views[v] for v in (*second.reads, *second.makes)]
    strides = row_strides(made.program, columns, tuple([(x.shape, x.strides) for x in own]))
    chunks = chunks_of(gemm, library.cut)
    needed = library.scratch(gemm, chunks)
    if strides is None or needed is None:
        return None
    cut = Chunks(chunks[0].rows, len(chunks), columns, 0)
    space = LoopSpace(rows, columns, tuple(strides), cut)
    found = in_place_pairs(made.program, made.schedule, rows, own)
    over, pairs = shared_bytes(region, [(second, found)])
    target = over[region.num_inputs] - region.first_output if over else -1
    return _Call(region, made, function, gemm, chunks, needed, space, pairs, target)


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


FUSED_PRODUCT_KERNELS = tuple(
    [FusedProductKernel(library) for library in LIBRARIES if library.cut.has_whole_rows]
)
