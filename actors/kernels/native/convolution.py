"""Convolutions by oneDNN: cut into slices of channels and runs of images; a chunk is both.

A call brings some images to the library's layout, convolves, and brings the result back, in scratch
of its chunk. Weights are brought there once, before, or by each chunk where there are slices. The
gradient of weights is a sum over images: each run adds up its own, the first where the result will
be, and the others are added to it in order. The cut follows from shapes alone, so that bits do not
depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import partial

from actors.kernels import cost
from actors.kernels.attributes import integer, integers
from actors.kernels.interpret.shape import shown
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace
from actors.kernels.library import onednn
from actors.kernels.library.convolution_onednn import (
    ARGUMENTS,
    BlockedTensor,
    ConvolutionCalls,
    ConvolutionForm,
    PlainTensor,
    calls_of,
    sum_of,
)
from actors.kernels.library.gemm_onednn import CallTable
from actors.kernels.library.onednn import DESTINATION, SOURCE, Primitive
from actors.kernels.native import runtime
from actors.kernels.native.gemm import Chunk, ProductCall
from actors.kernels.native.gemm_launch import PackedPlace, ProductScratch, aligned
from actors.kernels.native.launch import address, argument_block, native_launch
from actors.kernels.work import BytePass, CWork, MatrixProduct, Work
from actors.protocol import Array, Arrays, Launch
from compiler.errors import InternalError

_CALL_BYTES = 2 << 20
"""x and y of the images of a call, about: they stay in a core's cache."""

_CHUNKS = 8
"""A cut has about so many chunks, where there are so many images or channels."""

_SLICE = 16
"""Slices have multiples of so many channels, the library's blocks."""

_ITEM = 4
_CALLS = 0.5


@dataclass(frozen=True, slots=True)
class _Images:
    """Some images of a call: the first of them, and their primitives."""

    first: int
    calls: ConvolutionCalls


@dataclass(frozen=True, slots=True)
class _SliceRun:
    """A run of images of a slice: x, weight and y of the slice, and which of its runs it is."""

    roles: Arrays
    images: tuple[_Images, ...]
    run: int


@dataclass(frozen=True, slots=True)
class _ConvolutionCut:
    """All chunks, slice by slice, and where things lie in the scratch that they have, in bytes.

    First the weight, or the sums of all runs but the first; then of each chunk x, y, and the
    weight or its gradient.
    """

    op: str
    chunks: tuple[_SliceRun, ...]
    num_runs: int

    @property
    def shares_weight(self) -> bool:
        """Whether all chunks read one weight, brought to the library's layout before."""
        return self.op != "conv_weight_grad" and self.num_runs == len(self.chunks)

    @property
    def first(self) -> ConvolutionCalls:
        """The primitives of the first images, of which there are the most at once."""
        return self.chunks[0].images[0].calls

    @property
    def sum_bytes(self) -> int:
        """The bytes of the sum of a run."""
        return aligned(self.chunks[0].roles[1].size * _ITEM)

    @property
    def shared_bytes(self) -> int:
        """What lies before the scratch of chunks."""
        if self.op == "conv_weight_grad":
            return self.sum_bytes * len([chunk for chunk in self.chunks if chunk.run])
        return _kept(self.first.weight) if self.shares_weight else 0

    @property
    def chunk_bytes(self) -> int:
        """The scratch of one chunk."""
        first = self.first
        own = 0 if self.shares_weight else _kept(first.weight)
        return _kept(first.x) + _kept(first.y) + own

    @property
    def moved_bytes(self) -> int:
        """What is brought to the library or back, weights aside."""
        each = [one.calls for chunk in self.chunks for one in chunk.images]
        return sum([_kept(calls.x) + _kept(calls.y) for calls in each])

    @property
    def scratch(self) -> ProductScratch:
        """The scratch of all."""
        each = [one.calls for chunk in self.chunks for one in chunk.images]
        used = {p for calls in each for p in _primitives(calls)}
        return ProductScratch(
            max([p.scratch_bytes for p in used]),
            self.shared_bytes + self.chunk_bytes * len(self.chunks),
        )


def _kept(tensor: BlockedTensor) -> int:
    return 0 if tensor.there is None else aligned(tensor.size_bytes)


def _primitives(calls: ConvolutionCalls) -> list[Primitive]:
    sides = [(t.there, t.back, t.adds) for t in (calls.x, calls.weight, calls.y)]
    return [calls.main, *[p for side in sides for p in side if p is not None]]


