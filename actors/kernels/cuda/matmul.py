"""Products by cuBLASLt: matrices that lie somehow, as calls on matrices that the library takes.

`gemm_of` finds rows, columns and batch. The library sees columns where we see rows: out = a b is
computed as out^T = b^T a^T, of the same bytes. It walks one axis of a batch with even steps; the
others are a loop of calls. What it does not read, and what would need many calls, is copied
first, where that takes less time; so every layout is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from actors.kernels.common import kernel
from actors.kernels.common.gemm import Gemm, MatrixView, Side, gemm_of, views_of
from actors.kernels.common.kernel import Attrs, KernelNeeds, KernelPlan, Operand, Operands, Piece
from actors.kernels.common.strides import collapse_axes
from actors.kernels.cuda.calls import (
    AlternativeCalls,
    DeviceCall,
    DeviceCalls,
    LaunchCalls,
    LtLayout,
    LtProduct,
    RunProduct,
    alignment_of,
)
from actors.kernels.cuda.few_rows import few_rows_call, few_rows_ns
from actors.kernels.cuda.kernel import (
    CudaPlan,
    DeviceView,
    Gpu,
    PlacedViews,
    Scratch,
    carve,
    on_device,
)
from actors.kernels.cuda.movement import copy_calls, copy_ns, seen_as_array
from compiler.contract.types import HALVES, DType, TensorType, contiguous_strides, numpy_dtype

_TILE, _PLAIN_TILE = 128, 64
_LEAST_SPLIT = 512
"""Extents that the library works on, about: where tensor cores multiply, and where they do not. A
sum over less than the third is not split."""

_PLAIN_WAITS = 2
"""How often a product waits for memory beside its work, where tensor cores do not multiply: their
tiles are on their way while others are multiplied. Copies wait as often, so ways are alike in it.
"""

_MOST_PLACES = 65_535
"""Of a batch in one call."""

_TINY, _SHORT = 1 << 24, 2048
"""Multiplications, and an inner extent, of products that run as fast without a workspace. A longer
sum of few elements is split over the SMs, and its parts need a place."""

_HOPPER = (9, 0)

_MOST_TILE, _LEAST_SLICE = 256, 64
"""What no sum is split finer than: parts of this many terms, of tiles of this width."""

_MARGIN_BYTES = 1 << 20
"""For what the library may keep besides parts of sums, such as counters; not measured."""

_WAYS = tuple(product((False, True), (False, True), (False, True)))
"""Which of a, b and out are copied; none, at first."""

_Steps = tuple[int, int, int]
"""Of out, a and b, in elements."""


@dataclass(frozen=True, slots=True)
class PlannedProduct:
    """How out = a @ b is computed, or added to out.

    `copied` are those of `views` (a, b, out) that go through scratch. `form` is None where there
    is nothing to multiply.
    """

    gpu: Gpu
    views: tuple[MatrixView, MatrixView, MatrixView]
    copied: tuple[bool, bool, bool]
    form: Gemm | None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Scratch: the library's workspace, and a dense copy of each that goes through it.

        The library's comes first, for that is where the workspace of a launch is aligned best.
        """
        copies = [
            Piece(_unrepeated(view).shape if is_copied else (0,), numpy_dtype(view.dtype))
            for view, is_copied in zip(self.views, self.copied, strict=True)
        ]
        return (Piece((self._library_bytes,), np.dtype(np.uint8)), *copies)

    @property
    def _library_bytes(self) -> int:
        return 0 if self.form is None else _library_bytes(self.gpu, self.form)

    def duration_ns(self) -> float:
        """Return an estimate: copies, and for each call the multiplications or the bytes."""
        copies = [
            copy_ns(self.gpu, _unread(_dense(_unrepeated(view))), _unread(_unrepeated(view)))
            for view, is_copied in zip(self.views, self.copied, strict=True)
            if is_copied
        ]
        if self.form is None:
            return self.gpu.call_ns + sum(copies)
        batches = _batches(self.form)
        waits_ns = 0 if self.form.dtype in HALVES else _PLAIN_WAITS * self.gpu.latency_ns
        calls = [_call_ns(self.gpu, self.form, batch) for batch in batches]
        return sum(copies) + waits_ns + sum(calls)

    def calls(
        self,
        operands: tuple[DeviceView, DeviceView, DeviceView],
        scratch: tuple[int, ...],
        beta: float = 0.0,
    ) -> DeviceCalls:
        """Return the calls on a, b and out, with the addresses of `pieces`.

        `beta` 1: the product is added to what out has.
        """
        out = operands[2]
        if self.form is None:
            return () if beta else self._zeros(out)
        placed, (workspace, *copies) = [view.address for view in operands], scratch
        before: list[DeviceCall] = []
        after: list[DeviceCall] = []
        for place, view in enumerate(operands):
            if not self.copied[place]:
                continue
            here = seen_as_array(_without_repeats(view))
            dense = _dense(_unrepeated(self.views[place]))
            there = seen_as_array(_placed(dense, copies[place]))
            placed[place] = copies[place]
            # The old values of out matter only where the product is added to them.
            if place < 2 or beta:
                before += copy_calls(self.gpu, there, here)
            if place == 2:
                after += copy_calls(self.gpu, here, there)
        return (*before, *self._products(self.form, placed, workspace, beta), *after)

    @property
    def is_plain(self) -> bool:
        """Whether this is one call of the library, whose columns are those of out."""
        form = self.form
        return not (form is None or any(self.copied) or form.is_swapped or form.batch)

    def _zeros(self, out: DeviceView) -> DeviceCalls:
        zero = np.broadcast_to(np.zeros((), numpy_dtype(out.dtype)), out.shape)
        return copy_calls(self.gpu, seen_as_array(out), zero)

    def _products(
        self, form: Gemm, placed: list[int], workspace: int, beta: float
    ) -> Iterator[RunProduct]:
        """Yield the calls of the library; its first operand is our second one."""
        a, b, out = placed
        if form.is_swapped:
            a, b = b, a
        size = self._library_bytes
        for batch in _batches(form):
            to, first, second = [
                address + step * dtype.itemsize
                for address, step, dtype in zip(
                    (out, a, b), batch.start, (form.out_dtype, form.dtype, form.dtype), strict=True
                )
            ]
            record = _record(form, batch, (to, first, second), beta)
            yield RunProduct(record, second, first, to, to, workspace, size)


