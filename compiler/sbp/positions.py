"""Where the elements of a rank's part are in the whole tensor, and what ops make of that.

What follows from the place of an element, such as random numbers and masks, is the same on a rank
that has a slice as on one that has all: the slice is told where it begins. That is no constant of
the graph, which would tell ranks apart that compute alike, but a variable: of the numbers 0, 1, 2,
... a rank has the part that it has of the axis (`global_indices`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from compiler.contract.attrs import Attrs
from compiler.contract.placement import Mesh
from compiler.contract.sbp import (
    BROADCAST,
    PARTIAL,
    NdSbp,
    Shape,
    Split,
    local_shape,
    local_slices,
    splits_of,
)
from compiler.contract.types import DType, ValueId
from compiler.graph.columns import (
    LocalCall,
    SbpSignature,
    by_axes,
    linear_in,
    project,
    sbp_signatures,
)
from compiler.graph.graph import GraphBuilder
from compiler.graph.registry import Types
from compiler.ops.families.arithmetic import EQUAL, LESS, LESS_EQUAL, MUL, SUB, WHERE
from compiler.ops.families.attention import ATTENTION, ATTENTION_GRAD
from compiler.ops.families.embedding import CHECKED_INDEX, EMBEDDING, EMBEDDING_GRAD
from compiler.ops.language.vjp import GraphEmitter
from compiler.ops.primitives.shape import broadcast_value, cast_to, reshape_to
from compiler.ops.primitives.slicing import PAD, SLICE
from compiler.ops.primitives.sources import (
    DROPOUT,
    NUMBERS,
    RANDOM_BITS,
    VARIABLE,
    constant,
    keep_threshold,
    scalar,
)


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A rank's part of a tensor: the extents of the whole, how it lies, and which rank it is.

    The numbers of an axis that is whole are constants.
    """

    shape: Shape
    sbp: NdSbp
    mesh: Mesh
    coordinates: tuple[int, ...]
    shared: dict[object, ValueId] = field(default_factory=dict, compare=False)

    @staticmethod
    def of_output(call: LocalCall, index: int = 0) -> ShardIndex:
        """Return the place of what a rank makes of a node's result."""
        return ShardIndex.of_call(call, call.whole_outputs[index].shape, call.output_sbp(index))

    @staticmethod
    def of_input(call: LocalCall, index: int = 0) -> ShardIndex:
        """Return the place of what a rank has of a node's operand."""
        return ShardIndex.of_call(call, call.whole_inputs[index].shape, call.input_sbp(index))

    @staticmethod
    def of_call(call: LocalCall, shape: Shape, sbp: NdSbp) -> ShardIndex:
        """Return the place of what a call's rank has of a tensor that lies in some way."""
        return ShardIndex(shape, sbp, call.mesh, call.coordinates, call.shared)

    @property
    def own(self) -> Shape:
        """The extents of the part."""
        return local_shape(self.shape, self.sbp, self.mesh.shape, self.coordinates)

    def rows(self, axis: int) -> slice:
        """Return which rows of an axis of the whole are the part's."""
        return local_slices(self.shape, self.sbp, self.mesh.shape, self.coordinates)[axis]

    @property
    def is_whole(self) -> bool:
        """Whether the part is all of the tensor."""
        return self.own == self.shape

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements of the part follow each other in the whole, in row-major order."""
        cut = [axis for axis, n in enumerate(self.own) if n != self.shape[axis]]
        return not cut or math.prod(self.own[: cut[-1]]) == 1

    def without_last(self) -> ShardIndex:
        """Return the part of a tensor without its last axis, which has one element."""
        last = len(self.shape) - 1
        return replace(self.widened(last), shape=self.shape[:last])

    def widened(self, axis: int) -> ShardIndex:
        """Return the part with all of an axis."""
        sbp = tuple([BROADCAST if word == Split(axis) else word for word in self.sbp])
        return replace(self, sbp=sbp)


def global_indices(b: GraphBuilder, place: ShardIndex, axis: int) -> ValueId:
    """Emit the numbers, in the whole, of the part's rows along an axis: an int64 [rows]."""
    extent, rows = place.shape[axis], place.rows(axis)
    names = tuple([name for name, cut in splits_of(place.sbp, place.mesh) if cut == axis])
    key = (NUMBERS, extent, rows.start, rows.stop, names)
    if key not in place.shared:
        if names:
            numbers = b.emit_one(
                VARIABLE,
                name="/".join([NUMBERS, str(extent), *names]),
                dtype=DType.INT64.value,
                shape=(rows.stop - rows.start,),
                role=NUMBERS,
                init=(("kind", NUMBERS),),
                whole=(extent,),
                splits=tuple([(name, 0) for name in names]),
            )
        else:
            numbers = constant(b, np.arange(rows.start, rows.stop, dtype=np.int64))
        place.shared[key] = numbers
    return place.shared[key]


