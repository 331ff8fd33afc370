"""An update of the rows of a table that a batch picked.

The gradient of an embedding is zero but for those rows. Where a rule leaves the others as they are,
neither the gradient of the table nor the pass over all of it is needed. The program is that of the
dense rule, on one row at a time. Only the pass `sparse_update` emits these ops, after autodiff;
they have no gradient.
"""

from __future__ import annotations

from compiler.attrs import Attrs
from compiler.fusion.program import GRADIENT
from compiler.fusion.updates import update
from compiler.ops.embedding import sums_by_id
from compiler.ops.indices import check_indices
from compiler.ops.signature import (
    Array,
    Types,
    expect_float,
    expect_inputs,
    expect_integer,
    expect_type,
)
from compiler.ops.update import SGD_UPDATE
from compiler.registry import (
    Cost,
    Op,
    OpAttr,
    OpTypeError,
    cost,
    define,
    infer_type,
    reference,
    runs_as,
    writes,
)
from compiler.types import TensorType

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
        moved = (1.0 + 2 * len(outputs)) * dy.size_bytes + ids.size_bytes
        return Cost(3.0 * dy.num_elements, moved)

    writes.register(op, tuple([(out, i + (i > GRADIENT)) for out, i in writes.get(dense)]))
    update.register(op, update.get(dense))
    update_of_rows.register(dense, op)
    runs_as.register(op, "embedding_update")
    infer_type.register(op, infer)
    reference.register(op, run)
    cost.register(op, work)
    return op


EMBEDDING_SGD_UPDATE = _of_rows(SGD_UPDATE)
