"""Reductions that the compiler does not fuse (`reduce.cuh`); order and recurrences (`along.cuh`).

Floats are added up in float64. Results that are few and long are cut into segments, which a second
launch joins: how many follows from shapes and the GPU, so the bits are the same on every card.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from actors.kernels.common.kernel import (
    Attrs,
    KernelNeeds,
    KernelPlan,
    Operand,
    Operands,
    Piece,
    flag,
    integers,
    size_bytes,
)
from actors.kernels.common.strides import MAX_OUTER, Axis, collapse_axes
from actors.kernels.cuda.calls import (
    KernelText,
    LaunchCalls,
    RunKernel,
    Word,
    file_text,
)
from actors.kernels.cuda.kernel import (
    CudaPlan,
    DeviceView,
    Gpu,
    PlacedViews,
    Scratch,
    address_of,
    carve,
    on_device,
    places_words,
)
from actors.kernels.cuda.programs import ProgramStep, column_sum_step
from actors.kernels.program.values import conversions, storage_of
from compiler.contract.types import DType, TensorType

_THREADS = 256
_MAX_AXES = 8
_NEIGHBOURS = 32
"""Results that neighbouring threads have where they lie side by side: 128 bytes of float32."""

_LEAST_TERMS = 16
"""Elements of a thread, at least, before a result is cut."""

_MOST_SEGMENTS = 1024
_WIDE_BYTES = 8

_WIDEST = (DType.FLOAT64, DType.INT64, DType.UINT64)
"""What is joined: one for each sort of number."""


def plan_reduce(
    op: str, gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands
) -> CudaPlan | None:
    """Plan `sum`, `mean` or `max`, where NaN wins.

    It takes every number, a mean only of floats, and no maximum over no element.
    """
    (x,), (out,) = inputs, outputs
    if x.type.dtype is DType.BOOL or (op == "mean" and not x.type.dtype.is_float):
        return None
    if op == "max" and x.type.num_elements == 0 and out.type.num_elements > 0:
        return None
    whole = _reduction(gpu, attrs, x, out)
    columns = _columns(op, gpu, whole, x, out)
    if columns is not None:
        needs = KernelNeeds(size_bytes(columns.pieces), duration_ns=columns.duration_ns())
        return KernelPlan(needs, partial(_bind_columns, columns))
    if max(len(whole.kept), len(whole.reduced)) > _MAX_AXES:
        return None
    moved_bytes = x.type.size_bytes + out.type.size_bytes
    calls = 2 if whole.num_segments > 1 else 1
    duration = calls * gpu.call_ns + gpu.bytes_ns(moved_bytes)
    needs = KernelNeeds(size_bytes(whole.pieces), duration_ns=duration)

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        x, out = on_device((*inputs, *outputs))
        if not out.type.num_elements:
            return ()
        of, divisor = _sort(x.dtype), 1.0
        if op == "mean":
            divisor = float(max(whole.num_elements, 1))
        is_max = op == "max"
        if whole.num_segments == 1:
            text = _reduce_text(is_max, x.dtype, x.dtype)
            return (_call(whole, x.address, out.address, divisor, text),)
        (partials,) = carve(workspace, whole.pieces)
        first, second = whole.into_segments(), whole.of_segments()
        return (
            _call(first, x.address, partials, 1.0, _reduce_text(is_max, x.dtype, of)),
            _call(second, partials, out.address, divisor, _reduce_text(is_max, of, x.dtype)),
        )

    return KernelPlan(needs, bind)


def _columns(op: str, gpu: Gpu, whole: _Reduction, x: Operand, out: Operand) -> ProgramStep | None:
    """Return a sum over the rows of a matrix as a program, whose threads move 16 bytes at once.

    None for what is no such sum: of a tensor [rows, columns] that lies so, by few axes or many.
    """
    dtype = x.type.dtype
    if op != "sum" or not dtype.is_float or not x.type.num_elements:
        return None
    if len(whole.kept) != 1 or len(whole.reduced) != 1 or not out.is_dense:
        return None
    (kept,), (reduced,), item = whole.kept, whole.reduced, dtype.itemsize
    step = reduced.steps[0]
    if kept.steps != (item, item) or step < kept.extent * item or step % item:
        return None
    matrix = TensorType(dtype, (reduced.extent, kept.extent))
    row = TensorType(dtype, (kept.extent,))
    ends = DeviceView(0, matrix, (step, item)), DeviceView(0, row, (item,))
    return column_sum_step(gpu, *ends)


def _sort(dtype: DType) -> DType:
    """Return the widest type of the sort of number."""
    return next(wide for wide in _WIDEST if wide.value[0] == dtype.value.removeprefix("b")[0])


def _bind_columns(
    columns: ProgramStep, inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch
) -> LaunchCalls:
    views = zip(columns.views, (*inputs, *outputs), strict=True)
    placed = tuple([replace(view, address=address_of(x)) for view, x in views])
    return replace(columns, views=placed).calls(workspace)


@dataclass(frozen=True, slots=True)
class _Reduction:
    """Axes with steps of x and the output, the reduced ones of x alone; outermost first.

    A result has `lanes` threads, which are neighbours in x where it is reduced along its fastest
    axis. The elements of a result are cut into `num_segments`, each to lie `segment_step` bytes
    after the one before it.
    """

    kept: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    lanes: int
    are_lanes_neighbours: bool
    num_segments: int = 1
    segment_step: int = 0

    @property
    def num_results(self) -> int:
        """How many results there are."""
        return math.prod([axis.extent for axis in self.kept])

    @property
    def num_elements(self) -> int:
        """How many elements each of them has."""
        return math.prod([axis.extent for axis in self.reduced])

    @property
    def num_groups(self) -> int:
        """How many blocks all results take."""
        return -(-self.num_results // (_THREADS // self.lanes))

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Scratch: a number for each segment of each result."""
        count = self.num_segments * self.num_results if self.num_segments > 1 else 0
        return (Piece((count,), np.dtype(np.float64)),)

    def into_segments(self) -> _Reduction:
        """Return the reduction whose output is one result after the other, for each segment."""
        kept, step = [], _WIDE_BYTES
        # Dense, the last kept axis fastest: neighbours write neighbours.
        for axis in reversed(self.kept):
            kept.append(Axis(axis.extent, (axis.steps[0], step)))
            step *= axis.extent
        return replace(self, kept=tuple(reversed(kept)), segment_step=step)

    def of_segments(self) -> _Reduction:
        """Return the reduction of what that left."""
        first = self.into_segments()
        kept = [
            Axis(axis.extent, (mid.steps[1], axis.steps[1]))
            for axis, mid in zip(self.kept, first.kept, strict=True)
        ]
        reduced = (Axis(self.num_segments, (first.segment_step,)),)
        lanes = min(_THREADS, _power(self.num_segments))
        if self.num_results > 1:
            lanes = min(lanes, _THREADS // _NEIGHBOURS)
        return _Reduction(tuple(kept), reduced, lanes, are_lanes_neighbours=False)


def _reduction(gpu: Gpu, attrs: Attrs, x: Operand, out: Operand) -> _Reduction:
    axes = integers(attrs, "axes")
    kept_axes = [axis for axis in range(len(x.shape)) if axis not in axes]
    steps = out.strides_bytes
    if flag(attrs, "keepdims"):
        steps = tuple([steps[axis] for axis in kept_axes])
    shape, strides = [x.shape[axis] for axis in kept_axes], [x.strides_bytes[a] for a in kept_axes]
    kept = collapse_axes(tuple(shape), (tuple(strides), steps), in_order=False)
    reduced = collapse_axes(
        tuple([x.shape[axis] for axis in axes]),
        (tuple([x.strides_bytes[axis] for axis in axes]),),
        in_order=False,
    )
    reduction = _Reduction(kept, reduced, 1, are_lanes_neighbours=True)
    # Steps of 0, of repeated axes, say nothing about where neighbours lie.
    fastest = [
        min([abs(a.steps[0]) for a in group if a.steps[0]], default=0) for group in (kept, reduced)
    ]
    is_by_columns = bool(kept) and fastest[0] and (not fastest[1] or fastest[0] < fastest[1])
    lanes = min(_THREADS, _power(reduction.num_elements))
    # Threads follow the kept axis: up to 32 of them have neighbouring results.
    if is_by_columns:
        lanes = min(lanes, _THREADS // min(_NEIGHBOURS, _power(reduction.num_results)))
    reduction = replace(reduction, lanes=lanes, are_lanes_neighbours=not is_by_columns)
    # Segments enough to fill the GPU, as long as each thread has elements enough.
    num_wanted = gpu.num_sms * gpu.threads_per_sm // (max(1, reduction.num_groups) * _THREADS)
    enough = reduction.num_elements // (lanes * _LEAST_TERMS)
    return replace(reduction, num_segments=max(1, min(num_wanted, enough, _MOST_SEGMENTS)))


def _call(plan: _Reduction, x: int, out: int, divisor: float, text: KernelText) -> RunKernel:
    segments = plan.num_segments if plan.segment_step else 1
    segment = -(-max(plan.num_elements, 1) // segments)
    *outer, inner = plan.reduced or (Axis(1, (0,)),)
    words: tuple[Word, ...] = (
        *(x, out, plan.num_results, plan.num_elements),
        len(plan.kept),
        *_padded([axis.extent for axis in plan.kept]),
        *_padded([axis.steps[0] for axis in plan.kept]),
        *_padded([axis.steps[1] for axis in plan.kept]),
        len(outer),
        *_padded([axis.extent for axis in outer]),
        *_padded([axis.steps[0] for axis in outer]),
        *(max(inner.extent, 1), inner.steps[0]),
        *(plan.lanes, plan.are_lanes_neighbours, segments, segment, plan.segment_step),
        divisor,
    )
    return RunKernel(text, text.kernels[0], plan.num_groups * segments, _THREADS, words)


def _padded(column: list[int]) -> list[int]:
    return [*column, *[0] * (_MAX_AXES - len(column))]


def _power(number: int) -> int:
    """Return the power of two that is next to a number, from above; at least 1."""
    return 1 << max(number - 1, 0).bit_length()


@functools.cache
def _reduce_text(is_maximum: bool, of: DType, to: DType) -> KernelText:
    """Return the kernel that makes results of type `to` of elements of type `of`."""
    sort = "double" if of.is_float else "uint64_t" if of.value[0] == "u" else "int64_t"
    first, join = "0", "((a) + (b))"
    if is_maximum:
        lowest = {"double": "(-(double)INFINITY)", "uint64_t": "0", "int64_t": "INT64_MIN"}
        first, join = lowest[sort], "AF_LARGER(a, b)"
    elif sort != "double":  # wraps around
        join = f"(({sort})((uint64_t)(a) + (uint64_t)(b)))"
    finished = conversions(to, sort)["TO(x)"]
    if sort == "double" and not is_maximum:
        # Divided in double, before the result is rounded to its type.
        finished = finished.replace("(x)", "(x / a->divisor)")
    defined = {
        "IN": storage_of(of),
        "OUT": storage_of(to),
        "TOTAL": sort,
        "FIRST": first,
        "FROM(x)": conversions(of, sort)["FROM(x)"],
        "JOIN(a, b)": join,
        "TO(x)": finished,
    }
    text, about = file_text("reduce.cuh", defined), f"reduces {of.value} to {to.value}"
    return KernelText.of("af_reduce", text, ("NAME",), about)


# Along the last axis: a merge sort of log2(columns / 32) calls, in each of which every element
# looks for its place by itself, without a barrier.

_BLOCK, _SHORT_RUN, _WARP = 256, 32, 32


def _are_walked(x: Operand) -> bool:
    axes = collapse_axes(x.shape[:-1], (x.strides_bytes[:-1],), in_order=True)
    is_taken = x.type.dtype.is_float or x.type.dtype is DType.INT64
    return is_taken and len(axes) <= MAX_OUTER


def _rows(x: DeviceView) -> list[int]:
    return [x.address, x.strides_bytes[-1], *places_words(x.shape[:-1], x.strides_bytes[:-1])]


@functools.cache
def _along_text(dtype: DType) -> KernelText:
    # Keys are unsigned numbers in the order of the values, so that one comparison serves all.
    wide, key = ("double", "float") if dtype.is_float else ("uint64_t", "int")
    defined = {"T": storage_of(dtype), "WIDE": wide, "KEY(x)": f"NAME_of_{key}(x)"}
    text = file_text("along.cuh", defined | conversions(dtype, wide))
    names = ("NAME_keys", "NAME_merge", "NAME_recur")
    return KernelText.of("along", text, names, f"order and recurrences of {dtype}")


def plan_argsort(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan `argsort`(x) -> places in ascending order, equal ones as they came; attrs descending.

    It takes a dense output; scratch is keys and places, twice.
    """
    (x,), (out,) = inputs, outputs
    if not (_are_walked(x) and out.is_dense and x.shape[-1] < 1 << 31):
        return None
    num, merges = x.type.num_elements, len(_widths(x.shape[-1]))
    moved = gpu.call_ns + gpu.bytes_ns(24.0 * num)
    needs = KernelNeeds(size_bytes(_pieces(num)), duration_ns=(1 + merges) * moved)
    is_descending = int(flag(attrs, "descending"))

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        x, out = on_device((*inputs, *outputs))
        num, columns = x.type.num_elements, x.shape[-1]
        if not num:
            return ()
        keys, other, places, others = carve(workspace, _pieces(num))
        text, blocks, widths = _along_text(x.dtype), -(-num // _BLOCK), _widths(columns)
        rest, rows = (num, columns), _rows(x)
        words = (*rows, keys, other, places, others, 0, *rest, 0, is_descending)
        calls = [RunKernel(text, text.kernels[0], blocks, _BLOCK, words)]
        for width in widths:
            # The last merge writes places straight to the output.
            target = out.address if width == widths[-1] else 0
            words = (*rows, keys, other, places, others, target, *rest, width, 0)
            calls.append(RunKernel(text, text.kernels[1], blocks, _BLOCK, words))
            # Each merge reads one pair of buffers and writes the other.
            keys, other, places, others = other, keys, others, places
        return tuple(calls)

    return KernelPlan(needs, bind)


def _widths(columns: int) -> list[int]:
    """Return the runs that are merged: 0 for those that are made first."""
    widths, width = [0], _SHORT_RUN
    while width < columns:
        widths.append(width)
        width *= 2
    return widths


def _pieces(num: int) -> tuple[Piece, ...]:
    keys, places = Piece((num,), np.dtype(np.uint64)), Piece((num,), np.dtype(np.uint32))
    return (keys, keys, places, places)


def plan_recurrence(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan `recurrence`(a, b): y[i] = a[i] * y[i - 1] + b[i]; attrs reverse.

    It takes a dense output; no scratch.
    """
    (out,) = outputs
    if not (all(map(_are_walked, inputs)) and out.is_dense):
        return None
    moved_bytes = 5.0 * out.type.size_bytes
    is_reversed = int(flag(attrs, "reverse"))

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        a, b, out = on_device((*inputs, *outputs))
        if not out.type.num_elements:
            return ()
        # A block for each row.
        rows, columns, text = math.prod(out.shape[:-1]), out.shape[-1], _along_text(out.dtype)
        threads = min(_BLOCK, -(-columns // (4 * _WARP)) * _WARP)
        words = (*_rows(a), *_rows(b), out.address, columns, is_reversed)
        return (RunKernel(text, text.kernels[2], rows, threads, words),)

    duration_ns = gpu.call_ns + gpu.bytes_ns(moved_bytes)
    return KernelPlan(KernelNeeds(duration_ns=duration_ns), bind)
