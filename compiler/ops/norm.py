"""Layer normalisation over the last axis (Ba, Kiros & Hinton, Layer Normalization, 2016)."""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.errors import CompileError
from compiler.graph import GraphBuilder, Node
from compiler.ops.reduce import total
from compiler.ops.rule import Grads
from compiler.ops.signature import (
    Array,
    Types,
    expect_equal_dtypes,
    expect_float,
    expect_inputs,
    expect_type,
)
from compiler.registry import Cost, OpTypeError, cost, define, infer_type, reference
from compiler.rules import gradient
from compiler.types import TensorType

LAYER_NORM = define("layer_norm")
"""x [..., D], gamma [D], beta [D] -> y [..., D], mean [...], rstd [...]. Floats. Attrs: eps.

y = (x - mean) * rstd * gamma + beta with rstd = 1 / sqrt(var + eps) and the biased variance. Only y
has a gradient; mean and rstd are kept for it.
"""

LAYER_NORM_GRAD = define("layer_norm_grad")
"""dy, x, gamma, mean, rstd -> dx, dgamma [D], dbeta [D]."""


@infer_type.of(LAYER_NORM)
def _layer_norm_type(inputs: Types, attrs: Attrs) -> Types:
    x, gamma, beta = expect_inputs(inputs, "x", "gamma", "beta")
    dtype = expect_equal_dtypes(inputs)
    expect_float(inputs, "x")
    if x.rank == 0 or x.shape[-1] == 0:
        raise OpTypeError(f"needs at least one element on the last axis of x, got {x}")
    if not attrs.float_("eps") >= 0:
        raise OpTypeError(f"needs an eps of 0 or more, got {attrs.float_('eps')}")
    last = TensorType(dtype, x.shape[-1:])
    expect_type(gamma, "gamma", last)
    expect_type(beta, "beta", last)
    rows = TensorType(dtype, x.shape[:-1])
    return x, rows, rows


@infer_type.of(LAYER_NORM_GRAD)
def _layer_norm_grad_type(inputs: Types, attrs: Attrs) -> Types:
    dy, x, gamma, mean, rstd = expect_inputs(inputs, "dy", "x", "gamma", "mean", "rstd")
    expect_float(inputs, "dy")
    if dy.rank == 0:
        raise OpTypeError(f"needs dy of rank 1 or more, got {dy}")
    last, rows = TensorType(dy.dtype, dy.shape[-1:]), TensorType(dy.dtype, dy.shape[:-1])
    expect_type(x, "x", dy)
    expect_type(gamma, "gamma", last)
    expect_type(mean, "mean", rows)
    expect_type(rstd, "rstd", rows)
    return x, last, last


@reference.of(LAYER_NORM)
def _layer_norm_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    x, gamma, beta = inputs
    count = x.shape[-1]
    mean = total(x, -1, count, keepdims=True)
    variance = total(np.square(x - mean), -1, count, keepdims=True)
    rstd = 1 / np.sqrt(variance + attrs.float_("eps"))
    y = (x - mean) * rstd * gamma + beta
    return y, mean[..., 0], rstd[..., 0]


@reference.of(LAYER_NORM_GRAD)
def _layer_norm_grad_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    dy, x, gamma, mean, rstd = inputs
    normal = (x - mean[..., None]) * rstd[..., None]
    inner = dy * gamma
    count = x.shape[-1]
    constant = total(inner, -1, count, keepdims=True)
    slope = total(inner * normal, -1, count, keepdims=True)
    dx = rstd[..., None] * (inner - constant - normal * slope)
    rows = tuple(range(x.ndim - 1))
    return dx, total(dy * normal, rows), total(dy, rows)


@cost.of(LAYER_NORM)
def _layer_norm_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    """Sum, difference, square, sum, two products and a sum per element."""
    moved = sum(t.size_bytes for t in (*inputs, *outputs))
    return Cost(8.0 * inputs[0].num_elements, float(moved))


@cost.of(LAYER_NORM_GRAD)
def _layer_norm_grad_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    moved = sum(t.size_bytes for t in (*inputs, *outputs))
    return Cost(14.0 * inputs[0].num_elements, float(moved))


@gradient.of(LAYER_NORM)
def _layer_norm_gradient(b: GraphBuilder, node: Node, grads: Grads) -> Grads:
    dy, *others = grads
    if any(grad is not None for grad in others):
        raise CompileError(
            f"{node.source}: layer_norm has no gradient for mean and rstd; compute them with"
            " mean and square where they are needed in the loss"
        )
    if dy is None:
        return None, None, None
    x, gamma, _ = node.inputs
    _, mean, rstd = node.outputs
    return b.emit(LAYER_NORM_GRAD, (dy, x, gamma, mean, rstd))
