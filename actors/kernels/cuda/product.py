"""A matrix product as cuBLASLt takes it: column-major matrices, a batch with strides, an epilogue.

This is the record of a call. Whoever executes it makes the library's descriptors of it; what those
say can be read back and compared with this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from compiler.types import DType

MOST_ALIGNMENT = 256
"""The library tells addresses apart up to here."""

AUX_BYTES, AUX_ELEMENTS = 16, 8
"""What the address and the stride of aux are multiples of."""


class LtEpilogue(Enum):
    """What the library does to a result before it stores it; the numbers are its own."""

    NONE = 1
    BIAS = 4
    GELU = 32
    GELU_BIAS = 36
    GELU_AUX = 160
    GELU_AUX_BIAS = 164
    DGELU = 192
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

    @property
    def text(self) -> str:
        """All of it, as part of a key."""
        steps = f"{self.column_stride}:{self.batch_stride}"
        return f"{self.dtype.value} {self.rows}x{self.columns} by {steps} at {self.alignment}"

    def span_bytes(self, batch: int) -> int:
        """Return the bytes from the first element of a batch to behind the last."""
        last = (batch - 1) * self.batch_stride + (self.columns - 1) * self.column_stride
        return (last + self.rows) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LtProduct:
    """d = epilogue(op(a) op(b) + beta c) for each of `batch` places; c lies as d does.

    op transposes where asked. `compute` is the type of the sums, and of beta. `bias` and `aux` are
    byte addresses of what the epilogue reads or writes; 0 for none. `bias_dtype` is d's if None.
    `aux` is a matrix as d is, with columns `aux_stride` elements apart, a multiple of
    `AUX_ELEMENTS`, at a multiple of `AUX_BYTES`.
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
    bias_dtype: DType | None = None
    aux: int = 0
    aux_stride: int = 0
    is_deterministic: bool = False

    @property
    def inner(self) -> int:
        """The extent that is summed over."""
        return self.a.rows if self.transpose_a else self.a.columns

    @property
    def bias_type(self) -> DType:
        """The element type of the bias, or of its gradient."""
        return self.bias_dtype or self.d.dtype

    @property
    def key(self) -> str:
        """What a choice of algorithm depends on: all but addresses, of which the alignment."""
        turned = f"{'T' if self.transpose_a else 'N'}{'T' if self.transpose_b else 'N'}"
        sums = f"{self.compute.value} beta {self.beta:g}"
        bias = f"{self.bias_type.value} {alignment_of(self.bias)}"
        finish = f"{self.epilogue.name} {bias} {alignment_of(self.aux)}"
        return "; ".join(
            [
                f"{turned} {self.batch}",
                *[layout.text for layout in (self.a, self.b, self.d)],
                sums,
                f"{finish} {self.aux_stride}",
                "deterministic" if self.is_deterministic else "any order",
            ]
        )


def alignment_of(address: int) -> int:
    """Return the largest power of 2 that divides an address, up to what the library tells apart."""
    return math.gcd(address, MOST_ALIGNMENT)
