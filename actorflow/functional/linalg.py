"""Linear algebra of batches of matrices, as `af.linalg`: torch.linalg's names and arguments.

Matrices are the last two axes of a tensor of floats, and all axes before are batches. They are
computed by LAPACK on the host, 16-bit floats in float32. A matrix that is singular for `solve`, or
not positive definite for `cholesky`, fails the step with numpy's LinAlgError.

Gradients: Giles, Collected Matrix Derivative Results for Forward and Reverse Mode Algorithmic
Differentiation, 2008; of `qr` Walter & Lehmann, 2012, and of m < n Roberts & Roberts, 2020;
of `svd` Townsend, Differentiating the Singular Value Decomposition, 2016. Those of vectors that
belong to equal eigenvalues or singular values are not defined, and come out infinite or NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from actorflow.functional.arranging import diagonal, eye, tril
from actorflow.functional.elementwise import abs as absolute
from actorflow.functional.elementwise import where
from actorflow.functional.indexing import broadcast_shapes
from actorflow.functional.reduce import amax, amin, cumprod, norm
from actorflow.functional.reduce import norm as vector_norm
from actorflow.functional.reduce import sum as summed
from actorflow.functional.shape import concat
from actorflow.tensor.gradient_rules import Grads, Tensors, register_gradient
from actorflow.tensor.op_math import in_float32
from actorflow.tensor.tensor import Tensor, apply, apply_many, as_tensor
from actorflow.tensor.tracer import find_source
from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.ops.families.linear_algebra import CHOLESKY, DET, EIGH, QR, SLOGDET, SOLVE, SVD

__all__ = [
    "cholesky",
    "det",
    "eigh",
    "eigvalsh",
    "inv",
    "matrix_norm",
    "matrix_power",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
    "vector_norm",
]


class QrResult(NamedTuple):
    """Orthonormal columns and an upper triangle; their product is the matrix."""

    Q: Tensor
    R: Tensor


class SvdResult(NamedTuple):
    """Orthonormal columns, singular values in falling order, orthonormal rows."""

    U: Tensor
    S: Tensor
    Vh: Tensor


class EighResult(NamedTuple):
    """Eigenvalues in rising order, and eigenvectors as columns."""

    eigenvalues: Tensor
    eigenvectors: Tensor


class SlogdetResult(NamedTuple):
    """The sign of a determinant, 0 where it is 0, and the logarithm of its absolute value."""

    sign: Tensor
    logabsdet: Tensor


def _matrices(x: Tensor, what: str, is_square: bool = True) -> Tensor:
    x = as_tensor(x)
    if x.ndim < 2 or not x.dtype.is_float or (is_square and x.shape[-1] != x.shape[-2]):
        kind = "square matrices" if is_square else "matrices"
        raise CompileError(f"{find_source()}: {what} needs {kind} of floats, got {x.type}")
    return x


def _turned(x: Tensor) -> Tensor:
    return x.swapaxes(-1, -2)


@in_float32
def cholesky(x: Tensor, *, upper: bool = False) -> Tensor:
    """Return the lower triangle L with x = L Lᵀ, of symmetric positive definite matrices.

    Only the lower triangle of x is read; the gradient takes x for symmetric. With `upper` it is Lᵀ.
    """
    lower = apply(CHOLESKY, _matrices(x, "cholesky"))
    return _turned(lower) if upper else lower


@in_float32
def solve(a: Tensor, b: Tensor, *, left: bool = True) -> Tensor:
    """Return x with a x = b, or x a = b without `left`: a [..., n, n], b [..., n, k] or [..., n].

    Batches broadcast. As in torch, b is a vector for each matrix where it has one axis, or one less
    than a and the batch of a.
    """
    a, b = _matrices(a, "solve"), as_tensor(b)
    is_vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    if not left:
        if is_vector:
            raise CompileError(
                f"{find_source()}: solve with left=False needs matrices, got {b.type}"
            )
        return _turned(solve(_turned(a), _turned(b)))
    right = b.reshape(*b.shape, 1) if is_vector else b
    n = a.shape[-1]
    if right.ndim < 2 or right.shape[-2] != n or right.dtype is not a.dtype:
        raise CompileError(
            f"{find_source()}: solve of {a.type} needs right sides {a.dtype}[..., {n}, k] or"
            f" [..., {n}], got {b.type}"
        )
    batch = broadcast_shapes([a.shape[:-2], right.shape[:-2]], "the batches of solve")
    made = apply(SOLVE, _wide(a, batch), _wide(right, batch))
    return made.reshape(made.shape[:-1]) if is_vector else made


def _wide(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    return x if x.shape[:-2] == batch else x.broadcast_to(*batch, *x.shape[-2:])


@in_float32
def inv(x: Tensor) -> Tensor:
    """Return the inverse of square matrices. To apply it to something, `solve` is more exact."""
    x = _matrices(x, "inv")
    return apply(SOLVE, x, eye(x.shape[-1], dtype=x.dtype).broadcast_to(x.shape))


@in_float32
def det(x: Tensor) -> Tensor:
    """Return the determinants of square matrices [..., n, n] -> [...]."""
    return apply(DET, _matrices(x, "det"))


@in_float32
def slogdet(x: Tensor) -> SlogdetResult:
    """Return sign and logarithm of the absolute value of determinants, which cannot overflow."""
    return SlogdetResult(*apply_many(SLOGDET, _matrices(x, "slogdet")))


@in_float32
def qr(x: Tensor) -> QrResult:
    """Return Q [..., m, k] and R [..., k, n] with k = min(m, n) and x = Q R."""
    return QrResult(*apply_many(QR, _matrices(x, "qr", is_square=False)))


@in_float32
def svd(x: Tensor, *, full_matrices: bool = False) -> SvdResult:
    """Return U [..., m, k], S [..., k] and Vh [..., k, n] with k = min(m, n), x = U diag(S) Vh.

    Only this reduced form: `full_matrices` is False here by default, and has no other value.
    """
    if full_matrices:
        raise CompileError(f"{find_source()}: svd computes the reduced form, full_matrices=False")
    return SvdResult(*apply_many(SVD, _matrices(x, "svd", is_square=False)))


@in_float32
def svdvals(x: Tensor) -> Tensor:
    """Return the singular values of matrices in falling order."""
    return svd(x).S


@in_float32
def eigh(x: Tensor) -> EighResult:
    """Return eigenvalues and eigenvectors of symmetric matrices.

    Only the lower triangle of x is read; the gradient takes x for symmetric.
    """
    return EighResult(*apply_many(EIGH, _matrices(x, "eigh")))


@in_float32
def eigvalsh(x: Tensor) -> Tensor:
    """Return the eigenvalues of symmetric matrices in rising order."""
    return eigh(x).eigenvalues


@in_float32
def pinv(x: Tensor, *, rtol: float | None = None) -> Tensor:
    """Return the pseudoinverse, without singular values up to `rtol` times the largest.

    By default `rtol` is max(m, n) times the spacing of numbers at 1, as in torch.
    """
    x = _matrices(x, "pinv", is_square=False)
    if 0 in x.shape:
        return _turned(x)
    u, s, vh = svd(x)
    spacing = float(np.finfo(x.dtype.value).eps)
    share = max(x.shape[-2:]) * spacing if rtol is None else rtol
    is_kept = s > share * s[..., :1]
    inverse = where(is_kept, 1.0 / where(is_kept, s, 1.0), 0.0)
    return _turned(vh) @ (inverse.unsqueeze(-1) * _turned(u))


@in_float32
def matrix_power(x: Tensor, n: int) -> Tensor:
    """Return the n-th power of square matrices, of the inverse where n is negative."""
    x = _matrices(x, "matrix_power")
    if n < 0:
        return matrix_power(inv(x), -n)
    result: Tensor | None = None
    while n:
        if n & 1:
            result = x if result is None else result @ x
        n >>= 1
        x = x @ x if n else x
    if result is None:
        return eye(x.shape[-1], dtype=x.dtype).broadcast_to(x.shape)
    return result


@in_float32
def matrix_norm(x: Tensor, ord: float | str = "fro", *, keepdim: bool = False) -> Tensor:  # noqa: A002  # torch's name
    """Return the norm of matrices: "fro", "nuc", 1, -1, 2, -2, inf or -inf, as in torch."""
    x = _matrices(x, "matrix_norm", is_square=False)
    if ord == "fro":
        return norm(x, 2.0, (-2, -1), keepdim=keepdim)
    if ord in ("nuc", 2, -2):
        s = svdvals(x)
        made = summed(s, -1) if ord == "nuc" else (s[..., 0] if ord == 2 else s[..., -1])
    elif ord in (1, -1, math.inf, -math.inf):
        sums = summed(absolute(x), -2 if ord in (1, -1) else -1)
        made = amax(sums, -1) if float(ord) > 0 else amin(sums, -1)
    else:
        raise CompileError(
            f"{find_source()}: matrix_norm has ord of 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, got"
            f" {ord!r}"
        )
    return made.reshape(*made.shape, 1, 1) if keepdim else made


# Gradients. `dx` is the gradient by x; a missing one of an output is None.


def _symmetric(x: Tensor) -> Tensor:
    return (x + _turned(x)) * 0.5


def _diagonal_matrix(x: Tensor) -> Tensor:
    """Return [..., n] as diagonal matrices [..., n, n]."""
    return x.unsqueeze(-1) * eye(x.shape[-1], dtype=x.dtype)


def _cholesky_gradient(attrs: Attrs, inputs: Tensors, outputs: Tensors, grads: Grads) -> Grads:
    (lower,), (dl,) = outputs, grads
    if dl is None:
        return (None,)
    inner = tril(_turned(lower) @ dl)
    inner = inner - 0.5 * _diagonal_matrix(diagonal(inner, 0, -2, -1))
    half = solve(_turned(lower), _turned(inner))  # L^-T P^T
    return (_symmetric(solve(_turned(lower), _turned(half))),)


def _solve_gradient(attrs: Attrs, inputs: Tensors, outputs: Tensors, grads: Grads) -> Grads:
    (a, _), (x,), (dx,) = inputs, outputs, grads
    if dx is None:
        return None, None
    db = solve(_turned(a), dx)
    return -(db @ _turned(x)), db


def _slogdet_gradient(attrs: Attrs, inputs: Tensors, outputs: Tensors, grads: Grads) -> Grads:
    (x,), dlog = inputs, grads[1]
    return (None if dlog is None else dlog.unsqueeze(-1).unsqueeze(-1) * _turned(inv(x)),)


def _det_gradient(attrs: Attrs, inputs: Tensors, outputs: Tensors, grads: Grads) -> Grads:
    """Multiply by the cofactors, by way of `svd`: a singular matrix has them and no inverse."""
    (x,), (dy,) = inputs, grads
    if dy is None or not x.shape[-1]:
        return (None,)
    u, s, vh = svd(x)
    # Products of all singular values but one: those before times those behind.
    ones = as_tensor(1.0, s.dtype).broadcast_to(*s.shape[:-1], 1)
    before = cumprod(concat([ones, s[..., :-1]], -1), -1)
    behind = cumprod(concat([ones, s.flip(-1)[..., :-1]], -1), -1).flip(-1)
    weight = dy * det(u) * det(vh)
    return (weight.unsqueeze(-1).unsqueeze(-1) * ((u * (before * behind).unsqueeze(-2)) @ vh),)


def _qr_gradient(attrs: Attrs, inputs: Tensors, outputs: Tensors, grads: Grads) -> Grads:
    (x,), (q, r), (dq, dr) = inputs, outputs, grads
    m, n = x.shape[-2:]
    if dq is None and dr is None:
        return (None,)
    if m >= n:
        return (_tall_qr_gradient(q, r, dq, dr),)
    # x = [a, b], r = [u, v]: a = q u is square, and v = q^T b.
    b = x[..., m:]
    dv = None if dr is None else dr[..., m:]
    du = None if dr is None else dr[..., :m]
    flow = dq
    if dv is not None:
        through = b @ _turned(dv)
        flow = through if dq is None else dq + through
    da = _tall_qr_gradient(q, r[..., :m], flow, du)
    return (
        concat([da, as_tensor(0.0, x.dtype).broadcast_to(b.shape) if dv is None else q @ dv], -1),
    )


def _tall_qr_gradient(q: Tensor, r: Tensor, dq: Tensor | None, dr: Tensor | None) -> Tensor:
    terms = []
    if dr is not None:
        terms.append(r @ _turned(dr))
    if dq is not None:
        terms.append(-(_turned(dq) @ q))
    middle = terms[0] if len(terms) == 1 else terms[0] + terms[1]
    below = tril(middle, -1)
    # The lower triangle, copied to the upper one.
    whole = below + _turned(below) + _diagonal_matrix(diagonal(middle, 0, -2, -1))
    flow = q @ whole if dq is None else dq + q @ whole
    return _turned(solve(r, _turned(flow)))


def _eigh_gradient(attrs: Attrs, inputs: Tensors, outputs: Tensors, grads: Grads) -> Grads:
    (w, v), (dw, dv) = outputs, grads
    if dw is None and dv is None:
        return (None,)
    inner = None if dw is None else _diagonal_matrix(dw)
    if dv is not None:
        identity = eye(w.shape[-1], dtype=w.dtype)
        # 1 on the diagonal, where the numerator counts nothing.
        gaps = w.unsqueeze(-2) - w.unsqueeze(-1) + identity
        turned = (_turned(v) @ dv) * (1.0 - identity) / gaps
        inner = turned if inner is None else inner + turned
    return (_symmetric(v @ as_tensor(inner) @ _turned(v)),)


def _svd_gradient(attrs: Attrs, inputs: Tensors, outputs: Tensors, grads: Grads) -> Grads:
    (u, s, vh), (du, ds, dvh) = outputs, grads
    if du is None and ds is None and dvh is None:
        return (None,)
    inner = None if ds is None else _diagonal_matrix(ds)
    identity = eye(s.shape[-1], dtype=s.dtype)
    squares = s * s
    gaps = squares.unsqueeze(-2) - squares.unsqueeze(-1) + identity
    row, column = s.unsqueeze(-2), s.unsqueeze(-1)
    beside: Tensor | None = None
    if du is not None:
        flow = _turned(u) @ du
        skew = (flow - _turned(flow)) / gaps * row
        inner = skew if inner is None else inner + skew
        if u.shape[-2] > u.shape[-1]:
            beside = ((du - u @ flow) / row) @ vh
    if dvh is not None:
        flow = vh @ _turned(dvh)
        skew = column * ((flow - _turned(flow)) / gaps)
        inner = skew if inner is None else inner + skew
        if vh.shape[-1] > vh.shape[-2]:
            rest = u @ ((dvh - _turned(flow) @ vh) / column)
            beside = rest if beside is None else beside + rest
    dx = u @ as_tensor(inner) @ vh
    return (dx if beside is None else dx + beside,)


register_gradient(CHOLESKY, _cholesky_gradient)
register_gradient(SOLVE, _solve_gradient)
register_gradient(SLOGDET, _slogdet_gradient)
register_gradient(DET, _det_gradient)
register_gradient(QR, _qr_gradient)
register_gradient(EIGH, _eigh_gradient)
register_gradient(SVD, _svd_gradient)
