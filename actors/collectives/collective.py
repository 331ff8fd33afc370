"""What a collective moves, between whom, and what ranks tell each other of it beforehand.

A rank's part of an extent is that of `shard_range`: where an extent is no multiple of the ranks,
the first ones have one row more. All follows from what every rank of a group knows alike.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from actors.collectives import segments
from actors.collectives.segments import ByteBlocks
from actors.machine.protocol import CollectiveCall
from compiler.contract.attrs import PlainValue
from compiler.contract.errors import DeviceError, PeerFailed
from compiler.contract.sbp import shard_range
from compiler.contract.types import DType, TensorType

_OPS = {
    "all_reduce": segments.ALL_REDUCE,
    "reduce_scatter": segments.REDUCE_SCATTER,
    "all_gather": segments.MOVE,
    "all_to_all": segments.MOVE,
    "send": segments.TRANSFER,
    "receive": segments.TRANSFER,
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
            names = ", ".join(_OPS)
            raise DeviceError(f"{call.op!r} moves nothing between ranks here; known are {names}")
        if _OPS[call.op] == segments.TRANSFER:
            return Collective._of_two(call, own)
        attrs, (source,), (target,) = call.attrs, call.inputs, call.outputs
        by = ""
        if _OPS[call.op] != segments.MOVE:
            by = str(attrs.get("by"))
            if by not in segments.REDUCTIONS:
                raise DeviceError(f"{call.op} of {source} cannot reduce by {by!r}")
        axis = to_axis = None
        whole = source.shape
        if call.op == "reduce_scatter":
            to_axis = _axis(call, "axis", source)
        elif call.op != "all_reduce":
            axis = _axis(call, "axis", source)
            # A rank sees its part only: how many rows all parts have is an attribute, alike on all
            # ranks.
            whole = (*whole[:axis], _number(call, "rows"), *whole[axis + 1 :])
        if call.op == "all_to_all":
            to_axis = _axis(call, "to_axis", source)
            if to_axis == axis:
                raise DeviceError(f"all_to_all of {source} leads from axis {axis} to the same")
        group, order = str(attrs.get("group")), _number(call, "order")
        ranks = _number(call, "num_ranks")
        collective = Collective(
            call.op, group, order, ranks, source.dtype, whole, by, axis, to_axis, call.where
        )
        if target.dtype is not source.dtype:
            raise DeviceError(f"{call.op} of {source} cannot leave {target}")
        return collective

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
        """The text that all ranks of the collective must offer identically.

        The user's line is given by the name of its file alone: its folder is shown relative to the
        working directory, which may differ between ranks.
        """
        if not self.ends:
            return f"{self._text} ({self.where.rpartition(' at ')[2].rpartition('/')[2]})"
        type_ = TensorType(self.dtype, self.whole)
        return f"transfer {self.order} of {type_} from {self.ends[0]} to {self.ends[1]}"

    def check(self, call: CollectiveCall, own: int) -> None:
        """Check that a rank's operands are its parts of the whole. Raises DeviceError."""
        # Both ends move the whole tensor; that their types agree is checked by their texts.
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
        # `shard_range` gives the first ranks one row more, so rank 0 has the largest part.
        return TensorType(self.dtype, self.input_shape(0)).size_bytes

    def input_shape(self, rank: int) -> Shape:
        """Return the shape that a rank of the group reads; ranks are numbered within the group."""
        return self._part(self.axis, rank)

    def output_shape(self, rank: int) -> Shape:
        """Return the shape that a rank of the group writes."""
        return self._part(self.to_axis, rank)

    def region(self, start: int, end: int) -> ByteBlocks:
        """Return the bytes that move from the input of rank `start` to the output of rank `end`."""
        block = list(self.whole)
        rows: dict[int, range] = {}
        for axis, rank in ((self.axis, start), (self.to_axis, end)):
            if axis is not None:
                rows[axis] = shard_range(self.whole[axis], self.num_ranks, rank)
        # Cut along both axes: what `start` has of one and `end` of the other is what moves.
        for axis, shard in rows.items():
            block[axis] = len(shard)
        # With one cut both entries are the same axis; without any, the whole is one run of bytes.
        cuts = sorted(rows) or [0]
        return _region(
            block,
            (self.input_shape(start), self._first(rows, self.to_axis)),
            (self.output_shape(end), self._first(rows, self.axis)),
            (cuts[0], cuts[-1]),
            self.dtype.itemsize,
        )

    def __str__(self) -> str:
        return f"{self._text} ({self.where})"

    @property
    def _text(self) -> str:
        by = f" by {self.by}" if self.by else ""
        cut = "".join(
            [
                f" {word} axis {axis}"
                for word, axis in (("from", self.axis), ("to", self.to_axis))
                if axis is not None
            ]
        )
        whole = TensorType(self.dtype, self.whole)
        return f"{self.op} {self.order} of {whole}{by}{cut}"

    def _part(self, axis: int | None, rank: int) -> Shape:
        if axis is None:
            return self.whole
        rows = len(shard_range(self.whole[axis], self.num_ranks, rank))
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
        # Three loops around a run: before the first cut, along it, and between the two cuts.
        extents = (math.prod(block[:low]), block[low], math.prod(block[low + 1 : high]))
    strides, offsets = [], []
    for shape, (axis, row) in (given, left):
        # dense[n]: bytes of one entry of axis n - 1, all axes from n on.
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


