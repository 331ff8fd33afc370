"""Arrays of the host that begin where a line of the cache does.

numpy's begin 16 bytes after one, so that each vector of 64 bytes lies on two lines: a product that
takes as long as reading its weights takes a quarter longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_LINE_BYTES = 64
_MOST_BYTES = 1 << 62
_LEAST_BYTES = 16 << 10
"""A smaller array is in the first-level cache whenever it is read again."""


def aligned_empty(shape: Sequence[int], dtype: npt.DTypeLike) -> np.ndarray[Any, Any]:
    """Return an array like `np.empty` does; a large one begins at a multiple of 64 bytes.

    Raises MemoryError and ValueError as `np.empty` does.
    """
    kind = np.dtype(dtype)
    size_bytes = math.prod(shape) * kind.itemsize
    if not _LEAST_BYTES <= size_bytes < _MOST_BYTES:
        return np.empty(shape, kind)
    block = np.empty(size_bytes + _LINE_BYTES, np.uint8)
    begin = -block.ctypes.data % _LINE_BYTES
    return block[begin : begin + size_bytes].view(kind).reshape(shape)


def freeze(array: np.ndarray[Any, Any]) -> None:
    """Make an array read-only, and the block that it lies in where that is another array."""
    array.flags.writeable = False
    if isinstance(array.base, np.ndarray):
        array.base.flags.writeable = False


def is_frozen(array: np.ndarray[Any, Any]) -> bool:
    """Whether nobody can write into an array, nor into the one whose memory it has."""
    owner = array if array.flags.owndata else array.base
    if not isinstance(owner, np.ndarray) or not owner.flags.owndata:
        return False
    return not array.flags.writeable and not owner.flags.writeable
