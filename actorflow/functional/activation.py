"""Activations: nonlinear functions of each element, and softmax over an axis."""

from __future__ import annotations

from actorflow.functional.names import with_numpy_names
from actorflow.literals import checked_number
from actorflow.tensor import Tensor, apply, as_tensor, checked_axis
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.ops import activation
from compiler.ops import softmax as softmax_ops

__all__ = ["gelu", "relu", "sigmoid", "silu", "softmax", "tanh"]


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0)."""
    return apply(activation.RELU, x)


def gelu(x: Tensor) -> Tensor:
    """Return the Gaussian error linear unit in its tanh form (Hendrycks & Gimpel, 2016)."""
    return apply(activation.GELU, x)


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x)."""
    return apply(activation.SILU, x)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return apply(activation.SIGMOID, x)


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent."""
    return apply(activation.TANH, x)


@with_numpy_names
def softmax(x: Tensor, dim: int = -1, *, scale: float = 1.0, causal: bool = False) -> Tensor:
    """Return the softmax of `scale * x` over the axis `dim`.

    With `causal`, x is [..., T, S] and row i sees only columns j <= i + (S - T).
    """
    x = as_tensor(x)
    factor, last, axis = checked_number(scale, "the scale of softmax"), x.ndim - 1, x.ndim - 1
    if x.ndim:
        axis = checked_axis(x, dim)
    if axis != last and causal:
        raise CompileError(f"{find_source()}: a causal softmax goes over the last axis, got {dim}")
    moved = x if axis == last else x.swapaxes(axis, last)
    made = apply(softmax_ops.SOFTMAX, moved, scale=factor, causal=bool(causal))
    return made if axis == last else made.swapaxes(axis, last)
