"""The kernel "numpy.region": the steps of a region by numpy, chunk after chunk.

It takes the calls that native kernels do not. Floats of 16 bits are computed in float32, as in
"numpy.fused". A region that is cut by its kernel has chunks that stay in cache, but where a program
looks at all rows.

numpy's product cannot add to its output. The first chunk writes a sum of products; the others add a
product of `PRODUCT_BYTES` at a time, so that scratch does not hold the sum twice.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

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
    Piece,
    Work,
    Workspace,
    checked,
    in_sequence,
    index_pieces,
    operands_of,
    over_blocks,
    require_plan,
)
from actors.kernels.common.kernel import region as region_of
from actors.kernels.common.strides import cut
from actors.kernels.program.spaces import (
    Over,
    RegionArrays,
    check_once,
    made_of_step,
    meta_arrays,
    program_attrs,
    shared_bytes,
    tile_scratch,
)
from actors.kernels.reference.bfloat16 import has_halves
from actors.kernels.reference.fused import NUMPY_FUSED_KERNELS
from actors.kernels.reference.matmul import Window, merged_rows
from actors.kernels.reference.reduce import WIDE, column_sums
from actors.kernels.reference.walk import BYTE
from actors.machine.protocol import Array, Arrays, Launch
from compiler.contract.errors import InternalError
from compiler.contract.program import Kind
from compiler.contract.region import TiledLoop, TileStep, TileStepKind
from compiler.contract.types import HALVES, DType

PRODUCT_BYTES = 4 << 20
"""Bytes of a product that is added to a sum: between 1 and 8 MiB the time is the same, and the
fewer calls the better. [50257, 768], 960 rows in chunks of 160: 0.41 s; without adding, 0.39 s."""

PIECE_BYTES = 1 << 20
"""Bytes of the wide value of a chunk where the kernel cuts."""

(_FUSED,) = NUMPY_FUSED_KERNELS


def _plan_region(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `region`: its operands in order.

    It takes every region on operands whose rows are evenly spaced.
    """
    region = _widened_region(region_of(attrs, "region"))
    if has_halves((*inputs, *outputs)) or not _takes_outputs(region, outputs):
        return None
    check_once(region, tuple([x.type for x in inputs]))
    steps = _planned(_cut(region), meta_arrays(inputs), meta_arrays(outputs))
    pieces = steps.pieces()
    if pieces is None:
        return None
    count = len(tile_scratch(steps.region, steps.bound.over))

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        arrays = list(kernel.carve(workspace, pieces))
        tiles, checks, space = tuple(arrays[:count]), arrays[count:-1], arrays[-1]
        bound = RegionArrays(steps.region, inputs, outputs, tiles, steps.bound.over)
        return in_sequence(_NumpySteps(bound, space, checks).calls())

    _, pairs = steps.shared_bytes()
    pairs = tuple([(o, x) for o, x in pairs if inputs[x].is_dense and outputs[o].is_dense])
    work = _work(steps.bound, inputs[0].dtype.itemsize)
    return KernelPlan(cost.needs(inputs, outputs, work, kernel.size_bytes(pieces), pairs), bind)


def _takes_outputs(region: TiledLoop, outputs: Operands) -> bool:
    """Whether all outputs are dense, or are made by rows that lie evenly apart.

    Others numpy would see as a matrix only in a copy.
    """
    by_rows = [TileStepKind.PROGRAM, TileStepKind.PRODUCT]
    row_values = {value for step in region.steps if step.kind in by_rows for value in step.makes}
    return all(
        [
            x.is_dense or (value in row_values and _lies_by_rows(x, region.rows))
            for value, x in enumerate(outputs, region.first_output)
        ]
    )


def _lies_by_rows(out: Operand, rows: int) -> bool:
    if len(out.shape) < 2 or math.prod(out.shape[:-1]) != rows:
        return False
    window = merged_rows(Window(out.shape, out.strides_bytes, out.dtype))
    return window is not None and window.is_row_major


@functools.lru_cache(maxsize=1024)
def _widened_region(region: TiledLoop) -> TiledLoop:
    """Return a region that computes in float32 where it says less, as in `bfloat16.upcast`."""
    widened: TiledLoop = _widened(region)
    return widened


def _widened(part: Any) -> Any:
    if part in HALVES:
        return DType.FLOAT32
    if isinstance(part, tuple):
        return tuple([_widened(x) for x in part])
    if not is_dataclass(part) or isinstance(part, type):
        return part
    return replace(part, **{f.name: _widened(getattr(part, f.name)) for f in fields(part)})


