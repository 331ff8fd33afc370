"""Batched matrix products through BLAS.

`np.matmul` hands an operand to BLAS when its last two axes are a row-major or a transposed matrix
with unit inner stride; everything else it copies to memory of its own. So this kernel brings
every call into that form with views, or with copies into planned scratch:

- an output that lies transposed is computed as (b^T a^T)^T;
- with one matrix b for a whole batch of a, the batch joins the rows: one large product instead of
  many ([32, 64, 128] times [128, 512]: 3.4 ms as a batch, 1.6 ms joined);
- what BLAS cannot read is packed, and so is a small transposed b in a batch, where OpenBLAS is slow
  (128 products 64 x 32 x 64: 532 us, with packing 315 + 83 us; no gain from 128 x 64 on).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from actors.kernels.common import cost, kernel
from actors.kernels.common.kernel import (
    CALLS_PER_PRODUCT,
    Attrs,
    BytePass,
    HostPlan,
    Kernel,
    KernelPlan,
    MatrixProduct,
    Operands,
    Piece,
    Work,
    Workspace,
    in_sequence,
    item_weight,
)
from actors.kernels.common.strides import Axis, collapse_axes
from actors.kernels.reference.bfloat16 import has_halves
from actors.machine.protocol import Array, Arrays, Launch
from compiler.contract.types import DType, contiguous_strides

SMALL_MATRIX = 64 * 64
_BLAS = ("float32", "float64")


@dataclass(frozen=True, slots=True)
class Window:
    """Extents and byte strides of an operand, without its bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def transposed(self) -> Window:
        """The last two axes exchanged."""
        shape, strides = self.shape, self.strides
        return replace(
            self,
            shape=(*shape[:-2], shape[-1], shape[-2]),
            strides=(*strides[:-2], strides[-1], strides[-2]),
        )

    @property
    def is_row_major(self) -> bool:
        """Whether BLAS reads the last two axes as they are."""
        (m, k), (row, column), item = self.shape[-2:], self.strides[-2:], self.dtype.itemsize
        return (k == 1 or column == item) and (m == 1 or (row % item == 0 and row >= k * item))

    @property
    def is_blas_matrix(self) -> bool:
        """Whether BLAS reads the last two axes as they are or transposed."""
        return self.is_row_major or self.transposed.is_row_major


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How a product is computed: windows on a, b and out, and which of them go through scratch."""

    a: Window
    b: Window
    out: Window
    is_swapped: bool
    packs_a: bool
    packs_b: bool
    packs_out: bool

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Scratch for the operands that are packed, in the order a, b, out."""
        packed = ((self.a, self.packs_a), (self.b, self.packs_b), (self.out, self.packs_out))
        return tuple([Piece(w.shape, w.dtype) for w, is_packed in packed if is_packed])


def arrange(a: Window, b: Window, out: Window) -> Arrangement:
    """Choose views and copies for out = a @ b. Depends on shapes, strides and dtype only."""
    is_swapped = not out.is_row_major and out.transposed.is_row_major
    if is_swapped:
        a, b, out = b.transposed, a.transposed, out.transposed
    a, b, out = _joined(_plain(a), _plain(b), _plain(out))
    uses_blas = a.dtype.name in _BLAS
    is_batch = math.prod(out.shape[:-2]) > 1
    is_slow_b = is_batch and not b.is_row_major and b.shape[-2] * b.shape[-1] <= SMALL_MATRIX
    return Arrangement(
        a,
        b,
        out,
        is_swapped,
        packs_a=uses_blas and not a.is_blas_matrix,
        packs_b=uses_blas and (is_slow_b or not b.is_blas_matrix),
        packs_out=uses_blas and not out.is_row_major,
    )


def _plain(window: Window) -> Window:
    """Give axes of extent 1 the stride of a dense array: theirs means nothing but confuses BLAS."""
    dense = contiguous_strides(window.shape, window.dtype.itemsize)
    strides = [
        d if n == 1 else s for n, s, d in zip(window.shape, window.strides, dense, strict=True)
    ]
    return replace(window, strides=tuple(strides))


def _joined(a: Window, b: Window, out: Window) -> tuple[Window, Window, Window]:
    """Join a batch of a with its rows when b is one matrix and the strides allow."""
    if math.prod(b.shape[:-2]) != 1 or len(out.shape) == 2 or len(a.shape) != len(out.shape):
        return a, b, out
    rows, rows_out = merged_rows(a), merged_rows(out)
    if a.shape[:-1] != out.shape[:-1] or rows is None or rows_out is None:
        return a, b, out
    matrix = replace(b, shape=b.shape[-2:], strides=b.strides[-2:])
    return rows, matrix, rows_out


def merged_rows(window: Window) -> Window | None:
    """Return the window as one matrix, or None where its rows do not lie evenly."""
    axes = collapse_axes(window.shape[:-1], (window.strides[:-1],), in_order=True)
    if len(axes) > 1:
        return None
    (rows,) = axes or (Axis(1, window.strides[-1:]),)
    strides = (*rows.steps, window.strides[-1])
    return replace(window, shape=(rows.extent, window.shape[-1]), strides=strides)


def _plan_product(attrs: Attrs, inputs: Operands, outputs: Operands) -> HostPlan | None:
    """Plan `matmul`: np.matmul on ranks >= 2, leading axes broadcast, operands and output strided.

    It takes every number; scratch is what must be packed.
    """
    (a, b), (out,) = inputs, outputs
    if a.type.dtype is not b.type.dtype or a.type.dtype is DType.BOOL or has_halves(inputs):
        return None
    plan = arrange(*[Window(x.shape, x.strides_bytes, x.dtype) for x in (a, b, out)])
    needs = cost.needs(inputs, outputs, _work(plan), kernel.size_bytes(plan.pieces))
    return KernelPlan(needs, partial(_bind, plan))


def _bind(plan: Arrangement, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
    """Return the product, between copies where operands are packed."""
    first, second = (inputs[1], inputs[0]) if plan.is_swapped else inputs
    a, b, out = _view(first, plan.a), _view(second, plan.b), _view(outputs[0], plan.out)
    packed = iter(kernel.carve(workspace, plan.pieces))
    calls: list[Launch] = []
    if plan.packs_a:
        dense = next(packed)
        calls.append(partial(np.copyto, dense, a))
        a = dense
    if plan.packs_b:
        dense = next(packed)
        calls.append(partial(np.copyto, dense, b))
        b = dense
    if not plan.packs_out:
        return in_sequence((*calls, partial(np.matmul, a, b, out=out)))
    dense = next(packed)
    product = partial(np.matmul, a, b, out=dense)
    return in_sequence((*calls, product, partial(np.copyto, out, dense)))


def _work(plan: Arrangement) -> Work:
    """Return the products and the copies of what is packed."""
    shape, k, dtype = plan.out.shape, plan.a.shape[-1], plan.out.dtype
    batch = math.prod(shape[:-2])
    if dtype.name in _BLAS:
        product = MatrixProduct(batch * item_weight(dtype.itemsize), shape[-2], shape[-1], k)
        passes = tuple([(BytePass.STRIDED, float(piece.size_bytes)) for piece in plan.pieces])
        return Work(float(CALLS_PER_PRODUCT + len(passes)), passes=passes, products=(product,))
    size = float(batch * shape[-2] * shape[-1] * k * dtype.itemsize)
    return Work(passes=((BytePass.REDUCE, size),))


def _view(array: Array, window: Window) -> Array:
    return np.lib.stride_tricks.as_strided(array, window.shape, window.strides)


MATMUL_KERNELS = (Kernel("numpy.matmul", "matmul", _plan_product),)
