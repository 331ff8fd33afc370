"""Attention, convolution and their gradients by cuDNN, each in one call.

Attention, whose scores never go through memory, is for bfloat16 and float16 with heads of 8n
numbers, up to `MOST_WIDTH`, that begin at multiples of 16 bytes; all else is composed
(`cuda.attention`). What scratch the library gets is fixed here, from shapes alone; which of its
ways it takes within that is found on the device, and changes no plan.

The gradient of queries is added up in a fixed order, so that a run can be repeated bit by bit.
cuDNN has two ways to do that on Hopper; elsewhere the gradient is composed. The faster one keeps
the gradient of all scores in scratch, so it computes as many heads at once as `SCORES_BYTES` hold.
The other lets blocks wait for their turn to add to dq, which takes scratch of the size of dq; it is
taken where the scores of one head are too many. Which one is in the plan, as the kernel's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from actors.kernels.common.convolution_steps import OPS
from actors.kernels.common.kernel import (
    Attrs,
    KernelNeeds,
    Operand,
    Operands,
    Piece,
    flag,
    integer,
    integers,
    number,
    size_bytes,
)
from actors.kernels.common.strides import Axis, collapse_axes
from actors.kernels.cuda.calls import (
    BACKWARD,
    CONV,
    CONV_INPUT_GRAD,
    CONV_WEIGHT_GRAD,
    FORWARD,
    AlternativeCalls,
    ConvCall,
    CudnnTensor,
    DeviceCalls,
    Extents,
    LaunchCalls,
    RunCudnn,
    SdpaCall,
)
from actors.kernels.cuda.convolution import CudaConvolution
from actors.kernels.cuda.cudnn_library import (
    CUDNN,
    ORDERED_GRADIENT,
    CudnnLibrary,
    oldest_for,
)
from actors.kernels.cuda.kernel import CudaKernel, DeviceView, Gpu, PlacedView, carve, on_device
from compiler.contract.errors import InternalError
from compiler.contract.types import HALVES, DType, contiguous_strides

MOST_WIDTH = 128
"""What every GPU takes; more depends on the generation."""

_WIDTH_STEP, _ALIGNMENT = 8, 16
_MOST_HEADS = 65_535
"""Blocks along the second and third axis of a grid."""

_HOPPER = 9
_FORWARD_BYTES = 1 << 20
_MARGIN_BYTES = 16 << 20
_ROW_TILE = 128
"""Of scratch with a row for each query the library may fill whole tiles."""

SCORES_BYTES = 256 << 20
"""What the gradient of the scores that are computed at once may take: those of 8 texts of GPT-2. A
call of as many heads has six blocks for each multiprocessor of an H200."""

_SCORE_BYTES = 2
_SCORE_TILE = 64
"""The library pads the rows and the columns of those scores to multiples: the planners of 9.19,
9.27 and 9.28, given the description of an H200, want that and 128 bytes."""

_LSE_STEP = _ALIGNMENT // 4

_ATTENTION_RATE, _GRADIENT_RATE = 0.36, 0.144
"""Of the rate of products: 260 and 105 TFLOP/s of an H100. On one, with cuDNN 9.19, attention of 64
texts of GPT-2 took 313 us in a step, and its gradient 2,557, timed by hand."""

_ORDERED_RATE = 0.12
"""The same of the gradient whose blocks wait: 36 ms a step of GPT-2, 64 texts, on an H100."""

_GRADIENT = ("dy", "q", "k", "v", "y", "lse", "dq", "dk", "dv")
"""The operands of `attention_grad`, inputs and then outputs; those of `attention` are `FORWARD`."""


@dataclass(frozen=True, slots=True)
class CudnnAttention:
    """`attention`: attrs scale, causal."""

    gpu: Gpu
    name: str = f"{CUDNN}attention"
    op: str = "attention"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take what the library takes; scratch is small."""
        sdpa = None
        if len(inputs) == len(FORWARD) - len(outputs):
            sdpa = _asked(attrs, FORWARD, (*inputs, *outputs), FORWARD)
        return None if sdpa is None else _needs(self.gpu, sdpa, _FORWARD_PIECES, _ATTENTION_RATE)

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return the call."""
        sdpa, places = _bound(attrs, (FORWARD, FORWARD), on_device((*inputs, *outputs)))
        (scratch,) = carve(workspace, _FORWARD_PIECES)
        return (RunCudnn(sdpa, places, scratch, _FORWARD_PIECES[0].size_bytes),)


@dataclass(frozen=True, slots=True)
class CudnnAttentionGrad:
    """`attention_grad`: attrs scale, causal. Scratch is the gradient of the scores."""

    gpu: Gpu
    scores_bytes: int = SCORES_BYTES
    name: str = f"{CUDNN}attention_grad"
    op: str = "attention_grad"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take what the library takes on Hopper, where the scores of a head have room."""
        sdpa = _gradient_asked(self.gpu, attrs, inputs, outputs)
        portions = () if sdpa is None else _portions(sdpa, self.scores_bytes)
        if sdpa is None or not portions:
            return None
        return _needs(self.gpu, sdpa, _scores_pieces(portions), _GRADIENT_RATE, len(portions))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return a call for each portion of the heads."""
        sdpa, places = _bound(attrs, (_GRADIENT, BACKWARD), on_device((*inputs, *outputs)))
        portions = _portions(sdpa, self.scores_bytes)
        pieces = _scores_pieces(portions)
        (scratch,) = carve(workspace, pieces)
        size = pieces[0].size_bytes
        return tuple(
            [RunCudnn(part, _moved(places, offsets), scratch, size) for part, offsets in portions]
        )


@dataclass(frozen=True, slots=True)
class CudnnOrderedAttentionGrad:
    """`attention_grad`: attrs scale, causal. Scratch is dq in float32; the library is 9.25."""

    gpu: Gpu
    name: str = ORDERED_GRADIENT
    op: str = "attention_grad"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take what the library takes on Hopper."""
        sdpa = _gradient_asked(self.gpu, attrs, inputs, outputs)
        return (
            None if sdpa is None else _needs(self.gpu, sdpa, _ordered_pieces(sdpa), _ORDERED_RATE)
        )

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return the call."""
        sdpa, places = _bound(attrs, (_GRADIENT, BACKWARD), on_device((*inputs, *outputs)))
        pieces = _ordered_pieces(sdpa)
        (scratch,) = carve(workspace, pieces)
        return (RunCudnn(sdpa, places, scratch, pieces[0].size_bytes),)


def _gradient_asked(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> SdpaCall | None:
    if gpu.capability[0] != _HOPPER or len(inputs) > len(_GRADIENT) - len(outputs):
        return None
    return _asked(attrs, _GRADIENT, (*inputs, *outputs), BACKWARD)


def _asked(
    attrs: Attrs, order: tuple[str, ...], operands: Operands, wanted: tuple[str, ...]
) -> SdpaCall | None:
    """Return the record of a call that is planned, or None where the library does not take it."""
    if any([operand.offset_bytes % _ALIGNMENT for operand in operands]):
        return None
    return _sdpa(attrs, dict(zip(order, operands, strict=True)), wanted)


def _sdpa(
    attrs: Attrs, named: Mapping[str, Operand | DeviceView], wanted: tuple[str, ...]
) -> SdpaCall | None:
    """Return the record of a call on some operands, or None for one that is not taken."""
    lse = named["lse"]
    matrices = {name: named[name] for name in wanted if name != "lse"}
    dtype, rows = named["q"].type.dtype, lse.shape[-1]
    widths = [x.shape[-1] for x in matrices.values()]
    # The first queries would see no key at all.
    if flag(attrs, "causal") and rows > named["k"].shape[-2]:
        return None
    if dtype not in HALVES or any([w % _WIDTH_STEP or not 0 < w <= MOST_WIDTH for w in widths]):
        return None
    if not all([x.type.num_elements for x in matrices.values()]) or not lse.is_dense:
        return None
    heads = _heads(list(matrices.values()))
    if heads is None:
        return None
    batch, count = [axis.extent for axis in heads]
    shape = (batch, count, rows, 1)
    tensors = {"lse": _attention_tensor("lse", DType.FLOAT32, shape, contiguous_strides(shape, 1))}
    for place, (name, x) in enumerate(matrices.items()):
        shape = (batch, count, x.shape[-2], x.shape[-1])
        steps = (*[axis.steps[place] for axis in heads], *x.strides_bytes[-2:])
        in_elements = tuple([step // dtype.itemsize for step in steps])
        tensors[name] = _attention_tensor(name, dtype, shape, in_elements)
    if not all([_is_taken(tensor) for tensor in tensors.values()]):
        return None
    ordered = tuple([tensors[name] for name in wanted])
    return SdpaCall(ordered, number(attrs, "scale"), flag(attrs, "causal"))


def _heads(matrices: Sequence[Operand | DeviceView]) -> tuple[Axis, Axis] | None:
    """Return batch and heads of some operands: two leading axes, or what can be seen as such."""
    shape = matrices[0].shape[:-2]
    strides = [x.strides_bytes[:-2] for x in matrices]
    axes = collapse_axes(shape, strides, in_order=True)
    if len(shape) == 2 and 1 not in shape:
        axes = tuple([Axis(n, tuple(s)) for n, *s in zip(shape, *strides, strict=True)])
    if len(axes) > 2 or any([axis.extent > _MOST_HEADS for axis in axes]):
        return None
    one = Axis(1, tuple([0] * len(matrices)))
    first, second = (*[one] * (2 - len(axes)), *axes)
    return first, second


def _attention_tensor(
    name: str, dtype: DType, shape: Extents, steps: tuple[int, ...]
) -> CudnnTensor:
    """Return a tensor; an axis of extent 1 gets the stride of a packed one."""
    packed, strides = 1, []
    for extent, step in zip(reversed(shape), reversed(steps), strict=True):
        strides.append(packed if extent == 1 else step)
        packed = max(packed, extent * strides[-1])
    width, row, head, batch = strides
    return CudnnTensor(name, dtype, shape, (batch, head, row, width))


def _is_taken(tensor: CudnnTensor) -> bool:
    """Whether rows are dense and begin where the library can load 16 bytes at once."""
    *outer, inner = tensor.strides
    step = 1 if tensor.name == "lse" else _WIDTH_STEP
    return inner == 1 and all([stride > 0 and stride % step == 0 for stride in outer])


_FORWARD_PIECES = (Piece((_FORWARD_BYTES,), np.dtype(np.uint8)),)


def _ordered_pieces(sdpa: SdpaCall) -> tuple[Piece, ...]:
    """Return scratch of dq and of a sum for each query."""
    b, h, rows, width = sdpa.tensors[0].shape
    size = 4 * b * h * _whole(rows, _ROW_TILE) * (width + 1) + _MARGIN_BYTES
    return (Piece((size,), np.dtype(np.uint8)),)


Portion = tuple[SdpaCall, tuple[int, ...]]
"""A call on some of the heads, and how many bytes behind its tensors each of those begins."""


def _portions(sdpa: SdpaCall, scores_bytes: int) -> tuple[Portion, ...]:
    """Return a gradient as calls whose scores have room; none where those of a head have not.

    A portion is some places of the batch with all their heads, else some heads of one place.
    """
    count, heads, rows, _ = sdpa.tensors[0].shape
    most = scores_bytes // _head_bytes(sdpa)
    num_places = _even(count, most // heads) if most >= heads else 1
    num_heads = heads if most >= heads else _even(heads, most)
    is_whole = (num_places, num_heads) == (count, heads)
    # Of a portion lse, too, begins where the library can load 16 bytes at once.
    if not most or (not is_whole and num_heads * rows % _LSE_STEP):
        return ()
    kept, portions = replace(sdpa, keeps_scores=True), []
    for place in range(0, count, num_places):
        for head in range(0, heads, num_heads):
            extents = min(num_places, count - place), min(num_heads, heads - head)
            portions.append(_portion(kept, (place, head), extents))
    return tuple(portions)


def _portion(sdpa: SdpaCall, first: tuple[int, int], extents: tuple[int, int]) -> Portion:
    """Return a call on some heads of some places of the batch."""
    tensors, offsets = [], []
    for x in sdpa.tensors:
        shape = (*extents, *x.shape[2:])
        tensors.append(_attention_tensor(x.name, x.dtype, shape, x.strides))
        offset = sum([index * step for index, step in zip(first, x.strides[:2], strict=True)])
        offsets.append(offset * x.dtype.itemsize)
    return replace(sdpa, tensors=tuple(tensors)), tuple(offsets)


def _even(count: int, most: int) -> int:
    """Return how many of `count` to take at once: `most`, or fewer if all portions are then equal.

    A portion of another size is one more plan of the library.
    """
    most = min(most, count)
    equal = [size for size in range(most, most // 2, -1) if count % size == 0]
    return equal[0] if equal else most


def _moved(places: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([place + offset for place, offset in zip(places, offsets, strict=True)])


def _head_bytes(sdpa: SdpaCall) -> int:
    """Return the bytes of the scores of a head, in the type of q."""
    rows, keys = sdpa.tensors[0].shape[2], sdpa.tensors[1].shape[2]
    return _SCORE_BYTES * _whole(rows, _SCORE_TILE) * _whole(keys, _SCORE_TILE)


def _scores_pieces(portions: tuple[Portion, ...]) -> tuple[Piece, ...]:
    """Return scratch of the scores of one portion, and of a sum for each query."""
    first, _ = portions[0]
    b, h, rows, _ = first.tensors[0].shape
    size = b * h * (_head_bytes(first) + 4 * _whole(rows, _ROW_TILE)) + _MARGIN_BYTES
    return (Piece((size,), np.dtype(np.uint8)),)


def _whole(count: int, tile: int) -> int:
    """Return the least multiple of a tile that holds so many."""
    return -(-count // tile) * tile


def _needs(
    gpu: Gpu, sdpa: SdpaCall, pieces: tuple[Piece, ...], rate: float, num_portions: int = 1
) -> KernelNeeds:
    q, k, v = sdpa.tensors[:3]
    b, h, rows, width = q.shape
    # With the diagonal at the bottom right: 0 scores of the last row, rows - 1 of the first.
    hidden = rows * (rows - 1) // 2 if sdpa.causal else 0
    visible = rows * k.shape[2] - hidden
    num_products = 3 * width + 2 * v.shape[3] if sdpa.is_backward else width + v.shape[3]
    flops = 2.0 * b * h * visible * num_products
    moved = sum([math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in sdpa.tensors])
    num_calls = 3 * num_portions if sdpa.is_backward else 1
    duration = max(gpu.product_ns(q.dtype, flops) / rate, gpu.bytes_ns(moved))
    return KernelNeeds(size_bytes(pieces), duration_ns=duration + num_calls * gpu.call_ns)


def _bound(
    attrs: Attrs, names: tuple[tuple[str, ...], tuple[str, ...]], views: tuple[DeviceView, ...]
) -> tuple[SdpaCall, tuple[int, ...]]:
    """Return the record of a call on memory, and the addresses of its tensors."""
    order, record_names = names
    by_name = dict(zip(order, views, strict=True))
    sdpa = _sdpa(attrs, by_name, record_names)
    if sdpa is None:
        raise InternalError(f"cuDNN does not take {', '.join([str(x.type) for x in views])}")
    return sdpa, tuple([by_name[name].address for name in record_names])


# Convolution. Taken are one to three spatial axes of float32, never as TF32, and of bfloat16 and
# float16, with as much padding behind an axis as before it. Tensors lie dense, channels first or
# last. Tensor cores read channels last, so what lies otherwise, as weights do, the library turns in
# its scratch.
#
# That is fixed here, from shapes alone. Both ways are bound: where the library has no plan within
# it, and where its plan takes longer, `CudaConvolution` with small chunks computes the call. No
# plan of the library adds up out of order.

_NAMES = dict(zip(OPS, (CONV, CONV_INPUT_GRAD, CONV_WEIGHT_GRAD), strict=True))
_TYPES = (DType.FLOAT32, *HALVES)
_MOST_ELEMENTS = (1 << 31) - 1
"""Of a tensor: engines of the library count in 32 bits."""

_LEAST_BYTES, _MOST_BYTES = 1 << 20, 16 << 20
"""What the library may have for partial sums, besides what it turns. Its first plans for the
convolutions of ResNet-50, planned for an H200, want all of that at 8 images, 4 MiB at 256."""

_CONVOLUTION_RATE = 0.6
"""Of the rate of products; an estimate, as that of attention is."""


@dataclass(frozen=True, slots=True)
class CudnnConvolution:
    """`conv`, `conv_input_grad` or `conv_weight_grad`."""

    gpu: Gpu
    op: str

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"{CUDNN}{self.op}"

    @property
    def _instead(self) -> CudaConvolution:
        return CudaConvolution(self.gpu, self.op, chunk_bytes=_MOST_BYTES)

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take what the library takes; scratch is for what it turns, sums, and a chunk of ours."""
        if any([operand.offset_bytes % _ALIGNMENT for operand in (*inputs, *outputs)]):
            return None
        call = _convolution_call(self.op, attrs, (*inputs, *outputs))
        own_needs = None if call is None else self._instead.query(attrs, inputs, outputs)
        if call is None or own_needs is None:
            return None
        size = max(_workspace_bytes(call), own_needs.workspace_bytes)
        return KernelNeeds(size, duration_ns=_duration_ns(self.gpu, call))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> LaunchCalls:
        """Return the library's call, or those of ours."""
        views = on_device((*inputs, *outputs))
        call = _convolution_call(self.op, attrs, views)
        if call is None or workspace is None:
            raise InternalError(f"cuDNN does not take {', '.join([str(x.type) for x in views])}")
        places = tuple([view.address for view in views])
        library_call = RunCudnn(call, places, workspace.address, _workspace_bytes(call))
        return (
            AlternativeCalls(
                ((library_call,), self._instead.bind(attrs, inputs, outputs, workspace))
            ),
        )