@dataclass(frozen=True, slots=True)
class _BatchCall:
    """Places of a batch that one call takes: how many, their steps, and where the first is."""

    count: int
    steps: _Steps
    start: _Steps


def plan_product(gpu: Gpu, a: Operand, b: Operand, out: Operand) -> PlannedProduct | None:
    """Return how a product is computed, by types and layouts alone.

    Of the ways to copy operands that give the library what it takes, the fastest. None where
    elements lie at odd bytes, which no plan has.
    """
    matrices = views_of((a, b, out))
    if matrices is None:
        return None
    views = (matrices[0], matrices[1], matrices[2])
    if 0 in (*a.shape, *b.shape, *out.shape):
        return PlannedProduct(gpu, views, (False, False, False), None)
    ways: list[PlannedProduct] = []
    for copied in _WAYS:
        operands = [
            _dense(_unrepeated(view)) if is_copied else view
            for view, is_copied in zip(views, copied, strict=True)
        ]
        form = gemm_of(*operands)
        if form is not None:
            ways.append(PlannedProduct(gpu, views, copied, form))
            # One call without a copy: no other way can be faster.
            if not any(copied) and len(_batches(form)) == 1:
                break
    return min(ways, key=PlannedProduct.duration_ns)


def _unrepeated(view: MatrixView) -> MatrixView:
    """Return the view without the repeats of a batch: one matrix stands for all of an axis."""
    leading = [1 if s == 0 else n for n, s in zip(view.shape[:-2], view.strides[:-2], strict=True)]
    return replace(view, shape=(*leading, *view.shape[-2:]))


def _without_repeats(view: DeviceView) -> DeviceView:
    steps = zip(view.shape[:-2], view.strides_bytes[:-2], strict=True)
    leading = [1 if s == 0 else n for n, s in steps]
    return replace(view, type=TensorType(view.dtype, (*leading, *view.shape[-2:])))


def _dense(view: MatrixView) -> MatrixView:
    return replace(view, strides=contiguous_strides(view.shape, 1))


def _placed(view: MatrixView, address: int) -> DeviceView:
    strides = tuple([step * view.dtype.itemsize for step in view.strides])
    return DeviceView(address, TensorType(view.dtype, view.shape), strides)


def _unread(view: MatrixView) -> np.ndarray:
    """Return an array that lies so, of which no element may be touched."""
    return seen_as_array(_placed(view, 256))


def _batches(form: Gemm) -> list[_BatchCall]:
    """Return the calls that a batch takes: the longest axis, after joins, is the library's."""
    axes = list(
        collapse_axes(form.batch, (form.out.batch, form.a.batch, form.b.batch), in_order=False)
    )
    if not axes:
        return [_BatchCall(1, (0, 0, 0), (0, 0, 0))]
    # The library steps along one axis of a batch; the others are calls of their own.
    longest = max(axes, key=lambda axis: axis.extent)
    axes.remove(longest)
    calls = []
    for index in product(*[range(axis.extent) for axis in axes]):
        for first in range(0, longest.extent, _MOST_PLACES):
            steps = [
                sum([i * axis.steps[side] for i, axis in zip(index, axes, strict=True)])
                + first * longest.steps[side]
                for side in range(3)
            ]
            count = min(_MOST_PLACES, longest.extent - first)
            calls.append(_BatchCall(count, _three(longest.steps), _three(steps)))
    return calls


