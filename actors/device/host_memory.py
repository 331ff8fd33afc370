"""Memory that the host can address: aligned blocks, and numpy arrays as the views on them."""

from __future__ import annotations

import numpy as np

from actors.protocol import Array
from compiler.errors import InternalError
from compiler.placement import Memory
from compiler.types import TensorType, numpy_dtype


def allocate(size_bytes: int, alignment: int, memory: Memory) -> Array:
    """Return a block; see `DeviceStore.allocate`. Memory is ordinary whatever is asked for."""
    if memory is Memory.SHARED:
        raise InternalError("memory that ranks share is made by what they meet through")
    try:
        block = np.empty(size_bytes + alignment, np.uint8)
    except ValueError as error:  # more than numpy can address
        raise MemoryError(str(error)) from error
    start = -block.ctypes.data % alignment
    return block[start : start + size_bytes]


def view_on(
    block: Array, offset_bytes: int, type_: TensorType, strides_bytes: tuple[int, ...]
) -> Array:
    """Return an array on a block; see `DeviceStore.view`."""
    dtype = numpy_dtype(type_.dtype)
    try:
        return np.ndarray(type_.shape, dtype, block, offset_bytes, strides_bytes)
    except TypeError as error:  # what numpy says of a buffer that is too small
        raise ValueError(str(error)) from error


def read(view: Array) -> Array:
    """Return a copy."""
    return np.array(view)


def write(view: Array, array: Array) -> None:
    """Fill a view from an array that broadcasts to it."""
    np.copyto(view, array)
