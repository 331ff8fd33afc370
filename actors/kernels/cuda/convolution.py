"""Convolution and its gradients as products of the library, and pooling by a kernel of ours.

A convolution goes chunk by chunk, with copies of ours. The steps are those of
`actors.kernels.common.convolution_steps`. The gradient of a weight in 16 bits is rounded once for
each chunk that the columns of a batch take.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.kernels.common.convolution_steps import (
    OPS,
    POOLING_OPS,
    Copy,
    Fill,
    Multiply,
    ScratchLayout,
    Step,
    steps_of,
    windows_of,
)
from actors.kernels.common.kernel import Attrs, KernelNeeds, Operands, Piece, size_bytes
from actors.kernels.cuda.calls import DeviceCalls, KernelText, RunKernel
from actors.kernels.cuda.kernel import DeviceView, Gpu, PlacedView, carve, on_device
from actors.kernels.cuda.matmul import PlannedProduct, plan_product
from actors.kernels.cuda.movement import copy_calls, copy_ns, seen_as_array
from actors.machine.protocol import Array
from compiler.contract.errors import InternalError
from compiler.contract.types import DType, TensorType, numpy_dtype

CHUNK_BYTES = 256 << 20
"""Columns of a chunk."""

_NOWHERE = 1 << 20
_BYTES = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class CudaConvolution:
    """`conv`, `conv_input_grad` or `conv_weight_grad` of any floats."""

    gpu: Gpu
    op: str
    chunk_bytes: int = CHUNK_BYTES

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"cuda.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every call; scratch is a chunk of columns, what is padded, and the products'."""
        if not outputs[0].type.dtype.is_float:
            return None
        pieces, duration_ns = self._asked(attrs, _layouts(inputs), _layouts(outputs))
        return KernelNeeds(size_bytes(tuple(pieces.values())), duration_ns=duration_ns)

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return the calls of all steps."""
        sources, targets = on_device(inputs), on_device(outputs)
        dtype = targets[0].dtype
        pieces, _ = self._asked(attrs, sources, targets)
        places = dict(zip(pieces, carve(workspace, tuple(pieces.values())), strict=True))
        arrays = {name: _bytes_at(places[name], piece) for name, piece in pieces.items()}
        room = ScratchLayout(numpy_dtype(dtype), self.chunk_bytes, arrays)
        steps = steps_of(self.op, attrs, _arrays(sources), _arrays(targets), room)
        return tuple([call for step, _ in steps for call in self._calls(step, dtype, places)])

    def _asked(
        self, attrs: Attrs, inputs: tuple[DeviceView, ...], outputs: tuple[DeviceView, ...]
    ) -> tuple[Mapping[str, Piece], float]:
        """Return the scratch of a call, the library's first: it wants 256 bytes; and its time."""
        dtype, duration_ns, most = outputs[0].dtype, 0.0, 0
        room = ScratchLayout(numpy_dtype(dtype), self.chunk_bytes, None)
        for step, times in steps_of(self.op, attrs, _arrays(inputs), _arrays(outputs), room):
            if isinstance(step, Multiply):
                plan = self._product(step, dtype)
                most = max(most, size_bytes(plan.pieces))
                duration_ns += times * plan.duration_ns()
            else:
                duration_ns += times * copy_ns(self.gpu, *_ends(step))
        return {"library": Piece((most,), _BYTES), **room.pieces}, duration_ns

    def _calls(self, step: Step, dtype: DType, places: Mapping[str, int]) -> DeviceCalls:
        if not isinstance(step, Multiply):
            return copy_calls(self.gpu, *_ends(step))
        plan = self._product(step, dtype)
        scratch = DeviceView(
            places["library"], TensorType(DType.UINT8, (size_bytes(plan.pieces),)), (1,)
        )
        operands = _view(step.a, dtype), _view(step.b, dtype), _view(step.out, dtype)
        beta = 1.0 if step.adds else 0.0
        return plan.calls(operands, carve(scratch, plan.pieces), beta)

    def _product(self, step: Multiply, dtype: DType) -> PlannedProduct:
        operands = [_view(array, dtype).as_operand for array in (step.a, step.b, step.out)]
        plan = plan_product(self.gpu, *operands)
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