def _three(steps: tuple[int, ...] | list[int]) -> _Steps:
    out, a, b = steps
    return out, a, b


def _record(form: Gemm, batch: _BatchCall, places: _Steps, beta: float) -> LtProduct:
    """Return the record of a call: out^T = b^T a^T, by columns."""
    steps = batch.steps if batch.count > 1 else (0, 0, 0)
    alignment = [alignment_of(address) for address in places]
    first, turns_first = _by_columns(form.dtype, form.b, (form.k, form.n), steps[2], alignment[2])
    second, turns_second = _by_columns(form.dtype, form.a, (form.m, form.k), steps[1], alignment[1])
    output, _ = _by_columns(form.out_dtype, form.out, (form.m, form.n), steps[0], alignment[0])
    compute = DType.FLOAT64 if form.dtype is DType.FLOAT64 else DType.FLOAT32
    return LtProduct(first, second, output, turns_first, turns_second, batch.count, beta, compute)


def _by_columns(
    dtype: DType, side: Side, extents: tuple[int, int], step: int, alignment: int
) -> tuple[LtLayout, bool]:
    """Return a matrix of rows and columns as the library's transpose of it, and whether it lies so.

    By rows it is that transpose already; else the library has to turn it.
    """
    rows, columns = extents
    is_by_rows = side.column == 1 and (rows == 1 or side.row >= columns)
    if not is_by_rows:
        rows, columns, side = columns, rows, side.transposed
    # A single row steps nowhere, yet the library checks that its step is long enough.
    apart = columns if rows == 1 else side.row
    return LtLayout(dtype, columns, rows, apart, step, alignment), not is_by_rows


def _library_bytes(gpu: Gpu, form: Gemm) -> int:
    """Return the workspace that the library may have: what all parts of its sums take, at most.

    Small products would be the peak of a small model if they had what large ones get.
    """
    if form.flops < 2 * _TINY and form.k <= _SHORT:
        return 0
    most = 32 << 20 if gpu.capability >= _HOPPER else 4 << 20
    tiles = math.prod(form.batch) * math.prod([-(-x // _MOST_TILE) for x in (form.m, form.n)])
    parts = max(1, min(gpu.num_sms, form.k // _LEAST_SLICE))
    # 4 bytes: parts of sums are float32.
    return min(most, 4 * parts * tiles * _MOST_TILE**2 + _MARGIN_BYTES)


def _call_ns(gpu: Gpu, form: Gemm, batch: _BatchCall) -> float:
    item = form.dtype.itemsize
    places = [batch.count if step else 1 for step in batch.steps]
    moved_bytes = places[0] * form.m * form.n * form.out_dtype.itemsize
    moved_bytes += (places[1] * form.m + places[2] * form.n) * form.k * item
    return gpu.call_ns + max(_products_ns(gpu, form, batch.count), gpu.bytes_ns(moved_bytes))


def _products_ns(gpu: Gpu, form: Gemm, count: int) -> float:
    """Return the time of all tiles, in waves over the SMs.

    The library splits the inner extent where tiles are few, or those of the last wave would be, and
    adds up parts that lie in the workspace.
    """
    tile = _TILE if form.dtype in HALVES else _PLAIN_TILE
    tiles = count * -(-form.m // tile) * -(-form.n // tile)
    room = _library_bytes(gpu, form) // (4 * count * form.m * form.n)
    most = max(1, min(room, form.k // _LEAST_SPLIT))
    # A part is 1/parts of a tile's work; the last wave may leave SMs idle.
    waves = min([-(-tiles * parts // gpu.num_sms) / parts for parts in range(1, most + 1)])
    flops = 2.0 * waves * gpu.num_sms * tile * tile * form.k
    return gpu.product_ns(form.dtype, flops)


def plan_matmul(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan `matmul` of any floats: leading axes broadcast, operands and output strided.

    It takes every product; scratch is what is copied, and what the library works in.
    """
    product = plan_product(gpu, *inputs, *outputs)
    if product is None:
        return None
    duration_ns = product.duration_ns()
    a, b, out = [DeviceView(0, x.type, x.strides_bytes) for x in (*inputs, *outputs)]
    if few_rows_call(gpu, a, b, out) is not None:
        duration_ns = min(duration_ns, few_rows_ns(gpu, *b.shape))

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        a, b, out = on_device((*inputs, *outputs))
        library = product.calls((a, b, out), carve(workspace, product.pieces))
        # Of few rows, two ways to compute one, where its addresses allow it.
        own = few_rows_call(gpu, a, b, out)
        return library if own is None else (AlternativeCalls((library, (own,))),)

    needs = KernelNeeds(kernel.size_bytes(product.pieces), duration_ns=duration_ns)
    return KernelPlan(needs, bind)