@dataclass(frozen=True, slots=True)
class OnednnConvolution:
    """`conv`, `conv_input_grad` or `conv_weight_grad` of several images in float32."""

    op: str

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"onednn.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take float32 of up to three axes of space."""
        x, weight, y = roles = _roles(self.op, shown((*inputs, *outputs)))
        found = _cut(self.op, attrs, roles) if runtime.is_on() else None
        if found is None:
            return None
        size = found.scratch.size_bytes(min(runtime.num_threads(), len(found.chunks)))
        groups, columns = integer(attrs, "groups"), math.prod(y.shape[2:])
        form = (len(weight) // groups, columns, math.prod(weight.shape[1:]))
        product = MatrixProduct(len(x) * groups, *form)
        moved = ((BytePass.STRIDED, float(found.moved_bytes)),)
        in_c = partial(CWork, moved, products=(product,), pieces=len(found.chunks))
        work = Work(_CALLS, passes=moved, products=(product,), in_c=in_c)
        return cost.needs(inputs, outputs, work, size)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the native launch."""
        roles = _roles(self.op, (*inputs, *outputs))
        found = _cut(self.op, attrs, roles)
        given = 0 if workspace is None else workspace.size
        if found is None or found.scratch.size_bytes(1) > given:
            raise InternalError(f"{self.name} is bound to arrays or scratch that it does not take")
        workers = min(len(found.chunks), runtime.num_threads())
        while found.scratch.size_bytes(workers) > given:
            workers -= 1
        place = PackedPlace(workspace, found.scratch, workers, None)
        images, once = _tables(found, place)
        first, last = (images, once) if self.op == "conv_weight_grad" else (once, images)
        words, kept = first.table.words(first.chunks, place, 0)
        block = argument_block(words)
        before = ctypes.addressof(block) if first.chunks else 0
        words, keep = last.table.words(last.chunks, place, before)
        function = runtime.address_in("gemm.c", "af_gemm_onednn")
        return native_launch(function, words, (*keep, *kept, block, *roles), onednn.explain)


@dataclass(slots=True)
class _Calls:
    """A table of calls, and how they are cut into chunks."""

    table: CallTable
    chunks: list[Chunk]

    def close(self) -> None:
        """Make a chunk of the calls since the last one."""
        count = len(self.table.rows) - sum([len(chunk.calls) for chunk in self.chunks])
        if count:
            self.chunks.append(Chunk((ProductCall(0, 0, 0, 0, 0, 0),) * count, 0, 0))


def _tables(found: _ConvolutionCut, place: PackedPlace) -> tuple[_Calls, _Calls]:
    """Return the calls on images, and those that are made once: before them, or after a sum."""
    images, once = _Calls(CallTable(place), []), _Calls(CallTable(place), [])
    is_sum, first, next_sum = found.op == "conv_weight_grad", found.first, place.shared
    at_weight = address(found.chunks[0].roles[1])
    if found.shares_weight and first.weight.there is not None:
        once.table.add(first.weight.there, (SOURCE, at_weight), (DESTINATION, place.shared))
        at_weight = place.shared
    for number, chunk in enumerate(found.chunks):
        weight = chunk.roles[1]
        space = place.shared + found.shared_bytes + number * found.chunk_bytes
        own = space + _kept(first.x) + _kept(first.y)
        total = address(weight)
        if not chunk.run:
            once.close()
        elif is_sum:
            total, next_sum = next_sum, next_sum + found.sum_bytes
            once.table.add(_added(weight), (SOURCE, total), (DESTINATION, address(weight)))
        if not found.shares_weight:
            there = chunk.images[0].calls.weight.there
            at_weight = address(weight) if there is None else own
            if there is not None and not is_sum:
                images.table.add(there, (SOURCE, address(weight)), (DESTINATION, own))
        for some in chunk.images:
            _add_images(images.table, found, chunk, some, (space, at_weight, total))
        images.close()
    once.close()
    return images, once


def _add_images(
    table: CallTable,
    found: _ConvolutionCut,
    chunk: _SliceRun,
    some: _Images,
    places: tuple[int, int, int],
) -> None:
    """Add the calls on some images: there, the primitive, and back.

    `places`: of the chunk's scratch, of the weight as the library reads or makes it, and of what
    the gradient is added to.
    """
    space, at_weight, total = places
    is_sum = found.op == "conv_weight_grad"
    at: list[int] = []
    x, _, y = chunk.roles
    ends = ((some.calls.x, x, space), (some.calls.y, y, space + _kept(found.first.x)))
    for side, (tensor, array, own) in enumerate(ends):
        plain = address(array) + some.first * array.strides[0]
        at.append(plain if tensor.there is None else own)
        is_read = is_sum or side == (found.op == "conv_input_grad")
        if tensor.there is not None and is_read:
            table.add(tensor.there, (SOURCE, plain), (DESTINATION, own))
    given = zip(ARGUMENTS[found.op], (at[0], at_weight, at[1]), strict=True)
    table.add(some.calls.main, *given)
    if is_sum:
        tensor, own, plain = some.calls.weight, at_weight, total
        back = tensor.back if some is chunk.images[0] else tensor.adds
    else:
        tensor, array, own = ends[found.op == "conv"]
        plain, back = address(array) + some.first * array.strides[0], tensor.back
    if back is not None:
        table.add(back, (SOURCE, own), (DESTINATION, plain))


def _cut(op: str, attrs: Attrs, roles: Arrays) -> _ConvolutionCut | None:
    """Return how a call is cut; None for one that is not taken."""
    x, weight = roles[:2]
    is_known = onednn.is_there() and {a.dtype.name for a in roles} == {"float32"} and x.ndim <= 5
    if not is_known or 0 in [a.size for a in roles]:
        return None
    if min(*integers(attrs, "low"), *integers(attrs, "high")) < 0:
        return None
    if any([step % _ITEM for a in roles for step in a.strides]) or not weight.flags.c_contiguous:
        return None
    num_slices, num_runs = _best_cut(op, roles, integer(attrs, "groups"))
    per_run = -(-len(x) // num_runs)
    chunks: list[_SliceRun] = []
    for part in _slices(op, roles, num_slices):
        step = _at_once(op, part, per_run)
        for run, begin in enumerate(range(0, len(x), per_run)):
            end = min(begin + per_run, len(x))
            made = [
                (first, calls_of(_form(op, attrs, part, min(step, end - first))))
                for first in range(begin, end, step)
            ]
            own = tuple([_Images(first, calls) for first, calls in made if calls is not None])
            if len(own) < len(made):
                return None
            chunks.append(_SliceRun(part, own, run))
    found = _ConvolutionCut(op, tuple(chunks), -(-len(x) // per_run))
    return found if op == "conv_weight_grad" or _reads_alike(found) else None


def _reads_alike(found: _ConvolutionCut) -> bool:
    """Whether all calls that share a weight read it in one layout."""
    for chunk in found.chunks:
        lead = found.first if found.shares_weight else chunk.images[0].calls
        if not all([onednn.pack_alike(lead.main, one.calls.main) for one in chunk.images]):
            return False
    return True


def _at_once(op: str, part: Arrays, most: int) -> int:
    """Return how many images a call has.

    They stay in a core's cache; but each call of a sum moves all of the sum, which is to be less.
    """
    x, weight, y = part
    image_bytes = (x.size + y.size) * _ITEM // len(x)
    wanted = _CALL_BYTES
    if op == "conv_weight_grad":
        wanted = max(4 * _CALL_BYTES, 4 * weight.size * _ITEM)
    return max(1, min(most, wanted // image_bytes))


def _best_cut(op: str, roles: Arrays, groups: int) -> tuple[int, int]:
    """Return slices and runs so that the fewest bytes are brought to the library and back.

    Each slice brings what has all channels, and each run its sum, or the weight of its slice; one
    weight for all is brought by one thread.
    """
    x, weight, y = [a.size for a in roles]
    channels = roles[1].shape[op == "conv_input_grad"]
    moved_x, moved_y = [0 if _plain(a).is_channels_last else a.size for a in roles[::2]]
    whole = moved_y if op == "conv_input_grad" else moved_x
    best, least = (1, 1), math.inf
    for slices in (1, 2, 4, 8):
        if slices > 1 and (groups > 1 or channels < slices * _SLICE):
            break
        runs = min(len(roles[0]), -(-_CHUNKS // slices))
        if slices > 1:  # the other one is brought by the slice, however it lies
            moved = float(slices * whole + (x if op == "conv_input_grad" else y))
        else:
            moved = float(moved_x + moved_y)
        if op == "conv_weight_grad":
            moved += 1.5 * runs * weight
        else:
            moved += weight * (runs if slices > 1 else 2)
        if slices * runs < _CHUNKS:  # cores that have nothing to do
            moved += 16.0 * (x + y + weight) * (_CHUNKS - slices * runs) / _CHUNKS
        if moved < least:
            best, least = (slices, runs), moved
    return best


def _slices(op: str, roles: Arrays, count: int) -> list[Arrays]:
    """Return x, weight and y of slices of the channels that a call makes, or of its results."""
    x, weight, y = roles
    if count == 1:
        return [roles]
    axis = int(op == "conv_input_grad")
    width = -(-weight.shape[axis] // count // _SLICE) * _SLICE
    parts: list[Arrays] = []
    for begin in range(0, weight.shape[axis], width):
        part = slice(begin, begin + width)
        ends = (x[:, part], weight[:, part], y) if axis else (x, weight[part], y[:, part])
        parts.append(ends)
    return parts


def _form(op: str, attrs: Attrs, roles: Arrays, count: int) -> ConvolutionForm:
    x, weight, y = roles
    groups = integer(attrs, "groups")
    if groups > 1:
        weight = weight.reshape(groups, len(weight) // groups, *weight.shape[1:])
    ways = [integers(attrs, name) for name in ("strides", "dilation", "low", "high")]
    x, y = x[:count], y[:count]
    return ConvolutionForm(op, _plain(x), _plain(weight), _plain(y), *ways)


def _plain(array: Array) -> PlainTensor:
    return PlainTensor(array.shape, tuple([step // _ITEM for step in array.strides]))


def _added(weight: Array) -> Primitive:
    found = sum_of(_plain(weight))
    if found is None:
        raise InternalError(f"oneDNN does not add tensors of {weight.shape}")
    return found


def _roles(op: str, operands: Arrays) -> Arrays:
    """Return x, weight and y of inputs and the output."""
    first, second, out = operands
    if op == "conv":
        return first, second, out
    return (out, second, first) if op == "conv_input_grad" else (first, out, second)


CONVOLUTION_KERNELS = tuple([OnednnConvolution(op) for op in ARGUMENTS])
