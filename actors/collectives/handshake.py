"""Which bytes a collective moves, between whom, and what ranks tell each other of it beforehand.

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

from actors.collectives import segments
from actors.collectives.segments import ByteBlocks
from compiler.contract.attrs import PlainValue
from compiler.contract.codec import DecodeError, Text, from_row, to_row, unexpected
from compiler.contract.collective import SEND, Collective
from compiler.contract.errors import DeviceError, PeerFailed
from compiler.contract.placement import Mesh
from compiler.contract.sbp import Shape, shard_range
from compiler.contract.types import TensorType

KIND_OF_OP = {
    "all_reduce": segments.ALL_REDUCE,
    "reduce_scatter": segments.REDUCE_SCATTER,
    "all_gather": segments.MOVE,
    "all_to_all": segments.MOVE,
    "send": segments.TRANSFER,
    "receive": segments.TRANSFER,
}
"""What C calls an op."""


def check_call(collective: Collective, place: int) -> None:
    """Check that ranks can meet for a collective, of whom one has this place along the axis.

    Raises DeviceError for an op, type or shape for which none can.
    """
    op, source, peer = collective.op, collective.reads, collective.peer
    if op not in KIND_OF_OP:
        names = ", ".join(KIND_OF_OP)
        raise DeviceError(f"{op!r} moves nothing between ranks here; known are {names}")
    if peer is not None:
        if not 0 <= peer < collective.num_ranks or peer == place:
            raise DeviceError(f"{op} of rank {place} of {collective.num_ranks} has no peer {peer}")
        return
    if KIND_OF_OP[op] != segments.MOVE and collective.by not in segments.REDUCTIONS:
        raise DeviceError(f"{op} of {source} cannot reduce by {collective.by!r}")
    for axis in (collective.axis, collective.to_axis):
        if axis is not None and not 0 <= axis < source.rank:
            raise DeviceError(f"{op} of {source} has no axis {axis}")
    if op == "all_to_all" and collective.to_axis == collective.axis:
        raise DeviceError(f"{op} of {source} leads from axis {collective.axis} to the same")
    if collective.makes.dtype is not source.dtype:
        raise DeviceError(f"{op} of {source} cannot leave {collective.makes}")


def check_parts(collective: Collective, place: int) -> None:
    """Check that a rank's operands are its parts of the whole. Raises DeviceError."""
    # Both ends move the whole tensor; that their types agree is checked by their texts.
    if collective.peer is not None:
        return
    for what, type_, shape in (
        ("reads", collective.reads, input_shape(collective, place)),
        ("leaves", collective.makes, output_shape(collective, place)),
    ):
        if type_.shape != shape:
            raise DeviceError(
                f"{described(collective)} {what} {type_}; place {place} of {collective.num_ranks}"
                f" has {TensorType(type_.dtype, shape)} of it"
            )


def lane_of(collective: Collective, mesh: Mesh, rank: int) -> CommunicatorKey:
    """Return who meets a rank for a collective, and on which stream.

    Raises DeviceError where the rank has no part in it, or operands that are not its part.
    """
    name = collective.group
    if name not in mesh.names:
        raise DeviceError(
            f"{collective.op} ({collective.site.where}) is for a group {name!r}; the mesh of {mesh}"
            f" has {', '.join(map(repr, mesh.names))}"
        )
    axis = mesh.axis(name)
    group = mesh.group(rank, axis)
    place = group.index(rank)
    check_call(collective, place)
    if len(group) != collective.num_ranks:
        raise DeviceError(
            f"{described(collective)} is for {collective.num_ranks} ranks; the mesh of {mesh} has"
            f" {len(group)} along {name!r}"
        )
    check_parts(collective, place)
    ends = ends_of(collective, place)
    return CommunicatorKey(axis, *((-1, *ends) if ends else (collective.site.stream,)))


def ends_of(collective: Collective, place: int) -> tuple[int, ...]:
    """Return the places of who sends and who receives; () where all ranks meet."""
    if collective.peer is None:
        return ()
    return (place, collective.peer) if collective.op == SEND else (collective.peer, place)


def described(collective: Collective) -> str:
    """Return a text for messages: what moves, and the user's line."""
    return f"{_moved(collective)} ({collective.site.where})"


def offered(collective: Collective, place: int) -> str:
    """Return the text that all ranks of a collective must offer identically.

    The user's line is given by the name of its file alone: its folder is shown relative to the
    working directory, which may differ between ranks.
    """
    if ends := ends_of(collective, place):
        return f"transfer {collective.order} of {collective.whole} from {ends[0]} to {ends[1]}"
    return f"{_moved(collective)} ({collective.site.source.rpartition('/')[2]})"


def _moved(collective: Collective) -> str:
    by = f" by {collective.by}" if collective.by else ""
    ways = (("from", collective.axis), ("to", collective.to_axis))
    cut = "".join([f" {word} axis {axis}" for word, axis in ways if axis is not None])
    return f"{collective.op} {collective.order} of {collective.whole}{by}{cut}"


