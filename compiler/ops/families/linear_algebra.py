"""Decompositions of matrices and the discrete Fourier transform, which libraries compute.

Matrices are the last two axes, rows of a transform the last but one; all axes before are batches.
The host calls LAPACK and pocketfft through numpy. Their gradients are functions of tensors, in
`actorflow.functional.linalg` and `fft`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from compiler.contract.attrs import Attrs
from compiler.contract.types import DType, TensorType
from compiler.graph.columns import SbpSignature, by_axes, reference_of, sbp_signatures
from compiler.graph.registry import (
    Array,
    Cost,
    Op,
    OpTypeError,
    Types,
    cost,
    define,
    expect_inputs,
    infer_type,
    reference,
)

CHOLESKY = define("cholesky")
"""x [..., n, n], of which the lower triangle is read -> L [..., n, n], lower, x = L L^T."""

SOLVE = define("solve")
"""a [..., n, n], b [..., n, k] of the same batch -> x [..., n, k], a x = b, by LU."""

QR = define("qr")
"""x [..., m, n] -> q [..., m, k], r [..., k, n] with k = min(m, n); r is upper."""

SVD = define("svd")
"""x [..., m, n] -> u [..., m, k], s [..., k] falling, vh [..., k, n] with k = min(m, n)."""

EIGH = define("eigh")
"""x [..., n, n], of which the lower triangle is read -> w [..., n] rising, v [..., n, n]."""

SLOGDET = define("slogdet")
"""x [..., n, n] -> sign [...], logarithm of the absolute determinant [...]."""

DET = define("det")
"""x [..., n, n] -> determinant [...]."""

FFT = define("fft")
"""x [..., n, 2], complex numbers as pairs -> [..., n, 2], without a factor. Attrs: inverse."""


def _matrix(x: TensorType, is_square: bool) -> None:
    if x.rank < 2 or x.dtype not in (DType.FLOAT32, DType.FLOAT64):
        raise OpTypeError(f"needs matrices of float32 or float64; got {x}")
    if is_square and x.shape[-1] != x.shape[-2]:
        raise OpTypeError(f"needs square matrices; got {x}")


Outputs = Callable[[tuple[int, ...], int, int], tuple[tuple[int, ...], ...]]
"""Batch, rows and columns of a matrix -> the shapes of the outputs."""


def _decomposition(
    op: Op, is_square: bool, outputs: Outputs, function: Callable[..., object]
) -> None:
    """Fill the columns of an op on one batch of matrices."""

    def infer(inputs: Types, attrs: Attrs) -> Types:
        (x,) = expect_inputs(inputs, "x")
        _matrix(x, is_square)
        shapes = outputs(x.shape[:-2], *x.shape[-2:])
        return tuple([TensorType(x.dtype, shape) for shape in shapes])

    def refer(attrs: Attrs, x: Array) -> tuple[Array, ...]:
        made = function(x)
        return tuple([np.asarray(y) for y in (made if isinstance(made, tuple) else (made,))])

    infer_type.register(op, infer)
    reference.register(op, refer)


_decomposition(CHOLESKY, True, lambda batch, m, n: ((*batch, n, n),), np.linalg.cholesky)
_decomposition(
    QR,
    False,
    lambda batch, m, n: ((*batch, m, min(m, n)), (*batch, min(m, n), n)),
    np.linalg.qr,
)
_decomposition(
    SVD,
    False,
    lambda batch, m, n: ((*batch, m, min(m, n)), (*batch, min(m, n)), (*batch, min(m, n), n)),
    partial(np.linalg.svd, full_matrices=False),
)
_decomposition(EIGH, True, lambda batch, m, n: ((*batch, n), (*batch, n, n)), np.linalg.eigh)
_decomposition(SLOGDET, True, lambda batch, m, n: (batch, batch), np.linalg.slogdet)
_decomposition(DET, True, lambda batch, m, n: (batch,), np.linalg.det)


@infer_type.of(SOLVE)
def _solve_type(inputs: Types, attrs: Attrs) -> Types:
    a, b = expect_inputs(inputs, "a", "b")
    _matrix(a, is_square=True)
    if b.dtype is not a.dtype or b.shape[:-1] != a.shape[:-1] or b.rank != a.rank:
        raise OpTypeError(f"needs right sides [..., {a.shape[-1]}, k] for {a}; got {b}")
    return (b,)


@reference_of(SOLVE)
def _solve(attrs: Attrs, a: Array, b: Array) -> Array:
    return np.asarray(np.linalg.solve(a, b))


@infer_type.of(FFT)
def _fft_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    is_known = x.dtype in (DType.FLOAT32, DType.FLOAT64)
    if not is_known or x.rank < 2 or x.shape[-1] != 2 or not x.shape[-2]:
        raise OpTypeError(f"needs pairs [..., n, 2] of float32 or float64, n > 0; got {x}")
    attrs.bool_("inverse")
    return (x,)


@reference_of(FFT)
def _fft(attrs: Attrs, x: Array) -> Array:
    complex_dtype = np.complex64 if x.dtype == np.float32 else np.complex128
    numbers = np.ascontiguousarray(x).view(complex_dtype)[..., 0]
    inverse = attrs.bool_("inverse")
    made = np.fft.ifft(numbers, norm="forward") if inverse else np.fft.fft(numbers)
    made = np.ascontiguousarray(made, complex_dtype)  # numpy before 2.0 gives complex128
    return made.view(x.dtype).reshape(x.shape)


@cost.of(CHOLESKY, SOLVE, QR, SVD, EIGH, SLOGDET, DET)
def _matrix_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    """Of the order of rows times columns times the smaller of the two, for each matrix."""
    *batch, m, n = inputs[0].shape
    flops = 2.0 * math.prod(batch) * m * n * min(m, n)
    return Cost(flops, float(sum([t.size_bytes for t in (*inputs, *outputs)])))


@cost.of(FFT)
def _fft_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    (x,) = inputs
    return Cost(2.5 * x.num_elements * max(1, x.shape[-2].bit_length()), 2.0 * x.size_bytes)


@sbp_signatures.of(CHOLESKY, SOLVE, QR, SVD, EIGH, SLOGDET, DET, FFT)
def _signatures(inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> list[SbpSignature]:
    """Split any axis of the batch."""
    batch = [str(axis) for axis in range(inputs[0].rank - 2)]

    def named(types: Types) -> list[list[str]]:
        return [[*batch, *[""] * (t.rank - len(batch))] for t in types]

    return by_axes(named(inputs), named(outputs))
