"""Attention over queries, keys and values that one projection made, in its own layout.

What a projection gives lies as [batch, T, 3, heads, width]. Here attention reads it there, writes
its result as [batch, T, heads, width], which is what the next projection reads, and its gradient
writes all three gradients into one tensor: cutting out heads and joining them moves no byte.
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.errors import CompileError
from compiler.graph import GraphBuilder, Node
from compiler.ops.attention import ATTENTION, ATTENTION_GRAD
from compiler.ops.rule import Grads
from compiler.ops.signature import Array, Types, expect_inputs, expect_type
from compiler.registry import Cost, OpTypeError, cost, define, infer_type, reference
from compiler.rules import gradient
from compiler.types import TensorType

PACKED_ATTENTION = define("packed_attention")
"""qkv [B, T, 3, H, D] -> y [B, T, H, D], lse [B, H, T].

Attention of q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], head by head. Attrs: scale (> 0),
causal.
"""

PACKED_ATTENTION_GRAD = define("packed_attention_grad")
"""dy, qkv, y, lse -> dqkv. Attrs: scale, causal. It has no gradient itself."""


@infer_type.of(PACKED_ATTENTION)
def _packed_type(inputs: Types, attrs: Attrs) -> Types:
    (qkv,) = expect_inputs(inputs, "qkv")
    return _result_types(qkv, attrs)


@infer_type.of(PACKED_ATTENTION_GRAD)
def _packed_grad_type(inputs: Types, attrs: Attrs) -> Types:
    dy, qkv, y, lse = expect_inputs(inputs, "dy", "qkv", "y", "lse")
    of_y, of_lse = _result_types(qkv, attrs)
    expect_type(y, "y", of_y)
    expect_type(dy, "dy", of_y)
    expect_type(lse, "lse", of_lse)
    return (qkv,)


def _result_types(qkv: TensorType, attrs: Attrs) -> Types:
    one = _one_head_type(qkv)
    y, lse = infer_type.get(ATTENTION)((one, one, one), attrs)
    return TensorType(y.dtype, _swapped(y.shape)), lse


def _one_head_type(qkv: TensorType) -> TensorType:
    """Return the type of q, of k and of v: [B, H, T, D]."""
    if qkv.rank != 5 or qkv.shape[2] != 3:
        raise OpTypeError(f"needs qkv of shape [batch, T, 3, heads, width], got {list(qkv.shape)}")
    batch, rows, _, heads, width = qkv.shape
    return TensorType(qkv.dtype, (batch, heads, rows, width))


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[2], shape[1], shape[3])


@reference.of(PACKED_ATTENTION)
def _packed_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    y, lse = reference.get(ATTENTION)(attrs, *_parts(inputs[0]))
    return np.ascontiguousarray(y.swapaxes(1, 2)), lse


@reference.of(PACKED_ATTENTION_GRAD)
def _packed_grad_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    dy, qkv, y, lse = inputs
    operands = dy.swapaxes(1, 2), *_parts(qkv), y.swapaxes(1, 2), lse
    grads = reference.get(ATTENTION_GRAD)(attrs, *operands)
    return (np.stack([grad.swapaxes(1, 2) for grad in grads], axis=2),)


def _parts(qkv: Array) -> tuple[Array, ...]:
    """Return q, k and v as views [B, H, T, D]."""
    return tuple([qkv[:, :, index].swapaxes(1, 2) for index in range(3)])


@cost.of(PACKED_ATTENTION)
def _packed_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    one = _one_head_type(inputs[0])
    return cost.get(ATTENTION)((one, one, one), outputs, attrs)


@cost.of(PACKED_ATTENTION_GRAD)
def _packed_grad_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    dy, qkv, y, lse = inputs
    one = _one_head_type(qkv)
    return cost.get(ATTENTION_GRAD)((dy, one, one, one, y, lse), (one, one, one), attrs)


@gradient.of(PACKED_ATTENTION)
def _packed_gradient(b: GraphBuilder, node: Node, grads: Grads) -> Grads:
    dy, dlse = grads
    if dlse is not None:
        raise CompileError(
            f"{node.source}: attention has no gradient for lse; compute it with a product, max,"
            " exp, sum and log where it is needed in the loss"
        )
    if dy is None:
        return (None,)
    return b.emit(PACKED_ATTENTION_GRAD, (dy, *node.inputs, *node.outputs), node.attrs)
