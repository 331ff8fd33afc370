"""Convolution and its gradients: copies of ours, products of the library, chunk by chunk.

The steps are those of `actors.kernels.convolution`. The gradient of a weight in 16 bits is rounded
once for each chunk that the columns of a batch take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from actors.kernels.convolution import OPS, Copy, Fill, Multiply, Room, Step, steps_of
from actors.kernels.cuda.calls import DeviceCalls
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.movement import seen_as_array
from actors.kernels.cuda.products import PlannedProduct, plan_product
from actors.kernels.cuda.strided_copy import copy_calls, copy_ns
from actors.kernels.cuda.views import DeviceView, PlacedView, carve, on_device
from actors.kernels.kernel import Attrs, KernelNeeds, Operands
from actors.kernels.scratch import Piece, size_bytes
from actors.protocol import Array
from compiler.errors import InternalError
from compiler.types import DType, TensorType, numpy_dtype

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
        given, made = on_device(inputs), on_device(outputs)
        dtype = made[0].dtype
        pieces, _ = self._asked(attrs, given, made)
        places = dict(zip(pieces, carve(workspace, tuple(pieces.values())), strict=True))
        arrays = {name: _bytes_at(places[name], piece) for name, piece in pieces.items()}
        room = Room(numpy_dtype(dtype), self.chunk_bytes, arrays)
        steps = steps_of(self.op, attrs, _arrays(given), _arrays(made), room)
        return tuple([call for step, _ in steps for call in self._calls(step, dtype, places)])

    def _asked(
        self, attrs: Attrs, inputs: tuple[DeviceView, ...], outputs: tuple[DeviceView, ...]
    ) -> tuple[Mapping[str, Piece], float]:
        """Return the scratch of a call, the library's first: it wants 256 bytes; and its time."""
        dtype, duration_ns, most = outputs[0].dtype, 0.0, 0
        room = Room(numpy_dtype(dtype), self.chunk_bytes, None)
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
