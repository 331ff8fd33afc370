"""What a collective moves: the whole, the parts of each rank, and blocks of bytes between them.

A rank's part of an extent is that of `part_of`: where an extent is no multiple of the ranks, the
first ones have one row more. All follows from what every rank of a group knows alike.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

from actors.collectives import native
from actors.collectives.native import ByteBlocks
from actors.collectives.protocol import CollectiveCall
from compiler.errors import DeviceError
from compiler.sbp.words import part_of
from compiler.types import DType, TensorType

_OPS = {
    "all_reduce": native.ALL_REDUCE,
    "reduce_scatter": native.REDUCE_SCATTER,
    "all_gather": native.MOVE,
    "all_to_all": native.MOVE,
    "send": native.TRANSFER,
    "receive": native.TRANSFER,
}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective as all ranks of its group see it; or what one sends and another receives.

    `whole` is the shape that all have together of what moves. It is cut along `axis` before and
    along `to_axis` after, where these are not None. `by` is "" where nothing is reduced. `ends` are
    the coordinates of who sends and who receives, or ().
    """

    op: str
    group: str
    order: int
    num_ranks: int
    dtype: DType
    whole: Shape
    by: str
    axis: int | None
    to_axis: int | None
    where: str
    ends: tuple[int, ...] = ()

    @staticmethod
    def of(call: CollectiveCall, own: int) -> Collective:
        """Read a call of the rank with this coordinate.

        Raises DeviceError for an op, type or shape that no rank can meet for.
        """
        if call.op not in _OPS:
            known = ", ".join(_OPS)
            raise DeviceError(f"{call.op!r} moves nothing between ranks here; known are {known}")
        if _OPS[call.op] == native.TRANSFER:
            return Collective._of_two(call, own)
        attrs, (given,), (left,) = call.attrs, call.inputs, call.outputs
        by = ""
        if _OPS[call.op] != native.MOVE:
            by = str(attrs.get("by"))
            if by not in native.REDUCTIONS:
                raise DeviceError(f"{call.op} of {given} cannot reduce by {by!r}")
        axis = to_axis = None
        whole = given.shape
        if call.op == "reduce_scatter":
            to_axis = _axis(call, "axis", given)
        elif call.op != "all_reduce":
            axis = _axis(call, "axis", given)
            whole = (*whole[:axis], _number(call, "rows"), *whole[axis + 1 :])
        if call.op == "all_to_all":
            to_axis = _axis(call, "to_axis", given)
            if to_axis == axis:
                raise DeviceError(f"all_to_all of {given} leads from axis {axis} to the same")
        group, order = str(attrs.get("group")), _number(call, "order")
        ranks = _number(call, "num_ranks")
        found = Collective(
            call.op, group, order, ranks, given.dtype, whole, by, axis, to_axis, call.where
        )
        if left.dtype is not given.dtype:
            raise DeviceError(f"{call.op} of {given} cannot leave {left}")
        return found

    @staticmethod
    def _of_two(call: CollectiveCall, own: int) -> Collective:
        """Read what is sent or received. Where a user asked for it is told alike by both ends."""
        peer, ranks = _number(call, "peer"), _number(call, "num_ranks")
        if not 0 <= peer < ranks or peer == own:
            raise DeviceError(f"{call.op} of rank {own} of {ranks} has no peer {peer}")
        is_sent = call.op == "send"
        type_ = call.inputs[0] if is_sent else call.outputs[0]
        group, order = str(call.attrs.get("group")), _number(call, "order")
        ends = (own, peer) if is_sent else (peer, own)
        return Collective(
            call.op, group, order, ranks, type_.dtype, type_.shape, "", None, None, call.where, ends
        )

    @property
    def text(self) -> str:
        """What all who meet for it must say alike."""
        if not self.ends:
            return str(self)
        type_ = TensorType(self.dtype, self.whole)
        return f"transfer {self.order} of {type_} from {self.ends[0]} to {self.ends[1]}"

    def check(self, call: CollectiveCall, own: int) -> None:
        """Check that a rank's operands are its parts of the whole. Raises DeviceError."""
        if self.ends:
            return
        for what, type_, shape in (
            ("reads", call.inputs[0], self.input_shape(own)),
            ("leaves", call.outputs[0], self.output_shape(own)),
        ):
            if type_.shape != shape:
                raise DeviceError(
                    f"{self} {what} {type_}; place {own} of {self.num_ranks} has"
                    f" {TensorType(self.dtype, shape)} of it"
                )

    @property
    def kind(self) -> int:
        """What C calls the op."""
        return _OPS[self.op]

    @property
    def aside_bytes(self) -> int:
        """The bytes of the largest operand that a rank reads: the first one's."""
        return TensorType(self.dtype, self.input_shape(0)).size_bytes

    def input_shape(self, rank: int) -> Shape:
        """Return what a rank of the group reads; ranks are counted within the group."""
        return self._part(self.axis, rank)

    def output_shape(self, rank: int) -> Shape:
        """Return what it leaves."""
        return self._part(self.to_axis, rank)

    def region(self, start: int, end: int) -> ByteBlocks:
        """Return which bytes of what rank `start` reads rank `end` leaves, and where."""
        block = list(self.whole)
        rows: dict[int, range] = {}
        for axis, rank in ((self.axis, start), (self.to_axis, end)):
            if axis is not None:
                rows[axis] = part_of(self.whole[axis], self.num_ranks, rank)
        for axis, own in rows.items():
            block[axis] = len(own)
        cuts = sorted(rows) or [0]
        return _region(
            block,
            (self.input_shape(start), self._first(rows, self.to_axis)),
            (self.output_shape(end), self._first(rows, self.axis)),
            (cuts[0], cuts[-1]),
            self.dtype.itemsize,
        )

    def __str__(self) -> str:
        by = f" by {self.by}" if self.by else ""
        cut = "".join(
            [
                f" {word} axis {axis}"
                for word, axis in (("from", self.axis), ("to", self.to_axis))
                if axis is not None
            ]
        )
        whole = TensorType(self.dtype, self.whole)
        return f"{self.op} {self.order} of {whole}{by}{cut} ({self.where})"

    def _part(self, axis: int | None, rank: int) -> Shape:
        if axis is None:
            return self.whole
        rows = len(part_of(self.whole[axis], self.num_ranks, rank))
        return (*self.whole[:axis], rows, *self.whole[axis + 1 :])

    @staticmethod
    def _first(rows: dict[int, range], axis: int | None) -> tuple[int, int]:
        """Return an axis, and the first row of a block along it in an operand that has all."""
        return (0, 0) if axis is None else (axis, rows[axis].start)


