"""Rows of a table picked by ids, the adjoint, which adds rows up, and updates of picked rows."""

from __future__ import annotations

import math

import numpy as np

from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.program import GRADIENT
from compiler.contract.sbp import BROADCAST, PARTIAL
from compiler.contract.types import DType, TensorType, ValueId
from compiler.graph.columns import (
    Grads,
    SbpSignature,
    by_axes,
    gradient_of,
    reference_of,
    sbp_signatures,
)
from compiler.graph.graph import GraphBuilder, Node
from compiler.graph.registry import (
    Array,
    Cost,
    Op,
    OpAttr,
    OpTypeError,
    Types,
    cost,
    define,
    expect_float,
    expect_inputs,
    expect_integer,
    expect_type,
    infer_type,
    input_output_aliases,
    kernel_op,
    reference,
)
from compiler.ops.families.arithmetic import LESS, MAXIMUM, WHERE
from compiler.ops.families.updates import SGD_UPDATE
from compiler.ops.language.define import fused_op, update
from compiler.ops.language.expressions import Expression
from compiler.ops.primitives.reduce import check_indices
from compiler.ops.primitives.shape import broadcast_value, reshape_to
from compiler.ops.primitives.sources import scalar

EMBEDDING = define("embedding")
"""weight [V, D], ids (integer, any shape) -> ids.shape + [D].

An id outside 0..V-1 raises IndexError at run time. Attrs: axes, where ids are of `FLAT_INDEX`: the
extents that they were made of.
"""

EMBEDDING_GRAD = define("embedding_grad")
"""dy (ids.shape + [D]), ids -> [rows, D], the sum of the rows of dy with equal id.

Attrs: rows, and axes as above.
"""


def _flat_index(
    flat: Expression, index: Expression, *, extent: int, number: int, count: int, rows: int
) -> Expression:
    """Encode which axis it was and how far beyond its ends, so that the error can say it."""
    beyond = (index < 0).where((-index - (extent + 1)) * 2 + 1, (index - extent) * 2)
    is_bad = (index < -extent) | (index >= extent)
    at = flat * extent + (index < 0).where(index + extent, index)
    return (flat >= rows).where(flat, is_bad.where(beyond * count + (rows + number), at))


FLAT_INDEX = fused_op("flat_index", "flat: number, index: number -> y", _flat_index)
"""Row-major numbers of elements, one axis after the other: flat * extent + index, both int64.

An index counts from the end where it is negative. One outside of -extent..extent - 1 makes a number
of `rows` or more, and stays one over the axes that follow; `compiler.contract.errors.bad_index`
reads it.
Attrs: extent; number: that of the axis among the `count` that have indices of the user; rows: of
the whole table.
"""

CHECKED_INDEX = fused_op(
    "checked_index",
    "indices[*, C]: whole -> same[*]",
    lambda indices, *, extent: indices.min().within(extent),
)
"""Indices [..., 1] as [...]; the launch fails for one outside of 0..extent-1. Attrs: extent."""

LAST_PLACE = define("last_place")
"""ids (integer, any shape) -> [rows] int32: the last place of each id in row-major order, or -1.

Attrs: rows, and axes as above.
"""

PUT_ROWS = define("put_rows")
"""x [*A, *D], ids (integer, any shape), rows (ids.shape + D) -> x with rows at ids.

Any dtype. The axes A, the first `depth`, are numbered in row-major order; of several rows for one
id the last counts. An id that numbers no row raises IndexError at run time, before anything is
written. Attrs: depth, and axes as above.
"""

ASSIGN_ROWS = define("assign_rows")
"""`put_rows` over its variable x: only the rows move. The pass `assign_rows` emits it."""

input_output_aliases.register(ASSIGN_ROWS, ((0, 0),))
kernel_op.register(ASSIGN_ROWS, "put_rows")


@infer_type.of(EMBEDDING)
def _embedding_type(inputs: Types, attrs: Attrs) -> Types:
    weight, ids = expect_inputs(inputs, "weight", "ids")
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


