"""The transport between ranks on one host: registers lie in shared memory, and ranks meet there.

Each rank makes a segment per block that the loader asks for, and one for its board. When all is
bound, the ranks tell each other where their operands are (`Offer`), check that they will meet for
the same, and map what the others have. From then on nothing goes between them but reads and writes
(`meet.c`).

Who gives up marks the board of rank 0, where the first one stays, and wakes whoever sleeps.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.collectives import native
from actors.collectives.agreement import (
    CollectiveOffer,
    Offer,
    Row,
    check_collectives,
    check_hosts,
    this_host,
)
from actors.collectives.board import ASIDE_BYTES, Board, watched
from actors.collectives.collective import Collective
from actors.collectives.lanes import RankLane
from actors.collectives.meeting import GroupView, MeetLaunch
from actors.collectives.protocol import CollectiveCall, Gather
from actors.collectives.segments import PAGE_BYTES, OwnSegments, Segment, map_all
from actors.device.protocol import Block
from actors.kernels.native.launch import address
from actors.kernels.native.toolchain import Toolchain
from actors.protocol import Array, Launch
from compiler.errors import DeviceError, InternalError, PeerFailed
from compiler.mesh import Mesh


@dataclass(slots=True)
class _Bound:
    """A collective of this rank, its place in its lane, and the launches bound to it."""

    collective: Collective
    lane: RankLane
    place: tuple[int, int]
    firings: ctypes.c_uint64 = field(default_factory=ctypes.c_uint64)
    rows: list[Row] = field(default_factory=list)
    launches: list[MeetLaunch] = field(default_factory=list)


class SharedMemory:
    """A rank's end of the transport; see `Communicator`.

    Args:
        rank: Which rank of the mesh this is.
        mesh: All ranks.
        gather: How ranks tell each other where their memory is; called twice, in `ready`.
        toolchain: What builds the C half.
        deadline_s: How long a launch waits for the others before it raises.

    Raises DeviceError without a C compiler, or for a rank that is not in the mesh.
    """

    def __init__(
        self,
        rank: int,
        mesh: Mesh,
        gather: Gather,
        toolchain: Toolchain | None,
        *,
        deadline_s: float = 300.0,
    ) -> None:
        if toolchain is None:
            raise DeviceError(
                f"rank {rank} of {mesh.num_ranks} needs a C compiler to meet the others: install"
                " cc, gcc or clang, or name one as CC"
            )
        self._rank, self._mesh, self._gather = rank, mesh, gather
        if not 0 <= rank < mesh.num_ranks <= native.MAX_RANKS:
            raise DeviceError(
                f"rank {rank} of a mesh of {mesh} cannot be: ranks of one host are numbered from 0,"
                f" {native.MAX_RANKS} at most"
            )
        self._library = native.library(toolchain)
        self._deadline_ns = int(deadline_s * 1e9)
        self._own = OwnSegments()
        self._bound: dict[tuple[str, int], _Bound] = {}
        self._boards: list[Board] = []
        self._processes: list[int] = []
        self._given_up: tuple[str, int] | None = None
        # Reentrant: the collector may drop a run of this thread while it gives this one up.
        self._lock = threading.RLock()

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self._rank

    @property
    def mesh(self) -> Mesh:
        """All ranks."""
        return self._mesh

    # -- binding ---------------------------------------------------------------------------------

    def allocate(self, size_bytes: int, alignment: int) -> Block:
        """Return memory that other ranks will map; see `Communicator.allocate`."""
        spare = alignment if PAGE_BYTES % alignment else 0
        segment = self._own.allocate("registers", size_bytes + spare)
        start = -segment.address % alignment
        return segment.array[start : start + size_bytes]

    def bind(
        self, call: CollectiveCall, inputs: tuple[Array, ...], outputs: tuple[Array, ...]
    ) -> Launch:
        """Return the launch of a collective; see `Communicator.bind`."""
        name = str(call.attrs.get("group"))
        if name not in self._mesh.names:
            raise DeviceError(
                f"{call.op} ({call.where}) is for a group {name!r}; the mesh of {self._mesh} has"
                f" {', '.join(map(repr, self._mesh.names))}"
            )
        axis = self._mesh.axis(name)
        group = self._ranks_along(axis)
        collective = Collective.of(call, group.index(self._rank))
        if len(group) != collective.num_ranks:
            raise DeviceError(
                f"{collective} is for {collective.num_ranks} ranks; the mesh of {self._mesh} has"
                f" {len(group)} along {collective.group!r}"
            )
        collective.check(call, group.index(self._rank))
        given = None if call.op == "receive" else inputs[0]  # what it has more are tokens
        left = None if call.op == "send" else outputs[0]
        operands = (given, left)
        if not all([array is None or array.flags.c_contiguous for array in operands]):
            raise DeviceError(f"{collective} moves rows that lie one after another")
        places = [
            (-1, 0) if array is None else self._own.place(address(array), array.nbytes)
            for array in operands
        ]
        row = (*places[0], *places[1])
        if collective.aside_bytes > ASIDE_BYTES:
            _check_shared(collective, operands, row)
        ends = collective.ends
        lane = RankLane(axis, *((-1, *ends) if ends else (call.stream,)))
        bound = self._bound_of(collective, lane, call.actor)
        launch = MeetLaunch(collective, operands, bound.firings, self._library.af_meet)
        bound.rows.append(row)
        bound.launches.append(launch)
        return launch

    def _bound_of(self, collective: Collective, lane: RankLane, actor: str) -> _Bound:
        """Return the entry of a collective. Two of one order are of two programs of the plan."""
        key = (actor, collective.order)
        if key not in self._bound:
            others = [b for b in self._bound.values() if b.lane == lane]
            before = [b for b in others if b.collective.order == collective.order]
            self._bound[key] = _Bound(collective, lane, (len(before), collective.order))
        if self._bound[key].collective != collective:
            raise InternalError(
                f"actor {actor!r} has {self._bound[key].collective} and {collective} in one place"
            )
        return self._bound[key]

    # -- agreement -------------------------------------------------------------------------------

    def ready(self) -> None:
        """Meet all ranks once, agree and map their memory; see `Communicator.ready`."""
        self._own.allocate("board", Board.size_bytes(len(self._lanes())))
        collectives = [
            CollectiveOffer(b.lane, b.place, b.collective.text, tuple(b.rows))
            for b in self._bound.values()
        ]
        own = Offer(
            this_host(), os.getpid(), self._own.offer(), str(self._mesh), tuple(collectives)
        )
        said = self._gather("share memory for collectives", own.row())
        offers = [Offer.of(value, rank) for rank, value in enumerate(said)]
        check_hosts(offers)
        check_collectives(offers, self._all_groups())
        failure = ""
        try:
            mapped = [self._segments_of(rank, offer) for rank, offer in enumerate(offers)]
            for offer in offers:
                self._processes.append(watched(offer.pid))
        except OSError as error:
            failure = (
                f"rank {self._rank} cannot map the memory of the others: {error}; all ranks must be"
                " processes of one user, in one container, with a file descriptor for each other"
                " rank ('ulimit -n')"
            )
        answers = self._gather("map the memory of the others", failure)
        self._own.close_files()
        for rank, text in enumerate(answers):
            if text:
                raise PeerFailed(str(text), rank=rank)
        with self._lock:
            self._connect(offers, mapped)
            if self._given_up is not None:
                self._wake_all(*self._given_up)

    def _segments_of(self, rank: int, offer: Offer) -> list[Segment]:
        """Map what a rank offers: all of it for one that this one meets, else its board."""
        if rank == self._rank:
            return self._own.made
        meets = any([rank in lane.members(self._ranks_along(lane.axis)) for lane in self._lanes()])
        return map_all(offer.pid, offer.segments if meets else offer.segments[-1:])

    def _lanes(self) -> list[RankLane]:
        return sorted({bound.lane for bound in self._bound.values()})

    def _ranks_along(self, axis: int, rank: int | None = None) -> tuple[int, ...]:
        """Return the group of a rank, this one by default."""
        return self._mesh.group(self._rank if rank is None else rank, axis)

    def _all_groups(self) -> list[tuple[int, tuple[int, ...]]]:
        ranks = range(self._mesh.num_ranks)
        found = [
            (axis, self._ranks_along(axis, rank))
            for axis in range(len(self._mesh.names))
            for rank in ranks
        ]
        return list(dict.fromkeys(found))

    def _connect(self, offers: Sequence[Offer], mapped: Sequence[list[Segment]]) -> None:
        """Fill in where everything of other ranks is; launches may run from then on."""
        self._boards = [
            Board(segments[-1], len(offer.lanes))
            for segments, offer in zip(mapped, offers, strict=True)
        ]
        for lane in self._lanes():
            ranks = lane.members(self._ranks_along(lane.axis))
            texts = [f"{lane} {c.place} {c.text}" for c in offers[self._rank].along(lane)]
            digests = [_digest(texts, place) for place in range(len(texts))]
            own = sorted([b for b in self._bound.values() if b.lane == lane], key=lambda b: b.place)
            group = GroupView(
                ranks,
                [offers[rank].lanes.index(lane) for rank in ranks],
                [mapped[rank] for rank in ranks],
                [self._boards[rank] for rank in ranks],
                [self._processes[rank] for rank in ranks],
                {d: str(b.collective) for d, b in zip(digests, own, strict=True)},
                self._deadline_ns,
                self.abort,
                self._given_up_by,
            )
            group.start(self._rank)
            for place, bound in enumerate(own):
                rows = [offers[rank].along(lane)[place].rows for rank in ranks]
                for row, launch in enumerate(bound.launches):
                    launch.connect(group, digests[place], row, rows)

    # -- ending ----------------------------------------------------------------------------------

    def abort(self, reason: str, at_fault: int | None = None) -> None:
        """Wake whoever waits on any rank; see `Communicator.abort`."""
        with self._lock:
            if self._given_up is None:
                self._given_up = reason, self._rank if at_fault is None else at_fault
                self._wake_all(*self._given_up)

    def close(self) -> None:
        """Let go of other ranks' memory; see `Communicator.close`."""
        with self._lock:
            for bound in self._bound.values():
                for launch in bound.launches:
                    launch.disconnect()
            for fd in self._processes:
                if fd >= 0:
                    os.close(fd)
            self._own.close_files()
            self._boards, self._processes, self._own = [], [], OwnSegments()
            self._bound.clear()

    def _wake_all(self, reason: str, at_fault: int) -> None:
        if not self._boards:
            return  # nobody sleeps yet; `ready` does it
        try:
            self._boards[self._rank].write_reason(reason, at_fault)
        finally:  # or they would sleep until the deadline
            self._library.af_mark(self._boards[0].mark, self._rank + 1)
            for board in self._boards:
                for lane in range(board.num_lanes):
                    self._library.af_give_up(board.line(lane))

    def _given_up_by(self) -> PeerFailed:
        """Return the error of who was woken: the first reason of all, and whose fault it is."""
        boards = self._boards
        rank = boards[0].marked_by() if boards else None
        if rank is None:
            return PeerFailed("the run was given up")
        text = f"rank {rank} gave the run up: {boards[rank].reason()}"
        return PeerFailed(text, rank=boards[rank].at_fault())


def _check_shared(collective: Collective, operands: Sequence[Array | None], row: Row) -> None:
    """Check that others can reach what they work on. Raises DeviceError."""
    is_read = collective.kind in (native.ALL_REDUCE, native.REDUCE_SCATTER)
    is_written = collective.kind != native.REDUCE_SCATTER and collective.op != "send"
    met = ((is_read, operands[0], row[0]), (is_written, operands[1], row[2]))
    # Of an empty part there is nothing to reach.
    if any([is_met and place < 0 and x is not None and x.nbytes for is_met, x, place in met]):
        raise DeviceError(
            f"{collective} works on memory of this process alone; registers that ranks meet over"
            " lie in shared memory"
        )


def _digest(texts: Sequence[str], place: int) -> int:
    """Return a number for one of some collectives, which says what all of them are."""
    text = "\n".join([*texts, str(place)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
