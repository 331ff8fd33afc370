"""The hash by which a resumed run knows its data again."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

_CHUNK_BYTES = 1 << 24


def content_hash(array: npt.NDArray[Any]) -> str:
    """Return the xxh3_128 of an array's dtype, shape and elements in row-major order, in hex.

    Reads the array once, in chunks of at most 16 MiB or one row, so a memory-mapped file is never
    loaded whole; layout in memory does not matter.
    """
    hasher = xxhash.xxh3_128(f"{array.dtype.str}{array.shape}".encode())
    row_bytes = max(1, array.nbytes // max(1, len(array)))
    step = max(1, _CHUNK_BYTES // row_bytes)
    for first in range(0, len(array), step):
        chunk = np.ascontiguousarray(array[first : first + step])
        hasher.update(chunk.reshape(-1).view(np.uint8).data)
    return str(hasher.hexdigest())