def convolution_kernels(gpu: Gpu) -> tuple[CudaConvolution, ...]:
    """Return the kernels of this file for a GPU."""
    return tuple([CudaConvolution(gpu, op) for op in OPS])


# Pooling: the largest elements of windows, and the gradient, a thread for each result.

_BLOCK = 256
_MOST_AXES = 3

_ROWS = {
    DType.FLOAT32: ("float", "float", "(x)", "(x)"),
    DType.FLOAT64: ("double", "double", "(x)", "(x)"),
    DType.BFLOAT16: ("uint16_t", "float", "af_from_bf16(x)", "af_to_bf16(x)"),
    DType.FLOAT16: ("uint16_t", "float", "af_from_f16(x)", "af_to_f16(x)"),
}
"""By type of x: the type of an element, of a number, a number of an element, and back."""


@dataclass(frozen=True, slots=True)
class CudaPooling:
    """One of `POOLING_OPS`."""

    gpu: Gpu
    op: str

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"cuda.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take up to three axes of space, in any layout."""
        dtype, image = inputs[0].type.dtype, max(inputs[0].type, outputs[0].type, key=_image_size)
        is_large = _image_size(image) >= 1 << 31  # places in an image are numbers of 32 bits
        if dtype not in _ROWS or is_large or len(windows_of(attrs).kernel) > _MOST_AXES:
            return None
        moved_bytes = sum([x.type.size_bytes for x in (*inputs, *outputs)])
        return KernelNeeds(duration_ns=self.gpu.call_ns + self.gpu.bytes_ns(moved_bytes))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return one call."""
        sources, targets = on_device(inputs), on_device(outputs)
        if not targets[0].type.num_elements:
            return ()
        if self.op == "max_pool":
            (x,), (y, taps) = sources, targets
        elif self.op == "max_pool_pick":
            (x, taps), (y,) = sources, targets
        else:
            (y, taps), (x,) = sources, targets
        ways, num = windows_of(attrs), targets[0].type.num_elements
        steps = targets[0].strides_bytes
        words = (
            *(x.address, y.address, taps.address, num, math.prod(ways.kernel)),
            *(
                int(steps[1] < min(steps[2:])),
                x.shape[1],
                *_three(x.shape[2:], 1),
                *_three(y.shape[2:], 1),
            ),
            *(*_three(ways.kernel, 1), *_three(ways.strides, 1)),
            *(*_three(ways.dilation, 1), *_three(ways.low, 0)),
            *[
                s
                for v in (x, y, taps)
                for s in (*v.strides_bytes[:2], *_three(v.strides_bytes[2:], 0))
            ],
        )
        text = _text(x.dtype, taps.dtype)
        kernel = text.kernels[POOLING_OPS.index(self.op)]
        return (RunKernel(text, kernel, -(-num // _BLOCK), _BLOCK, words),)


def _image_size(type_: TensorType) -> int:
    return math.prod(type_.shape[1:])


def _three(numbers: tuple[int, ...], other: int) -> tuple[int, ...]:
    """Return a number for each of three axes, of which the first may be none of a tensor."""
    return (*[other] * (_MOST_AXES - len(numbers)), *numbers)


@functools.cache
def _text(dtype: DType, taps: DType) -> KernelText:
    row, real, number, element = _ROWS[dtype]
    tap = "uint8_t" if taps is DType.UINT8 else "int32_t"
    head = f"#define NAME_ROW {row}\n#define NAME_REAL {real}\n#define NAME_TAP {tap}\n"
    head += f"#define NAME_FROM(x) {number}\n#define NAME_TO(x) {element}\n"
    text = head + Path(__file__).with_name("pooling.cuh").read_text(encoding="utf-8")
    names = ("NAME_max", "NAME_grad", "NAME_pick")
    about = f"the largest elements of windows of {dtype}"
    return KernelText.of("pooling", text, names, about, has_exchanges=False)


def pooling_kernels(gpu: Gpu) -> tuple[CudaPooling, ...]:
    """Return the kernels of this file for a GPU."""
    return tuple([CudaPooling(gpu, op) for op in POOLING_OPS])
