"""Plain descent on the rows of a table that a batch picked.

The gradient of an embedding is zero but for those rows, and plain descent leaves the others as they
are: so neither the gradient of the table nor the pass over all of it is needed. Only the pass
`sparse_update` emits this op, behind autodiff; it has no gradient.
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.ops.embedding import sums_by_id
from compiler.ops.indices import check_indices
from compiler.ops.rule import array_of
from compiler.ops.signature import (
    Array,
    Types,
    expect_float,
    expect_inputs,
    expect_integer,
    expect_type,
)
from compiler.registry import Cost, OpTypeError, cost, define, infer_type, writes
from compiler.types import TensorType

EMBEDDING_SGD_UPDATE = define("embedding_sgd_update")
"""param [V, D], dy (ids.shape + [D]), ids, lr [] -> param - lr * g, over param. Floats.

g is `embedding_grad`(dy, ids): rows of dy with equal id are added up first, in the order of the
ids. An id outside 0..V-1 raises IndexError at run time, before anything is written.
"""

writes.register(EMBEDDING_SGD_UPDATE, ((0, 0),))


@infer_type.of(EMBEDDING_SGD_UPDATE)
def _update_type(inputs: Types, attrs: Attrs) -> Types:
    param, dy, ids, lr = expect_inputs(inputs, "param", "dy", "ids", "lr")
    expect_float((param,), "param")
    expect_integer(ids, "ids")
    if param.rank != 2:
        raise OpTypeError(f"needs a param of shape [rows, width], got {list(param.shape)}")
    expect_type(dy, "dy", TensorType(param.dtype, (*ids.shape, param.shape[1])))
    expect_type(lr, "lr", TensorType(param.dtype, ()))
    return (param,)


@array_of(EMBEDDING_SGD_UPDATE)
def _update(attrs: Attrs, param: Array, dy: Array, ids: Array, lr: Array) -> Array:
    check_indices(ids, param.shape[0], "embedding: id")
    return np.asarray(param - lr * sums_by_id(dy, ids, param.shape[0]))


@cost.of(EMBEDDING_SGD_UPDATE)
def _update_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    """Every row of dy is read, and the row of the table that it goes to read and written."""
    _, dy, ids, _ = inputs
    return Cost(3.0 * dy.num_elements, 3.0 * dy.size_bytes + ids.size_bytes)
