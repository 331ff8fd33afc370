"""A matrix product as cuBLASLt takes it: column-major matrices, a batch with strides, an epilogue.

This is the record of a call. Whoever executes it makes the library's descriptors of it; what those
say can be read back and compared with this.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from compiler.types import DType


class LtEpilogue(Enum):
    """What the library does to a result before it stores it; the numbers are its own."""

    NONE = 1
    BIAS = 4
    GELU = 32
    GELU_BIAS = 36
    GELU_AUX_BIAS = 164
    DGELU_BGRAD = 208
    BGRAD_A = 256
    BGRAD_B = 512


@dataclass(frozen=True, slots=True)
class LtLayout:
    """A column-major matrix [rows, columns]; strides are in elements, of a column and the batch.

    `alignment` divides its address, in bytes; 256 or less.
    """

    dtype: DType
    rows: int
    columns: int
    column_stride: int
    batch_stride: int = 0
    alignment: int = 16


@dataclass(frozen=True, slots=True)
class LtProduct:
    """d = epilogue(op(a) op(b) + beta c) for each of `batch` places; c lies as d does.

    op transposes where asked. `compute` is the type of the sums. `bias` and `aux` are byte
    addresses of what the epilogue reads or writes; 0 for none.
    """

    a: LtLayout
    b: LtLayout
    d: LtLayout
    transpose_a: bool
    transpose_b: bool
    batch: int = 1
    beta: float = 0.0
    compute: DType = DType.FLOAT32
    epilogue: LtEpilogue = LtEpilogue.NONE
    bias: int = 0
    aux: int = 0
    aux_stride: int = 0
    is_deterministic: bool = False