def first_along(b: GraphBuilder, place: ShardIndex, axis: int) -> ValueId:
    """Emit the number, in the whole, of the first of the part's rows along an axis: an int64 []."""
    numbers = global_indices(b, place, axis)
    return reshape_to(b, b.emit_one(SLICE, numbers, starts=(0,), stops=(1,), steps=(1,)), ())


def first_numbers(b: GraphBuilder, place: ShardIndex) -> ValueId:
    """Emit the row-major number, in the whole, of the part's first element, or of each row's.

    An int64: a number where the elements of the part follow each other, else of the part's shape
    but for its last axis.
    """
    key = ("first", place.shape, place.sbp)
    if key not in place.shared:
        place.shared[key] = _first_numbers(b, place)
    return place.shared[key]


def row_major_numbers(b: GraphBuilder, place: ShardIndex, axes: range) -> ValueId:
    """Emit the number of each place along some axes that follow each other, as if alone: int64.

    Of the extents that the part has along these axes.
    """
    emit, total = GraphEmitter(b).op, scalar(b, 0, DType.INT64)
    for axis in axes:
        numbers = global_indices(b, place, axis)
        step = math.prod([place.shape[inner] for inner in axes if inner > axis])
        inner = axes.stop - 1 - axis
        numbers = reshape_to(b, numbers, (place.own[axis], *[1] * inner))
        if step > 1:
            numbers = emit("mul", numbers, scalar(b, step, DType.INT64))
        total = numbers if axis == axes.start else emit("add", total, numbers)
    return broadcast_value(b, total, tuple([place.own[axis] for axis in axes]))


def _first_numbers(b: GraphBuilder, place: ShardIndex) -> ValueId:
    emit, extents, rank = GraphEmitter(b).op, place.own, len(place.own)
    rows = () if place.is_contiguous else extents[:-1]
    total: ValueId | None = None
    for axis in range(rank):
        is_cut = extents[axis] != place.shape[axis]
        is_row = bool(rows) and axis < rank - 1
        if not is_cut and not (is_row and extents[axis] > 1):
            continue  # it begins at 0
        step = math.prod(place.shape[axis + 1 :])
        if is_row:
            numbers = global_indices(b, place, axis)
            numbers = reshape_to(b, numbers, (extents[axis], *[1] * (rank - 2 - axis)))
        else:
            numbers = first_along(b, place, axis)
        if step > 1:
            numbers = emit("mul", numbers, scalar(b, step, DType.INT64))
        total = numbers if total is None else emit("add", total, numbers)
    if total is None:
        total = scalar(b, 0, DType.INT64)
    return broadcast_value(b, total, rows)


def own_rows(b: GraphBuilder, value: ValueId, place: ShardIndex, axis: int) -> ValueId:
    """Emit the rank's rows of a value that all have; `place` is where they are along an axis."""
    shape, rows = place.shape, place.rows(axis)
    if math.prod(shape[:axis]) == 1:
        table = reshape_to(b, value, (shape[axis], math.prod(shape[axis + 1 :])))
        gathered = b.emit_one(EMBEDDING, table, global_indices(b, place, axis))
        return reshape_to(b, gathered, place.own)
    # Inside of other axes a slice by numbers would copy element by element: where it is, is said.
    starts = [rows.start if other == axis else 0 for other in range(len(shape))]
    stops = [rows.stop if other == axis else extent for other, extent in enumerate(shape)]
    steps = (1,) * len(shape)
    return b.emit_one(SLICE, value, starts=tuple(starts), stops=tuple(stops), steps=steps)