def _convolution_call(
    op: str, attrs: Attrs, operands: Sequence[Operand | DeviceView]
) -> ConvCall | None:
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


def _image_tensor(name: str, x: Operand | DeviceView) -> CudnnTensor | None:
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
    library: CudnnLibrary, kernel: CudaKernel, attrs: Attrs, inputs: Operands, outputs: Operands
) -> bool:
    """Whether a library has what a kernel that takes a call computes it with, if it is cuDNN's."""
    if library.is_jit and isinstance(kernel, CudnnConvolution):
        call = _convolution_call(kernel.op, attrs, (*inputs, *outputs))
        return call is not None and _has_compiled(call)
    return library.version >= oldest_for((kernel.name,))


def _duration_ns(gpu: Gpu, call: ConvCall) -> float:
    """Return the time of the products or of the bytes, and of what is turned: read and written."""
    _, weight, y = call.roles
    flops = 2.0 * math.prod(y.shape) * math.prod(weight.shape[1:])
    moved_bytes = sum([tensor.size_bytes for tensor in call.tensors])
    turned = _turned(call)
    work = max(gpu.product_ns(weight.dtype, flops) / _CONVOLUTION_RATE, gpu.bytes_ns(moved_bytes))
    return work + gpu.bytes_ns(2 * sum(turned)) + (1 + len(turned)) * gpu.call_ns


def cudnn_convolutions(gpu: Gpu) -> tuple[CudnnConvolution, ...]:
    """Return the kernels of this file for a GPU."""
    return tuple([CudnnConvolution(gpu, op) for op in OPS])
