"""Softmax over the last axis, scaled and optionally causal, as attention wants it.

Computed after subtracting the row's maximum, so that nothing overflows (Goodfellow, Bengio &
Courville, Deep Learning, 2016, section 4.1).
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.graph import GraphBuilder, Node
from compiler.ops.reduce import total
from compiler.ops.rule import Grads, gradient_of
from compiler.ops.signature import Array, Types, expect_float, expect_inputs, expect_type
from compiler.registry import Cost, OpTypeError, cost, define, infer_type, reference
from compiler.types import ValueId

SOFTMAX = define("softmax")
"""x [..., S] -> softmax(scale * x). Floats. Attrs: scale (> 0), causal.

Causal: x is [..., T, S] with S >= T, and column j of row i counts only when j <= i + (S - T).
"""

SOFTMAX_GRAD = define("softmax_grad")
"""dy, y -> dx, with y = softmax(scale * x). Attrs: scale."""


@infer_type.of(SOFTMAX)
def _softmax_type(inputs: Types, attrs: Attrs) -> Types:
    (x,) = expect_inputs(inputs, "x")
    expect_float(inputs, "x")
    _expect_scale(attrs)
    causal = attrs.bool_("causal")
    if x.rank < (2 if causal else 1):
        raise OpTypeError(
            f"needs an input of rank {2 if causal else 1} or more, got a {_kind(x.rank)}"
        )
    if causal and x.shape[-1] < x.shape[-2]:
        raise OpTypeError(
            "needs at least as many columns as rows when causal, or the first rows have nothing to"
            f" attend to; got {x.shape[-2]} rows and {x.shape[-1]} columns"
        )
    return inputs


@infer_type.of(SOFTMAX_GRAD)
def _softmax_grad_type(inputs: Types, attrs: Attrs) -> Types:
    dy, y = expect_inputs(inputs, "dy", "y")
    expect_float(inputs, "dy")
    _expect_scale(attrs)
    expect_type(y, "y", dy)
    return (dy,)


def _expect_scale(attrs: Attrs) -> None:
    if not attrs.float_("scale") > 0:
        raise OpTypeError(f"needs a scale above 0, got {attrs.float_('scale')}")


def _kind(rank: int) -> str:
    return "scalar" if rank == 0 else "vector"


@reference.of(SOFTMAX)
def _softmax_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    z = inputs[0] * attrs.float_("scale")
    if attrs.bool_("causal"):
        rows, columns = z.shape[-2:]
        allowed = np.tri(rows, columns, columns - rows, dtype=bool)
        z = np.where(allowed, z, z.dtype.type(-np.inf))
    if z.shape[-1] == 0:
        return (z,)
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return (e / total(e, -1, keepdims=True),)


@reference.of(SOFTMAX_GRAD)
def _softmax_grad_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    dy, y = inputs
    return (attrs.float_("scale") * y * (dy - total(dy * y, -1, keepdims=True)),)


@cost.of(SOFTMAX)
def _softmax_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    """Scale, maximum, difference, exponential (8), sum and division per element."""
    x = inputs[0]
    return Cost(13.0 * x.num_elements, 2.0 * x.size_bytes)


@cost.of(SOFTMAX_GRAD)
def _softmax_grad_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    y = inputs[1]
    return Cost(5.0 * y.num_elements, 3.0 * y.size_bytes)


@gradient_of(SOFTMAX)
def _softmax_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return (b.one(SOFTMAX_GRAD, dy, node.outputs[0], scale=node.attrs.float_("scale")),)