@infer_type.of(LAST_PLACE)
def _last_place_type(inputs: Types, attrs: Attrs) -> Types:
    (ids,) = expect_inputs(inputs, "ids")
    expect_integer(ids, "ids")
    return (TensorType(DType.INT32, (attrs.int_("rows"),)),)


@infer_type.of(PUT_ROWS, ASSIGN_ROWS)
def _put_rows_type(inputs: Types, attrs: Attrs) -> Types:
    x, ids, rows = expect_inputs(inputs, "x", "ids", "rows")
    expect_integer(ids, "ids")
    depth = attrs.int_("depth")
    if not 0 < depth <= x.rank:
        raise OpTypeError(f"needs 0 < depth <= {x.rank}, the axes of x, got {depth}")
    expect_type(rows, "rows", TensorType(x.dtype, ids.shape + x.shape[depth:]))
    return (x,)


def _axes(attrs: Attrs) -> tuple[int, ...]:
    return attrs.ints("axes") if "axes" in attrs else ()


@reference_of(EMBEDDING)
def _embedding(attrs: Attrs, weight: Array, ids: Array) -> Array:
    check_indices(ids, weight.shape[0], "embedding: id", _axes(attrs))
    return np.asarray(weight[ids.astype(np.int64)])


@reference_of(EMBEDDING_GRAD)
def _embedding_grad(attrs: Attrs, dy: Array, ids: Array) -> Array:
    check_indices(ids, attrs.int_("rows"), "embedding: id", _axes(attrs))
    return sums_by_id(dy, ids, attrs.int_("rows"))


@reference_of(LAST_PLACE)
def _last_place(attrs: Attrs, ids: Array) -> Array:
    check_indices(ids, attrs.int_("rows"), "id", _axes(attrs))
    result = np.full(attrs.int_("rows"), -1, np.int32)
    np.maximum.at(result, ids.reshape(-1).astype(np.int64), np.arange(ids.size, dtype=np.int32))
    return result


@reference_of(PUT_ROWS, ASSIGN_ROWS)
def _put_rows(attrs: Attrs, x: Array, ids: Array, rows: Array) -> Array:
    depth = attrs.int_("depth")
    count = math.prod(x.shape[:depth])
    check_indices(ids, count, "id", _axes(attrs))
    result = x.copy()
    table = result.reshape(count, *x.shape[depth:])
    for row, place in enumerate(ids.reshape(-1).tolist()):
        table[place] = rows.reshape(ids.size, *x.shape[depth:])[row]
    return result


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
    moved_bytes = 3.0 * dy.size_bytes + ids.size_bytes + outputs[0].size_bytes
    return Cost(float(dy.num_elements), moved_bytes)


@cost.of(PUT_ROWS)
def _put_rows_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    moved_bytes = 2.0 * (inputs[0].size_bytes + inputs[2].size_bytes) + inputs[1].size_bytes
    return Cost(0.0, moved_bytes)


@cost.of(ASSIGN_ROWS)
def _assign_rows_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(0.0, 2.0 * inputs[2].size_bytes + inputs[1].size_bytes)


def _checks(attrs: Attrs) -> dict[str, AttrValue]:
    return {"axes": attrs["axes"]} if "axes" in attrs else {}


@gradient_of(EMBEDDING)
def _embedding_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    weight, ids = node.inputs
    attrs = _checks(node.attrs) | {"rows": b.type_of(weight).shape[0]}
    return *b.emit(EMBEDDING_GRAD, (dy, ids), attrs), None


@gradient_of(EMBEDDING_GRAD)
def _embedding_grad_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    return *b.emit(EMBEDDING, (dy, node.inputs[1]), _checks(node.attrs)), None


