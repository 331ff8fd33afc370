"""Convolution and its gradients as products of the library, and pooling by a kernel of ours.

A convolution goes chunk by chunk, with copies of ours. The steps are those of
`actors.kernels.common.convolution_steps`. The gradient of a weight in 16 bits is rounded once for
each chunk that the columns of a batch take.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import numpy as np

from actors.kernels.common.convolution_steps import (
    POOLING_OPS,
    Copy,
    Fill,
    Multiply,
    ScratchLayout,
    Step,
    steps_of,
    windows_of,
)
from actors.kernels.common.kernel import Attrs, KernelNeeds, KernelPlan, Operands, Piece, size_bytes
from actors.kernels.cuda.calls import DeviceCalls, KernelText, LaunchCalls, RunKernel, file_text
from actors.kernels.cuda.kernel import (
    CudaPlan,
    DeviceView,
    Gpu,
    PlacedViews,
    Scratch,
    carve,
    on_device,
)
from actors.kernels.cuda.matmul import PlannedProduct, plan_product
from actors.kernels.cuda.movement import copy_calls, copy_ns, seen_as_array
from actors.kernels.program.values import conversions, storage_of, type_of
from actors.machine.protocol import Array
from compiler.contract.errors import InternalError
from compiler.contract.types import DType, TensorType, numpy_dtype

CHUNK_BYTES = 256 << 20
"""Columns of a chunk."""

_NOWHERE = 1 << 20
_BYTES = np.dtype(np.uint8)


BindToCalls = Callable[[PlacedViews, PlacedViews, Scratch], DeviceCalls]
"""Binds a launch with one way to compute it."""


def plan_convolution(
    op: str,
    gpu: Gpu,
    attrs: Attrs,
    inputs: Operands,
    outputs: Operands,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> KernelPlan[BindToCalls] | None:
    """Plan `conv`, `conv_input_grad` or `conv_weight_grad` of any floats.

    It takes every call; scratch is a chunk of columns, what is padded, and the products'.
    """
    dtype = outputs[0].type.dtype
    if not dtype.is_float:
        return None
    duration_ns, most = 0.0, 0
    room = ScratchLayout(numpy_dtype(dtype), chunk_bytes, None)
    sources, targets = _arrays(_layouts(inputs)), _arrays(_layouts(outputs))
    for step, times in steps_of(op, attrs, sources, targets, room):
        if isinstance(step, Multiply):
            product = _product(gpu, step, dtype)
            most = max(most, size_bytes(product.pieces))
            duration_ns += times * product.duration_ns()
        else:
            duration_ns += times * copy_ns(gpu, *_ends(step))
    # The library's comes first: it wants 256 bytes.
    pieces = {"library": Piece((most,), _BYTES), **room.pieces}
    needs = KernelNeeds(size_bytes(tuple(pieces.values())), duration_ns=duration_ns)

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> DeviceCalls:
        sources, targets = on_device(inputs), on_device(outputs)
        dtype = targets[0].dtype
        places = dict(zip(pieces, carve(workspace, tuple(pieces.values())), strict=True))
        arrays = {name: _bytes_at(places[name], piece) for name, piece in pieces.items()}
        room = ScratchLayout(numpy_dtype(dtype), chunk_bytes, arrays)
        steps = steps_of(op, attrs, _arrays(sources), _arrays(targets), room)
        return tuple([call for step, _ in steps for call in _calls(gpu, step, dtype, places)])

    return KernelPlan(needs, bind)


def _calls(gpu: Gpu, step: Step, dtype: DType, places: Mapping[str, int]) -> DeviceCalls:
    if not isinstance(step, Multiply):
        return copy_calls(gpu, *_ends(step))
    plan = _product(gpu, step, dtype)
    scratch = DeviceView(
        places["library"], TensorType(DType.UINT8, (size_bytes(plan.pieces),)), (1,)
    )
    operands = _view(step.a, dtype), _view(step.b, dtype), _view(step.out, dtype)
    beta = 1.0 if step.adds else 0.0
    return plan.calls(operands, carve(scratch, plan.pieces), beta)


def _product(gpu: Gpu, step: Multiply, dtype: DType) -> PlannedProduct:
    operands = [_view(array, dtype).as_operand for array in (step.a, step.b, step.out)]
    plan = plan_product(gpu, *operands)
    if plan is None:
        raise InternalError(f"no product takes {operands}")
    return plan


def _ends(step: Fill | Copy) -> tuple[Array, Array]:
    if isinstance(step, Copy):
        return step.target, step.source
    # A broadcast array cannot be written, which `copy_calls` takes for a constant: a fill.
    return step.target, np.broadcast_to(np.zeros((), step.target.dtype), step.target.shape)


def _bytes_at(address: int, piece: Piece) -> Array:
    return seen_as_array(
        DeviceView(address or _NOWHERE, TensorType(DType.UINT8, piece.shape), (1,))
    )


def _layouts(operands: Operands) -> tuple[DeviceView, ...]:
    return tuple([DeviceView(_NOWHERE, x.type, x.strides_bytes) for x in operands])


def _arrays(views: tuple[DeviceView, ...]) -> tuple[Array, ...]:
    return tuple([seen_as_array(view) for view in views])


def _view(array: Array, dtype: DType) -> DeviceView:
    return DeviceView(int(array.ctypes.data), TensorType(dtype, array.shape), array.strides)


# Pooling: the largest elements of windows, and the gradient. A thread makes one result, or those of
# as many channels as 16 bytes hold, where these are neighbours and all begins at multiples.

_BLOCK = 256
_MOST_AXES = 3
_WIDE_BYTES = 16
_WIDE_ITEMS = (2, 4)
"""Bytes of elements that are moved several at once: taps of fewer would lie at odd places."""


def plan_pooling(
    op: str, gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands
) -> CudaPlan | None:
    """Plan one of `POOLING_OPS`.

    It takes up to three axes of space, in any layout.
    """
    dtype, image = inputs[0].type.dtype, max(inputs[0].type, outputs[0].type, key=_image_size)
    is_large = _image_size(image) >= 1 << 31  # places in an image are numbers of 32 bits
    if not dtype.is_float or is_large or len(windows_of(attrs).kernel) > _MOST_AXES:
        return None
    moved_bytes = sum([x.type.size_bytes for x in (*inputs, *outputs)])
    ways = windows_of(attrs)
    needs = KernelNeeds(duration_ns=gpu.call_ns + gpu.bytes_ns(moved_bytes))

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        sources, targets = on_device(inputs), on_device(outputs)
        if not targets[0].type.num_elements:
            return ()
        if op == "max_pool":
            (x,), (y, taps) = sources, targets
        elif op == "max_pool_pick":
            (x, taps), (y,) = sources, targets
        else:
            (y, taps), (x,) = sources, targets
        wide = _channels_at_once((x, y, taps))
        num = targets[0].type.num_elements // wide
        steps = targets[0].strides_bytes
        words = (
            *(x.address, y.address, taps.address, num, math.prod(ways.kernel)),
            *(
                int(steps[1] < min(steps[2:])),
                x.shape[1] // wide,
                *three_axes(x.shape[2:], 1),
                *three_axes(y.shape[2:], 1),
            ),
            *(*three_axes(ways.kernel, 1), *three_axes(ways.strides, 1)),
            *(*three_axes(ways.dilation, 1), *three_axes(ways.low, 0)),
            *[
                s
                for v in (x, y, taps)
                for s in (*v.strides_bytes[:2], *three_axes(v.strides_bytes[2:], 0))
            ],
        )
        text = _text(x.dtype, taps.dtype, wide)
        kernel = text.kernels[POOLING_OPS.index(op)]
        return (RunKernel(text, kernel, -(-num // _BLOCK), _BLOCK, words),)

    return KernelPlan(needs, bind)


def _channels_at_once(views: tuple[DeviceView, DeviceView, DeviceView]) -> int:
    """Return how many channels of elements, windows and taps a thread moves together."""
    item = views[0].dtype.itemsize
    wide = _WIDE_BYTES // item if item in _WIDE_ITEMS else 1
    for view in views:
        size = view.dtype.itemsize
        first, channel, *others = view.strides_bytes
        places = (view.address, first, *others)
        chunk = min(size * wide, _WIDE_BYTES)
        if channel != size or view.shape[1] % wide or any([place % chunk for place in places]):
            return 1
    return wide


def _image_size(type_: TensorType) -> int:
    return math.prod(type_.shape[1:])


def three_axes(numbers: tuple[int, ...], other: int) -> tuple[int, ...]:
    """Return a number for each of three axes, of which the first may be none of a tensor."""
    return (*[other] * (_MOST_AXES - len(numbers)), *numbers)


@functools.cache
def _text(dtype: DType, taps: DType, wide: int) -> KernelText:
    defined = {
        "ROW": storage_of(dtype),
        "REAL": type_of(dtype),
        "TAP": "uint8_t" if taps is DType.UINT8 else "int32_t",
        "WIDE": wide,
        **conversions(dtype, type_of(dtype)),
    }
    text = file_text("pooling.cuh", defined)
    names = ("NAME_max", "NAME_grad", "NAME_pick")
    about = f"the largest elements of windows of {dtype}"
    return KernelText.of("pooling", text, names, about, has_exchanges=False)