# Why ranks meet in lanes: streams that move tensors between ranks run side by side, so a rank may
# wait for several others at once; and what it says of itself for one must not stand where it says
# what it does for another. On its board each lane that it is in has a line of its own, in the order
# of lanes.

_NONE = -1


class CommunicatorKey(NamedTuple):
    """An axis, and which of the streams all ranks along it meet on, or who sends to whom there.

    `sender` and `receiver` are coordinates along the axis; what two streams of two ranks have to do
    with each other has no number of a stream.
    """

    axis: int
    stream: int = _NONE
    sender: int = _NONE
    receiver: int = _NONE

    def members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return who meets, of the ranks along the axis: the one that sends comes first."""
        if self.sender == _NONE:
            return tuple(ranks)
        return ranks[self.sender], ranks[self.receiver]


# Every rank checks what all have offered, so that all come to the same answer: either all go on, or
# each raises the error of the first two that disagree.

FORMAT = 1
"""Version of an offer and of the layout of the memory that it describes."""

MEND = "run the same script with the same options and data on all ranks"

Row = tuple[int, int, int, int]
"""Where a launch has its operands: segment and offset of what it reads, and of what it leaves."""


@dataclass(frozen=True, slots=True)
class CollectiveDescriptor:
    """A collective of one rank: its place among those of a lane, its text, and its rows."""

    lane: CommunicatorKey
    place: tuple[int, int]
    text: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class RankDescriptor:
    """What a rank offers to the others: its host, process, segments and collectives."""

    host: str
    pid: int
    segments: tuple[tuple[int, int], ...]
    mesh: str
    collectives: tuple[CollectiveDescriptor, ...]

    @property
    def lanes(self) -> list[CommunicatorKey]:
        """The lanes that the rank is in, as they lie on its board."""
        # Sorted, because every rank computes the place of another's line on its board from this
        # order.
        return sorted({c.lane for c in self.collectives})

    def along(self, lane: CommunicatorKey) -> list[CollectiveDescriptor]:
        """Return the collectives of a lane, in their order."""
        return sorted([c for c in self.collectives if c.lane == lane], key=lambda c: c.place)

    def row(self) -> PlainValue:
        """Return the offer as a value that can be sent."""
        return (
            FORMAT, self.host, self.pid, self.segments, self.mesh,
            tuple([(tuple(c.lane), c.place, c.text, c.rows) for c in self.collectives]),
        )  # fmt: skip

    @staticmethod
    def of(value: Any, rank: int) -> RankDescriptor:
        """Read what a rank sent. Raises PeerFailed where that is no offer."""
        try:
            format_, host, pid, segments, mesh, collectives = value
            # Raised as the errors of a wrong shape are, and told by the same words below.
            if format_ != FORMAT:
                raise ValueError(f"format {format_}")
            return RankDescriptor(
                str(host),
                int(pid),
                tuple([(int(fd), int(size)) for fd, size in segments]),
                str(mesh),
                tuple([_collective(*row) for row in collectives]),
            )
        except (TypeError, ValueError) as error:
            raise PeerFailed(
                f"rank {rank} offers its memory as another version of actorflow does ({error});"
                " run the same version on all ranks",
                rank=rank,
            ) from None


def _collective(
    lane: Sequence[int], place: Sequence[int], text: str, rows: Any
) -> CollectiveDescriptor:
    program, order = place
    operand_rows = tuple([(int(a), int(b), int(c), int(d)) for a, b, c, d in rows])
    return CollectiveDescriptor(
        CommunicatorKey(*map(int, lane)), (int(program), int(order)), str(text), operand_rows
    )


def this_host() -> str:
    """Return a text that is equal for processes that can open each other's files in /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # The namespace of pids: in another container /proc/PID of a peer is another process.
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename


def check_hosts(offers: Sequence[RankDescriptor]) -> None:
    """Check that all ranks are on one host, of one mesh. Raises PeerFailed."""
    first = offers[0]
    for rank, offer in enumerate(offers):
        if offer.host != first.host:
            raise PeerFailed(
                f"rank {rank} runs on another host, or in another container, than rank 0; ranks"
                " share memory, which works on one host only",
                rank=rank,
            )
        if offer.mesh != first.mesh:
            raise PeerFailed(
                f"rank {rank} has a mesh of {offer.mesh}, rank 0 one of {first.mesh}; {MEND}",
                rank=rank,
            )


def check_collectives(
    offers: Sequence[RankDescriptor], groups: Sequence[tuple[int, Sequence[int]]]
) -> None:
    """Check that ranks of a group meet for the same, in one order.

    `groups` are all of them, as the number of an axis and the ranks. Raises PeerFailed, which names
    the first collective that two ranks do not have alike.
    """
    for axis, ranks in groups:
        lanes = {c.lane for rank in ranks for c in offers[rank].collectives}
        for lane in sorted([lane for lane in lanes if lane.axis == axis]):
            first, *others = lane.members(ranks)
            for rank in others:
                # All with the first: two that differ from one another differ from it as well.
                for mine, theirs in _pairs(offers[first].along(lane), offers[rank].along(lane)):
                    if mine != theirs:
                        raise PeerFailed(
                            f"rank {rank} has {theirs} where rank {first} has {mine}; they would"
                            f" take different tensors for one: {MEND}",
                            rank=rank,
                        )


def _pairs(
    mine: Sequence[CollectiveDescriptor], theirs: Sequence[CollectiveDescriptor]
) -> Iterator[tuple[str, str]]:
    for a, b in zip_longest(mine, theirs):
        none = "no further collective"
        yield (none if a is None else a.text, none if b is None else b.text)
