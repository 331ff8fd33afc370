"""Nonlinearities.

gelu is the tanh form of Hendrycks & Gimpel, Gaussian Error Linear Units (2016), section 2, and
gelu_exact what it is near to; silu is from Elfwing et al. (2017). Formulas and what is chosen at
their kinks are torch's. Gradients of their own are of fewer instructions than the derived ones,
and read the output alone where that is enough.
"""

from __future__ import annotations

import math

from compiler.graph.columns import Values
from compiler.graph.graph import GraphBuilder, Node, simplify
from compiler.ops.language.define import fused_op
from compiler.ops.language.expressions import Expression

_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715

GELU_BOUND = 30.0
"""From here on the gate is 0 or 1 to the last bit of any float, and so is the derivative. Bounded
by it, x^3 does not overflow, and nothing that is infinite is multiplied by 0."""

SILU_BOUND = 1000.0
"""From here on the sigmoid is 0 or 1 to the last bit of any float."""


def sigmoid(x: Expression) -> Expression:
    """Where e^-x overflows the result is 0, which is right to the last bit."""
    return 1 / (1 + (-x).exp())


def _gate(x: Expression) -> Expression:
    """Return (1 + tanh(u)) / 2 as 1 / (1 + e^-2u): without the cancellation near -1."""
    return sigmoid(x * (x * x * (_SLOPE * _CUBIC) + _SLOPE))


def _gelu(x: Expression) -> Expression:
    return x.maximum(-GELU_BOUND) * _gate(x.clip(-GELU_BOUND, GELU_BOUND))


def _gelu_gradient(dy: Expression, x: Expression) -> Expression:
    x = x.clip(-GELU_BOUND, GELU_BOUND)
    s, change = _gate(x), x * x * (3 * _SLOPE * _CUBIC) + _SLOPE
    return dy * (s + s * (1 - s) * (x * change))


def _silu(x: Expression) -> Expression:
    low = x.maximum(-SILU_BOUND)
    return low * sigmoid(low)


def _silu_gradient(dy: Expression, x: Expression) -> Expression:
    x = x.clip(-SILU_BOUND, SILU_BOUND)
    s = sigmoid(x)
    return dy * s * (1 + x * (1 - s))


def _gelu_exact(x: Expression) -> Expression:
    return x.maximum(-GELU_BOUND) * _normal_below(x)


def _normal_below(x: Expression) -> Expression:
    """Return the share of the normal distribution below x."""
    return ((x * math.sqrt(0.5)).erf() + 1) * 0.5


def _gelu_exact_gradient(dy: Expression, x: Expression) -> Expression:
    x = x.clip(-GELU_BOUND, GELU_BOUND)
    density = (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi))
    return dy * (_normal_below(x) + x * density)


def _elu(x: Expression, *, alpha: float, scale: float, input_scale: float) -> Expression:
    low = (x.minimum(0) * input_scale).expm1() * (alpha * scale)
    return (x > 0).where(x * scale, low)


def _elu_gradient(
    dy: Expression, x: Expression, *, alpha: float, scale: float, input_scale: float
) -> Expression:
    low = (x.minimum(0) * input_scale).exp() * (alpha * scale * input_scale)
    return (x > 0).where(dy * scale, dy * low)


def _softplus(x: Expression, *, beta: float, threshold: float) -> Expression:
    z = x * beta
    soft = (z.maximum(0) + (-abs(z)).exp().log1p()) * (1 / beta)
    return (z > threshold).where(x, soft)


def _softplus_gradient(
    dy: Expression, x: Expression, *, beta: float, threshold: float
) -> Expression:
    z = x * beta
    return (z > threshold).where(dy, dy * sigmoid(z))


def _mish_gate(x: Expression) -> Expression:
    """Return tanh(log(1 + e^x)), of which nothing cancels for negative x."""
    n = x.minimum(MISH_BOUND).exp()
    n = n * (n + 2)
    return n / (n + 2)


def _mish_gradient(dy: Expression, x: Expression) -> Expression:
    x = x.clip(-SILU_BOUND, SILU_BOUND)
    gate = _mish_gate(x)
    return dy * (gate + x * sigmoid(x) * (1 - gate * gate))


