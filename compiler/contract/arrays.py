"""Arrays of other libraries, as numpy's: by DLPack or by `__array__`, without importing any.

Source: the Python array API standard, 2023.12, "Data interchange mechanisms".
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_HOST_DEVICES = (1, 3)
"""DLPack's numbers of memory that the host reads: its own, and such as is pinned for CUDA."""


def as_array(value: Any) -> Array | None:
    """Return an array of numpy or of another library as numpy's; None for what is no array.

    The array shares its memory with a value on the host; one of another device is copied. A
    bfloat16 value, which numpy has not, becomes float32, which holds all its numbers. Of a torch
    tensor that requires gradients the data is taken. A library's error about a value that it
    cannot export (sparse, or of a dtype that numpy has not) is raised as it is.
    """
    if isinstance(value, np.ndarray):
        return value
    if hasattr(type(value), "__dlpack__") and not isinstance(value, np.generic):
        if getattr(value, "requires_grad", False):
            value = value.detach()
        if value.__dlpack_device__()[0] not in _HOST_DEVICES and hasattr(value, "cpu"):
            value = value.cpu()
        if str(getattr(value, "dtype", "")).endswith("bfloat16"):
            # torch says float(), JAX astype().
            value = value.float() if hasattr(value, "float") else value.astype("float32")
        if value.__dlpack_device__()[0] in _HOST_DEVICES:
            return np.from_dlpack(value)
    return np.asarray(value) if hasattr(type(value), "__array__") else None
