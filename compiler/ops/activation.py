"""Nonlinearities.

gelu is the tanh form of Hendrycks & Gimpel, Gaussian Error Linear Units (2016), section 2; silu is
from Elfwing et al. (2017). Gradients of their own are of fewer instructions than the derived ones,
and read the output alone where that is enough.
"""

from __future__ import annotations

import math

from compiler.fusion.define import fused_op
from compiler.fusion.expressions import Expression
from compiler.graph import GraphBuilder, Node
from compiler.ops.rule import Values
from compiler.rules import simplify

_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715

GELU_BOUND = 30.0
"""From here on the gate is 0 or 1 to the last bit of any float, and so is the derivative. Bounded
by it, x^3 does not overflow, and nothing that is infinite is multiplied by 0."""

SILU_BOUND = 1000.0
"""From here on the sigmoid is 0 or 1 to the last bit of any float."""


def _sigmoid(x: Expression) -> Expression:
    """Where e^-x overflows the result is 0, which is right to the last bit."""
    return 1 / (1 + (-x).exp())


def _gate(x: Expression) -> Expression:
    """Return (1 + tanh(u)) / 2 as 1 / (1 + e^-2u): without the cancellation near -1."""
    return _sigmoid(x * (x * x * (_SLOPE * _CUBIC) + _SLOPE))


def _gelu(x: Expression) -> Expression:
    return x.maximum(-GELU_BOUND) * _gate(x.clip(-GELU_BOUND, GELU_BOUND))


def _gelu_gradient(dy: Expression, x: Expression) -> Expression:
    x = x.clip(-GELU_BOUND, GELU_BOUND)
    s, change = _gate(x), x * x * (3 * _SLOPE * _CUBIC) + _SLOPE
    return dy * (s + s * (1 - s) * (x * change))


def _silu(x: Expression) -> Expression:
    low = x.maximum(-SILU_BOUND)
    return low * _sigmoid(low)


def _silu_gradient(dy: Expression, x: Expression) -> Expression:
    x = x.clip(-SILU_BOUND, SILU_BOUND)
    s = _sigmoid(x)
    return dy * s * (1 + x * (1 - s))


TANH = fused_op("tanh", "x -> y", Expression.tanh)

SIGMOID = fused_op("sigmoid", "x -> y", _sigmoid, gradient=lambda dy, y: dy * y * (1 - y))

RELU = fused_op(
    "relu",
    "x: signed -> y",
    lambda x: x.maximum(0),
    gradient=lambda dy, y: (y > 0).where(dy, 0.0),
)
"""NaN for NaN."""

GELU = fused_op("gelu", "x -> y", _gelu, gradient=_gelu_gradient)

SILU = fused_op("silu", "x -> y", _silu, gradient=_silu_gradient)


@simplify.of(RELU)
def _simplify_relu(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    return inputs if b.producer_of(inputs[0]).op is RELU else None