MISH_BOUND = 20.0
"""From here on the gate is 1 to the last bit of any float."""


def _hardtanh_gradient(dy: Expression, x: Expression, *, low: float, high: float) -> Expression:
    return ((x <= low) | (x >= high)).where(0.0, dy)


def _hard_gate(x: Expression) -> Expression:
    return (x + 3).clip(0, 6) * (1 / 6)


def _hardswish_gradient(dy: Expression, x: Expression) -> Expression:
    middle = (x > -3).where(dy * (x * (1 / 3) + 0.5), 0.0)
    return (x < 3).where(middle, dy)


def _leaky_relu(x: Expression, *, negative_slope: float) -> Expression:
    return (x > 0).where(x, x * negative_slope)


def _hardshrink(x: Expression, *, lambd: float) -> Expression:
    return ((x <= lambd) & (x >= -lambd)).where(0.0, x)


def _threshold(x: Expression, *, threshold: float, value: float) -> Expression:
    return (x <= threshold).where(value, x)


def _hardtanh(x: Expression, *, low: float, high: float) -> Expression:
    return x.clip(low, high)


def _softshrink(x: Expression, *, lambd: float) -> Expression:
    return (x > lambd).where(x - lambd, (x < -lambd).where(x + lambd, (x != x).where(x, 0.0)))


TANH = fused_op("tanh", "x -> y", Expression.tanh)

SIGMOID = fused_op("sigmoid", "x -> y", sigmoid, gradient=lambda dy, y: dy * y * (1 - y))

RELU = fused_op(
    "relu",
    "x: signed -> y",
    lambda x: x.maximum(0),
    gradient=lambda dy, y: (y <= 0).where(0.0, dy),
)
"""NaN for NaN, with all of the gradient, as in torch."""

GELU = fused_op("gelu", "x -> y", _gelu, gradient=_gelu_gradient)

SILU = fused_op("silu", "x -> y", _silu, gradient=_silu_gradient)

GELU_EXACT = fused_op("gelu_exact", "x -> y", _gelu_exact, gradient=_gelu_exact_gradient)

ELU = fused_op("elu", "x -> y", _elu, gradient=_elu_gradient)
"""scale * x above 0, else scale * alpha * (e^(input_scale * x) - 1)."""

SOFTPLUS = fused_op("softplus", "x -> y", _softplus, gradient=_softplus_gradient)
"""log(1 + e^(beta x)) / beta, and x itself where beta x is above the threshold."""

LOG_SIGMOID = fused_op(
    "log_sigmoid",
    "x -> y",
    lambda x: x.minimum(0) - (-abs(x)).exp().log1p(),
    gradient=lambda dy, x: dy * sigmoid(-x),
)

MISH = fused_op(
    "mish",
    "x -> y",
    lambda x: x.maximum(-SILU_BOUND) * _mish_gate(x),
    gradient=_mish_gradient,
)
"""x tanh(softplus(x)) (Misra, 2019)."""

HARDTANH = fused_op("hardtanh", "x -> y", _hardtanh, gradient=_hardtanh_gradient)

HARDSIGMOID = fused_op(
    "hardsigmoid",
    "x -> y",
    _hard_gate,
    gradient=lambda dy, x: ((x > -3) & (x < 3)).where(dy * (1 / 6), 0.0),
)

HARDSWISH = fused_op(
    "hardswish", "x -> y", lambda x: x * _hard_gate(x), gradient=_hardswish_gradient
)

LEAKY_RELU = fused_op("leaky_relu", "x -> y", _leaky_relu)

PRELU = fused_op("prelu", "x, weight -> y", lambda x, weight: (x > 0).where(x, x * weight))

SOFTSHRINK = fused_op("softshrink", "x -> y", _softshrink)

HARDSHRINK = fused_op("hardshrink", "x -> y", _hardshrink)

THRESHOLD = fused_op("threshold", "x -> y", _threshold)
"""x above the threshold, else `value`."""


@simplify.of(RELU)
def _simplify_relu(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    return inputs if b.producer_of(inputs[0]).op is RELU else None