def _region(
    block: Sequence[int],
    given: tuple[Shape, tuple[int, int]],
    left: tuple[Shape, tuple[int, int]],
    cuts: tuple[int, int],
    itemsize: int,
) -> ByteBlocks:
    """Return a block of two arrays, each with its shape and the row where the block begins.

    What lies behind the last axis that is cut is contiguous in both.
    """
    low, high = cuts
    if low == high:
        extents = (math.prod(block[:low]), 1, 1)
    else:
        extents = (math.prod(block[:low]), block[low], math.prod(block[low + 1 : high]))
    strides, offsets = [], []
    for shape, (axis, row) in (given, left):
        dense = [itemsize * math.prod(shape[n:]) for n in range(len(shape) + 1)]
        inner = (0, 0) if low == high else (dense[low + 1], dense[high])
        strides.append((dense[low], *inner))
        offsets.append(row * dense[axis + 1] if shape else 0)
    run = itemsize * math.prod(block[high:])
    triple = ctypes.c_int64 * 3
    return ByteBlocks(triple(*extents), triple(*strides[0]), triple(*strides[1]), *offsets, run)


def _number(call: CollectiveCall, name: str) -> int:
    value = call.attrs.get(name)
    if not isinstance(value, int):
        raise DeviceError(f"{call.op} needs a number as {name!r}, got {value!r}")
    return value


def _axis(call: CollectiveCall, name: str, type_: TensorType) -> int:
    axis = _number(call, name)
    if not 0 <= axis < type_.rank:
        raise DeviceError(f"{call.op} of {type_} has no axis {axis}")
    return axis
