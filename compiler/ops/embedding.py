"""Rows of a table picked by integer ids, and its adjoint, which adds rows up."""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.graph import GraphBuilder, Node
from compiler.ops.indices import check_indices
from compiler.ops.rule import Grads, array_of, gradient_of
from compiler.ops.signature import Array, Types, expect_float, expect_inputs, expect_integer
from compiler.registry import Cost, OpTypeError, cost, define, infer_type
from compiler.types import TensorType, ValueId

EMBEDDING = define("embedding")
"""weight [V, D], ids (integer, any shape) -> ids.shape + [D]. Floats.

An id outside 0..V-1 raises IndexError at run time.
"""

EMBEDDING_GRAD = define("embedding_grad")
"""dy (ids.shape + [D]), ids -> [rows, D], the sum of the rows of dy with equal id. Attrs: rows."""


@infer_type.of(EMBEDDING)
def _embedding_type(inputs: Types, attrs: Attrs) -> Types:
    weight, ids = expect_inputs(inputs, "weight", "ids")
    expect_float(inputs, "weight")
    expect_integer(ids, "ids")
    if weight.rank != 2:
        raise OpTypeError(f"needs a weight of shape [rows, width], got {list(weight.shape)}")
    return (TensorType(weight.dtype, ids.shape + weight.shape[1:]),)


@infer_type.of(EMBEDDING_GRAD)
def _embedding_grad_type(inputs: Types, attrs: Attrs) -> Types:
    dy, ids = expect_inputs(inputs, "dy", "ids")
    expect_float(inputs, "dy")
    expect_integer(ids, "ids")
    if dy.rank != ids.rank + 1 or dy.shape[:-1] != ids.shape:
        raise OpTypeError(
            f"needs dy of the shape of ids and one more axis, got {list(dy.shape)} for ids of shape"
            f" {list(ids.shape)}"
        )
    return (TensorType(dy.dtype, (attrs.int_("rows"), dy.shape[-1])),)


@array_of(EMBEDDING)
def _embedding(attrs: Attrs, weight: Array, ids: Array) -> Array:
    check_indices(ids, weight.shape[0], "embedding: id")
    return np.asarray(weight[ids.astype(np.int64)])


@array_of(EMBEDDING_GRAD)
def _embedding_grad(attrs: Attrs, dy: Array, ids: Array) -> Array:
    check_indices(ids, attrs.int_("rows"), "embedding: id")
    return sums_by_id(dy, ids, attrs.int_("rows"))


def sums_by_id(dy: Array, ids: Array, rows: int) -> Array:
    """Return the sums of the rows of dy with equal ids, added up in float64, in its dtype."""
    result = np.zeros((rows, dy.shape[-1]), np.promote_types(dy.dtype, np.float64))
    np.add.at(result, ids.astype(np.int64), dy)
    return np.asarray(result.astype(dy.dtype))


@cost.of(EMBEDDING)
def _embedding_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    """Only the rows that are picked move."""
    return Cost(0.0, 2.0 * outputs[0].size_bytes + inputs[1].size_bytes)


@cost.of(EMBEDDING_GRAD)
def _embedding_grad_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    """The table is zeroed once; then each row of dy is added to one of its rows."""
    dy, ids = inputs
    moved = 3.0 * dy.size_bytes + ids.size_bytes + outputs[0].size_bytes
    return Cost(float(dy.num_elements), moved)


@gradient_of(EMBEDDING)
def _embedding_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    weight, ids = node.inputs
    return b.one(EMBEDDING_GRAD, dy, ids, rows=b.type_of(weight).shape[0]), None


@gradient_of(EMBEDDING_GRAD)
def _embedding_grad_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return b.one(EMBEDDING, dy, node.inputs[1]), None
