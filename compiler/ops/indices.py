"""The check of indices in references: what kernels refuse at run time, with the same words."""

from __future__ import annotations

import numpy as np

from compiler.errors import bad_index
from compiler.ops.signature import Array


def check_indices(indices: Array, count: int, name: str, axes: tuple[int, ...] = ()) -> None:
    """Raise IndexError when an index lies outside 0..count-1, naming it and its position."""
    bad = (indices < 0) | (indices >= count)
    if bad.any():
        position = tuple(int(i) for i in np.argwhere(bad)[0])
        raise bad_index(name, int(indices[position]), position, count, axes)
