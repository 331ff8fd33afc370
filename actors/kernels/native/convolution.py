"""Convolutions by oneDNN, and pooling in C.

A convolution is cut into slices of channels and runs of images, or of rows where there are few
images; a chunk is both. A call brings some images to the library's layout, convolves, and brings
the result back, in scratch of its chunk. Weights are brought there once, before, or by each chunk
where there are slices; those that a job only reads (`held`) once for all steps, into scratch that
stays. The gradient of weights is a sum over images: each run adds up its own, the first where the
result will be, and the others are added to it in order.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from actors.kernels.common import cost
from actors.kernels.common.convolution_steps import POOLING_OPS, windows_of
from actors.kernels.common.gemm import Chunk, ProductCall
from actors.kernels.common.host_memory import address, meta_views
from actors.kernels.common.kernel import (
    Attrs,
    BytePass,
    HostPlan,
    Kernel,
    KernelPlan,
    MatrixProduct,
    Operand,
    Operands,
    Work,
    Workspace,
    integer,
    item_weight,
    native_work,
)
from actors.kernels.library import launch, onednn, runtime
from actors.kernels.library.convolution_onednn import ARGUMENTS, PlainTensor, reorder_primitive
from actors.kernels.library.gemm_launch import PackedPlace, ProductScratch, aligned
from actors.kernels.library.gemm_onednn import CallTable
from actors.kernels.library.launch import PackedOperand, Word, argument_block, native_launch
from actors.kernels.library.onednn import DESTINATION, SOURCE, Primitive
from actors.kernels.native.convolution_cut import (
    ConvolutionCut,
    SliceRun,
    SomeImages,
    cut_of,
    kept_bytes,
    plain_of,
    wide_of,
)
from actors.machine.protocol import Array, Arrays, Launch
from compiler.contract.errors import InternalError
from compiler.contract.spaces import Windows
from compiler.contract.types import DType

_CALLS = 0.5

_NOTE_BYTES = 64
"""What is before all scratch that stays: whether the weights are there."""


def _plan_convolution(
    op: str, attrs: Attrs, inputs: Operands, outputs: Operands
) -> HostPlan | None:
    """Plan `conv`, `conv_input_grad` or `conv_weight_grad` of several images.

    In float32, and in bfloat16 where the processor multiplies that; sums are in float32.

    It takes up to three axes of space.
    """
    x, weight, y = planned = _roles(op, meta_views((*inputs, *outputs)))
    cut = cut_of(op, attrs, planned) if runtime.is_enabled() else None
    if cut is None:
        return None
    size = cut.scratch.size_bytes(min(runtime.num_threads(), len(cut.chunks)))
    size += _NOTE_BYTES * cut.is_held
    groups, columns = integer(attrs, "groups"), math.prod(y.shape[2:])
    form = (len(weight) // groups, columns, math.prod(weight.shape[1:]))
    product = MatrixProduct(len(x) * groups, *form)
    passes = ((BytePass.STRIDED, float(cut.moved_bytes)),)
    work = Work(_CALLS, passes=passes, products=(product,), is_native=True)
    needs = cost.needs(inputs, outputs, work, size)
    needs = replace(needs, prepacked_input=1) if cut.is_held else needs

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        roles = _roles(op, (*inputs, *outputs))
        note, note_bytes = 0, workspace
        if cut.is_held and workspace is not None:
            # Zeroed when weights are written: then the next launch packs them again.
            note, workspace = address(workspace), workspace[_NOTE_BYTES:]
        size = 0 if workspace is None else workspace.size
        if cut.scratch.size_bytes(1) > size:
            raise InternalError(f"onednn.{op} is bound to scratch of {size} bytes, too few")
        workers = min(len(cut.chunks), runtime.num_threads())
        # Fewer workers rather than an error: the plan may have been made for fewer threads.
        while cut.scratch.size_bytes(workers) > size:
            workers -= 1
        place = PackedPlace(workspace, cut.scratch, workers, None)
        moved = [address(x) - address(old) for x, old in zip(roles, planned, strict=True)]
        images, once = _tables(cut, place, moved)
        first, last = (images, once) if op == "conv_weight_grad" else (once, images)
        words, first_keep = first.table.words(first.chunks, place, 0)
        block = argument_block(words)
        before = ctypes.addressof(block) if first.chunks else 0
        words, keep = last.table.words(last.chunks, place, before, note)
        function = runtime.address_in("gemm.c", "af_gemm_onednn")
        is_packed = note != 0 and bool(once.packings)
        kept = roles[::2] if is_packed else roles
        made = native_launch(function, words, (*keep, *first_keep, block, *kept), onednn.explain)
        if is_packed and note_bytes is not None:
            # Planned and bound weights are alike: where a slice begins is the same in both.
            begin = address(roles[1])
            parts = [(p.back, p.packed_at, p.plain_at - begin) for p in once.packings]
            made.packed = PackedOperand(1, note_bytes, partial(_unpack, parts), roles[1])
        return made

    return KernelPlan(needs, bind)


def _unpack(parts: Sequence[tuple[Primitive, int, int]], out: Array) -> None:
    """Bring slices of a weight from where they are packed to their places in a dense array."""
    size = max([back.scratch_bytes for back, _, _ in parts])
    scratch = ProductScratch(size)
    place = PackedPlace(np.empty(scratch.size_bytes(1), np.uint8), scratch, 1, None)
    table = CallTable(place)
    for back, packed_at, offset in parts:
        table.add(back, (SOURCE, packed_at), (DESTINATION, address(out) + offset))
    chunk = Chunk((ProductCall(0, 0, 0, 0, 0, 0),) * len(parts), 0, 0)
    words, keep = table.words([chunk], place, 0)
    function = runtime.address_in("gemm.c", "af_gemm_onednn")
    native_launch(function, words, (*keep, out), onednn.explain)()


class _PackedWeight(NamedTuple):
    """A slice of a weight: what brings it back, and where it is packed and was."""

    back: Primitive
    packed_at: int
    plain_at: int


@dataclass(slots=True)
class _Calls:
    """A table of calls, and how they are cut into chunks; `packings` are those of weights."""

    table: CallTable
    chunks: list[Chunk]
    packings: list[_PackedWeight] = field(default_factory=list)

    def close(self) -> None:
        """Make a chunk of the calls since the last one."""
        count = len(self.table.rows) - sum([len(chunk.calls) for chunk in self.chunks])
        if count:
            self.chunks.append(Chunk((ProductCall(0, 0, 0, 0, 0, 0),) * count, 0, 0))


def _tables(
    found: ConvolutionCut, place: PackedPlace, moved: Sequence[int]
) -> tuple[_Calls, _Calls]:
    """Return the calls on images, and those that are made once: before them, or after a sum.

    `moved`: how far behind their planned addresses x, weight and y lie, in bytes.
    """
    images, once = _Calls(CallTable(place), []), _Calls(CallTable(place), [])
    is_sum, first, next_sum = found.op == "conv_weight_grad", found.first, place.shared
    at_weight = first_total = 0
    for number, chunk in enumerate(found.chunks):
        weight = chunk.roles[1]
        x_at, plain_at, y_at = [address(a) + m for a, m in zip(chunk.roles, moved, strict=True)]
        there = chunk.images[0].calls.weight.there
        if found.shares_weight and not chunk.run:
            at_weight = plain_at
            if there is not None:
                at_weight = place.shared + number // found.num_runs * kept_bytes(first.weight)
                once.table.add(there, (SOURCE, plain_at), (DESTINATION, at_weight))
                back = chunk.images[0].calls.weight.back
                once.packings += [] if back is None else [_PackedWeight(back, at_weight, plain_at)]
        space = place.shared + found.shared_bytes + number * found.chunk_bytes
        packed_at = space + found.ends_bytes
        if not chunk.run:
            once.close()
            first_total = plain_at
        total = first_total
        if is_sum and (chunk.run or found.is_narrow):
            total, next_sum = next_sum, next_sum + found.sum_bytes
        if is_sum and chunk.run:
            adder = _copied(wide_of(weight), wide_of(weight), adds=True)
            once.table.add(adder, (SOURCE, total), (DESTINATION, first_total))
        elif found.is_narrow:
            first_total = total
        if found.is_narrow and chunk.run == found.num_runs - 1:
            rounding = _copied(wide_of(weight), plain_of(weight))
            once.table.add(rounding, (SOURCE, first_total), (DESTINATION, plain_at))
        if not found.shares_weight:
            at_weight = packed_at if there is not None else total
            if there is not None and not is_sum:
                images.table.add(there, (SOURCE, plain_at), (DESTINATION, packed_at))
        for some in chunk.images:
            _add_images(images.table, found, chunk, some, (x_at, y_at), (space, at_weight, total))
        images.close()
    once.close()
    return images, once


def _add_images(
    table: CallTable,
    found: ConvolutionCut,
    chunk: SliceRun,
    some: SomeImages,
    at: tuple[int, int],
    places: tuple[int, int, int],
) -> None:
    """Add the calls on some images: there, the primitive, and back.

    `at`: where x and y of the chunk begin. `places`: of the chunk's scratch, of the weight as the
    library reads or makes it, and of what the gradient is added to.
    """
    space, at_weight, total = places
    is_sum = found.op == "conv_weight_grad"
    used_at: list[int] = []
    x, _, y = chunk.roles
    plains = [begin + some.first * a.strides[0] for begin, a in zip(at, (x, y), strict=True)]
    ends = ((some.calls.x, plains[0], space), (some.calls.y, plains[1], space + found.x_bytes))
    for side, (tensor, plain, scratch) in enumerate(ends):
        # Where the library reads or writes: the operand itself, or its form in scratch.
        used_at.append(plain if tensor.there is None else scratch)
        is_read = is_sum or side == (found.op == "conv_input_grad")
        if tensor.there is not None and is_read:
            table.add(tensor.there, (SOURCE, plain), (DESTINATION, scratch))
    arguments = zip(some.calls.arguments, (used_at[0], at_weight, used_at[1]), strict=True)
    table.add(some.calls.main, *arguments)
    if is_sum:
        tensor, scratch, plain = some.calls.weight, at_weight, total
        # The first images of a run write the sum, those after them add to it.
        back = tensor.back if some is chunk.images[0] else tensor.adds
    else:
        tensor, plain, scratch = ends[found.op == "conv"]
        back = tensor.back
    if back is not None:
        table.add(back, (SOURCE, scratch), (DESTINATION, plain))


def _copied(one: PlainTensor, other: PlainTensor, *, adds: bool = False) -> Primitive:
    primitive = reorder_primitive(one, other, adds=adds)
    if primitive is None:
        raise InternalError(f"oneDNN does not copy {one} to {other}")
    return primitive


def _roles(op: str, operands: Arrays) -> Arrays:
    """Return x, weight and y of inputs and the output."""
    first, second, out = operands
    if op == "conv":
        return first, second, out
    return (out, second, first) if op == "conv_input_grad" else (first, out, second)


NATIVE_CONVOLUTION_KERNELS = tuple(
    [Kernel(f"onednn.{op}", op, partial(_plan_convolution, op)) for op in ARGUMENTS]
)


# Pooling: the largest elements of windows, and the gradient (`pooling.c`).

_MOST_AXES = 3
_MOST_LANES = 128
_UNITS_PER_THREAD = 2
"""Where images are few, their rows of windows are cut so often."""

_WIDE = 64
"""So many channels side by side are lanes enough; fewer are taken of several windows."""

_PASSES = 3
"""A byte takes as long here as in so many passes over dense tensors, about."""

_ADJACENT_TAP_BYTES, _SCATTERED_TAP_BYTES = 80, 240
"""What an element of a window takes, in bytes that additions of float32 go over: 20 additions where
the lanes of a block lie side by side (0.2 ns), of wider types more; 60 where a table says how far
apart they are (0.7 ns, most of it to gather them one by one)."""


def _plan_pooling(op: str, attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan one of `POOLING_OPS`, on tensors that lie anyhow.

    It takes float32, float64 and bfloat16 of up to three axes of space. Where windows overlap, the
    gradient of bfloat16 is added up in float32, in scratch of each worker, and rounded once.
    """
    operands, ways = (*inputs, *outputs), windows_of(attrs)
    is_known = inputs[0].type.dtype in _POOLED
    if not (runtime.is_enabled() and is_known and len(ways.kernel) <= _MOST_AXES):
        return None
    if not all([_is_within_reach(x) for x in operands]):
        return None
    x, y = meta_views((inputs[0], outputs[0]))
    if op == "max_pool_grad":
        x, y = y, x
    is_adjacent = _are_adjacent(x, y.shape[-1], ways.strides[-1])
    tap = _ADJACENT_TAP_BYTES * item_weight(x.itemsize) if is_adjacent else _SCATTERED_TAP_BYTES
    moved_bytes = sum([o.type.size_bytes for o in operands])
    work = native_work(
        (BytePass.MOVE, float(moved_bytes)), (BytePass.ADD, math.prod(ways.kernel) * y.size * tap)
    )
    is_tiled = _are_tiles(ways, x.shape[2:], y.shape[2:])
    has_sums = op == "max_pool_grad" and not is_tiled and x.itemsize < _SUM_BYTES and x.size > 0
    sum_bytes = aligned(_block(x, y.shape[-1])[1] * math.prod(x.shape[2:]) * _SUM_BYTES)
    sum_bytes *= has_sums
    needs = cost.needs(inputs, outputs, work, sum_bytes * runtime.num_threads())

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        if op == "max_pool":
            (x,), (y, taps) = inputs, outputs
        elif op == "max_pool_pick":
            (x, taps), (y,) = inputs, outputs
        else:
            (y, taps), (x,) = inputs, outputs
        # Of tiles each element of the gradient is written once: no fill with zeros, no addition.
        kind = _SPREAD if op == "max_pool_grad" and is_tiled else _OPS[op]
        is_last, group, at_once = _block(x, y.shape[-1])
        workers, sums, steps = runtime.num_threads(), 0, _steps(x)
        if has_sums:
            # Fewer workers rather than an error: the plan may have been made for fewer threads.
            room = 0 if workspace is None else workspace.size // sum_bytes
            workers, sums = min(workers, room), address(workspace)
            steps = _steps_of_sums(group, x.shape[2:], is_last=is_last)
        blocks = len(x) * -(-x.shape[1] // group)
        # What is added up for an image's channels is one thread's; else some rows are enough.
        rows = _three(y.shape[2:], 1)[1]
        parts = 1 if kind == _OPS["max_pool_grad"] else _parts(blocks, rows, runtime.num_threads())
        units = blocks * parts
        work = _PASSES * (math.prod(ways.kernel) * y.nbytes + x.nbytes)
        words: list[Word] = [
            *(address(x), address(y), address(taps), units),
            *(launch.units_per_chunk(max(units, 1), work), workers),
            *(kind, _POOLED_BYTES.index(x.itemsize) + 3 * int(taps.itemsize == 4)),
            *(x.shape[1], group, at_once, int(is_last), parts),
            *(*steps, *_steps(y), *_steps(taps)),
            *(*_three(x.shape[2:], 1), *_three(y.shape[2:], 1), *_three(ways.kernel, 1)),
            *(*_three(ways.strides, 1), *_three(ways.dilation, 1), *_three(ways.low, 0)),
            *(sums, sum_bytes, *_steps(x)),
        ]
        entry = runtime.address_in("pooling.c", "af_pool")
        return native_launch(entry, words, (inputs, outputs, workspace))

    return KernelPlan(needs, bind)


_POOLED = (DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16)
_POOLED_BYTES, _SUM_BYTES = (4, 8, 2), 4

_OPS = {"max_pool": 0, "max_pool_grad": 1, "max_pool_pick": 2}
_SPREAD = 3


def _is_within_reach(operand: Operand) -> bool:
    """Whether elements are whole steps apart, that 32 bits hold."""
    size = operand.dtype.itemsize
    far = sum([(n - 1) * abs(s) for n, s in zip(operand.shape, operand.strides_bytes, strict=True)])
    return far < size << 31 and not any([step % size for step in operand.strides_bytes])


def _are_tiles(ways: Windows, spatial: tuple[int, ...], counts: tuple[int, ...]) -> bool:
    """Whether each element of x is in one window, so that nothing is added up."""
    tiled = tuple([k * n for k, n in zip(ways.kernel, counts, strict=True)])
    is_apart = ways.strides == ways.kernel and {*ways.dilation} == {1}
    return tiled == spatial and is_apart and not any(ways.low)


def _block(x: Array, windows: int) -> tuple[bool, int, int]:
    """Return whether channels lie innermost, and the channels and windows of a block of lanes.

    Only what fills the innermost is less than there is, so that the last block is a beginning.
    """
    channels = max(x.shape[1], 1)
    is_last = channels > 1 and abs(x.strides[1]) < abs(x.strides[-1])
    if is_last and channels >= _WIDE:
        return is_last, min(channels, _MOST_LANES), 1
    if is_last:
        return is_last, channels, max(1, min(windows, _MOST_LANES // channels))
    at_once = max(1, min(windows, _MOST_LANES))
    return is_last, min(channels, _MOST_LANES // at_once), at_once


def _parts(blocks: int, rows: int, num_threads: int) -> int:
    """Return into how many parts rows of windows are cut: more than one where blocks are few."""
    return max(1, min(rows, -(-_UNITS_PER_THREAD * num_threads // max(blocks, 1))))


def _are_adjacent(x: Array, windows: int, stride: int) -> bool:
    """Return whether the lanes of a block lie side by side in x, as `lay_out` in pooling.c asks."""
    is_last, group, at_once = _block(x, windows)
    lanes = [(group, x.strides[1]), (at_once, stride * x.strides[-1])]
    (few, step), (many, far) = lanes if is_last else lanes[::-1]
    return (few == 1 or step == x.itemsize) and (many == 1 or far == few * x.itemsize)


def _steps(array: Array) -> tuple[int, ...]:
    image, channel, *spatial = [step // array.itemsize for step in array.strides]
    return (image, channel, *_three(tuple(spatial), 0))


def _steps_of_sums(channels: int, extents: tuple[int, ...], *, is_last: bool) -> tuple[int, ...]:
    """Return how far apart the sums of a group of channels lie: as x has them, side by side."""
    planes, rows, columns = _three(extents, 1)
    if is_last:
        return 0, 1, rows * columns * channels, columns * channels, channels
    return 0, planes * rows * columns, rows * columns, columns, 1


def _three(numbers: tuple[int, ...], other: int) -> tuple[int, ...]:
    """Return a number for each of three axes, of which the first may be none of a tensor."""
    return (*[other] * (_MOST_AXES - len(numbers)), *numbers)


NATIVE_POOLING_KERNELS = tuple(
    [Kernel(f"c.{op}", op, partial(_plan_pooling, op)) for op in POOLING_OPS]
)
