"""Calls of cuDNN on the host: numpy computes what a record of a call says.

Where cuDNN's frontend is installed the record is what its own graph says, read back: that can be
made without a GPU.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from actors.device.cuda import cudnn
from actors.device.cuda.cudnn_graphs import read_back
from actors.device.emulated import attention, convolution
from actors.device.emulated.library_call import LibraryOperand
from actors.device.emulated.products import array_at, store, widened
from actors.kernels.cuda.cudnn_records import CudnnCall, SdpaCall

_ALIGNMENT = 16


def described(call: CudnnCall) -> CudnnCall:
    """Return a call as the library's graph says it; as it is where there is no library."""
    library = _library()
    return call if library is None else read_back(str(library.describe(call)))


@functools.cache
def _library() -> cudnn.Cudnn | None:
    return cudnn.Cudnn() if cudnn.is_installed() else None


@dataclass(frozen=True, slots=True)
class ChosenCall:
    """A call that was checked, with the workspace that it may use."""

    call: CudnnCall
    workspace_bytes: int

    def operands(self, addresses: tuple[int, ...]) -> tuple[LibraryOperand, ...]:
        """Return what a call with these addresses reads and writes."""
        return tuple(
            [
                LibraryOperand(tensor.name, address, tensor.span_bytes, _ALIGNMENT)
                for tensor, address in zip(self.call.tensors, addresses, strict=True)
            ]
        )

    def lies_over_itself(self, addresses: tuple[int, ...]) -> bool:
        """Whether a result lies over an operand."""
        operands = self.operands(addresses)
        count = len(operands) - self.call.num_results
        pairs = itertools.product(operands[:count], operands[count:])
        return any([one.lies_over(other) for one, other in pairs])


def run(call: CudnnCall, addresses: tuple[int, ...]) -> None:
    """Compute a call on tensors at these addresses."""
    held = {
        tensor.name: (tensor.dtype, array_at(address, tensor.dtype, tensor.shape, tensor.strides))
        for tensor, address in zip(call.tensors, addresses, strict=True)
    }
    count = len(call.tensors) - call.num_results
    given = {name: widened(held[name][1], held[name][0]) for name in call.names[:count]}
    with np.errstate(invalid="ignore", over="ignore"):
        if isinstance(call, SdpaCall):
            made = attention.computed(call, given)
        else:
            made = convolution.computed(call, given)
    for name, values in zip(call.names[count:], made, strict=True):
        store(held[name][1], values, held[name][0])
