"""Convolution and its gradients by cuDNN, each in one call.

Taken are one to three spatial axes of float32, never as TF32, and of bfloat16 and float16, with as
much padding behind an axis as before it. Tensors lie dense, channels first or last. Tensor cores
read channels last, so what lies otherwise, as weights do, the library turns in its scratch.

That is fixed here, from shapes alone. Both ways are bound: where the library has no plan within
it, and where its plan takes longer, `CudaConvolution` with small chunks computes the call: with
channels last and windows of single elements that is one product of cuBLASLt. No plan of the library
adds up out of order.

Tensor cores load 16 bytes of channels at once. Images of fewer channels, the first ones of a
network, are also convolved with channels of zeros beside theirs, which change no sum: copies in
scratch are padded, and a gradient is cut back. With strides, blocks of elements are channels of
another copy, on which the convolution has none. All are timed against each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from actors.kernels.common.convolution_steps import OPS
from actors.kernels.common.kernel import (
    Attrs,
    KernelNeeds,
    KernelPlan,
    Operand,
    Operands,
    Piece,
    integer,
    integers,
    size_bytes,
)
from actors.kernels.cuda.calls import (
    CONV,
    CONV_INPUT_GRAD,
    CONV_WEIGHT_GRAD,
    AlternativeCalls,
    ConvCall,
    CudnnTensor,
    DeviceCall,
    DeviceCalls,
    Extents,
    KernelText,
    LaunchCalls,
    RunCudnn,
    RunKernel,
    file_text,
)
from actors.kernels.cuda.convolution import BindToCalls, plan_convolution, three_axes
from actors.kernels.cuda.cudnn_library import CUDNN, CudnnLibrary, oldest_for
from actors.kernels.cuda.kernel import (
    CudaKernel,
    CudaPlan,
    DeviceView,
    Gpu,
    PlacedViews,
    Scratch,
    carve,
    on_device,
)
from actors.kernels.cuda.movement import copy_calls, seen_as_array
from actors.machine.protocol import Array
from compiler.contract.errors import InternalError
from compiler.contract.types import HALVES, DType, TensorType, contiguous_strides

_ALIGNMENT = 16
_NAMES = dict(zip(OPS, (CONV, CONV_INPUT_GRAD, CONV_WEIGHT_GRAD), strict=True))
_TYPES = (DType.FLOAT32, *HALVES)
_MOST_ELEMENTS = (1 << 31) - 1
"""Of a tensor: engines of the library count in 32 bits."""

_LEAST_BYTES, _MOST_BYTES = 1 << 20, 16 << 20
"""What the library may have for partial sums, besides what it turns. Its first plans for the
convolutions of ResNet-50, planned for an H200, want all of that at 8 images, 4 MiB at 256."""

_RATES = ((8, 0.08), (16, 0.2), (64, 0.43), (128, 0.5))
_WIDE_RATE, _UNEVEN_RATE = 0.62, 0.02
"""Of the rate of products, in 16 bits: up to so many channels of image or result, for more, and for
channels that tensor cores cannot load. In a step of ResNet-50 with 64 images on an H100 these were
60 TFLOP/s with 3 channels padded, 310 at 64, 350 at 128, 465 at 256, and 9 to 20 at 3 unpadded.
Of 16, the first convolution by blocks, 117 with its copies."""

_MEMORY_RATE = 0.85
"""Of the rate of a copy: what convolutions of single elements reached there, whoever made them."""

_PADDED_WIDTHS, _BLOCK = (4, 8), 256
_MOST_BLOCK_CHANNELS = 32
_BYTES = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Where the elements of a copy come from: space to depth.

    Along each spatial axis element b of block p is that at `sizes` p + b + `first`; channels of a
    block are neighbours. Zeros stand where there is none, and behind all channels.
    """

    sizes: Extents
    first: Extents


