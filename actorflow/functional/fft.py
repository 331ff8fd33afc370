"""Discrete Fourier transforms, as `af.fft`, with torch.fft's names and norms.

There are no complex dtypes: a complex tensor has a last axis of 2, real and imaginary part, which
is the layout of torch.view_as_real. `dim` counts the axes without it. Lengths, `n`, cut or pad with
zeros at the end. They are computed by pocketfft on the host, 16-bit floats in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from actorflow.functional.arranging import pad, roll
from actorflow.functional.shape import concat, stack
from actorflow.tensor.gradient_rules import Grads, Tensors, register_gradient
from actorflow.tensor.literals import checked_size
from actorflow.tensor.op_math import in_float32
from actorflow.tensor.tensor import Tensor, apply, as_tensor
from actorflow.tensor.tracer import find_source
from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.ops.families.linear_algebra import FFT

__all__ = [
    "fft",
    "fft2",
    "fftfreq",
    "fftn",
    "fftshift",
    "ifft",
    "ifft2",
    "ifftn",
    "ifftshift",
    "irfft",
    "irfft2",
    "rfft",
    "rfft2",
    "rfftfreq",
]

NORMS = {"backward": (0.0, 1.0), "ortho": (0.5, 0.5), "forward": (1.0, 0.0)}
"""Powers of 1 / n by which a transform and its inverse are multiplied."""


def _pairs(x: Tensor, what: str) -> Tensor:
    x = as_tensor(x)
    if x.ndim < 2 or x.shape[-1] != 2 or not x.dtype.is_float:
        raise CompileError(
            f"{find_source()}: {what} needs complex numbers as floats [..., 2], real and imaginary"
            f" part, got {x.type}; of real numbers take rfft"
        )
    return x


def _axis(x: Tensor, dim: int, num_axes: int) -> int:
    if not -num_axes <= dim < num_axes:
        raise CompileError(
            f"{find_source()}: a transform along axis {dim} of {x.type}, which has {num_axes}"
        )
    return dim % num_axes


def _length(n: int | None, extent: int, what: str) -> int:
    length = extent if n is None else checked_size(n, f"n of {what}")
    if length < 1:
        raise CompileError(f"{find_source()}: {what} needs a length of 1 or more, got {length}")
    return length


def _fitted(x: Tensor, axis: int, length: int) -> Tensor:
    """Cut an axis, or pad it with zeros at its end, to a length."""
    extent = x.shape[axis]
    if length <= extent:
        return x if length == extent else x.narrow(axis, 0, length)
    return pad(x, (0, 0) * (x.ndim - 1 - axis) + (0, length - extent))


def _transformed(x: Tensor, axis: int, norm: str, what: str, *, inverse: bool) -> Tensor:
    """Transform pairs along an axis, with the factor of a norm."""
    if norm not in NORMS:
        raise CompileError(
            f"{find_source()}: norm of {what} is {', '.join(map(repr, NORMS))}, got {norm!r}"
        )
    last = x.ndim - 2
    moved = x if axis == last else x.swapaxes(axis, last)
    made = apply(FFT, moved, inverse=inverse)
    factor = float(moved.shape[-2]) ** -NORMS[norm][inverse]
    made = made if factor == 1.0 else made * factor
    return made if axis == last else made.swapaxes(axis, last)


def _complex(x: Tensor, n: int | None, dim: int, norm: str, what: str, *, inverse: bool) -> Tensor:
    x = _pairs(x, what)
    axis = _axis(x, dim, x.ndim - 1)
    fitted = _fitted(x, axis, _length(n, x.shape[axis], what))
    return _transformed(fitted, axis, norm, what, inverse=inverse)


@in_float32
def fft(x: Tensor, n: int | None = None, dim: int = -1, norm: str = "backward") -> Tensor:
    """Return the transform of complex numbers [..., 2] along `dim`."""
    return _complex(x, n, dim, norm, "fft", inverse=False)


@in_float32
def ifft(x: Tensor, n: int | None = None, dim: int = -1, norm: str = "backward") -> Tensor:
    """Return the inverse transform of complex numbers [..., 2] along `dim`."""
    return _complex(x, n, dim, norm, "ifft", inverse=True)


@in_float32
def rfft(x: Tensor, n: int | None = None, dim: int = -1, norm: str = "backward") -> Tensor:
    """Return the transform of real numbers along `dim`: its n // 2 + 1 first numbers, [..., 2]."""
    x = as_tensor(x)
    axis = _axis(x, dim, x.ndim)
    length = _length(n, x.shape[axis], "rfft")
    fitted = _fitted(x, axis, length)
    pairs = stack([fitted, fitted * 0.0], -1)
    whole = _transformed(pairs, axis, norm, "rfft", inverse=False)
    return whole.narrow(axis, 0, length // 2 + 1)


@in_float32
def irfft(x: Tensor, n: int | None = None, dim: int = -1, norm: str = "backward") -> Tensor:
    """Return the n real numbers whose transform begins with x [..., 2] along `dim`.

    By default n is 2 (m - 1), of m numbers of x. The imaginary parts of the first number, and for
    even n of the last one, count for nothing, as in torch.
    """
    x = _pairs(x, "irfft")
    axis = _axis(x, dim, x.ndim - 1)
    length = _length(n, 2 * (x.shape[axis] - 1), "irfft")
    half = _fitted(x, axis, length // 2 + 1)
    # What is left of the spectrum of real numbers is the first half, turned and conjugated.
    rest = half.narrow(axis, 1, (length - 1) // 2).flip(axis) * np.array([1.0, -1.0], np.float32)
    whole = _transformed(concat([half, rest], axis), axis, norm, "irfft", inverse=True)
    return whole[..., 0]


Lengths = Sequence[int] | None


def _several(x: Tensor, s: Lengths, dim: Lengths, norm: str, what: str, *, inverse: bool) -> Tensor:
    x = _pairs(x, what)
    axes = _axes(x.ndim - 1, s, dim)
    for place, axis in enumerate(axes):
        x = _complex(x, None if s is None else s[place], axis, norm, what, inverse=inverse)
    return x


def _axes(num_axes: int, s: Lengths, dim: Lengths) -> list[int]:
    axes = list(range(num_axes)) if dim is None else list(dim)
    axes = axes[len(axes) - len(s) :] if dim is None and s is not None else axes
    if s is not None and len(s) != len(axes):
        raise CompileError(
            f"{find_source()}: lengths for {len(s)} axes and {len(axes)} axes of a transform"
        )
    return axes


@in_float32
def fftn(x: Tensor, s: Lengths = None, dim: Lengths = None, norm: str = "backward") -> Tensor:
    """Return the transform of complex numbers [..., 2] along several axes, all by default."""
    return _several(x, s, dim, norm, "fftn", inverse=False)


@in_float32
def ifftn(x: Tensor, s: Lengths = None, dim: Lengths = None, norm: str = "backward") -> Tensor:
    """Return the inverse transform of complex numbers [..., 2] along several axes."""
    return _several(x, s, dim, norm, "ifftn", inverse=True)


@in_float32
def fft2(x: Tensor, s: Lengths = None, dim: Lengths = (-2, -1), norm: str = "backward") -> Tensor:
    """Return the transform of complex numbers [..., 2] along two axes."""
    return _several(x, s, dim, norm, "fft2", inverse=False)


@in_float32
def ifft2(x: Tensor, s: Lengths = None, dim: Lengths = (-2, -1), norm: str = "backward") -> Tensor:
    """Return the inverse transform of complex numbers [..., 2] along two axes."""
    return _several(x, s, dim, norm, "ifft2", inverse=True)


@in_float32
def rfft2(
    x: Tensor, s: Sequence[int] | None = None, dim: Sequence[int] = (-2, -1), norm: str = "backward"
) -> Tensor:
    """Return the transform of real numbers along two axes; the last one has n // 2 + 1."""
    first, last = dim
    rows, columns = s or (None, None)
    num_axes = as_tensor(x).ndim
    made = rfft(x, columns, last, norm)
    return fft(made, rows, _axis(made, first, num_axes), norm)


@in_float32
def irfft2(
    x: Tensor, s: Sequence[int] | None = None, dim: Sequence[int] = (-2, -1), norm: str = "backward"
) -> Tensor:
    """Return the real numbers whose transform along two axes is x [..., 2]."""
    first, last = dim
    rows, columns = s or (None, None)
    return irfft(ifft(x, rows, first, norm), columns, last, norm)


def fftfreq(n: int, d: float = 1.0) -> Tensor:
    """Return the frequencies of a transform of n numbers, `d` apart: float32 [n]."""
    return as_tensor(np.fft.fftfreq(n, d).astype(np.float32))


def rfftfreq(n: int, d: float = 1.0) -> Tensor:
    """Return the frequencies of `rfft` of n numbers, `d` apart: float32 [n // 2 + 1]."""
    return as_tensor(np.fft.rfftfreq(n, d).astype(np.float32))


def _shifted(x: Tensor, dim: int | Sequence[int] | None, by: Callable[[int], int]) -> Tensor:
    x = as_tensor(x)
    axes = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    for axis in axes:
        x = roll(x, by(x.shape[axis]), axis)
    return x


def fftshift(x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """Move frequency 0 into the middle of axes, all by default. Of pairs, name their axes."""
    return _shifted(x, dim, lambda n: n // 2)


def ifftshift(x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """Undo `fftshift`."""
    return _shifted(x, dim, lambda n: -(n // 2))


def _fft_gradient(attrs: Attrs, inputs: Tensors, outputs: Tensors, grads: Grads) -> Grads:
    """Transform the other way: the map is linear, and its matrix symmetric."""
    (dy,) = grads
    return (None if dy is None else apply(FFT, dy, inverse=not attrs.bool_("inverse")),)


register_gradient(FFT, _fft_gradient)
