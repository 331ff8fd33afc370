"""The kernel "cuda.region": the steps of a region, chunk of rows after chunk.

Products go to cuBLASLt, those that add up over chunks with beta 1, and programs to generated
kernels on the rows of the chunk. Scratch is the wide values of one chunk, and beside it what one
step needs: steps follow each other on their stream. Of a region that its kernel may cut, all rows
are one chunk: no smaller one would stay in a cache until the next step reads it.

An operand whose rows a step cannot walk is copied, as a whole: inputs first, outputs last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from actors.kernels.common import kernel
from actors.kernels.common.gemm import MatrixView, view_of_array
from actors.kernels.common.kernel import Attrs, KernelNeeds, KernelPlan, Operands, Piece
from actors.kernels.common.kernel import region as region_of
from actors.kernels.cuda.calls import AlternativeCalls, DeviceCall, LaunchCalls
from actors.kernels.cuda.epilogues import EpilogueProduct, finished_products
from actors.kernels.cuda.kernel import (
    CudaPlan,
    DeviceView,
    Gpu,
    PlacedViews,
    Scratch,
    carve,
    on_device,
)
from actors.kernels.cuda.matmul import PlannedProduct, plan_product
from actors.kernels.cuda.movement import copy_calls, copy_ns, seen_as_array
from actors.kernels.cuda.programs import (
    ProgramStep,
    column_sum_step,
    scheduled_for_device,
    uneven_operands,
)
from actors.kernels.program.spaces import (
    NOWHERE,
    Over,
    RegionArrays,
    ScheduledProgram,
    check_once,
    in_place_pairs,
    meta_arrays,
    shared_bytes,
    tile_scratch,
)
from actors.machine.protocol import Array, Arrays
from compiler.contract.errors import InternalError
from compiler.contract.region import PRODUCTS, TiledLoop, TileStep, TileStepKind
from compiler.contract.types import TensorType, contiguous_strides

_PRODUCT_AND_PROGRAM = [TileStepKind.PRODUCT, TileStepKind.PROGRAM]


def plan_region(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan `region`: its operands in order.

    It takes every region.
    """
    region = region_of(attrs, "region")
    check_once(region, tuple([x.type for x in inputs]))
    steps = _planned(gpu, region, meta_arrays(inputs), meta_arrays(outputs))
    pieces = steps.pieces()

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        sources = tuple(map(seen_as_array, on_device(inputs)))
        targets = tuple(map(seen_as_array, on_device(outputs)))
        places = zip(pieces, carve(workspace, pieces), strict=True)
        arrays = tuple([_array_at(piece, address) for piece, address in places])
        return _CudaSteps(gpu, steps.region, sources, targets, steps.over, arrays).calls()

    _, pairs = steps.shared_bytes()
    pairs = tuple([(o, x) for o, x in pairs if inputs[x].is_dense and outputs[o].is_dense])
    needs = KernelNeeds(kernel.size_bytes(pieces), pairs, steps.duration_ns())
    return KernelPlan(needs, bind)


def _planned(gpu: Gpu, region: TiledLoop, inputs: Arrays, outputs: Arrays) -> _CudaSteps:
    """Return the steps before there is scratch; what can lies where an output will be."""
    region = replace(region, chunk_rows=region.chunk_rows or region.rows)
    first = _CudaSteps(gpu, region, inputs, outputs)
    over, _ = first.shared_bytes()
    return _CudaSteps(gpu, region, inputs, outputs, over) if over else first


