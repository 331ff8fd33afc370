"""Embeddings on many ranks, of which each may have some of the ids, of the columns or of the rows.

Of rows that other ranks have, a rank makes zeros, and its gradient gets none: so the results are
shares of a sum, in which one rank alone has each row.
"""

from __future__ import annotations

from compiler.attrs import Attrs
from compiler.graph import GraphBuilder
from compiler.ops.binary import LESS, LESS_EQUAL, SUB, WHERE
from compiler.ops.elementwise import cast_to
from compiler.ops.embedding import CHECKED_INDEX, EMBEDDING, EMBEDDING_GRAD
from compiler.ops.shape import reshape_to
from compiler.ops.signature import Types
from compiler.ops.sources import scalar
from compiler.sbp.positions import PartPlace, first_along
from compiler.sbp.project import LocalCall, project
from compiler.sbp.signatures import SbpSignature, by_axes, linear_in, sbp_signatures
from compiler.sbp.words import BROADCAST, PARTIAL, Split
from compiler.types import ValueId


@sbp_signatures.of(EMBEDDING)
def _embedding_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> list[SbpSignature]:
    """Split ids, columns, or rows: whoever has no row of an id has zeros there."""
    names = list(map(str, range(inputs[1].rank)))
    by_rows = SbpSignature((Split(0), BROADCAST), (PARTIAL,))
    found = by_axes([["", "d"], names], [[*names, "d"]])
    return [*found, linear_in(0, 2), *[by_rows] * inputs[0].dtype.is_float]


@sbp_signatures.of(EMBEDDING_GRAD)
def _embedding_grad_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> list[SbpSignature]:
    names = list(map(str, range(inputs[1].rank)))
    by_rows = SbpSignature((BROADCAST, BROADCAST), (Split(0),))
    found = by_axes([[*names, "d"], names], [["", "d"]], sums=True)
    return [*found, linear_in(0, 2), by_rows]


@project.of(EMBEDDING)
def _rows_of_part(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Take zeros for the ids of rows that other ranks have."""
    weight, ids = call.inputs
    if b.type_of(weight).shape[0] == call.whole_inputs[0].shape[0]:
        return b.emit(EMBEDDING, call.inputs, call.node.attrs)
    own, is_own = _own_ids(b, ids, PartPlace.of_input(call))
    (rows,) = b.emit(EMBEDDING, (weight, own))
    return (b.one(WHERE, _as_column(b, is_own), rows, scalar(b, 0, b.type_of(rows).dtype)),)


@project.of(EMBEDDING_GRAD)
def _rows_of_part_grad(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Leave out the ids of rows that other ranks have."""
    dy, ids = call.inputs
    rows, whole = call.output_shape()[0], call.whole_outputs[0].shape[0]
    if rows != whole:
        ids, is_own = _own_ids(b, ids, PartPlace.of_output(call))
        dy = b.one(WHERE, _as_column(b, is_own), dy, scalar(b, 0, b.type_of(dy).dtype))
    return b.emit(EMBEDDING_GRAD, (dy, ids), {**call.node.attrs, "rows": rows})


def _own_ids(b: GraphBuilder, ids: ValueId, place: PartPlace) -> tuple[ValueId, ValueId]:
    """Emit ids among the rows of a part, 0 for those of others; and whether each is of the part."""
    dtype = b.type_of(ids).dtype
    column = reshape_to(b, ids, (*b.type_of(ids).shape, 1))
    ids = b.one(CHECKED_INDEX, column, extent=place.shape[0])
    local = b.one(SUB, ids, cast_to(b, first_along(b, place, 0), dtype))
    low = b.one(LESS_EQUAL, scalar(b, 0, dtype), local)
    is_own = b.one(LESS, local, scalar(b, place.own[0], dtype))
    is_own = b.one(WHERE, low, is_own, low)
    return b.one(WHERE, is_own, local, scalar(b, 0, dtype)), is_own


def _as_column(b: GraphBuilder, value: ValueId) -> ValueId:
    return reshape_to(b, value, (*b.type_of(value).shape, 1))
