"""Attention and its gradients by cuDNN, in one call or a few.

Attention, whose scores never go through memory, is for bfloat16 and float16 with heads of 8n
numbers, up to `MOST_WIDTH`, that begin at multiples of 16 bytes; all else is composed
(`cuda.attention`). What scratch the library gets is fixed here, from shapes alone; which of its
ways it takes within that is found on the device, and changes no plan.

Of the log of a row's sum the library has one float: tail is 0. So its gradient is for scores up to
about 1e5; beyond, half a unit in the last place of lse changes the probabilities by more than
bfloat16 does, and at 1e8 they are noise.

The gradient of queries is added up in a fixed order, so that a run can be repeated bit by bit.
cuDNN has two ways to do that on Hopper; elsewhere the gradient is composed. The faster one keeps
the gradient of all scores in scratch, so it computes as many heads at once as `SCORES_BYTES` hold.
The other lets blocks wait for their turn to add to dq, which takes scratch of the size of dq; it is
taken where the scores of one head are too many. Which one is in the plan, as the kernel's name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from actors.kernels.common.kernel import (
    Attrs,
    KernelNeeds,
    KernelPlan,
    Operand,
    Operands,
    Piece,
    flag,
    number,
    size_bytes,
)
from actors.kernels.common.strides import Axis, collapse_axes
from actors.kernels.cuda.calls import (
    BACKWARD,
    FORWARD,
    CudnnTensor,
    Extents,
    FillBytes,
    LaunchCalls,
    RunCudnn,
    SdpaCall,
)
from actors.kernels.cuda.kernel import (
    CudaPlan,
    Gpu,
    PlacedViews,
    Scratch,
    carve,
    on_device,
)
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
texts of GPT-2 took 313 us in a step, and its gradient 2,447 alone."""

_ORDERED_RATE = 0.12
"""The same of the gradient whose blocks wait: 36 ms a step of GPT-2, 64 texts, on an H100."""

_ATTENTION = (*FORWARD, "tail")
_GRADIENT = ("dy", "q", "k", "v", "y", "lse", "tail", "dq", "dk", "dv")
"""The operands of `attention` and of `attention_grad`, inputs and then outputs."""


def plan_attention(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan `attention`: attrs scale, causal.

    It takes what the library takes; scratch is small.
    """
    sdpa = None
    if len(inputs) == len(_ATTENTION) - len(outputs) and outputs[-1].is_dense:
        sdpa = _sdpa(attrs, _ATTENTION, (*inputs, *outputs), FORWARD)
    if sdpa is None:
        return None

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        places = _places(_ATTENTION, FORWARD, (*inputs, *outputs))
        (scratch,) = carve(workspace, _FORWARD_PIECES)
        (tail,) = on_device(outputs[-1:])
        cleared = FillBytes(tail.address, 0, tail.type.size_bytes)
        return cleared, RunCudnn(sdpa, places, scratch, _FORWARD_PIECES[0].size_bytes)

    return KernelPlan(_needs(gpu, sdpa, _FORWARD_PIECES, _ATTENTION_RATE), bind)


def plan_gradient(
    gpu: Gpu,
    attrs: Attrs,
    inputs: Operands,
    outputs: Operands,
    *,
    scores_bytes: int = SCORES_BYTES,
) -> CudaPlan | None:
    """Plan `attention_grad`: attrs scale, causal. Scratch is the gradient of the scores.

    It takes what the library takes on Hopper, where the scores of a head have room.
    """
    sdpa = _gradient(gpu, attrs, inputs, outputs)
    portions = () if sdpa is None else _portions(sdpa, scores_bytes)
    if sdpa is None or not portions:
        return None
    pieces = _scores_pieces(portions)

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        places, size = _places(_GRADIENT, BACKWARD, (*inputs, *outputs)), pieces[0].size_bytes
        (scratch,) = carve(workspace, pieces)
        calls = [RunCudnn(part, _moved(places, at), scratch, size) for part, at in portions]
        return tuple(calls)

    return KernelPlan(_needs(gpu, sdpa, pieces, _GRADIENT_RATE, len(portions)), bind)


def plan_ordered_gradient(
    gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands
) -> CudaPlan | None:
    """Plan `attention_grad`: attrs scale, causal. Scratch is dq in float32; the library is 9.25.

    It takes what the library takes on Hopper.
    """
    sdpa = _gradient(gpu, attrs, inputs, outputs)
    if sdpa is None:
        return None
    pieces = _ordered_pieces(sdpa)

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        places = _places(_GRADIENT, BACKWARD, (*inputs, *outputs))
        (scratch,) = carve(workspace, pieces)
        return (RunCudnn(sdpa, places, scratch, pieces[0].size_bytes),)

    return KernelPlan(_needs(gpu, sdpa, pieces, _ORDERED_RATE), bind)


def _gradient(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> SdpaCall | None:
    if gpu.capability[0] != _HOPPER or len(inputs) > len(_GRADIENT) - len(outputs):
        return None
    return _sdpa(attrs, _GRADIENT, (*inputs, *outputs), BACKWARD)


def _sdpa(
    attrs: Attrs, order: tuple[str, ...], operands: Operands, wanted: tuple[str, ...]
) -> SdpaCall | None:
    """Return the record of a call on operands in an order, or None for one that is not taken."""
    if any([operand.offset_bytes % _ALIGNMENT for operand in operands]):
        return None
    named = dict(zip(order, operands, strict=True))
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


def _heads(matrices: Sequence[Operand]) -> tuple[Axis, Axis] | None:
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
    # Fewer blocks than multiprocessors leave some without work.
    share = min(b * h * -(-rows // _ROW_TILE) / gpu.num_sms, 1.0)
    duration = max(gpu.product_ns(q.dtype, flops) / rate / share, gpu.bytes_ns(moved))
    return KernelNeeds(size_bytes(pieces), duration_ns=duration + num_calls * gpu.call_ns)


def _places(order: tuple[str, ...], names: tuple[str, ...], views: PlacedViews) -> tuple[int, ...]:
    """Return the addresses of some of the operands, which come in an order."""
    by_name = dict(zip(order, on_device(views), strict=True))
    return tuple([by_name[name].address for name in names])
