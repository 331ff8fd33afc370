"""What kernels over rows share: the types they take, and when plain exponentials will do."""

from __future__ import annotations

import numpy as np

from actors.kernels.kernel import Operands
from actors.protocol import Array
from compiler.types import DType

ROW_FLOATS = (DType.FLOAT32, DType.FLOAT64)


def are_row_floats(operands: Operands) -> bool:
    """Return whether all operands have one type that BLAS sums."""
    dtype = operands[0].type.dtype
    return dtype in ROW_FLOATS and all(operand.type.dtype is dtype for operand in operands)


def sum_is_safe(sums: Array, lowest: Array, highest: Array, low: float, high: float) -> bool:
    """Return whether all `sums` lie strictly between the bounds; False with NaN.

    `lowest` and `highest` are 0-d scratch.
    """
    np.minimum.reduce(sums, axis=None, out=lowest)
    np.maximum.reduce(sums, axis=None, out=highest)
    return low < float(lowest) and float(highest) < high
