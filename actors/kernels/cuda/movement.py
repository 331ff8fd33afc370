"""Kernels that move elements: copy, reshape, pad and concat, and copies between places.

The views that numpy's kernels make say from where to where; numpy is asked for addresses and
strides alone, and touches none of these bytes. A copy between places is the plain copy, bound to
pinned memory on one side: the device reads and writes that where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.kernels.cuda.calls import DeviceCalls
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.strided_copy import copy_calls, copy_ns
from actors.kernels.cuda.views import DeviceView, PlacedView, address_of
from actors.kernels.interpret.shape import (
    SHAPE_KERNELS,
    CopiesOf,
    can_copy,
    shown,
    written_over,
)
from actors.kernels.kernel import Attrs, KernelNeeds, Operands
from actors.protocol import Array, Arrays
from compiler.types import numpy_dtype


@dataclass(frozen=True, slots=True)
class CudaMove:
    """An op that only moves elements."""

    gpu: Gpu
    op: str
    copies: CopiesOf

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"cuda.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every call, but for a reshape between two tensors that are both not dense."""
        if not can_copy(self.op, inputs, outputs):
            return None
        phases = self.copies(shown(inputs), shown(outputs), attrs)
        times = [copy_ns(self.gpu, *copy) for copies in phases for copy in copies]
        return KernelNeeds(in_place=written_over(self.op), duration_ns=sum(times))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return the copies."""
        is_over_link = any([not isinstance(x, DeviceView) for x in (*inputs, *outputs)])
        phases = self.copies(_seen(inputs), _seen(outputs), attrs)
        return tuple(
            [
                call
                for copies in phases
                for copy in copies
                for call in copy_calls(self.gpu, *copy, is_over_link=is_over_link)
            ]
        )


def seen_as_array(view: DeviceView) -> Array:
    """Return an array that lies as a view does, at its address, in bytes that nobody may touch."""
    return np.asarray(_Elsewhere(view.address, numpy_dtype(view.dtype), view))


_NOWHERE = 64
"""Where an array without elements lies that has no address: numpy 1.26 takes no 0."""


class _Elsewhere:
    """What numpy asks of memory that somebody else has; it may be written, whoever shows it."""

    def __init__(self, address: int, dtype: np.dtype[Any], lies: DeviceView | Array) -> None:
        strides = lies.strides_bytes if isinstance(lies, DeviceView) else lies.strides
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address or _NOWHERE, False),
            "shape": lies.shape,
            "strides": strides,
            "typestr": dtype.str,
        }


def _seen(views: tuple[PlacedView, ...]) -> Arrays:
    return tuple([np.asarray(_Elsewhere(address_of(x), _dtype_of(x), x)) for x in views])


def _dtype_of(view: PlacedView) -> np.dtype[Any]:
    return numpy_dtype(view.dtype) if isinstance(view, DeviceView) else view.dtype


def movement_kernels(gpu: Gpu) -> tuple[CudaMove, ...]:
    """Return the kernels of this file for a GPU."""
    return tuple([CudaMove(gpu, kernel.op, kernel.copies) for kernel in SHAPE_KERNELS])
