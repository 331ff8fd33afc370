"""The kernel "numpy.chunked": the steps of a region by numpy, chunk after chunk.

It takes the calls that native kernels do not. bfloat16 is computed in float32, as in "numpy.fused".

numpy's product cannot add to its output. The first chunk writes a sum of products; the others add a
product of `PRODUCT_BYTES` at a time, so that scratch does not hold the sum twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import region as region_of
from actors.kernels.codegen.held import HeldBuffers, buffers_of, made_of_step, program_attrs
from actors.kernels.codegen.spaces import row_strides
from actors.kernels.indices import checked, index_pieces
from actors.kernels.interpret.bfloat16 import has_bfloat16
from actors.kernels.interpret.blocks import cut
from actors.kernels.interpret.fused import NumpyFusedKernel
from actors.kernels.interpret.steps import is_numpys
from actors.kernels.interpret.sums import WIDE, SumScratch, column_sums, sum_pieces
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, Operands, Workspace, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import (
    CALLS_PER_PRODUCT,
    BytePass,
    MatrixProduct,
    Work,
    item_weight,
    over_blocks,
)
from actors.protocol import Array, Arrays, Launch
from compiler.errors import InternalError
from compiler.fusion.program import FusedProgram, Kind
from compiler.fusion.region import Region, Step, StepKind, check_region
from compiler.types import DType, TensorType, contiguous_strides, numpy_dtype

PRODUCT_BYTES = 4 << 20
"""Bytes of a product that is added to a sum: between 1 and 8 MiB the time is the same, and the
fewer calls the better. [50257, 768], 960 rows in chunks of 160: 0.41 s; without adding, 0.39 s."""

_FUSED = NumpyFusedKernel()


@dataclass(frozen=True, slots=True)
class NumpyChunkedKernel:
    """`chunked`: the operands of a region in order."""

    name: str = "numpy.chunked"
    op: str = "chunked"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every region on operands whose rows are evenly spaced, with dense outputs."""
        region = _without_bfloat16(region_of(attrs, "region"))
        if has_bfloat16((*inputs, *outputs)) or not all([x.is_dense for x in outputs]):
            return None
        check_region(region, tuple([x.type for x in inputs]))
        plan = _ChunkPlan(region, buffers_of(region))
        steps = [tuple([s // x.dtype.itemsize for s in x.strides_bytes]) for x in inputs]
        shapes = [x.shape for x in inputs]
        if not plan.takes(dict(enumerate(zip(shapes, steps, strict=True)))):
            return None
        size = scratch.size_bytes(plan.pieces())
        return cost.needs(inputs, outputs, _work(region, inputs), size)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the checks of indices, then the steps of every chunk."""
        region = _without_bfloat16(region_of(attrs, "region"))
        plan = _ChunkPlan(region, buffers_of(region))
        return in_sequence(_ChunkBinding(plan, inputs, outputs, workspace).calls())


def _without_bfloat16(region: Region) -> Region:
    """Return a region that computes in float32 where it says bfloat16: so `upcast` calls it."""

    def wide(dtype: DType) -> DType:
        return DType.FLOAT32 if dtype is DType.BFLOAT16 else dtype

    def program(made: FusedProgram | None) -> FusedProgram | None:
        if made is None:
            return None
        entries = tuple([replace(entry, dtype=wide(entry.dtype)) for entry in made.inputs])
        steps = tuple([replace(step, dtype=wide(step.dtype)) for step in made.instructions])
        return FusedProgram(entries, steps, made.outputs)

    return replace(
        region,
        held=tuple([replace(held, dtype=wide(held.dtype)) for held in region.held]),
        outputs=tuple([replace(t, dtype=wide(t.dtype)) for t in region.outputs]),
        steps=tuple([replace(step, program=program(step.program)) for step in region.steps]),
    )


Layouts = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class _ChunkPlan:
    """A region and its scratch."""

    region: Region
    buffers: HeldBuffers

    def takes(self, layouts: Layouts) -> bool:
        """Whether every program can be walked on operands that lie so; outputs are dense."""
        programs = [step for step in self.region.steps if step.kind is StepKind.PROGRAM]
        return all([self._takes(step, layouts) for step in programs])

    def _takes(self, step: Step, layouts: Layouts) -> bool:
        region, program = self.region, made_of_step(step).program
        dense: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for value in (*step.reads, *step.makes):
            is_row = not region.is_wide(value)
            shape = (region.rows,) if is_row else (region.rows, region.columns)
            dense.append(layouts.get(value, (shape, contiguous_strides(shape, 1))))
        return is_numpys(program) and row_strides(program, region.columns, tuple(dense)) is not None

    def pieces(self) -> tuple[Piece, ...]:
        """Return scratch: wide values, values by rows, sums, and what steps need in turn."""
        region = self.region
        size = max([self._step_bytes(step) for step in region.steps], default=0)
        checks = [p for _ in _checks(region) for p in index_pieces(region.rows)]
        sums = [step for step in region.steps if step.kind is StepKind.COLUMN_SUM]
        return (
            *[Piece((region.chunk_rows, region.columns), d) for d in self.buffers.dtypes],
            *[
                Piece((region.rows,), numpy_dtype(held.dtype))
                for held in region.held
                if held.kind is Kind.ROW
            ],
            *[Piece((region.columns,), WIDE) for _ in sums],
            *checks,
            Piece((size,), np.dtype(np.uint8)),
        )

    def _step_bytes(self, step: Step) -> int:
        region = self.region
        if step.kind is StepKind.PROGRAM:
            chunks = {end - row for row, end in region.chunks()}
            return max([self.program_needs(step, rows).workspace_bytes for rows in chunks])
        if step.kind is StepKind.COLUMN_SUM:
            return scratch.size_bytes(_sum_pieces(region))
        if step.kind is StepKind.PRODUCT:
            return 0
        return max(PRODUCT_BYTES, 8 * region.columns)  # a row of a product at least

    def program_needs(self, step: Step, rows: int) -> KernelNeeds:
        """Return what "numpy.fused" needs for a chunk."""
        program = made_of_step(step).program
        kinds = [program.kind_of(v) for v in (*range(len(program.inputs)), *program.outputs)]
        dtypes = [program.dtype_of(v) for v in (*range(len(program.inputs)), *program.outputs)]
        extents = {
            Kind.FULL: (rows, self.region.columns),
            Kind.ROW: (rows,),
            Kind.COLUMN: (self.region.columns,),
            Kind.SCALAR: (),
        }
        operands = [_dense(d, extents[k]) for d, k in zip(dtypes, kinds, strict=True)]
        count = len(program.inputs)
        found = _FUSED.query(
            _attrs(self.region, step, rows), tuple(operands[:count]), tuple(operands[count:])
        )
        if found is None:
            raise InternalError("a program of a region is asked for that numpy does not take")
        return found


def _attrs(region: Region, step: Step, rows: int) -> Attrs:
    return {**program_attrs(step), "rows": rows, "columns": region.columns}


def _dense(dtype: DType, shape: tuple[int, ...]) -> Operand:
    return Operand(TensorType(dtype, shape), 0, contiguous_strides(shape, dtype.itemsize))


def _checks(region: Region) -> list[tuple[int, int]]:
    """Return which operands hold indices, and the extent that they are held to."""
    return [
        (step.reads[i.operands[0]], int(i.constants[0]))
        for step in region.steps
        if step.program is not None
        for i in step.program.instructions
        if i.op == "check_index" and i.operands[0] < len(step.reads)
    ]


def _sum_pieces(region: Region) -> tuple[Piece, ...]:
    size = region.chunk_rows * region.columns
    return (*sum_pieces(size, region.columns), Piece((region.chunk_rows,), WIDE))


class _ChunkBinding:
    """The arrays of a call, and the calls on them."""

    def __init__(
        self, plan: _ChunkPlan, inputs: Arrays, outputs: Arrays, workspace: Workspace
    ) -> None:
        self.plan, self.region = plan, plan.region
        region = plan.region
        own = iter(scratch.carve(workspace, plan.pieces()))
        buffers = [next(own) for _ in plan.buffers.dtypes]
        self.arrays: dict[int, Array] = dict(enumerate(inputs))
        for number, held in enumerate(region.held, region.num_inputs):
            is_wide = held.kind is Kind.FULL
            of_value = plan.buffers.of_value
            self.arrays[number] = buffers[of_value[number]] if is_wide else next(own)
        self.arrays.update(enumerate(outputs, region.first_output))
        sums = [s.makes[0] for s in region.steps if s.kind is StepKind.COLUMN_SUM]
        self.totals = {v: next(own) for v in sums}
        self.checks = [(v, n, next(own), next(own)) for v, n in _checks(region)]
        self.scratch = next(own)

    def calls(self) -> Iterator[Launch]:
        """Yield the calls; positions of bad indices are those among all rows."""
        for value, extent, dense, extremes in self.checks:
            labels = self._by_rows(value)
            yield checked("label", labels, extent, dense, extremes)
        for first, last in self.region.chunks():
            for step in self.region.steps:
                yield from self._calls(step, first, last)

    def _calls(self, step: Step, first: int, last: int) -> Iterator[Launch]:
        if step.kind is StepKind.PROGRAM:
            yield self._program(step, first, last)
        elif step.kind is StepKind.COLUMN_SUM:
            yield from self._column_sum(step, first, last)
        elif step.kind is StepKind.PRODUCT:
            a, b = self._rows(step.reads[0], first, last), self.arrays[step.reads[1]]
            out = self.arrays[step.makes[0]]
            is_inside = self.region.is_wide(step.makes[0])
            out = out if is_inside else out.reshape(self.region.rows, -1)[first:]
            yield partial(np.matmul, a, b, out=out[: last - first])
        else:
            yield from self._sum_of_products(step, first, last)

    def _rows(self, value: int, first: int, last: int) -> Array:
        array = self.arrays[value]
        return array[: last - first] if self.region.is_wide(value) else array[first:last]

    def _sum_of_products(self, step: Step, first: int, last: int) -> Iterator[Launch]:
        a, b = [self._rows(v, first, last) for v in step.reads]
        total = self.arrays[step.makes[0]].reshape(a.shape[1], b.shape[1])
        if first == 0:
            yield partial(np.matmul, a.T, b, out=total)
            return
        width = max(1, PRODUCT_BYTES // (total.itemsize * b.shape[1]))
        for left, part in cut((a.T, total), 1, width):
            size = part.size * part.itemsize
            product = self.scratch[:size].view(part.dtype).reshape(part.shape)
            yield partial(np.matmul, left, b, out=product)
            yield partial(np.add, part, product, out=part)

    def _column_sum(self, step: Step, first: int, last: int) -> Iterator[Launch]:
        (value,), (made,) = step.reads, step.makes
        wide, totals, parts, ones = scratch.carve(self.scratch, _sum_pieces(self.region))
        total, x = self.totals[made], self._rows(value, first, last)
        yield partial(ones.fill, 1)
        if first == 0:
            yield partial(total.fill, 0)
        yield from column_sums(x, 1, ones, total, SumScratch(wide, totals, parts))
        if last == self.region.rows:
            out = self.arrays[made].reshape(-1)
            yield partial(np.copyto, out, total, casting="unsafe")

    def _program(self, step: Step, first: int, last: int) -> Launch:
        program = made_of_step(step).program
        kinds = [program.kind_of(v) for v in (*range(len(program.inputs)), *program.outputs)]
        operands: list[Array] = []
        for value, kind in zip((*step.reads, *step.makes), kinds, strict=True):
            if kind is Kind.FULL:
                operands.append(self._rows(value, first, last))
            elif kind is Kind.ROW:
                operands.append(self._by_rows(value)[first:last])
            else:
                operands.append(self.arrays[value])
        count = len(step.reads)
        attrs = _attrs(self.region, step, last - first)
        return _FUSED.bind(attrs, tuple(operands[:count]), tuple(operands[count:]), self.scratch)

    def _by_rows(self, value: int) -> Array:
        """Return a tensor with one element for each row, evenly spaced, as a vector of them."""
        array = self.arrays[value]
        axes = [(n, s) for n, s in zip(array.shape, array.strides, strict=True) if n > 1]
        step = axes[-1][1] if axes else array.itemsize
        return np.lib.stride_tricks.as_strided(array, (self.region.rows,), (step,))


def _work(region: Region, inputs: Operands) -> Work:
    """Return passes over all of a wide value, and the products of every chunk."""
    chunks, item = len(region.chunks()), inputs[0].dtype.itemsize
    work = Work(0.0)
    for step in region.steps:
        program = step.program
        if program is not None:
            kinds = [program.kind_of(v) for v in range(program.num_values)]
            passes = {BytePass.PLAIN: kinds.count(Kind.FULL)}
            own = over_blocks(region.rows * region.columns, item, passes)
        elif step.kind is StepKind.COLUMN_SUM:
            own = over_blocks(region.rows * region.columns, item, {BytePass.SIMPLE: 1})
        else:
            k, n = [region.columns if region.is_wide(v) else inputs[v].shape[1] for v in step.reads]
            product = MatrixProduct(item_weight(item) * chunks, region.chunk_rows, n, k)
            own = Work(float(CALLS_PER_PRODUCT * chunks), products=(product,))
        work = Work(
            work.calls + own.calls,
            work.loops + own.loops,
            (*work.passes, *own.passes),
            (*work.products, *own.products),
        )
    return work


CHUNKED_KERNELS = (NumpyChunkedKernel(),)
