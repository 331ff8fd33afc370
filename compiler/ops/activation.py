"""Nonlinearities and their gradients, each an op of its own, so that each is one launch.

gelu is the tanh form of Hendrycks & Gimpel, Gaussian Error Linear Units (2016), section 2; silu is
from Elfwing et al. (2017).
"""

from __future__ import annotations

import math

import numpy as np

from compiler.attrs import Attrs
from compiler.graph import GraphBuilder, Node
from compiler.ops.binary import MUL, SUB, scaled
from compiler.ops.elementwise import expect_float_or_signed
from compiler.ops.rule import Grads, Values, gradient_of, pointwise
from compiler.ops.signature import Array, Types, expect_float, expect_inputs, expect_type
from compiler.ops.sources import scalar
from compiler.registry import Cost, cost, define, infer_type, reference
from compiler.rules import simplify
from compiler.types import ValueId

TANH = define("tanh")
"""x -> hyperbolic tangent. Floats."""

SIGMOID = define("sigmoid")
"""x -> 1 / (1 + e^-x). Floats."""

RELU = define("relu")
"""x -> max(x, 0), NaN for NaN. Floats and signed integers."""

GELU = define("gelu")
"""x -> x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). Floats."""

SILU = define("silu")
"""x -> x sigmoid(x). Floats."""

TANH_GRAD = define("tanh_grad")
"""dy, y -> dy (1 - y^2), with y = tanh(x)."""

SIGMOID_GRAD = define("sigmoid_grad")
"""dy, y -> dy y (1 - y), with y = sigmoid(x)."""

RELU_GRAD = define("relu_grad")
"""dy, y -> dy where y > 0, else 0, with y = relu(x)."""

GELU_GRAD = define("gelu_grad")
"""dy, x -> dy gelu'(x)."""

SILU_GRAD = define("silu_grad")
"""dy, x -> dy silu'(x)."""

GELU_GRAD_OUTPUT = define("gelu_grad_output")
"""dy, x -> dy gelu'(x), gelu(x): with the bits of gelu_grad and gelu."""

SILU_GRAD_OUTPUT = define("silu_grad_output")
"""dy, x -> dy silu'(x), silu(x): with the bits of silu_grad and silu."""

_SLOPE = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715

GELU_BOUND = 30.0
"""From here on 1 + tanh is 0 or 2 to the last bit of any float, and so is twice the derivative.
Bounded by it, x^3 does not overflow, and nothing that is infinite is multiplied by 0."""

SILU_BOUND = 1000.0
"""From here on the sigmoid is 0 or 1 to the last bit of any float."""

_FLOPS = {
    TANH: 8,
    SIGMOID: 8,
    GELU: 16,
    SILU: 9,
    GELU_GRAD: 24,
    SILU_GRAD: 14,
    GELU_GRAD_OUTPUT: 26,
    SILU_GRAD_OUTPUT: 15,
}
"""Per element, 6 to 8 for a transcendental function: good to rank kernels, not to time them."""


@infer_type.of(TANH, SIGMOID, GELU, SILU)
def _float_type(inputs: Types, attrs: Attrs) -> Types:
    expect_inputs(inputs, "x")
    expect_float(inputs, "x")
    return inputs


@infer_type.of(RELU)
def _relu_type(inputs: Types, attrs: Attrs) -> Types:
    expect_inputs(inputs, "x")
    expect_float_or_signed(inputs[0])
    return inputs


@infer_type.of(TANH_GRAD, SIGMOID_GRAD, RELU_GRAD, GELU_GRAD, SILU_GRAD)
def _grad_type(inputs: Types, attrs: Attrs) -> Types:
    dy, other = expect_inputs(inputs, "dy", "x or y")
    expect_float(inputs, "dy")
    expect_type(other, "the second input", dy)
    return (dy,)


@infer_type.of(GELU_GRAD_OUTPUT, SILU_GRAD_OUTPUT)
def _grad_output_type(inputs: Types, attrs: Attrs) -> Types:
    dy, x = expect_inputs(inputs, "dy", "x")
    expect_float(inputs, "dy")
    expect_type(x, "x", dy)
    return dy, dy


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))  # never overflows
    result: Array = np.where(x >= 0, 1 / (1 + small), small / (1 + small))
    return result


