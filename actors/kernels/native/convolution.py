"""Convolutions by oneDNN: images are cut into chunks, and a chunk is a list of calls.

A call brings some images to the library's layout, convolves, and brings the result back, in scratch
of its chunk. Weights are brought there once, before. The gradient of weights is a sum over images:
each chunk adds up its own, the first where the result will be, and the others are added to it in
order. Chunks follow from shapes alone, so that bits do not depend on the number of threads.
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
from actors.kernels.work import CWork, MatrixProduct, Work
from actors.protocol import Array, Arrays, Launch
from compiler.errors import InternalError

_CALL_BYTES = 2 << 20
"""x and y of the images of a call, about: they stay in a core's cache."""

_MOST_CHUNKS, _SUM_BYTES = 16, 2 << 20
"""Sums of chunks, of which there are at least two, take no more bytes: each is moved twice."""

_ITEM = 4
_CALLS = 0.5


@dataclass(frozen=True, slots=True)
class _Images:
    """Some images of a call: the first of them, and their primitives."""

    first: int
    calls: ConvolutionCalls


@dataclass(frozen=True, slots=True)
class _ImageCut:
    """All images, chunk by chunk, and where things lie in the scratch that chunks have, in bytes.

    First the weight, or the sums of all chunks but one; then of each chunk x, y, and the gradient.
    """

    op: str
    chunks: tuple[tuple[_Images, ...], ...]
    sum_bytes: int

    @property
    def first(self) -> ConvolutionCalls:
        """The primitives of the first images, of which there are the most at once."""
        return self.chunks[0][0].calls

    @property
    def shared_bytes(self) -> int:
        """What lies before the scratch of chunks."""
        if self.op == "conv_weight_grad":
            return aligned(self.sum_bytes) * (len(self.chunks) - 1)
        return _kept(self.first.weight)

    @property
    def chunk_bytes(self) -> int:
        """The scratch of one chunk."""
        first = self.first
        own = _kept(first.weight) if self.op == "conv_weight_grad" else 0
        return _kept(first.x) + _kept(first.y) + own

    @property
    def scratch(self) -> ProductScratch:
        """The scratch of all."""
        each = [one.calls for chunk in self.chunks for one in chunk]
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
        """Take more than one image; a single one is not cut, and numpy's threads share it."""
        x, weight, y = roles = _roles(self.op, shown((*inputs, *outputs)))
        found = _cut(self.op, attrs, roles) if runtime.is_on() else None
        if found is None:
            return None
        size = found.scratch.size_bytes(min(runtime.num_threads(), len(found.chunks)))
        groups, columns = integer(attrs, "groups"), math.prod(y.shape[2:])
        form = (len(weight) // groups, columns, math.prod(weight.shape[1:]))
        product = MatrixProduct(len(x) * groups, *form)
        in_c = partial(CWork, products=(product,), pieces=len(found.chunks))
        return cost.needs(inputs, outputs, Work(_CALLS, products=(product,), in_c=in_c), size)

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
        images, once = _tables(found, roles, place)
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

    def close(self, before: int) -> None:
        """Make a chunk of the calls from one on."""
        none = ProductCall(0, 0, 0, 0, 0, 0)
        if len(self.table.rows) > before:
            self.chunks.append(Chunk((none,) * (len(self.table.rows) - before), 0, 0))


def _tables(found: _ImageCut, roles: Arrays, place: PackedPlace) -> tuple[_Calls, _Calls]:
    """Return the calls on images, and those that are made once: before them, or after a sum."""
    images, once = _Calls(CallTable(place), []), _Calls(CallTable(place), [])
    x, weight, y = roles
    places = ARGUMENTS[found.op]
    is_sum, first = found.op == "conv_weight_grad", found.first
    at_weight = address(weight)
    if not is_sum and first.weight.there is not None:
        once.table.add(first.weight.there, (SOURCE, at_weight), (DESTINATION, place.shared))
        at_weight = place.shared
    for number, chunk in enumerate(found.chunks):
        begin, before = place.shared + found.shared_bytes, len(images.table.rows)
        spaces = [begin + number * found.chunk_bytes]
        spaces += [spaces[0] + _kept(first.x), spaces[0] + _kept(first.x) + _kept(first.y)]
        total = at_weight
        if number and is_sum:
            total = place.shared + (number - 1) * aligned(found.sum_bytes)
            once.table.add(_added(weight), (SOURCE, total), (DESTINATION, at_weight))
        for some in chunk:
            ends = [(some.calls.x, x, spaces[0]), (some.calls.y, y, spaces[1])]
            at: list[int] = []
            for side, (tensor, array, space) in enumerate(ends):
                plain = address(array) + some.first * array.strides[0]
                at.append(plain if tensor.there is None else space)
                is_read = is_sum or side == (found.op == "conv_input_grad")
                if tensor.there is not None and is_read:
                    images.table.add(tensor.there, (SOURCE, plain), (DESTINATION, space))
            middle = spaces[2] if is_sum else at_weight
            images.table.add(some.calls.main, *zip(places, (at[0], middle, at[1]), strict=True))
            back = some.calls.weight.back if some is chunk[0] else some.calls.weight.adds
            tensor, array, space = ends[found.op == "conv"]
            plain = address(array) + some.first * array.strides[0]
            if is_sum:
                tensor, space, plain = some.calls.weight, middle, total
            else:
                back = tensor.back
            if back is not None:
                images.table.add(back, (SOURCE, space), (DESTINATION, plain))
        images.close(before)
    once.close(0)
    return images, once


def _cut(op: str, attrs: Attrs, roles: Arrays) -> _ImageCut | None:
    """Return how the images are cut; None for a call that is not taken."""
    x, weight, y = roles
    is_sum, count = op == "conv_weight_grad", len(x)
    is_known = onednn.is_there() and {a.dtype.name for a in roles} == {"float32"} and x.ndim <= 5
    if not is_known or count < 2 or 0 in [a.size for a in roles]:
        return None
    if min(*integers(attrs, "low"), *integers(attrs, "high")) < 0:
        return None
    if any([step % _ITEM for a in roles for step in a.strides]) or not weight.flags.c_contiguous:
        return None
    most = _MOST_CHUNKS
    if is_sum:
        most = max(2, min(most, _SUM_BYTES // weight.nbytes))
    per_chunk = -(-count // min(most, count))
    at_once = _CALL_BYTES * (4 if is_sum else 1) // ((x.size + y.size) * _ITEM // count)
    step = max(1, min(per_chunk, at_once))
    chunks: list[tuple[_Images, ...]] = []
    for begin in range(0, count, per_chunk):
        own: list[_Images] = []
        end = min(begin + per_chunk, count)
        for first in range(begin, end, step):
            calls = calls_of(_form(op, attrs, roles, min(step, end - first)))
            if calls is None:
                return None
            own.append(_Images(first, calls))
        chunks.append(tuple(own))
    lead = chunks[0][0].calls.main
    others = {one.calls.main for chunk in chunks for one in chunk}
    if not is_sum and not all([onednn.pack_alike(lead, other) for other in others]):
        return None
    return _ImageCut(op, tuple(chunks), weight.nbytes)


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