@dataclass(frozen=True, slots=True)
class _LibraryWay:
    """A call, and how the library computes it: as it is, or on copies of `image` and `weight`."""

    gpu: Gpu
    call: ConvCall
    computed: ConvCall
    image: _Blocks
    weight: _Blocks

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Scratch: the library's, and each copy."""
        pairs = zip(self.call.tensors, self.computed.tensors, strict=True)
        copies = [Piece((copy.size_bytes if copy != x else 0,), _BYTES) for x, copy in pairs]
        return (Piece((_workspace_bytes(self.computed),), _BYTES), *copies)

    @property
    def needs(self) -> KernelNeeds:
        """Scratch and time."""
        pairs = zip(self.call.tensors, self.computed.tensors, strict=True)
        moved = [x.size_bytes + copy.size_bytes for x, copy in pairs if copy != x]
        copies_ns = sum([self.gpu.call_ns + self.gpu.bytes_ns(size) for size in moved])
        duration_ns = copies_ns + _duration_ns(self.gpu, self.computed)
        return KernelNeeds(size_bytes(self.pieces), duration_ns=duration_ns)

    def bind(self, inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> DeviceCalls:
        """Return the calls on the tensors of `call`, of which the last is written."""
        addresses = [view.address for view in on_device((*inputs, *outputs))]
        library, *copies = carve(workspace, self.pieces)
        tensors, computed = self.call.tensors, self.computed.tensors
        blocks = [self.image if x is self.call.roles[0] else self.weight for x in tensors]
        places = tuple([copy or x for copy, x in zip(copies, addresses, strict=True)])
        size = _workspace_bytes(self.computed)
        calls: list[DeviceCall] = [
            _gather_call((tensors[n], addresses[n]), (computed[n], copies[n]), blocks[n])
            for n in range(len(tensors) - 1)
            if copies[n]
        ]
        calls.append(RunCudnn(self.computed, places, library, size))
        if copies[-1]:
            ends = _placed(tensors[-1], addresses[-1]), _placed(computed[-1], copies[-1])
            for target, source in _scattered(*ends, blocks[-1]):
                calls += copy_calls(self.gpu, target, source)
        return tuple(calls)


def _library_ways(gpu: Gpu, call: ConvCall) -> tuple[_LibraryWay, ...]:
    """Return the ways of the library to compute a call; the first is the call as it is."""
    ones, zeros = (1,) * len(call.strides), (0,) * len(call.strides)
    plain = _Blocks(ones, zeros)
    channels = call.roles[1].shape[1]
    ways = [_LibraryWay(gpu, call, call, plain, plain)]
    if call.groups == 1 and call.tensors[0].dtype in HALVES and channels < _PADDED_WIDTHS[-1]:
        for width in _PADDED_WIDTHS:
            if channels < width:
                kernel, extents = call.roles[1].shape[2:], call.roles[0].shape[2:]
                computed = _on_copies(call, width, extents, kernel)
                ways.append(_LibraryWay(gpu, call, computed, plain, plain))
        if {*call.dilation} == {1} != {*call.strides}:
            ways += _by_blocks(gpu, call)
    return tuple(ways)


def _by_blocks(gpu: Gpu, call: ConvCall) -> list[_LibraryWay]:
    """Return a convolution of strides s as one of strides 1, over blocks of s elements an axis.

    With padding l, and L the next multiple of s, y[i] = the sum over k of w[k] x[s i + k - l], and
    k + L - l = s a + b: so block a of the weight meets block i + a of the image.
    """
    sizes = call.strides
    whole = [-(-low // s) * s for low, s in zip(call.padding, sizes, strict=True)]
    missing = [end - low for end, low in zip(whole, call.padding, strict=True)]
    taps = [
        -(-(k + m) // s) for k, m, s in zip(call.roles[1].shape[2:], missing, sizes, strict=True)
    ]
    extents = [n + k - 1 for n, k in zip(call.roles[2].shape[2:], taps, strict=True)]
    width = -(-math.prod(sizes) * call.roles[1].shape[1] // _WIDE) * _WIDE
    if width > _MOST_BLOCK_CHANNELS:
        return []
    ones, zeros = (1,) * len(sizes), (0,) * len(sizes)
    computed = replace(
        _on_copies(call, width, tuple(extents), tuple(taps)), padding=zeros, strides=ones
    )
    image = _Blocks(sizes, tuple([-n for n in whole]))
    return [_LibraryWay(gpu, call, computed, image, _Blocks(sizes, tuple([-n for n in missing])))]


def _on_copies(call: ConvCall, width: int, extents: Extents, kernel: Extents) -> ConvCall:
    """Return a call whose image and weight have other channels, which lie last, and extents."""
    image, weight, _ = call.roles
    tensors = []
    for tensor in call.tensors:
        spatial = extents if tensor is image else kernel
        shape = (tensor.shape[0], width, *spatial)
        copy = replace(tensor, shape=shape, strides=_packed(shape, is_last=True))
        tensors.append(copy if tensor is image or tensor is weight else tensor)
    return replace(call, tensors=tuple(tensors))


_PlacedTensor = tuple[CudnnTensor, int]
"""A tensor, and its address."""


def _gather_call(source: _PlacedTensor, target: _PlacedTensor, blocks: _Blocks) -> RunKernel:
    """Return the kernel that makes the copy of a tensor."""
    (x, address), (copy, copy_address) = source, target
    blocks_of_all, item = copy.shape[0] * math.prod(copy.shape[2:]), x.dtype.itemsize
    text = _gather_text(copy.shape[1])
    words = (
        *(copy_address, address, blocks_of_all, x.shape[1]),
        *[step * item for step in x.strides[:2]],
        *three_axes(copy.shape[2:], 1),
        *three_axes(x.shape[2:], 1),
        *three_axes(blocks.sizes, 1),
        *three_axes(blocks.first, 0),
        *three_axes(tuple([step * item for step in x.strides[2:]]), 0),
    )
    return RunKernel(text, text.kernels[0], -(-blocks_of_all // _BLOCK), _BLOCK, words)


def _scattered(target: Array, copy: Array, blocks: _Blocks) -> Iterator[tuple[Array, Array]]:
    """Yield parts of a tensor, and those of its copy where the same elements are."""
    channels = target.shape[1]
    for number, block in enumerate(product(*[range(size) for size in blocks.sizes])):
        places: list[slice] = [slice(None), slice(None)]
        sources = [slice(None), slice(number * channels, (number + 1) * channels)]
        for element, size, first, extent in zip(
            block, blocks.sizes, blocks.first, target.shape[2:], strict=True
        ):
            # The first place that is this element of a block, and which block that is.
            place = (element + first) % size
            count = len(range(place, extent, size))
            places.append(slice(place, None, size))
            sources.append(slice((place - first) // size, (place - first) // size + count))
        part = target[tuple(places)]
        if part.size:
            yield part, copy[tuple(sources)]


@functools.cache
def _gather_text(width: int) -> KernelText:
    text = file_text("space_to_depth.cuh", {"WIDTH": width})
    about = f"copies of images with {width} channels"
    return KernelText.of("space_to_depth", text, ("NAME",), about, has_exchanges=False)


def _placed(tensor: CudnnTensor, address: int) -> Array:
    """Return an array that lies as a tensor does, at an address; nothing may touch it."""
    strides_bytes = tuple([step * tensor.dtype.itemsize for step in tensor.strides])
    type_ = TensorType(tensor.dtype, tensor.shape)
    return seen_as_array(DeviceView(address, type_, strides_bytes))


def plan_cudnn_convolution(
    op: str, gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands
) -> CudaPlan | None:
    """Plan `conv`, `conv_input_grad` or `conv_weight_grad`.

    It takes what the library takes; scratch is for what it turns, sums, and a chunk of ours.
    """
    if any([operand.offset_bytes % _ALIGNMENT for operand in (*inputs, *outputs)]):
        return None
    call = _convolution_call(op, attrs, (*inputs, *outputs))
    plan_own = partial(plan_convolution, op, gpu, chunk_bytes=_MOST_BYTES)
    own = None if call is None else plan_own(attrs, inputs, outputs)
    if call is None or own is None:
        return None
    ways: list[tuple[KernelNeeds, BindToCalls]] = [
        (way.needs, way.bind) for way in _library_ways(gpu, call)
    ]
    # Our products, too, are no faster than memory.
    own_ns = max(own.needs.duration_ns, _memory_ns(gpu, call))
    ways.append((replace(own.needs, duration_ns=own_ns), own.bind))
    # First what is planned to be the fastest.
    ways.sort(key=lambda way: way[0].duration_ns)

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        calls = [bind_way(inputs, outputs, workspace) for _, bind_way in ways]
        return (AlternativeCalls(tuple(calls)),)

    size = max([needs.workspace_bytes for needs, _ in ways])
    return KernelPlan(KernelNeeds(size, duration_ns=ways[0][0].duration_ns), bind)


def _convolution_call(op: str, attrs: Attrs, operands: Operands) -> ConvCall | None:
    """Return the record of a call, or None for one that the library does not take."""
    names, dtype = _NAMES[op], operands[0].type.dtype
    low, strides, dilation = [integers(attrs, name) for name in ("low", "strides", "dilation")]
    sizes = [x.type.num_elements for x in operands]
    if dtype not in _TYPES or not 0 < min(sizes) <= max(sizes) <= _MOST_ELEMENTS:
        return None
    if len(low) > 3 or min(low) < 0:
        return None
    lying = [_image_tensor(name, x) for name, x in zip(names, operands, strict=True)]
    tensors = tuple([tensor for tensor in lying if tensor is not None])
    if len(tensors) < len(lying):
        return None
    ways = low, strides, dilation
    if len(low) == 1:
        ways = (0, *low), (1, *strides), (1, *dilation)
    # The library has no convolutions along one axis: they get a first axis of extent 1.
    call = ConvCall(tensors, *ways)
    if call.groups != integer(attrs, "groups"):
        raise InternalError(f"{call} has other groups than {attrs}")
    return call if _is_even(call) else None


def _is_even(call: ConvCall) -> bool:
    """Whether as much padding behind as before gives the same windows."""
    image, weight, y = [tensor.shape[2:] for tensor in call.roles]
    ways = zip(image, weight, y, call.padding, call.strides, call.dilation, strict=True)
    return all([(n + 2 * p - (k - 1) * d - 1) // s + 1 == t for n, k, t, p, s, d in ways])


def _image_tensor(name: str, x: Operand) -> CudnnTensor | None:
    """Return a dense tensor, of at least two spatial axes; None for one that lies otherwise.

    Where it can be seen with channels first and last, it is as its type likes it.
    """
    (count, channels, *extents), dtype = x.shape, x.type.dtype
    steps = [step // dtype.itemsize for step in x.strides_bytes]
    if len(extents) == 1:
        extents, steps = [1, *extents], [*steps[:2], 0, *steps[2:]]
    shape = count, channels, *extents
    both = [_packed(shape, is_last=is_last) for is_last in (False, True)]
    # Tensor cores read channels last, other engines channels first.
    for strides in reversed(both) if dtype in HALVES else both:
        pairs = zip(shape, strides, steps, strict=True)
        if all([extent == 1 or one == other for extent, one, other in pairs]):
            return CudnnTensor(name, dtype, shape, strides)
    return None


def _packed(shape: Extents, *, is_last: bool) -> Extents:
    """Return the strides of a dense tensor, with channels last or first."""
    if not is_last:
        return contiguous_strides(shape, 1)
    count, channels, *extents = shape
    steps = contiguous_strides((count, *extents, channels), 1)
    return (steps[0], steps[-1], *steps[1:-1])


def _turned(call: ConvCall) -> list[int]:
    """Return the bytes of the tensors that lie otherwise than the library computes on them."""
    is_last = call.tensors[0].dtype in HALVES
    return [t.size_bytes for t in call.tensors if t.strides != _packed(t.shape, is_last=is_last)]


def _workspace_bytes(call: ConvCall) -> int:
    sums = _LEAST_BYTES + 2 * sum([tensor.size_bytes for tensor in call.tensors])
    return sum(_turned(call)) + min(sums, _MOST_BYTES)


_WIDE = 8
"""Channels that an engine of the small library loads at once."""


def _has_compiled(call: ConvCall) -> bool:
    """Whether the small library has a plan for a convolution, which its engines compile.

    They are for 16 bits: float32 they multiply as TF32. What they need is what the planner of 9.27
    says of some hundred calls, given the description of an H200.
    """
    weight = call.roles[1]
    if weight.dtype not in HALVES:
        return False
    groups, channels, results = call.groups, weight.shape[1], weight.shape[0] // call.groups
    is_wide = channels % _WIDE == 0 == results % _WIDE
    has_last = not _turned(call)
    if call.names == CONV:
        return is_wide or has_last or groups == 1
    if call.names == CONV_INPUT_GRAD:
        return has_last or (is_wide and {*call.strides} == {1})
    return is_wide or (has_last and groups == 1 and channels % 2 == 0 == results % 2)


def is_offered(
    library: CudnnLibrary,
    gpu: Gpu,
    kernel: CudaKernel,
    attrs: Attrs,
    inputs: Operands,
    outputs: Operands,
) -> bool:
    """Whether a library has what a kernel that takes a call computes it with, if it is cuDNN's."""
    if library.is_jit and kernel.name == f"{CUDNN}{kernel.op}" and kernel.op in OPS:
        call = _convolution_call(kernel.op, attrs, (*inputs, *outputs))
        ways = () if call is None else _library_ways(gpu, call)
        return any([_has_compiled(way.computed) for way in ways])
    return library.version >= oldest_for((kernel.name,))


def _duration_ns(gpu: Gpu, call: ConvCall) -> float:
    """Return the time of the products or of the bytes, and of what is turned: read and written."""
    _, weight, y = call.roles
    flops = 2.0 * math.prod(y.shape) * math.prod(weight.shape[1:])
    turned = _turned(call)
    products_ns = gpu.call_ns + gpu.product_ns(weight.dtype, flops) / _rate(call)
    work = max(products_ns, _memory_ns(gpu, call))
    return work + gpu.bytes_ns(2 * sum(turned)) + len(turned) * gpu.call_ns


def _memory_ns(gpu: Gpu, call: ConvCall) -> float:
    """Return the time in which a call moves its tensors."""
    moved_bytes = sum([tensor.size_bytes for tensor in call.tensors])
    return gpu.call_ns + gpu.bytes_ns(moved_bytes) / _MEMORY_RATE


def _rate(call: ConvCall) -> float:
    """Return at what part of the rate of products a call is computed."""
    weight = call.roles[1]
    results, channels = weight.shape[0] // call.groups, weight.shape[1]
    if weight.dtype not in HALVES:
        return _WIDE_RATE
    if channels % _PADDED_WIDTHS[0]:
        return _UNEVEN_RATE
    least = min(channels, results)
    return next((rate for most, rate in _RATES if least <= most), _WIDE_RATE)