def _gelu(x: Array) -> Array:
    low, bounded = np.maximum(x, -GELU_BOUND), np.clip(x, -GELU_BOUND, GELU_BOUND)
    t: Array = np.tanh(_SLOPE * (bounded + _CUBIC * bounded * bounded * bounded))
    result: Array = 0.5 * low * (1 + t)
    return result


def _gelu_grad(dy: Array, x: Array) -> Array:
    x = np.clip(x, -GELU_BOUND, GELU_BOUND)
    t: Array = np.tanh(_SLOPE * (x + _CUBIC * x * x * x))
    slope = _SLOPE * (1 + 3 * _CUBIC * x * x)
    result: Array = dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)
    return result


def _silu(x: Array) -> Array:
    result: Array = np.maximum(x, -SILU_BOUND) * _sigmoid(x)
    return result


def _silu_grad(dy: Array, x: Array) -> Array:
    x = np.clip(x, -SILU_BOUND, SILU_BOUND)
    s = _sigmoid(x)
    result: Array = dy * s * (1 + x * (1 - s))
    return result


reference.register(TANH, pointwise(np.tanh))
reference.register(SIGMOID, pointwise(_sigmoid))
reference.register(RELU, pointwise(lambda x: np.maximum(x, 0)))
reference.register(GELU, pointwise(_gelu))
reference.register(SILU, pointwise(_silu))
reference.register(TANH_GRAD, pointwise(lambda dy, y: dy * (1 - y * y)))
reference.register(SIGMOID_GRAD, pointwise(lambda dy, y: dy * y * (1 - y)))
reference.register(RELU_GRAD, pointwise(lambda dy, y: np.where(y > 0, dy, dy.dtype.type(0))))
reference.register(GELU_GRAD, pointwise(_gelu_grad))
reference.register(SILU_GRAD, pointwise(_silu_grad))


@reference.of(GELU_GRAD_OUTPUT)
def _gelu_grad_output(attrs: Attrs, dy: Array, x: Array) -> tuple[Array, Array]:
    return np.asarray(_gelu_grad(dy, x)), np.asarray(_gelu(x))


@reference.of(SILU_GRAD_OUTPUT)
def _silu_grad_output(attrs: Attrs, dy: Array, x: Array) -> tuple[Array, Array]:
    return np.asarray(_silu_grad(dy, x)), np.asarray(_silu(x))


def _register_cost(flops: int) -> None:
    """Fill the cost of the ops that take `flops` per element."""

    @cost.of(*(op for op in _FLOPS if _FLOPS[op] == flops))
    def _cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        moved = sum(t.size_bytes for t in (*inputs, *outputs))
        return Cost(float(flops * outputs[0].num_elements), float(moved))


for _flops in sorted(set(_FLOPS.values())):
    _register_cost(_flops)


@gradient_of(TANH)
def _tanh_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (b.one(TANH_GRAD, dy, node.outputs[0]),)


@gradient_of(SIGMOID)
def _sigmoid_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (b.one(SIGMOID_GRAD, dy, node.outputs[0]),)


@gradient_of(RELU)
def _relu_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (b.one(RELU_GRAD, dy, node.outputs[0]),)


@gradient_of(GELU)
def _gelu_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (b.one(GELU_GRAD, dy, node.inputs[0]),)


@gradient_of(SILU)
def _silu_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (b.one(SILU_GRAD, dy, node.inputs[0]),)


@gradient_of(TANH_GRAD)
def _tanh_grad_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    first, y = node.inputs
    return b.one(TANH_GRAD, dy, y), b.one(MUL, scaled(b, b.one(MUL, dy, first), -2.0), y)


@gradient_of(SIGMOID_GRAD)
def _sigmoid_grad_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    first, y = node.inputs
    slope = b.one(SUB, scalar(b, 1.0, b.type_of(y).dtype), scaled(b, y, 2.0))
    return b.one(SIGMOID_GRAD, dy, y), b.one(MUL, b.one(MUL, dy, first), slope)


@gradient_of(RELU_GRAD)
def _relu_grad_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return b.one(RELU_GRAD, dy, node.inputs[1]), None


@simplify.of(RELU)
def _simplify_relu(b: GraphBuilder, node: Node, inputs: Values) -> Values | None:
    return inputs if b.producer_of(inputs[0]).op is RELU else None
