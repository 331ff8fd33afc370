"""Kernels that move elements: copy, reshape, pad and concat, and copies between places.

The views that numpy's kernels make say from where to where; numpy is asked for addresses and
strides alone, and touches none of these bytes. A copy between places is the plain copy, bound to
pinned memory on one side: the device reads and writes that where it lies.

A kernel that declines how an input lies is given a dense copy of it (`with_copies`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from actors.kernels.common.host_memory import (
    COPIES,
    can_copy,
    meta_views,
    written_over,
)
from actors.kernels.common.kernel import (
    Attrs,
    KernelNeeds,
    KernelPlan,
    Operand,
    Operands,
    Piece,
    size_bytes,
)
from actors.kernels.common.strides import Axis, columns_of, walk_arrays
from actors.kernels.cuda.calls import (
    CopyBytes,
    DeviceCall,
    DeviceCalls,
    FillBytes,
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
    PlacedView,
    PlacedViews,
    Scratch,
    address_of,
    carve,
    on_device,
)
from actors.machine.protocol import Array, Arrays
from compiler.contract.types import contiguous_strides, numpy_dtype

# Copies between strided tensors: bytes where both lie alike, else one kernel of two.
#
# Axes that lie evenly are joined first. Threads follow the target's fastest axis, with elements of
# up to 16 bytes where runs of both sides are so long; where the source's fastest axis is another
# one, a tile of both goes through shared memory. Indices are 32 bits wide and divided by products
# with reciprocals: a copy of more elements is cut along its outermost axis.

_MAX_AXES = 8
_MAX_ELEMENTS = 1 << 31
_THREADS = 256
_WAVES = 4
"""Blocks that an SM gets one after the other, at most; more elements are walked by the same."""

_WIDEST = 16
_SECTOR = 32
"""What memory gives at once, in bytes, however few of them are wanted."""

_MIN_TILED = 16
"""Extents of both axes from which a tile saves more than its barrier costs."""

_FEW_ROWS = 16
"""Rows that go over the link as a copy each; a call costs as much as 64 KiB."""

ELEMENT_TYPES = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t", 16: "af_16_bytes"}
"""What a text calls so many bytes."""


@functools.cache
def elements_text(item: int) -> KernelText:
    """Return the kernel that copies elements of 1, 2, 4, 8 or 16 bytes one by one."""
    text = file_text("strided_copy.cuh").replace("NAME_TYPE", ELEMENT_TYPES[item])
    about = f"copies elements of {item} bytes"
    return KernelText.of("af_copy", text, ("NAME",), about, has_exchanges=False)


@functools.cache
def tiles_text(item: int) -> KernelText:
    """Return the kernel that transposes elements of 1, 2, 4 or 8 bytes tile by tile."""
    text = file_text("transpose.cuh").replace("NAME_TYPE", ELEMENT_TYPES[item])
    text = text.replace("NAME_SIDE", str(_side(item)))
    return KernelText.of("af_transpose", text, ("NAME",), f"transposes elements of {item} bytes")


def copy_calls(
    gpu: Gpu, target: Array, source: Array, *, is_over_link: bool = False
) -> DeviceCalls:
    """Return the calls of a copy between arrays of one shape, of which only addresses matter.

    A source that cannot be written is a constant of the host, and read here. `is_over_link` says
    that one of them lies in pinned memory: few rows are then copied as bytes.
    """
    if not target.size:
        return ()
    # Views of device memory are writable by construction: see `_Elsewhere`.
    if not source.flags.writeable:
        return tuple(_fill_calls(gpu, target, source))
    whole = _StridedCopy(
        target.ctypes.data,
        source.ctypes.data,
        target.itemsize,
        walk_arrays(target, source, in_order=False),
    )
    if not whole.runs:
        return (CopyBytes(whole.target, whole.source, whole.run_bytes),)
    if is_over_link and whole.run_bytes and _count(whole.runs) <= _FEW_ROWS:
        return tuple([CopyBytes(*ends, whole.run_bytes) for ends in whole.ends_of_runs()])
    return tuple([_kernel_call(gpu, part) for part in _parts(whole)])


def copy_ns(gpu: Gpu, target: Array, source: Array) -> float:
    """Return what a copy takes."""
    if not target.size:
        return 0.0
    item, axes = target.itemsize, walk_arrays(target, source, in_order=False)
    moved = 0.0
    for operand in range(2):
        steps = [abs(axis.steps[operand]) for axis in axes]
        # Else each element costs a sector of 32 bytes, or as much of it as its step leaves.
        is_even = not axes or steps[-1] <= item or (_is_tiled(axes, item) and item in steps)
        moved += target.size * (item if is_even else max(item, min(_SECTOR, steps[-1])))
    return gpu.call_ns + gpu.bytes_ns(moved)


@dataclass(frozen=True, slots=True)
class _StridedCopy:
    """Elements of `item` bytes from `source` to `target`; a `source` of 0 is `value` everywhere."""

    target: int
    source: int
    item: int
    axes: tuple[Axis, ...]
    value: int = 0

    @property
    def runs(self) -> tuple[Axis, ...]:
        """The axes but for one along which both sides are dense."""
        is_dense = self.axes and self.axes[-1].steps == (self.item, self.item)
        return self.axes[:-1] if is_dense else self.axes

    @property
    def run_bytes(self) -> int:
        """The bytes of a run that is dense on both sides; 0 where there is none."""
        if self.axes and len(self.runs) == len(self.axes):
            return 0
        return self.item * (self.axes[-1].extent if self.axes else 1)

    def ends_of_runs(self) -> Iterator[tuple[int, int]]:
        """Yield target and source of each run."""
        for index in product(*[range(axis.extent) for axis in self.runs]):
            moves = [_moved(self.runs, index, operand) for operand in (0, 1)]
            yield self.target + moves[0], self.source + moves[1]


def _moved(axes: tuple[Axis, ...], index: tuple[int, ...], operand: int) -> int:
    return sum([i * axis.steps[operand] for i, axis in zip(index, axes, strict=True)])


def _fill_calls(gpu: Gpu, target: Array, source: Array) -> Iterator[DeviceCall]:
    value = source[(0,) * source.ndim].tobytes()
    axes = walk_arrays(target, in_order=False)
    count = _count(axes)
    is_dense = not axes or axes[-1] == Axis(count, (target.itemsize,))
    # memset sets bytes: it serves where all bytes of an element are equal, as of 0 and -1.
    if is_dense and len({*value}) == 1:
        yield FillBytes(target.ctypes.data, value[0], count * target.itemsize)
        return
    word = int.from_bytes(value * (8 // len(value)), "little", signed=True)
    walked = tuple([Axis(axis.extent, (*axis.steps, 0)) for axis in axes])
    for part in _parts(_StridedCopy(target.ctypes.data, 0, target.itemsize, walked, word)):
        yield _kernel_call(gpu, part)


def _parts(whole: _StridedCopy) -> Iterator[_StridedCopy]:
    """Yield copies of few enough elements and axes, cut in halves along the outermost axis."""
    axes = whole.axes
    if len(axes) <= _MAX_AXES and _count(axes) < _MAX_ELEMENTS:
        yield whole
        return
    first, half = axes[0], axes[0].extent // 2
    for start, extent in ((0, half), (half, first.extent - half)):
        ends = [start * step for step in first.steps]
        source = whole.source + ends[1] if whole.source else 0
        new_axes = (Axis(extent, first.steps), *axes[1:]) if extent > 1 else axes[1:]
        yield from _parts(
            replace(whole, target=whole.target + ends[0], source=source, axes=new_axes)
        )


def _kernel_call(gpu: Gpu, part: _StridedCopy) -> RunKernel:
    if part.source and _is_tiled(part.axes, part.item):
        return _tiles_call(part)
    part = _widened(part)
    axes = part.axes or (Axis(1, (0, 0)),)
    count = _count(axes)
    most = _WAVES * gpu.num_sms * gpu.threads_per_sm // _THREADS
    # floor(2^64 / n) + 1: the high word of its product with a 32-bit index is the quotient.
    reciprocals = [_signed((1 << 64) // axis.extent + 1) for axis in axes]
    _, *columns = columns_of(axes, 2, _MAX_AXES)
    words: tuple[Word, ...] = (
        *(part.target, part.source, part.value, count, len(axes)),
        *columns[:_MAX_AXES],
        *reciprocals,
        *[0] * (_MAX_AXES - len(axes)),
        *columns[_MAX_AXES:],
    )
    text = elements_text(part.item)
    return RunKernel(text, text.kernels[0], min(-(-count // _THREADS), most), _THREADS, words)


def _tiles_call(part: _StridedCopy) -> RunKernel:
    axes = [*part.axes]
    columns = axes.pop()
    rows = axes.pop(_rows_of(part.axes, part.item))
    side = _side(part.item)
    down, across = [-(-axis.extent // side) for axis in (rows, columns)]
    words: tuple[Word, ...] = (
        *(part.target, part.source),
        *(rows.extent, *rows.steps),
        *(columns.extent, *columns.steps),
        *(down, across),
        *columns_of(axes, 2, _MAX_AXES - 2),
    )
    text = tiles_text(part.item)
    num_blocks = down * across * _count(axes)
    return RunKernel(text, text.kernels[0], num_blocks, _THREADS, words)


def _is_tiled(axes: tuple[Axis, ...], item: int) -> bool:
    """Whether target and source are dense along different axes that are both long."""
    row = _rows_of(axes, item)
    if row < 0 or axes[-1].steps[1] in (0, item):
        return False
    return min(axes[row].extent, axes[-1].extent) >= _MIN_TILED


def _rows_of(axes: tuple[Axis, ...], item: int) -> int:
    """Return which axis but the last the source is dense along; -1 for none."""
    return next((i for i, axis in enumerate(axes[:-1]) if axis.steps[1] == item), -1)


def _widened(part: _StridedCopy) -> _StridedCopy:
    """Return the copy with elements as wide as addresses, steps and runs allow."""
    item = part.item
    last = part.axes[-1] if part.axes else Axis(1, (item, item))
    if last.steps not in ((item, item), (item, 0)) or (part.source and last.steps[1] == 0):
        return part
    outer = part.axes[:-1]
    lengths = [last.extent * item, part.target, part.source]
    lengths += [step for axis in outer for step in axis.steps]
    widest = math.gcd(_WIDEST if part.source else 8, *lengths)
    if widest <= item:
        return part
    steps = (widest, widest if part.source else 0)
    inner = (Axis(last.extent * item // widest, steps),)
    return replace(part, item=widest, axes=outer + (inner if inner[0].extent > 1 else ()))


def _count(axes: tuple[Axis, ...] | list[Axis]) -> int:
    return math.prod([axis.extent for axis in axes])


def _side(item: int) -> int:
    """Return the side of a tile: a row of it is at least two sectors, and it has 8 KiB at most."""
    return 64 if item <= 2 else 32


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def plan_copies(
    op: str, gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands
) -> CudaPlan | None:
    """Plan an op that only moves elements.

    It takes every call, but for a reshape between two tensors that are both not dense.
    """
    if not can_copy(op, inputs, outputs):
        return None
    phases = COPIES[op](meta_views(inputs), meta_views(outputs), attrs)
    times = [copy_ns(gpu, *copy) for copies in phases for copy in copies]

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        is_over_link = any([not isinstance(x, DeviceView) for x in (*inputs, *outputs)])
        phases = COPIES[op](_seen(inputs), _seen(outputs), attrs)
        calls = [
            copy_calls(gpu, *copy, is_over_link=is_over_link)
            for copies in phases
            for copy in copies
        ]
        return tuple([call for copy in calls for call in copy])

    needs = KernelNeeds(in_place=written_over(op), duration_ns=sum(times))
    return KernelPlan(needs, bind)


# Views of a tensor lie anyhow, by more axes than a kernel walks. The few programs in which that
# happens pay for a copy, instead of every kernel having a second way to find its elements.

Planning = Callable[[Gpu, Attrs, Operands, Operands], CudaPlan | None]
"""Plans a kernel for a GPU; None for a call that it does not take."""


def with_copies(plan_kernel: Planning) -> Planning:
    """Return what plans a kernel on dense copies of those inputs that it declines as they lie.

    As few inputs are copied as can be, and none that the kernel may write over. The copies are
    scratch, behind the kernel's own.
    """

    def planned(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
        plan = plan_kernel(gpu, attrs, inputs, outputs)
        if plan is not None:
            return plan
        copied = [place for place, x in enumerate(inputs) if not x.is_dense]
        plan = plan_kernel(gpu, attrs, _dense_at(copied, inputs), outputs)
        for place in tuple(copied) if plan is not None else ():
            others = [other for other in copied if other != place]
            less = plan_kernel(gpu, attrs, _dense_at(others, inputs), outputs)
            if less is not None:
                plan, copied = less, others
        if plan is None or any([place in copied for _, place in plan.needs.in_place]):
            return None
        return _copying(gpu, copied, inputs, plan)

    return planned


def _dense_at(places: list[int], inputs: Operands) -> Operands:
    return tuple([_densely(x) if place in places else x for place, x in enumerate(inputs)])


def _densely(x: Operand) -> Operand:
    return Operand(x.type, 0, contiguous_strides(x.shape, x.dtype.itemsize))


def _copying(gpu: Gpu, places: list[int], inputs: Operands, plan: CudaPlan) -> CudaPlan:
    """Return a plan that copies the inputs at `places` and then does what `plan` does."""
    targets = [_densely(inputs[place]) for place in places]
    own = Piece((plan.needs.workspace_bytes,), np.dtype(np.uint8))
    pieces = (own, *[Piece(x.shape, x.dtype) for x in targets])
    copies = [
        copy_ns(gpu, *meta_views((target, inputs[place])))
        for place, target in zip(places, targets, strict=True)
    ]

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        views = [*on_device(inputs)]
        calls: list[DeviceCall] = []
        addresses = carve(workspace, pieces)[1:]
        for place, target, address in zip(places, targets, addresses, strict=True):
            copy = DeviceView(address, target.type, target.strides_bytes)
            calls += copy_calls(gpu, seen_as_array(copy), seen_as_array(views[place]))
            views[place] = copy
        return (*calls, *plan.bind(tuple(views), outputs, workspace))

    needs = replace(
        plan.needs,
        workspace_bytes=size_bytes(pieces),
        duration_ns=plan.needs.duration_ns + sum(copies),
    )
    return KernelPlan(needs, bind)


def seen_as_array(view: DeviceView) -> Array:
    """Return an array that lies as a view does, at its address, in bytes that nobody may touch."""
    return np.asarray(_Elsewhere(view.address, numpy_dtype(view.dtype), view))


_NOWHERE = 64
"""Where an array without elements lies that has no address: numpy 1.26 takes no 0."""


class _Elsewhere:
    """What numpy asks of memory that somebody else has; it may be written, whoever shows it."""

    def __init__(self, address: int, dtype: np.dtype[Any], lies: DeviceView | Array) -> None:
        strides = lies.strides_bytes if isinstance(lies, DeviceView) else lies.strides
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address or _NOWHERE, False),
            "shape": lies.shape,
            "strides": strides,
            "typestr": dtype.str,
        }


def _seen(views: tuple[PlacedView, ...]) -> Arrays:
    return tuple([np.asarray(_Elsewhere(address_of(x), _dtype_of(x), x)) for x in views])


def _dtype_of(view: PlacedView) -> np.dtype[Any]:
    return numpy_dtype(view.dtype) if isinstance(view, DeviceView) else view.dtype
