"""Reductions that no fused kernel makes (`reduce.cuh`); order and recurrences (`along.cuh`).

Floats are added up in float64. Results that are few and long are cut into segments, which a second
launch joins: how many follows from shapes and the GPU, so the bits are the same on every card.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from actors.kernels.common.kernel import (
    Attrs,
    KernelNeeds,
    Operand,
    Operands,
    Piece,
    flag,
    integers,
    size_bytes,
)
from actors.kernels.common.strides import MAX_OUTER, Axis, collapse_axes
from actors.kernels.cuda.calls import DeviceCalls, KernelText, RunKernel, Word
from actors.kernels.cuda.kernel import (
    DeviceView,
    Gpu,
    PlacedView,
    address_of,
    carve,
    on_device,
    places_words,
)
from compiler.contract.errors import InternalError
from compiler.contract.types import DType

_THREADS = 256
_MAX_AXES = 8
_NEIGHBOURS = 32
"""Results that neighbouring threads have where they lie side by side: 128 bytes of float32."""

_LEAST_TERMS = 16
"""Elements of a thread, at least, before a result is cut."""

_MOST_SEGMENTS = 1024
_WIDE_BYTES = 8

_ELEMENTS = {
    DType.FLOAT64: ("double", "(x)", "(x)"),
    DType.FLOAT32: ("float", "(double)(x)", "(float)(x)"),
    DType.FLOAT16: ("uint16_t", "(double)af_from_f16(x)", "af_to_f16((float)(x))"),
    DType.BFLOAT16: ("uint16_t", "(double)af_from_bf16(x)", "af_to_bf16((float)(x))"),
}
"""By type: the type of an element, a double of one, one of a double."""

_WIDEST = (DType.FLOAT64, DType.INT64, DType.UINT64)
"""What is joined: one for each sort of number."""


@dataclass(frozen=True, slots=True)
class CudaReduce:
    """`sum`, `mean` or `max`, where NaN wins."""

    gpu: Gpu
    op: str

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"cuda.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every number, a mean only of floats, and no maximum over no element."""
        (x,), (out,) = inputs, outputs
        if x.type.dtype is DType.BOOL or (self.op == "mean" and not x.type.dtype.is_float):
            return None
        if self.op == "max" and x.type.num_elements == 0 and out.type.num_elements > 0:
            return None
        reduction = _reduction(self.gpu, attrs, x, out)
        if max(len(reduction.kept), len(reduction.reduced)) > _MAX_AXES:
            return None
        moved_bytes = x.type.size_bytes + out.type.size_bytes
        calls = 2 if reduction.num_segments > 1 else 1
        duration = calls * self.gpu.call_ns + self.gpu.bytes_ns(moved_bytes)
        return KernelNeeds(size_bytes(reduction.pieces), duration_ns=duration)

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return the launch over all elements, and one over the segments where there are some."""
        (x,), (out,) = inputs, outputs
        if not (isinstance(x, DeviceView) and isinstance(out, DeviceView)):
            raise InternalError(f"{self.name} reduces what lies on the device")
        if not out.type.num_elements:
            return ()
        whole = _reduction(self.gpu, attrs, x.as_operand, out.as_operand)
        ends = address_of(x), address_of(out)
        of, divisor = self._sort(x.dtype), 1.0
        if self.op == "mean":
            divisor = float(max(whole.num_elements, 1))
        if whole.num_segments == 1:
            return (_call(whole, *ends, divisor, _reduce_text(self.op == "max", x.dtype, x.dtype)),)
        (partials,) = carve(workspace, whole.pieces)
        first, second = whole.into_segments(), whole.of_segments()
        return (
            _call(first, ends[0], partials, 1.0, _reduce_text(self.op == "max", x.dtype, of)),
            _call(second, partials, ends[1], divisor, _reduce_text(self.op == "max", of, x.dtype)),
        )

    def _sort(self, dtype: DType) -> DType:
        """Return the widest type of the sort of number."""
        return next(wide for wide in _WIDEST if wide.value[0] == dtype.value.removeprefix("b")[0])


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
    in_type, from_in, _ = _ELEMENTS.get(of, (f"{of.value}_t", f"({sort})(x)", ""))
    out_type, _, to_out = _ELEMENTS.get(to, (f"{to.value}_t", "", f"({to.value}_t)(x)"))
    first, join = "0", "((a) + (b))"
    if is_maximum:
        lowest = {"double": "(-(double)INFINITY)", "uint64_t": "0", "int64_t": "INT64_MIN"}
        first, join = lowest[sort], "AF_LARGER(a, b)"
    elif sort != "double":  # wraps around
        join = f"(({sort})((uint64_t)(a) + (uint64_t)(b)))"
    finished = to_out
    if sort == "double" and not is_maximum:
        # Divided in double, before the result is rounded to its type.
        finished = to_out.replace("(x)", "(x / a->divisor)")
    defined = {
        "IN": in_type,
        "OUT": out_type,
        "TOTAL": sort,
        "FIRST": first,
        "FROM(x)": from_in,
        "JOIN(a, b)": join,
        "TO(x)": finished,
    }
    lines = [f"#define NAME_{name} {meaning}" for name, meaning in defined.items()]
    body = Path(__file__).with_name("reduce.cuh").read_text(encoding="utf-8")
    about = f"reduces {of.value} to {to.value}"
    return KernelText.of("af_reduce", "\n".join([*lines, body]), ("NAME",), about)


def reduce_kernels(gpu: Gpu) -> tuple[CudaReduce, ...]:
    """Return the kernels of this file for a GPU."""
    return tuple([CudaReduce(gpu, op) for op in ("sum", "mean", "max")])


# Along the last axis: a merge sort of log2(columns / 32) calls, in each of which every element
# looks for its place by itself, without a barrier.

_BLOCK, _SHORT_RUN, _WARP = 256, 32, 32
_TYPES = {
    DType.FLOAT32: ("float", "double", "(double)(x)", "(float)(x)"),
    DType.FLOAT64: ("double", "double", "(x)", "(x)"),
    DType.BFLOAT16: ("uint16_t", "double", "(double)af_from_bf16(x)", "af_to_bf16((float)(x))"),
    DType.FLOAT16: ("uint16_t", "double", "(double)af_from_f16(x)", "af_to_f16((float)(x))"),
    DType.INT64: ("int64_t", "uint64_t", "(uint64_t)(x)", "(int64_t)(x)"),
}
"""By element: its type, what is computed in, what makes that of one, and one of that."""


def _are_walked(x: Operand) -> bool:
    axes = collapse_axes(x.shape[:-1], (x.strides_bytes[:-1],), in_order=True)
    return x.type.dtype in _TYPES and len(axes) <= MAX_OUTER


def _rows(x: DeviceView) -> list[int]:
    return [x.address, x.strides_bytes[-1], *places_words(x.shape[:-1], x.strides_bytes[:-1])]


@functools.cache
def _along_text(dtype: DType) -> KernelText:
    c_type, wide, load, store = _TYPES[dtype]
    # Keys are unsigned numbers in the order of the values, so that one comparison serves all.
    key = "NAME_of_float" if dtype.is_float else "NAME_of_int"
    head = f"#define NAME_T {c_type}\n#define NAME_WIDE {wide}\n#define NAME_KEY(x) {key}(x)\n"
    head += f"#define NAME_FROM(x) {load}\n#define NAME_TO(x) {store}\n"
    text = head + (Path(__file__).parent / "along.cuh").read_text(encoding="utf-8")
    names = ("NAME_keys", "NAME_merge", "NAME_recur")
    return KernelText.of("along", text, names, f"order and recurrences of {dtype}")


@dataclass(frozen=True, slots=True)
class CudaArgsort:
    """`argsort`(x) -> places in ascending order, equal ones as they came; attrs descending."""

    gpu: Gpu
    name: str = "cuda.argsort"
    op: str = "argsort"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take a dense output; scratch is keys and places, twice."""
        (x,), (out,) = inputs, outputs
        if not (_are_walked(x) and out.is_dense and x.shape[-1] < 1 << 31):
            return None
        num, merges = x.type.num_elements, len(_widths(x.shape[-1]))
        moved = self.gpu.call_ns + self.gpu.bytes_ns(24.0 * num)
        return KernelNeeds(size_bytes(_pieces(num)), duration_ns=(1 + merges) * moved)

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return a call for the keys and one for each merge."""
        (x,), (out,) = on_device(inputs), on_device(outputs)
        num, columns = x.type.num_elements, x.shape[-1]
        if not num:
            return ()
        keys, other, places, others = carve(workspace, _pieces(num))
        text, blocks, widths = _along_text(x.dtype), -(-num // _BLOCK), _widths(columns)
        rest, rows = (num, columns), _rows(x)
        is_descending = int(flag(attrs, "descending"))
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


@dataclass(frozen=True, slots=True)
class CudaRecurrence:
    """`recurrence`(a, b): y[i] = a[i] * y[i - 1] + b[i]; attrs reverse."""

    gpu: Gpu
    name: str = "cuda.recurrence"
    op: str = "recurrence"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take a dense output; no scratch."""
        (out,) = outputs
        if not (all(map(_are_walked, inputs)) and out.is_dense):
            return None
        moved_bytes = 5.0 * out.type.size_bytes
        return KernelNeeds(duration_ns=self.gpu.call_ns + self.gpu.bytes_ns(moved_bytes))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return one call, with a block for each row."""
        (a, b), (out,) = on_device(inputs), on_device(outputs)
        if not out.type.num_elements:
            return ()
        columns, text = out.shape[-1], _along_text(out.dtype)
        threads = min(_BLOCK, -(-columns // (4 * _WARP)) * _WARP)
        words = (*_rows(a), *_rows(b), out.address, columns, int(flag(attrs, "reverse")))
        rows = math.prod(out.shape[:-1])
        return (RunKernel(text, text.kernels[2], rows, threads, words),)