class _CudaSteps:
    """The steps of a region on arrays that lie as its operands do; no element is ever touched.

    `own` are the arrays of `pieces`, where there is scratch.
    """

    def __init__(
        self,
        gpu: Gpu,
        region: TiledLoop,
        inputs: Arrays,
        outputs: Arrays,
        over: Over = NOWHERE,
        own: Arrays | None = None,
    ) -> None:
        self.gpu, self.region, self.over = gpu, region, over
        tensors = dict(enumerate(inputs)) | dict(enumerate(outputs, region.first_output))
        self.copied = {v: tensors[v] for v in uneven_operands(region, tensors)}
        copies = tuple([Piece(x.shape, x.dtype) for x in self.copied.values()])
        # In the order of `pieces`: copies, held values, sums; `placed` is cut up likewise below.
        tiles = tile_scratch(region, over, _schedule_of)
        sums = tuple(
            [
                Piece((len(region.chunks()), region.columns), tensors[step.makes[0]].dtype)
                for step in region.steps
                if step.kind is TileStepKind.COLUMN_SUM
            ]
        )
        self._pieces = (*copies, *tiles, *sums)
        self.space = None if own is None else own[0]
        scratch = meta_arrays(self._pieces) if own is None else own[1:]
        dense = dict(zip(self.copied, scratch[: len(copies)], strict=True))
        tile_arrays = scratch[len(copies) : len(copies) + len(tiles)]
        tensors |= dense
        self.arrays = RegionArrays(
            region,
            tuple([tensors[v] for v in range(len(inputs))]),
            tuple([tensors[region.first_output + out] for out in range(len(outputs))]),
            tile_arrays,
            over,
            _schedule_of,
        )
        self.sums = scratch[len(copies) + len(tiles) :]

    def pieces(self) -> tuple[Piece, ...]:
        """Return the scratch: that of a step, copies of what lies unevenly, what is held, sums."""
        sizes = [
            kernel.size_bytes(self._step_pieces(step, *chunk))
            for chunk in self._kinds_of_chunks()
            for step in self.region.steps
        ]
        sizes += [kernel.size_bytes(product.pieces) for product in self._finished()]
        return (Piece((max(sizes, default=0),), np.dtype(np.uint8)), *self._pieces)

    def shared_bytes(self) -> tuple[Over, tuple[tuple[int, int], ...]]:
        """Return what may lie where an output will be: wide values, and pairs (output, input)."""
        programs = [step for step in self.region.steps if step.kind is TileStepKind.PROGRAM]
        return shared_bytes(self.region, [(step, self._in_place(step)) for step in programs])

    def _in_place(self, step: TileStep) -> tuple[tuple[int, int], ...]:
        """Return the outputs of a program with what each may lie over, rows apart or not.

        Of two values in one place the rows are the same: it is asked as if they lay densely. What
        the library may do in the program's place is asked, too: the ways differ in bits, so none
        may depend on where a plan puts something. A product that then never exists lies where its
        finished one will be, so that other outputs may lie over inputs.
        """
        views = []
        for value in (*step.reads, *step.makes):
            view = view_of_array(self.arrays.arrays[value])
            if view is None:
                return ()
            shape = self._extents if self.region.is_wide(value) else view.shape
            views.append(MatrixView(view.dtype, shape, contiguous_strides(shape, 1)))
        scheduled = _schedule_of(step)
        pairs = in_place_pairs(scheduled.program, scheduled.schedule, self.region.rows, views)
        products = self._finished()
        for product in products:
            pairs = product.finish.in_place(pairs, len(step.reads))
        if products:
            (held,), out = self.region.steps[0].makes, products[0].finish.out - len(step.reads)
            pairs = tuple([(o, x) for o, x in pairs if step.reads[x] != held or o == out])
        return pairs

    @property
    def _extents(self) -> tuple[int, int]:
        return self.region.rows, self.region.columns

    def _kinds_of_chunks(self) -> list[tuple[int, int]]:
        """Return a chunk of every number of rows."""
        # All chunks but the last have equal rows, so there are two kinds at most.
        return list({last - first: (first, last) for first, last in self.region.chunks()}.values())

    def duration_ns(self) -> float:
        """Return an estimate: all steps of all chunks, and the copies; or a finished product."""
        ways = [product.duration_ns() for product in self._finished()]
        if ways:
            # The fastest is taken when the plan is loaded, so it is what counts here.
            return min(ways)
        counts = Counter([last - first for first, last in self.region.chunks()])
        steps = [
            counts[last - first] * self._step_ns(step, first, last)
            for first, last in self._kinds_of_chunks()
            for step in self.region.steps
        ]
        copies = [copy_ns(self.gpu, self.arrays.arrays[v], x) for v, x in self.copied.items()]
        return sum(steps) + sum(copies)

    def calls(self) -> LaunchCalls:
        """Return the calls in order."""
        plain = tuple(self._plain_calls())
        finished = [product for product in self._finished() if product.is_aligned]
        if not finished:
            return plain
        ways = [product.calls(self._space) for product in finished]
        return (AlternativeCalls((*ways, plain)),)

    def _finished(self) -> tuple[EpilogueProduct, ...]:
        """Return ways in which the library finishes the one product of the region itself."""
        steps, program = self.region.steps, self.region.steps[-1].program
        if [step.kind for step in steps] != _PRODUCT_AND_PROGRAM or program is None or self.copied:
            return ()
        (product,), step = steps[0].makes, steps[1]
        is_held = self.region.is_wide(product) and self.region.num_reads(product) == 1
        if len(self.region.chunks()) > 1 or not is_held or product not in step.reads:
            return ()
        views = [_view(self.arrays.arrays[value]) for value in (*step.reads, *step.makes)]
        (a, b, _), _ = self._product(steps[0], 0, self.region.rows)
        place = step.reads.index(product)
        return finished_products(self.gpu, program, (a, b), place, self._extents, views)

    def _plain_calls(self) -> Iterator[DeviceCall]:
        """Yield the calls of all steps."""
        for value, array in self.copied.items():
            if value < self.region.num_inputs:
                yield from copy_calls(self.gpu, self.arrays.arrays[value], array)
        for first, last in self.region.chunks():
            for step in self.region.steps:
                yield from self._calls(step, first, last)
        for value, array in self.copied.items():
            if value >= self.region.first_output:
                yield from copy_calls(self.gpu, array, self.arrays.arrays[value])

    def _calls(self, step: TileStep, first: int, last: int) -> Iterator[DeviceCall]:
        if step.kind in PRODUCTS:
            operands, planned = self._product(step, first, last)
            # The first chunk overwrites, so the sum needs no fill with zeros before it.
            adds = step.kind is TileStepKind.SUM_OF_PRODUCTS and first > 0
            yield from planned.calls(operands, carve(self._space, planned.pieces), float(adds))
            return
        yield from self._program(step, first, last).calls(self._space)
        if step.kind is TileStepKind.COLUMN_SUM and last == self.region.rows and first > 0:
            yield from self._total(step).calls(self._space)

    @property
    def _space(self) -> DeviceView | None:
        return None if self.space is None else _view(self.space)

    def _step_pieces(self, step: TileStep, first: int, last: int) -> tuple[Piece, ...]:
        if step.kind in PRODUCTS:
            return self._product(step, first, last)[1].pieces
        pieces = [self._program(step, first, last).pieces]
        if step.kind is TileStepKind.COLUMN_SUM:
            pieces.append(self._total(step).pieces)
        return max(pieces, key=kernel.size_bytes)

    def _step_ns(self, step: TileStep, first: int, last: int) -> float:
        if step.kind in PRODUCTS:
            return self._product(step, first, last)[1].duration_ns()
        return self._program(step, first, last).duration_ns()

    def _product(
        self, step: TileStep, first: int, last: int
    ) -> tuple[tuple[DeviceView, DeviceView, DeviceView], PlannedProduct]:
        a, b, out = [_view(x) for x in self.arrays.product(step, first, last)]
        planned = plan_product(self.gpu, a.as_operand, b.as_operand, out.as_operand)
        if planned is None:
            raise InternalError(f"a product of a region lies at odd bytes: {a}, {b}, {out}")
        return (a, b, out), planned

    def _program(self, step: TileStep, first: int, last: int) -> ProgramStep:
        """Return a program on the rows of a chunk, or the sum over these rows."""
        if step.program is None:
            x = self.arrays.rows(step.reads[0], first, last)
            number = self.region.chunks().index((first, last))
            is_alone = len(self.region.chunks()) == 1
            out = self.arrays.arrays[step.makes[0]] if is_alone else self._sums(step)[number]
            return column_sum_step(self.gpu, _view(x), _view(out))
        views = tuple([self._whole(v, first) for v in (*step.reads, *step.makes)])
        return ProgramStep(self.gpu, step.program, self._extents, views, (first, last))

    def _total(self, step: TileStep) -> ProgramStep:
        out = self.arrays.arrays[step.makes[0]]
        return column_sum_step(self.gpu, _view(self._sums(step)), _view(out))

    def _sums(self, step: TileStep) -> Array:
        """Return the scratch with a row of sums for each chunk."""
        steps = [s for s in self.region.steps if s.kind is TileStepKind.COLUMN_SUM]
        return self.sums[steps.index(step)]

    def _whole(self, value: int, first: int) -> DeviceView:
        """Return a value as if all of its rows were there, where a chunk begins at row `first`."""
        view = _view(self.arrays.arrays[value])
        if not self.region.is_wide(value) or value in self.over:
            return view
        # Only the chunk's rows are there: row `first` of the value is row 0 of the buffer.
        address = view.address - first * view.strides_bytes[0]
        return replace(view, address=address, type=TensorType(view.dtype, self._extents))


def _schedule_of(step: TileStep) -> ScheduledProgram:
    if step.program is None:
        raise InternalError(f"a step {step.kind.value} has no program")
    return scheduled_for_device(step.program)


def _array_at(piece: Piece, address: int) -> Array:
    """Return a piece of scratch at its address."""
    view = view_of_array(meta_arrays((piece,))[0])
    if view is None:
        raise InternalError(f"scratch of odd strides: {piece}")
    strides = contiguous_strides(piece.shape, piece.dtype.itemsize)
    return seen_as_array(DeviceView(address, TensorType(view.dtype, piece.shape), strides))


def _view(array: Array) -> DeviceView:
    """Return where an array lies; one of uint16 is taken for bfloat16, as no region has others."""
    view = view_of_array(array)
    if view is None:
        raise InternalError(f"an operand of a region has odd strides: {array.strides}")
    return DeviceView(array.ctypes.data, TensorType(view.dtype, array.shape), array.strides)
