"""Where the elements of a rank's part are in the whole tensor, as values of its graph.

What follows from the place of an element, such as random numbers and masks, is the same on a rank
that has a slice as on one that has all: the slice is told where it begins. That is no constant of
the graph, which would tell ranks apart that compute alike, but a variable: of the numbers 0, 1, 2,
... a rank has the part that it has of the axis (`Numbers`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from compiler.fusion.products import GraphEmitter
from compiler.graph import GraphBuilder
from compiler.ops.binary import EQUAL, WHERE
from compiler.ops.embedding import EMBEDDING, EMBEDDING_GRAD
from compiler.ops.shape import broadcast_value, reshape_to
from compiler.ops.slicing import PAD, SLICE
from compiler.ops.sources import NUMBERS, VARIABLE, constant, scalar
from compiler.sbp.parts import Splits
from compiler.sbp.project import LocalCall, Part, shape_of
from compiler.sbp.words import Shape
from compiler.types import DType, ValueId


@dataclass(frozen=True, slots=True)
class PartPlace:
    """A part of a tensor: the extents of the whole, the rank's slices, and what splits which axis.

    Where nothing says what splits an axis, its numbers are constants.
    """

    shape: Shape
    part: Part
    splits: Splits = ()
    shared: dict[object, ValueId] = field(default_factory=dict, compare=False)

    @staticmethod
    def of_output(call: LocalCall, index: int = 0) -> PartPlace:
        """Return the place of what a rank makes of a node's result."""
        splits = call.output_splits[index] if call.output_splits else ()
        whole = call.whole_outputs[index].shape
        return PartPlace(whole, call.output_parts[index], splits, call.shared)

    @staticmethod
    def of_input(call: LocalCall, index: int = 0) -> PartPlace:
        """Return the place of what a rank has of a node's operand."""
        splits = call.input_splits[index] if call.input_splits else ()
        whole = call.whole_inputs[index].shape
        return PartPlace(whole, call.input_parts[index], splits, call.shared)

    @property
    def own(self) -> Shape:
        """The extents of the part."""
        return shape_of(self.part)

    @property
    def is_whole(self) -> bool:
        """Whether the part is all of the tensor."""
        return self.own == self.shape

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements of the part follow each other in the whole, in row-major order."""
        cut = [axis for axis, n in enumerate(self.own) if n != self.shape[axis]]
        return not cut or math.prod(self.own[: cut[-1]]) == 1

    def without_last(self) -> PartPlace:
        """Return the part of a tensor without its last axis, which has one element."""
        last = len(self.shape) - 1
        splits = tuple([pair for pair in self.splits if pair[1] != last])
        return PartPlace(self.shape[:last], self.part[:last], splits, self.shared)

    def widened(self, axis: int) -> PartPlace:
        """Return the part with all of an axis."""
        part = list(self.part)
        part[axis] = slice(0, self.shape[axis])
        splits = tuple([pair for pair in self.splits if pair[1] != axis])
        return PartPlace(self.shape, tuple(part), splits, self.shared)


def numbers_along(b: GraphBuilder, place: PartPlace, axis: int) -> ValueId:
    """Emit the numbers, in the whole, of the part's rows along an axis: an int64 [rows]."""
    extent, rows = place.shape[axis], place.part[axis]
    names = tuple([name for name, own in place.splits if own == axis])
    key = (NUMBERS, extent, rows.start, rows.stop, names)
    if key not in place.shared:
        if names:
            made = b.one(
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
            made = constant(b, np.arange(rows.start, rows.stop, dtype=np.int64))
        place.shared[key] = made
    return place.shared[key]


def first_along(b: GraphBuilder, place: PartPlace, axis: int) -> ValueId:
    """Emit the number, in the whole, of the first of the part's rows along an axis: an int64 []."""
    numbers = numbers_along(b, place, axis)
    return reshape_to(b, b.one(SLICE, numbers, starts=(0,), stops=(1,), steps=(1,)), ())


def first_numbers(b: GraphBuilder, place: PartPlace) -> ValueId:
    """Emit the row-major number, in the whole, of the part's first element, or of each row's.

    An int64: a number where the elements of the part follow each other, else of the part's shape
    but for its last axis.
    """
    places = tuple([(rows.start, rows.stop) for rows in place.part])
    key = ("first", place.shape, places, place.splits)
    if key not in place.shared:
        place.shared[key] = _first_numbers(b, place)
    return place.shared[key]


def row_major_numbers(b: GraphBuilder, place: PartPlace, axes: range) -> ValueId:
    """Emit the number of each place along some axes that follow each other, as if alone: int64.

    Of the extents that the part has along these axes.
    """
    emit, total = GraphEmitter(b).op, scalar(b, 0, DType.INT64)
    for axis in axes:
        numbers = numbers_along(b, place, axis)
        step = math.prod([place.shape[inner] for inner in axes if inner > axis])
        inner = axes.stop - 1 - axis
        numbers = reshape_to(b, numbers, (place.own[axis], *[1] * inner))
        if step > 1:
            numbers = emit("mul", numbers, scalar(b, step, DType.INT64))
        total = numbers if axis == axes.start else emit("add", total, numbers)
    return broadcast_value(b, total, tuple([place.own[axis] for axis in axes]))


def _first_numbers(b: GraphBuilder, place: PartPlace) -> ValueId:
    emit, own, rank = GraphEmitter(b).op, place.own, len(place.own)
    rows = () if place.is_contiguous else own[:-1]
    total: ValueId | None = None
    for axis in range(rank):
        is_cut = own[axis] != place.shape[axis]
        is_row = bool(rows) and axis < rank - 1
        if not is_cut and not (is_row and own[axis] > 1):
            continue  # it begins at 0
        step = math.prod(place.shape[axis + 1 :])
        if is_row:
            numbers = numbers_along(b, place, axis)
            numbers = reshape_to(b, numbers, (own[axis], *[1] * (rank - 2 - axis)))
        else:
            numbers = first_along(b, place, axis)
        if step > 1:
            numbers = emit("mul", numbers, scalar(b, step, DType.INT64))
        total = numbers if total is None else emit("add", total, numbers)
    if total is None:
        total = scalar(b, 0, DType.INT64)
    return broadcast_value(b, total, rows)


def own_rows(b: GraphBuilder, value: ValueId, place: PartPlace, axis: int) -> ValueId:
    """Emit the rank's rows of a value that all have; `place` is where they are along an axis."""
    shape, rows = place.shape, place.part[axis]
    if math.prod(shape[:axis]) == 1 and place.splits:
        table = reshape_to(b, value, (shape[axis], math.prod(shape[axis + 1 :])))
        found = b.one(EMBEDDING, table, numbers_along(b, place, axis))
        return reshape_to(b, found, place.own)
    # Inside of other axes a slice by numbers would copy element by element: where it is, is said.
    starts = [rows.start if other == axis else 0 for other in range(len(shape))]
    steps = (1,) * len(shape)
    return b.one(SLICE, value, starts=tuple(starts), stops=_stops(place, axis), steps=steps)


def _stops(place: PartPlace, axis: int) -> Shape:
    stops = [n if other != axis else place.part[axis].stop for other, n in enumerate(place.shape)]
    return tuple(stops)


def among_zeros(b: GraphBuilder, value: ValueId, place: PartPlace, axis: int) -> ValueId:
    """Emit a tensor that has the rank's rows where they are along an axis, and zeros elsewhere."""
    shape, rows = place.shape, place.part[axis]
    inner = math.prod(shape[axis + 1 :])
    if math.prod(shape[:axis]) == 1 and place.splits and b.type_of(value).dtype.is_float:
        flat = reshape_to(b, value, (place.own[axis], inner))
        numbers = numbers_along(b, place, axis)
        made = b.one(EMBEDDING_GRAD, flat, numbers, rows=shape[axis])
        return reshape_to(b, made, shape)
    low = [rows.start if other == axis else 0 for other in range(len(shape))]
    high = [shape[axis] - rows.stop if other == axis else 0 for other in range(len(shape))]
    return b.one(PAD, value, low=tuple(low), high=tuple(high), steps=(1,) * len(shape))


def only_first(b: GraphBuilder, value: ValueId, place: PartPlace) -> ValueId:
    """Emit a value on the first of the ranks, zeros on others; `place` is the rank's among them."""
    type_ = b.type_of(value)
    number = numbers_along(b, place, 0)
    is_first = b.one(EQUAL, number, scalar(b, 0, DType.INT64))
    one = reshape_to(b, is_first, (1,) * type_.rank)
    return b.one(WHERE, one, value, scalar(b, 0, type_.dtype))
