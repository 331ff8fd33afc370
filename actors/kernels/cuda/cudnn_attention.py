"""Attention and its gradient by cuDNN, in one call whose scores never go through memory.

For bfloat16 and float16 with heads of 8n numbers, up to `MOST_WIDTH`, that begin at multiples of 16
bytes; all else is composed (`attention`). What scratch the library gets is fixed here, from shapes
alone; which of its ways it takes within that is found on the device, and changes no plan.

The gradient of queries is added up in a fixed order, so that a run can be repeated bit by bit.
cuDNN does that in scratch of the size of dq on Hopper alone; elsewhere it would want all scores,
and the gradient is composed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from actors.kernels.attributes import flag, number
from actors.kernels.axes import Axis, walk
from actors.kernels.cuda.calls import DeviceCalls, RunCudnn
from actors.kernels.cuda.cudnn_records import BACKWARD, FORWARD, CudnnTensor, Extents, SdpaCall
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.views import DeviceView, PlacedView, carve, on_device
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, Operands
from actors.kernels.scratch import Piece, size_bytes
from compiler.errors import InternalError
from compiler.types import HALVES, DType, contiguous_strides

CUDNN = "cudnn."
"""How the names of kernels begin that need the package of cuDNN."""

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

_RATE = 0.6
"""Of the rate of products. Read of other people's measurements on an H100; ours are to come."""

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
        return None if sdpa is None else _needs(self.gpu, sdpa)

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return the call."""
        views = on_device((*inputs, *outputs))
        return _call(attrs, (FORWARD, FORWARD), views, workspace)


@dataclass(frozen=True, slots=True)
class CudnnAttentionGrad:
    """`attention_grad`: attrs scale, causal."""

    gpu: Gpu
    name: str = f"{CUDNN}attention_grad"
    op: str = "attention_grad"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take what the library takes on Hopper; scratch is dq in float32 and a little."""
        if self.gpu.capability[0] != _HOPPER or len(inputs) > len(_GRADIENT) - len(outputs):
            return None
        sdpa = _asked(attrs, _GRADIENT, (*inputs, *outputs), BACKWARD)
        return None if sdpa is None else _needs(self.gpu, sdpa)

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return the call."""
        views = on_device((*inputs, *outputs))
        return _call(attrs, (_GRADIENT, BACKWARD), views, workspace)


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
    tensors = {"lse": _tensor("lse", DType.FLOAT32, shape, contiguous_strides(shape, 1))}
    for place, (name, x) in enumerate(matrices.items()):
        shape = (batch, count, x.shape[-2], x.shape[-1])
        steps = (*[axis.steps[place] for axis in heads], *x.strides_bytes[-2:])
        in_elements = tuple([step // dtype.itemsize for step in steps])
        tensors[name] = _tensor(name, dtype, shape, in_elements)
    if not all([_is_taken(tensor) for tensor in tensors.values()]):
        return None
    ordered = tuple([tensors[name] for name in wanted])
    return SdpaCall(ordered, number(attrs, "scale"), flag(attrs, "causal"))


def _heads(matrices: Sequence[Operand | DeviceView]) -> tuple[Axis, Axis] | None:
    """Return batch and heads of some operands: two leading axes, or what can be seen as such."""
    shape = matrices[0].shape[:-2]
    strides = [x.strides_bytes[:-2] for x in matrices]
    axes = walk(shape, strides, in_order=True)
    if len(shape) == 2 and 1 not in shape:
        axes = tuple([Axis(n, tuple(s)) for n, *s in zip(shape, *strides, strict=True)])
    if len(axes) > 2 or any([axis.extent > _MOST_HEADS for axis in axes]):
        return None
    one = Axis(1, tuple([0] * len(matrices)))
    first, second = (*[one] * (2 - len(axes)), *axes)
    return first, second


def _tensor(name: str, dtype: DType, shape: Extents, steps: tuple[int, ...]) -> CudnnTensor:
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


def _pieces(sdpa: SdpaCall) -> tuple[Piece, ...]:
    """Return the library's scratch."""
    b, h, rows, width = sdpa.tensors[0].shape
    size = _FORWARD_BYTES
    if sdpa.is_backward:
        whole = -(-rows // _ROW_TILE) * _ROW_TILE
        size = 4 * b * h * whole * (width + 1) + _MARGIN_BYTES
    return (Piece((size,), np.dtype(np.uint8)),)


def _needs(gpu: Gpu, sdpa: SdpaCall) -> KernelNeeds:
    q, k, v = sdpa.tensors[:3]
    b, h, rows, width = q.shape
    hidden = rows * (rows - 1) // 2 if sdpa.causal else 0
    visible = rows * k.shape[2] - hidden
    num_products = 3 * width + 2 * v.shape[3] if sdpa.is_backward else width + v.shape[3]
    flops = 2.0 * b * h * visible * num_products
    moved = sum([math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in sdpa.tensors])
    num_calls = 3 if sdpa.is_backward else 1
    duration = max(gpu.product_ns(q.dtype, flops) / _RATE, gpu.bytes_ns(moved))
    return KernelNeeds(size_bytes(_pieces(sdpa)), duration_ns=duration + num_calls * gpu.call_ns)


def _call(
    attrs: Attrs,
    names: tuple[tuple[str, ...], tuple[str, ...]],
    views: tuple[DeviceView, ...],
    workspace: DeviceView | None,
) -> DeviceCalls:
    """Return the library's call."""
    order, wanted = names
    named = dict(zip(order, views, strict=True))
    sdpa = _sdpa(attrs, named, wanted)
    if sdpa is None:
        raise InternalError(f"cuDNN does not take {', '.join([str(x.type) for x in views])}")
    pieces = _pieces(sdpa)
    (scratch,) = carve(workspace, pieces)
    places = tuple([named[name].address for name in wanted])
    return (RunCudnn(sdpa, places, scratch, pieces[0].size_bytes),)
