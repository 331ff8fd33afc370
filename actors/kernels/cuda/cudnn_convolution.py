"""Convolution and its gradients by cuDNN, in one call, or by products of ours where that is better.

Taken are one to three spatial axes of float32, never as TF32, and of bfloat16 and float16, with
as much padding behind an axis as before it. Tensors lie dense, channels first or last. Tensor cores
read channels last, so what lies otherwise, as weights do, the library turns in its scratch.

That is fixed here, from shapes alone. Both ways are bound: where the library has no plan within it,
and where its plan takes longer, `CudaConvolution` with small chunks computes the call. No plan of
the library adds up out of order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actors.kernels.attributes import integer, integers
from actors.kernels.convolution import OPS
from actors.kernels.cuda.calls import LaunchCalls, OneOf, RunCudnn
from actors.kernels.cuda.convolution import CudaConvolution
from actors.kernels.cuda.cudnn_attention import CUDNN
from actors.kernels.cuda.cudnn_records import (
    CONV,
    CONV_INPUT_GRAD,
    CONV_WEIGHT_GRAD,
    ConvCall,
    CudnnTensor,
    Extents,
)
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.views import DeviceView, PlacedView, on_device
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, Operands
from compiler.errors import InternalError
from compiler.types import HALVES, DType, contiguous_strides

_NAMES = dict(zip(OPS, (CONV, CONV_INPUT_GRAD, CONV_WEIGHT_GRAD), strict=True))
_TYPES = (DType.FLOAT32, *HALVES)
_ALIGNMENT = 16
_MOST_ELEMENTS = (1 << 31) - 1
"""Of a tensor: engines of the library count in 32 bits."""

_LEAST_BYTES, _MOST_BYTES = 1 << 20, 16 << 20
"""What the library may have for partial sums, besides what it turns. Its first plans for the
convolutions of ResNet-50, planned for an H200, want all of that at 8 images, 4 MiB at 256."""

_RATE = 0.6
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
        call = _call(self.op, attrs, (*inputs, *outputs))
        own = None if call is None else self._instead.query(attrs, inputs, outputs)
        if call is None or own is None:
            return None
        size = max(_workspace_bytes(call), own.workspace_bytes)
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
        call = _call(self.op, attrs, views)
        if call is None or workspace is None:
            raise InternalError(f"cuDNN does not take {', '.join([str(x.type) for x in views])}")
        places = tuple([view.address for view in views])
        its = RunCudnn(call, places, workspace.address, _workspace_bytes(call))
        return (OneOf(((its,), self._instead.bind(attrs, inputs, outputs, workspace))),)


def _call(op: str, attrs: Attrs, operands: Sequence[Operand | DeviceView]) -> ConvCall | None:
    """Return the record of a call, or None for one that the library does not take."""
    names, dtype = _NAMES[op], operands[0].type.dtype
    low, strides, dilation = [integers(attrs, name) for name in ("low", "strides", "dilation")]
    sizes = [x.type.num_elements for x in operands]
    if dtype not in _TYPES or not 0 < min(sizes) <= max(sizes) <= _MOST_ELEMENTS:
        return None
    if len(low) > 3 or min(low) < 0:
        return None
    lying = [_tensor(name, x) for name, x in zip(names, operands, strict=True)]
    tensors = tuple([tensor for tensor in lying if tensor is not None])
    if len(tensors) < len(lying):
        return None
    ways = low, strides, dilation
    if len(low) == 1:
        ways = (0, *low), (1, *strides), (1, *dilation)
    call = ConvCall(tensors, *ways)
    if call.groups != integer(attrs, "groups"):
        raise InternalError(f"{call} has other groups than {attrs}")
    return call if _is_even(call) else None


def _is_even(call: ConvCall) -> bool:
    """Whether as much padding behind as before gives the same windows."""
    image, weight, y = [tensor.shape[2:] for tensor in call.roles]
    ways = zip(image, weight, y, call.padding, call.strides, call.dilation, strict=True)
    return all([(n + 2 * p - (k - 1) * d - 1) // s + 1 == t for n, k, t, p, s, d in ways])


def _tensor(name: str, x: Operand | DeviceView) -> CudnnTensor | None:
    """Return a dense tensor, of at least two spatial axes; None for one that lies otherwise.

    Where it can be seen with channels first and last, it is as its type likes it.
    """
    (count, channels, *extents), dtype = x.shape, x.type.dtype
    steps = [step // dtype.itemsize for step in x.strides_bytes]
    if len(extents) == 1:
        extents, steps = [1, *extents], [*steps[:2], 0, *steps[2:]]
    shape = count, channels, *extents
    both = [_packed(shape, is_last=is_last) for is_last in (False, True)]
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


def _duration_ns(gpu: Gpu, call: ConvCall) -> float:
    """Return the time of the products or of the bytes, and of what is turned: read and written."""
    _, weight, y = call.roles
    flops = 2.0 * math.prod(y.shape) * math.prod(weight.shape[1:])
    moved = sum([tensor.size_bytes for tensor in call.tensors])
    turned = _turned(call)
    work = max(gpu.product_ns(weight.dtype, flops) / _RATE, gpu.bytes_ns(moved))
    return work + gpu.bytes_ns(2 * sum(turned)) + (1 + len(turned)) * gpu.call_ns


def cudnn_convolutions(gpu: Gpu) -> tuple[CudnnConvolution, ...]:
    """Return the kernels of this file for a GPU."""
    return tuple([CudnnConvolution(gpu, op) for op in OPS])
