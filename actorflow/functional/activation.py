"""Activations: nonlinear functions of each element, and softmax over an axis."""

from __future__ import annotations

from actorflow.functional.elementwise import where
from actorflow.functional.shape import split
from actorflow.tensor.literals import checked_number, with_numpy_names
from actorflow.tensor.op_math import in_float32
from actorflow.tensor.tensor import Tensor, apply, as_tensor, checked_axis
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.ops.families import activation, arithmetic, normalisation

__all__ = [
    "celu",
    "elu",
    "gelu",
    "glu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "log_softmax",
    "logsigmoid",
    "mish",
    "prelu",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softmax",
    "softmin",
    "softplus",
    "softshrink",
    "softsign",
    "swiglu",
    "tanh",
    "tanhshrink",
    "threshold",
]


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0)."""
    return apply(activation.RELU, x)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Return the Gaussian error linear unit, x times the share of the normal distribution below x.

    With approximate="tanh" in the form that GPT-2 has and that CUDA's products compute on the way
    (Hendrycks & Gimpel, 2016), which differs by up to 5e-4.
    """
    ops = {"none": activation.GELU_EXACT, "tanh": activation.GELU}
    if approximate not in ops:
        raise CompileError(
            f"{find_source()}: approximate of gelu must be 'none' or 'tanh', got {approximate!r}"
        )
    return apply(ops[approximate], x)


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x)."""
    return apply(activation.SILU, x)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return apply(activation.SIGMOID, x)


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent."""
    return apply(activation.TANH, x)


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return x, times `negative_slope` below 0."""
    slope = checked_number(negative_slope, "negative_slope of leaky_relu")
    return apply(activation.LEAKY_RELU, x, negative_slope=slope)


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """Return x, times `weight` below 0: one number, or [C], one for each channel of axis 1."""
    x, weight = as_tensor(x), as_tensor(weight)
    channels = x.shape[1] if x.ndim > 1 else 1
    if weight.ndim > 1 or weight.type.num_elements not in (1, channels):
        raise CompileError(
            f"{find_source()}: prelu expects a weight of 1 or {channels} elements for"
            f" {x.type}, got {weight.type}"
        )
    if weight.type.num_elements == 1:
        return apply(activation.PRELU, x, weight.reshape(()))
    return apply(activation.PRELU, x, weight.reshape(-1, *(1,) * (x.ndim - 2)))


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Return x, below 0 alpha * (e^x - 1) (Clevert et al., 2015)."""
    return _elu(x, checked_number(alpha, "alpha of elu"))


def selu(x: Tensor) -> Tensor:
    """Return the scaled elu that keeps mean 0 and variance 1 (Klambauer et al., 2017)."""
    return _elu(x, 1.6732632423543772848170429916717, scale=1.0507009873554804934193349852946)


def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Return x, below 0 alpha * (e^(x / alpha) - 1) (Barron, 2017)."""
    factor = checked_number(alpha, "alpha of celu")
    if factor == 0.0:
        raise CompileError(f"{find_source()}: alpha of celu must not be 0")
    return _elu(x, factor, input_scale=1.0 / factor)


def _elu(x: Tensor, alpha: float, *, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    return apply(activation.ELU, x, alpha=alpha, scale=scale, input_scale=input_scale)


def hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """Return x between two numbers; at them no gradient flows."""
    low, high = [checked_number(n, "a bound of hardtanh") for n in (min_val, max_val)]
    if not low < high:
        raise CompileError(f"{find_source()}: hardtanh needs min_val < max_val, got {low}, {high}")
    return apply(activation.HARDTANH, x, low=low, high=high)


def relu6(x: Tensor) -> Tensor:
    """Return x between 0 and 6."""
    return hardtanh(x, 0.0, 6.0)


def hardsigmoid(x: Tensor) -> Tensor:
    """Return (x + 3) / 6 between 0 and 1."""
    return apply(activation.HARDSIGMOID, x)


def hardswish(x: Tensor) -> Tensor:
    """Return x * hardsigmoid(x) (Howard et al., 2019)."""
    return apply(activation.HARDSWISH, x)


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Return log(1 + e^(beta x)) / beta; x itself where beta x is above the threshold."""
    factor, limit = checked_number(beta, "beta of softplus"), checked_number(threshold, "threshold")
    if factor == 0.0:
        raise CompileError(f"{find_source()}: beta of softplus must not be 0")
    return apply(activation.SOFTPLUS, x, beta=factor, threshold=limit)


def logsigmoid(x: Tensor) -> Tensor:
    """Return log(sigmoid(x)), of which nothing overflows."""
    return apply(activation.LOG_SIGMOID, x)


@in_float32
def softsign(x: Tensor) -> Tensor:
    """Return x / (1 + |x|), whose gradient keeps its digits where x is large."""
    size = apply(arithmetic.ABS, x)
    rest = 1 / (size + 1)
    return where(size > 1, apply(arithmetic.SIGN, x) * (1 - rest), x * rest)


def mish(x: Tensor) -> Tensor:
    """Return x * tanh(softplus(x)) (Misra, 2019)."""
    return apply(activation.MISH, x)


def tanhshrink(x: Tensor) -> Tensor:
    """Return x - tanh(x)."""
    return x - tanh(x)


def softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """Return x moved towards 0 by `lambd`, and 0 where it is nearer than that."""
    return apply(activation.SOFTSHRINK, x, lambd=_checked_lambd(lambd, "softshrink"))


def hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """Return x, and 0 where |x| <= lambd."""
    return apply(activation.HARDSHRINK, x, lambd=_checked_lambd(lambd, "hardshrink"))


def _checked_lambd(lambd: float, name: str) -> float:
    number = checked_number(lambd, f"lambd of {name}")
    if not number >= 0.0:
        raise CompileError(f"{find_source()}: lambd of {name} must be 0 or more, got {number}")
    return number


def threshold(x: Tensor, threshold: float, value: float) -> Tensor:
    """Return x where it is above the threshold, else `value`."""
    limit, number = [checked_number(n, "a number of threshold") for n in (threshold, value)]
    return apply(activation.THRESHOLD, x, threshold=limit, value=number)


@with_numpy_names
def glu(x: Tensor, dim: int = -1) -> Tensor:
    """Return a * sigmoid(b) of the halves a and b along an axis (Dauphin et al., 2016)."""
    x = as_tensor(x)
    extent = x.shape[checked_axis(x, dim)]
    if extent % 2:
        raise CompileError(f"{find_source()}: glu needs an even extent of axis {dim}, got {x.type}")
    a, b = split(x, [extent // 2] * 2, dim)
    return a * sigmoid(b)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer, GLU Variants Improve Transformer, 2020)."""
    return silu(gate) * as_tensor(up)


@with_numpy_names
def softmin(x: Tensor, dim: int = -1) -> Tensor:
    """Return softmax(-x) over the axis `dim`."""
    return softmax(-x, dim)


@with_numpy_names
def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return the logarithm of the softmax over the axis `dim`, of which nothing overflows."""
    x = as_tensor(x)
    axis, last = checked_axis(x, dim) if x.ndim else 0, x.ndim - 1
    if axis == last:
        return apply(normalisation.LOG_SOFTMAX, x)
    return apply(normalisation.LOG_SOFTMAX, x.swapaxes(axis, last)).swapaxes(axis, last)


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
    y = apply(normalisation.SOFTMAX, moved, scale=factor, causal=bool(causal))
    return y if axis == last else y.swapaxes(axis, last)