def _cut(region: TiledLoop) -> TiledLoop:
    """Return a region with chunks: of its own, or in place of none such as stay in cache."""
    rows = region.chunk_rows or region.rows
    if not region.chunk_rows and not region.looks_at_all_rows():
        item = max([value.dtype.itemsize for value in region.held])
        rows = min(rows, max(1, PIECE_BYTES // (item * region.columns)))
    return replace(region, chunk_rows=rows)


def _planned(region: TiledLoop, inputs: Arrays, outputs: Arrays) -> _NumpySteps:
    """Return the steps before there is scratch; what can lies where an output will be."""
    first = _NumpySteps(RegionArrays.planned(region, inputs, outputs))
    if not first.takes_programs():
        return first  # which has no pieces
    over, _ = first.shared_bytes()
    return _NumpySteps(RegionArrays.planned(region, inputs, outputs, over)) if over else first


class _NumpySteps:
    """The steps of a region on its arrays, with scratch for a step and for checks of indices."""

    def __init__(
        self, bound: RegionArrays, space: Workspace = None, checks: Sequence[Array] = ()
    ) -> None:
        self.bound, self.region = bound, bound.region
        self.space, self.checks = space, checks

    def pieces(self) -> tuple[Piece, ...] | None:
        """Return the scratch: what is held, checks, a step's; None where numpy takes no program."""
        if not self.takes_programs():
            return None
        sizes = [self._step_bytes(step) for step in self.region.steps]
        step_sizes = [size for size in sizes if size is not None]
        if len(step_sizes) < len(sizes):
            return None
        checks = [p for _ in self._checks() for p in index_pieces(self.region.rows)]
        tiles = tile_scratch(self.region, self.bound.over)
        return (*tiles, *checks, Piece((max(step_sizes, default=0),), BYTE))

    def takes_programs(self) -> bool:
        """Whether numpy can walk through the operands of every program by rows."""
        programs = [step for step in self.region.steps if step.kind is TileStepKind.PROGRAM]
        return all([self.bound.strides(step) is not None for step in programs])

    def _step_bytes(self, step: TileStep) -> int | None:
        region = self.region
        if step.kind is TileStepKind.PROGRAM:
            chunks = {last - first: (first, last) for first, last in region.chunks()}
            plans = [self._program_plan(step, *chunk) for chunk in chunks.values()]
            sizes = [plan.needs.workspace_bytes for plan in plans if plan is not None]
            return max(sizes) if len(sizes) == len(plans) else None
        if step.kind is TileStepKind.COLUMN_SUM:
            return Piece((region.columns,), WIDE).size_bytes
        if step.kind is TileStepKind.PRODUCT:
            return 0
        return max(PRODUCT_BYTES, 8 * region.columns)  # a row of a product at least

    def shared_bytes(self) -> tuple[Over, tuple[tuple[int, int], ...]]:
        """Return what may lie where an output will be: wide values, and pairs (output, input)."""
        programs = [step for step in self.region.steps if step.kind is TileStepKind.PROGRAM]
        pairs = [self._in_place(step, *self.region.chunks()[0]) for step in programs]
        return shared_bytes(self.region, zip(programs, pairs, strict=True))

    def _in_place(self, step: TileStep, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """Return the outputs of a program with what each may lie over, rows apart or not.

        Of two values in one place the rows are the same: it is asked as if they lay densely.
        """
        meta = [
            meta_arrays(tuple([Piece(x.shape, x.dtype) for x in arrays]))
            for arrays in self._operands(step, first, last)
        ]
        inputs, outputs = [operands_of(x) for x in meta]
        plan = _FUSED.plan(self._attrs(step, last - first), inputs, outputs)
        return () if plan is None else plan.needs.in_place

    def calls(self) -> Iterator[Launch]:
        """Yield the calls; positions of bad indices are those among all rows."""
        checks = zip(self._checks(), self.checks[::2], self.checks[1::2], strict=True)
        for (labels, extent), dense, extremes in checks:
            yield checked("label", labels, extent, dense, extremes)
        for first, last in self.region.chunks():
            for step in self.region.steps:
                yield from self._calls(step, first, last)

    def _calls(self, step: TileStep, first: int, last: int) -> Iterator[Launch]:
        if step.kind is TileStepKind.PROGRAM:
            inputs, outputs = self._operands(step, first, last)
            operands = [operands_of(x) for x in (inputs, outputs)]
            plan = require_plan(_FUSED, self._attrs(step, last - first), *operands)
            yield plan.bind(inputs, outputs, self.space)
        elif step.kind is TileStepKind.COLUMN_SUM:
            yield from self._column_sum(step, first, last)
        elif step.kind is TileStepKind.PRODUCT or first == 0:
            a, b, out = self.bound.product(step, first, last)
            yield partial(np.matmul, a, b, out=out)
        else:
            yield from self._added_product(*self.bound.product(step, first, last))

    def _added_product(self, a: Array, b: Array, total: Array) -> Iterator[Launch]:
        width = max(1, PRODUCT_BYTES // (total.itemsize * b.shape[1]))
        for left, part in cut((a, total), 1, width):
            piece = Piece(part.shape, part.dtype)
            (product,) = kernel.carve(self.space, (piece,))
            yield partial(np.matmul, left, b, out=product)
            # numpy's product cannot add to its output.
            yield partial(np.add, part, product, out=part)

    def _column_sum(self, step: TileStep, first: int, last: int) -> Iterator[Launch]:
        (value,), (target,) = step.reads, step.makes
        (part,) = kernel.carve(self.space, (Piece((self.region.columns,), WIDE),))
        total, x = self.bound.totals[target], self.bound.rows(value, first, last)
        # The total outlives chunks: it begins at 0 in each step.
        if first == 0:
            yield partial(total.fill, 0)
        yield from column_sums(x, total, part, np.empty(0, x.dtype))
        if last == self.region.rows:
            out = self.bound.arrays[target].reshape(-1)
            yield partial(np.copyto, out, total, casting="unsafe")

    def _program_plan(self, step: TileStep, first: int, last: int) -> HostPlan | None:
        """Return the plan of "numpy.fused" for a chunk."""
        inputs, outputs = [operands_of(x) for x in self._operands(step, first, last)]
        return _FUSED.plan(self._attrs(step, last - first), inputs, outputs)

    def _attrs(self, step: TileStep, rows: int) -> Attrs:
        return {**program_attrs(step), "rows": rows, "columns": self.region.columns}

    def _operands(self, step: TileStep, first: int, last: int) -> tuple[Arrays, Arrays]:
        """Return what a program reads and makes of the rows of a chunk."""
        operands = [
            self.bound.rows(value, first, last) if self.region.is_wide(value) else rows
            for value, rows in zip(
                (*step.reads, *step.makes), self._by_rows(step, first, last), strict=True
            )
        ]
        count = len(step.reads)
        return tuple(operands[:count]), tuple(operands[count:])

    def _by_rows(self, step: TileStep, first: int, last: int) -> Iterator[Array]:
        """Yield the operands of a program, of those that lie by rows some."""
        program, strides = made_of_step(step).program, self.bound.strides(step)
        if strides is None:
            raise InternalError("a program of a region is bound that numpy does not take")
        places = (*range(len(program.inputs)), *program.outputs)
        for x, place, apart in zip(
            self.bound.of((*step.reads, *step.makes)), places, strides, strict=True
        ):
            kind, item = program.kind_of(place), x.itemsize
            if kind not in (Kind.FULL, Kind.ROW) or self.region.chunk_rows == self.region.rows:
                yield x  # as it is: its rows may be repeated
                continue
            width = (self.region.columns,) * (kind is Kind.FULL)
            shape, step_bytes = (self.region.rows, *width), (apart * item, *[item] * len(width))
            yield np.lib.stride_tricks.as_strided(x, shape, step_bytes)[first:last]

    def _checks(self) -> list[tuple[Array, int]]:
        """Return labels that a program of several chunks checks, and their extent."""
        rows = self.region.rows
        if self.region.chunk_rows == rows:
            return []
        return [
            (list(self._by_rows(step, 0, rows))[i.operands[0]], int(i.constants[0]))
            for step in self.region.steps
            if step.program is not None
            for i in step.program.instructions
            if i.op == "check_index" and i.operands[0] < len(step.reads)
        ]


def _work(bound: RegionArrays, itemsize: int) -> Work:
    """Return passes over all of a wide value, and the products of every chunk."""
    region, work = bound.region, bound.products_work()
    passes: Counter[BytePass] = Counter()
    for step in region.steps:
        if step.program is not None:
            kinds = [step.program.kind_of(v) for v in range(step.program.num_values)]
            passes[BytePass.PLAIN] += kinds.count(Kind.FULL)
        elif step.kind is TileStepKind.COLUMN_SUM:
            passes[BytePass.SIMPLE] += 1
    swept = {sort: float(count) for sort, count in passes.items()}
    return work.then(over_blocks(region.rows * region.columns, itemsize, swept))


REGION_KERNELS = (Kernel("numpy.region", "region", _plan_region),)