def pad_to_global(b: GraphBuilder, value: ValueId, place: ShardIndex, axis: int) -> ValueId:
    """Emit a tensor that has the rank's rows where they are along an axis, and zeros elsewhere."""
    shape, rows = place.shape, place.rows(axis)
    inner = math.prod(shape[axis + 1 :])
    if math.prod(shape[:axis]) == 1 and b.type_of(value).dtype.is_float:
        flat = reshape_to(b, value, (place.own[axis], inner))
        numbers = global_indices(b, place, axis)
        padded = b.emit_one(EMBEDDING_GRAD, flat, numbers, rows=shape[axis])
        return reshape_to(b, padded, shape)
    low = [rows.start if other == axis else 0 for other in range(len(shape))]
    high = [shape[axis] - rows.stop if other == axis else 0 for other in range(len(shape))]
    return b.emit_one(PAD, value, low=tuple(low), high=tuple(high), steps=(1,) * len(shape))


def zero_off_first_rank(b: GraphBuilder, value: ValueId, place: ShardIndex) -> ValueId:
    """Emit a value on the first of the ranks, zeros on others; `place` is the rank's among them."""
    type_ = b.type_of(value)
    number = global_indices(b, place, 0)
    is_first = b.emit_one(EQUAL, number, scalar(b, 0, DType.INT64))
    one = reshape_to(b, is_first, (1,) * type_.rank)
    return b.emit_one(WHERE, one, value, scalar(b, 0, type_.dtype))


# Embeddings, of which a rank may have some of the ids, of the columns or of the rows. Of rows that
# other ranks have, a rank makes zeros, and its gradient gets none: so the results are shares of a
# sum, in which one rank alone has each row.


@sbp_signatures.of(EMBEDDING)
def _embedding_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> list[SbpSignature]:
    """Split ids, columns, or rows: a rank that does not hold the row of an id has zeros there."""
    names = list(map(str, range(inputs[1].rank)))
    by_rows = SbpSignature((Split(0), BROADCAST), (PARTIAL,))
    signatures = by_axes([["", "d"], names], [[*names, "d"]])
    return [*signatures, linear_in(0, 2), *[by_rows] * inputs[0].dtype.is_float]