@gradient_of(PUT_ROWS)
def _put_rows_gradient(b: GraphBuilder, node: Node, dy: ValueId) -> Grads:
    """Let what came from x go there, and to each row what its place has, if it was the last."""
    x, ids, rows = [b.type_of(v) for v in node.inputs]
    depth = node.attrs.int_("depth")
    lead, tail = x.shape[:depth], x.shape[depth:]
    count, width = math.prod(lead), math.prod(tail)
    (last,) = b.emit(LAST_PLACE, node.inputs[1:2], {"rows": count} | _checks(node.attrs))
    is_from_x = b.emit_one(LESS, last, scalar(b, 0, DType.INT32))
    is_from_x = reshape_to(b, is_from_x, (*lead, *[1] * len(tail)))
    zero = scalar(b, 0.0, x.dtype)
    of_x = b.emit_one(WHERE, is_from_x, dy, zero)
    if not rows.num_elements:
        return of_x, None, broadcast_value(b, zero, rows.shape)
    of_rows = reshape_to(b, b.emit_one(WHERE, is_from_x, zero, dy), (count, width))
    place = b.emit_one(MAXIMUM, last, scalar(b, 0, DType.INT32))
    sums = b.emit_one(EMBEDDING_GRAD, of_rows, place, rows=ids.num_elements)
    return of_x, None, reshape_to(b, sums, rows.shape)


@sbp_signatures.of(PUT_ROWS, ASSIGN_ROWS)
def _put_rows_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> list[SbpSignature]:
    """Split any axis of a row; shares of x and of rows make shares of the result."""
    x, ids, _ = inputs
    depth = attrs.int_("depth")
    names = [*map(str, range(x.rank - depth))]
    whole = [*[""] * depth, *names]
    split = by_axes([whole, [""] * ids.rank, [*[""] * ids.rank, *names]], [whole])
    return [*split, SbpSignature((PARTIAL, BROADCAST, PARTIAL), (PARTIAL,))]


# The gradient of an embedding is zero but for those rows. Where a rule leaves the others as they
# are, neither the gradient of the table nor the pass over all of it is needed. The program is that
# of the dense rule, on one row at a time. Only the pass `sparse_update` emits these ops, after
# autodiff; they have no gradient.

update_of_rows = OpAttr[Op]("update_of_rows", "the update of picked rows; read by sparse_update")


def _of_rows(dense: Op) -> Op:
    """Define param [V, D], dy (ids.shape + [D]), ids, ... -> what `dense` makes of the same.

    Its gradient is `embedding_grad`(dy, ids): rows of dy with equal id are added up first, in the
    order of the ids. An id outside 0..V-1 raises IndexError at run time, before anything is
    written.
    """
    op = define(f"embedding_{dense}")

    def infer(inputs: Types, attrs: Attrs) -> Types:
        param, dy, ids = expect_inputs(inputs[:3], "param", "dy", "ids")
        expect_float((param,), "param")
        expect_integer(ids, "ids")
        if param.rank != 2:
            raise OpTypeError(f"needs a param of shape [rows, width], got {list(param.shape)}")
        expect_type(dy, "dy", TensorType(param.dtype, (*ids.shape, param.shape[1])))
        return infer_type.get(dense)((param, param, *inputs[3:]), attrs)

    def run(attrs: Attrs, param: Array, dy: Array, ids: Array, *rest: Array) -> tuple[Array, ...]:
        check_indices(ids, param.shape[0], "embedding: id")
        sums = sums_by_id(dy, ids, param.shape[0])
        return reference.get(dense)(attrs, param, sums, *rest)

    def work(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        """Every row of dy is read, and the rows that it goes to are read and written."""
        _, dy, ids = inputs[:3]
        moved_bytes = (1.0 + 2 * len(outputs)) * dy.size_bytes + ids.size_bytes
        return Cost(3.0 * dy.num_elements, moved_bytes)

    input_output_aliases.register(
        op, tuple([(out, i + (i > GRADIENT)) for out, i in input_output_aliases.get(dense)])
    )
    update.register(op, update.get(dense))
    update_of_rows.register(dense, op)
    kernel_op.register(op, "embedding_update")
    infer_type.register(op, infer)
    reference.register(op, run)
    cost.register(op, work)
    return op


EMBEDDING_SGD_UPDATE = _of_rows(SGD_UPDATE)