def input_shape(collective: Collective, place: int) -> Shape:
    """Return the shape that a rank of the group reads, by its place along the axis."""
    return _part(collective, collective.axis, place)


def output_shape(collective: Collective, place: int) -> Shape:
    """Return the shape that a rank of the group writes."""
    return _part(collective, collective.to_axis, place)


def _part(collective: Collective, axis: int | None, place: int) -> Shape:
    shape = collective.whole.shape
    if axis is None:
        return shape
    rows = len(shard_range(shape[axis], collective.num_ranks, place))
    return (*shape[:axis], rows, *shape[axis + 1 :])


def aside_bytes(collective: Collective) -> int:
    """Return the bytes of the largest operand that a rank reads: the first one's."""
    # `shard_range` gives the first ranks one row more, so rank 0 has the largest part.
    return TensorType(collective.reads.dtype, input_shape(collective, 0)).size_bytes


def region(collective: Collective, start: int, end: int) -> ByteBlocks:
    """Return the bytes that move from the input of rank `start` to the output of rank `end`."""
    axis, to_axis, whole = collective.axis, collective.to_axis, collective.whole.shape
    block, rows = list(whole), dict[int, range]()
    for cut, rank in ((axis, start), (to_axis, end)):
        if cut is not None:
            rows[cut] = shard_range(whole[cut], collective.num_ranks, rank)
    # Cut along both axes: what `start` has of one and `end` of the other is what moves.
    for cut, shard in rows.items():
        block[cut] = len(shard)
    # With one cut both entries are the same axis; without any, the whole is one run of bytes.
    cuts = sorted(rows) or [0]
    return _region(
        block,
        (input_shape(collective, start), _first(rows, to_axis)),
        (output_shape(collective, end), _first(rows, axis)),
        (cuts[0], cuts[-1]),
        collective.reads.dtype.itemsize,
    )


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


# Why ranks meet in lanes: streams that move tensors between ranks run side by side, so a rank may
# wait for several others at once; and what it says of itself for one must not stand where it says
# what it does for another. On its board each lane that it is in has a line of its own, in the order
# of lanes.

_NONE = -1


@dataclass(frozen=True, slots=True, order=True)
class CommunicatorKey:
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

FORMAT = 3
"""Version of an offer and of the layout of the memory that it describes."""

MEND = "run the same script with the same options and data on all ranks"

Row = tuple[int, int, int, int]
"""Where a launch has its operands: segment and offset of what it reads, and of what it leaves."""


@dataclass(frozen=True, slots=True)
class CollectiveDescriptor:
    """A collective of one rank: its place among those of a lane, its text, and its rows."""

    lane: CommunicatorKey
    place: tuple[int, int]
    text: Text
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class RankDescriptor:
    """What a rank offers to the others: its host, process, segments and collectives."""

    host: Text
    pid: int
    segments: tuple[tuple[int, int], ...]
    mesh: Text
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
        return FORMAT, to_row(self)

    @staticmethod
    def of(value: PlainValue, rank: int) -> RankDescriptor:
        """Read what a rank sent. Raises PeerFailed where that is no offer."""
        version, row = value if isinstance(value, tuple) and len(value) == 2 else (None, value)
        try:
            if version != FORMAT:
                raise unexpected(version, f"format {FORMAT}", "the offer")
            return from_row(RankDescriptor, row)
        except DecodeError as error:
            raise PeerFailed(
                f"rank {rank} offers its memory as another version of actorflow does ({error});"
                " run the same version on all ranks",
                rank=rank,
            ) from None


def this_host() -> str:
    """Return a text that is equal for processes that can open each other's files in /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # The namespace of pids: in another container /proc/PID of a peer is another process.
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename


def check_hosts(offers: Sequence[RankDescriptor]) -> None:
    """Check that all ranks are on one host. Raises PeerFailed."""
    for rank, offer in enumerate(offers):
        if offer.host != offers[0].host:
            raise PeerFailed(
                f"rank {rank} runs on another host, or in another container, than rank 0; ranks"
                " share memory, which works on one host only",
                rank=rank,
            )


def check_meshes(offers: Sequence[RankDescriptor]) -> None:
    """Check that all ranks are of one mesh. Raises PeerFailed."""
    for rank, offer in enumerate(offers):
        if offer.mesh != offers[0].mesh:
            raise PeerFailed(
                f"rank {rank} has a mesh of {offer.mesh}, rank 0 one of {offers[0].mesh}; {MEND}",
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
                            f" combine different tensors: {MEND}",
                            rank=rank,
                        )


def _pairs(
    mine: Sequence[CollectiveDescriptor], theirs: Sequence[CollectiveDescriptor]
) -> Iterator[tuple[str, str]]:
    for a, b in zip_longest(mine, theirs):
        none = "no further collective"
        yield (none if a is None else a.text, none if b is None else b.text)