@sbp_signatures.of(EMBEDDING_GRAD)
def _embedding_grad_signatures(
    inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> list[SbpSignature]:
    names = list(map(str, range(inputs[1].rank)))
    by_rows = SbpSignature((BROADCAST, BROADCAST), (Split(0),))
    signatures = by_axes([[*names, "d"], names], [["", "d"]], sums=True)
    return [*signatures, linear_in(0, 2), by_rows]


@project.of(EMBEDDING)
def _rows_of_part(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Take zeros for the ids of rows that other ranks have."""
    weight, ids = call.inputs
    if b.type_of(weight).shape[0] == call.whole_inputs[0].shape[0]:
        return b.emit(EMBEDDING, call.inputs, call.node.attrs)
    own_ids, is_own = _own_ids(b, ids, ShardIndex.of_input(call))
    (rows,) = b.emit(EMBEDDING, (weight, own_ids))
    return (b.emit_one(WHERE, _as_column(b, is_own), rows, scalar(b, 0, b.type_of(rows).dtype)),)


@project.of(EMBEDDING_GRAD)
def _rows_of_part_grad(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Leave out the ids of rows that other ranks have."""
    dy, ids = call.inputs
    rows, whole = call.output_shape()[0], call.whole_outputs[0].shape[0]
    if rows != whole:
        ids, is_own = _own_ids(b, ids, ShardIndex.of_output(call))
        dy = b.emit_one(WHERE, _as_column(b, is_own), dy, scalar(b, 0, b.type_of(dy).dtype))
    return b.emit(EMBEDDING_GRAD, (dy, ids), {**call.node.attrs, "rows": rows})


def _own_ids(b: GraphBuilder, ids: ValueId, place: ShardIndex) -> tuple[ValueId, ValueId]:
    """Emit ids among the rows of a part, 0 for those of others; and whether each is of the part."""
    dtype = b.type_of(ids).dtype
    column = reshape_to(b, ids, (*b.type_of(ids).shape, 1))
    ids = b.emit_one(CHECKED_INDEX, column, extent=place.shape[0])
    local = b.emit_one(SUB, ids, cast_to(b, first_along(b, place, 0), dtype))
    low = b.emit_one(LESS_EQUAL, scalar(b, 0, dtype), local)
    is_own = b.emit_one(LESS, local, scalar(b, place.own[0], dtype))
    is_own = b.emit_one(WHERE, low, is_own, low)
    return b.emit_one(WHERE, is_own, local, scalar(b, 0, dtype)), is_own


def _as_column(b: GraphBuilder, value: ValueId) -> ValueId:
    return reshape_to(b, value, (*b.type_of(value).shape, 1))


# Random numbers: ranks that have different rows of a batch drop different elements of it, and all
# of them together those that one rank would.


@sbp_signatures.of(RANDOM_BITS)
def _bits_signatures(inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> list[SbpSignature]:
    """Draw any slice of the numbers."""
    state = (BROADCAST,) * len(inputs)
    return [SbpSignature(state, (Split(axis),)) for axis in range(outputs[0].rank)]


def bits_of_part(
    b: GraphBuilder, state: tuple[ValueId, ...], key: int, place: ShardIndex
) -> ValueId:
    """Emit the bits of a part of a tensor, as they are there; `state` is seed and step."""
    shape = place.own
    if place.is_whole or 0 in shape:
        return b.emit_one(RANDOM_BITS, *state, shape=shape, key=key)
    if place.is_contiguous or shape[-1] > 1:
        first = first_numbers(b, place)
        return b.emit_one(RANDOM_BITS, *state, first, shape=shape, key=key)
    if place.shape[-1] == 1:
        return reshape_to(b, bits_of_part(b, state, key, place.without_last()), shape)
    # A kernel counts along rows, which have one element here: so whole rows are drawn.
    last = len(shape) - 1
    wide = bits_of_part(b, state, key, place.widened(last))
    rows, steps = place.rows(last), (1,) * len(shape)
    starts, stops = (*[0] * last, rows.start), (*shape[:last], rows.stop)
    return b.emit_one(SLICE, wide, starts=starts, stops=stops, steps=steps)


def kept_by(b: GraphBuilder, bits: ValueId, p: float) -> ValueId:
    """Emit whether elements with these bits are kept."""
    return GraphEmitter(b).op("ge", bits, scalar(b, keep_threshold(p), DType.INT32))


@project.of(RANDOM_BITS)
def _own_bits(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    key = call.node.attrs.int_("key")
    return (bits_of_part(b, call.inputs, key, ShardIndex.of_output(call)),)


@project.of(ATTENTION, ATTENTION_GRAD)
def _own_heads(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Emit attention of the rank's heads, of whose weights are dropped those of the whole."""
    attrs, op = call.node.attrs, call.node.op
    heads = ShardIndex.of_output(call)
    axes = range(len(heads.shape) - 2)
    is_whole = all([heads.own[axis] == heads.shape[axis] for axis in axes])
    if "p" not in attrs or is_whole:
        return b.emit(op, call.inputs, attrs)
    q, k = [type_.shape for type_ in call.whole_inputs[1 if op is ATTENTION_GRAD else 0 :][:2]]
    step = scalar(b, q[-2] * k[-2], DType.INT64)
    first = b.emit_one(MUL, row_major_numbers(b, heads, axes), step)
    return b.emit(op, (*call.inputs, first), {**attrs, "numbered": True})


@project.of(DROPOUT)
def _own_dropout(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Emit dropout of the rank's part, with the mask that it has in the whole."""
    attrs, place = call.node.attrs, ShardIndex.of_output(call)
    x, *state = call.inputs
    if place.is_whole:
        return b.emit(DROPOUT, call.inputs, attrs)
    if place.is_contiguous or place.own[-1] > 1:
        return b.emit(DROPOUT, (*call.inputs, first_numbers(b, place)), attrs)
    p, dtype = attrs.float_("p"), b.type_of(x).dtype
    bits = bits_of_part(b, tuple(state), attrs.int_("key"), place)
    mask = kept_by(b, bits, p)
    factor = b.emit_one(WHERE, mask, scalar(b, 1 / (1 - p), dtype), scalar(b, 0.0, dtype))
    return (b.emit_one(MUL, x, factor),)
