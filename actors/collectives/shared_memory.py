"""The transport between ranks on one host: registers lie in shared memory, and ranks meet there.

Each rank makes a segment per block that the loader asks for, and one for its board. When all is
bound, the ranks tell each other where their operands are (`RankDescriptor`), check that they will
meet for the same, and map what the others have. From then on nothing goes between them but reads
and writes (`meet.c`).

A rank that gives up writes its mark to the board of rank 0, where the first mark stays, and wakes
all ranks that sleep.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from actors.collectives import segments
from actors.collectives.collective import (
    MEND,
    Collective,
    CollectiveDescriptor,
    CommunicatorKey,
    RankDescriptor,
    Row,
    check_collectives,
    check_hosts,
    this_host,
)
from actors.collectives.segments import (
    PAGE_BYTES,
    STAGING_BYTES,
    ByteBlocks,
    CollectiveState,
    GroupState,
    OwnSegments,
    Segment,
    StatusPage,
    map_all,
    open_pidfd,
)
from actors.kernels.common.host_memory import address
from actors.kernels.library.runtime import Toolchain
from actors.machine.protocol import AllGatherObject, Array, Block, CollectiveCall, Launch
from compiler.contract.errors import DeviceError, InternalError, OutOfMemory, PeerFailed
from compiler.contract.placement import Mesh


@dataclass(slots=True)
class GroupView:
    """The group of ranks that share a lane, as one of its ranks sees it.

    `lanes` are the lane's numbers on the board of each. `segments` are those of each rank as they
    are mapped here, with the board last; they live as long as this does. `texts` are its
    collectives by digest. `give_up` wakes every rank that sleeps, and `given_up` returns the error
    of a rank that was woken. `follow` returns the chain of ranks that a rank waits for.
    """

    ranks: tuple[int, ...]
    lanes: Sequence[int]
    segments: Sequence[Sequence[Segment]]
    boards: Sequence[StatusPage]
    processes: Sequence[int]
    texts: Mapping[int, str]
    deadline_ns: int
    give_up: Callable[[str, int], None]
    given_up: Callable[[], PeerFailed]
    follow: Callable[[int], Sequence[int]]
    struct: GroupState = field(init=False)
    _kept: tuple[object, ...] = field(init=False)

    def start(self, rank: int) -> None:
        """Make what C sees of it."""
        boards = list(zip(self.boards, self.lanes, strict=True))
        lines = segments.addresses([board.line(lane) for board, lane in boards])
        aside = segments.addresses([board.staging_buffers(lane) for board, lane in boards])
        processes = (ctypes.c_int32 * len(self.ranks))(*self.processes)
        # C holds addresses of these arrays only: Python must not free them.
        self._kept = (lines, aside, processes)
        self.struct = GroupState(
            len(self.ranks), self.ranks.index(rank), self.deadline_ns, STAGING_BYTES, 0, 0, 0,
            *[ctypes.addressof(array) for array in (lines, aside, processes)],
        )  # fmt: skip

    def error(self, collective: Collective, status: int, firing: int) -> PeerFailed:
        """Return the error for a launch's status, and give the run up on all ranks."""
        # As `status_of` in meet.c packs them; the place is within the group.
        kind, place = status & 255, status >> 8
        if kind == segments.ABORTED:
            return self.given_up()
        own, rank = self.ranks[self.struct.own], self.ranks[place]
        here = f"{collective}, firing {firing}"
        # Arrivals alternate between two entries: the peer may be at its next one already.
        came_to = self.boards[place].last_arrival(self.lanes[place], self.struct.num_arrivals & 1)
        other = self.texts.get(came_to.digest, "something unknown")
        # Who is late may itself wait for another: at fault is the one that waits for nobody.
        *waiting, rank = (own, *self.follow(rank)) if kind == segments.TIMED_OUT else (own, rank)
        before = "".join([f", for which rank {one} waits" for one in reversed(waiting[:-1])])
        messages = {
            segments.TIMED_OUT: f"rank {rank} did not come within {self.deadline_ns / 1e9:g} s to"
            f" where rank {waiting[-1]} waits{before}: {here}. Its process lives, but is stopped,"
            " hangs or is slow",
            segments.PEER_EXITED: f"the process of rank {rank} has ended; rank {own} waits for"
            f" it: {here}",
            segments.WRONG_COLLECTIVE: f"rank {rank} came to {other}, firing {came_to.firing},"
            f" where rank {own} came to {here}; {MEND}",
            segments.WRONG_FIRING: f"rank {rank} came to firing {came_to.firing} where rank {own}"
            f" came to {here}; {MEND}",
        }
        text = messages[kind]
        self.give_up(text, rank)
        return PeerFailed(text, rank=rank)


class CollectiveLaunch:
    """A bound launch: meets the other ranks each time that it is called."""

    __slots__ = ("_collective", "_connected", "_firings", "_given", "_group", "_left", "_meet")

    def __init__(
        self,
        collective: Collective,
        operands: tuple[Array | None, Array | None],
        firings: ctypes.c_uint64,
        meet: Callable[[int], int],
    ) -> None:
        self._collective, self._firings, self._meet = collective, firings, meet
        self._given, self._left = operands
        self._group: GroupView | None = None
        self._connected: tuple[CollectiveState, tuple[object, ...]] | None = None

    def connect(
        self, group: GroupView, digest: int, row: int, rows: Sequence[Sequence[Row]]
    ) -> None:
        """Fill in where the operands of all ranks are.

        `rows` are those of the collective that each rank offers, `row` is this launch's among the
        own.
        """
        c, own = self._collective, group.struct.own
        is_aside = c.aside_bytes <= STAGING_BYTES
        # What C needs beside addresses: regions that move (per rank, or one), none for an
        # all-reduce.
        if c.kind == segments.TRANSFER:
            blocks = [c.region(0, 1)]
        elif c.kind == segments.MOVE:
            places = range(len(group.ranks))
            # Small operands are read by each rank from the staging of all; large ones are written
            # by their owner to the outputs of all.
            blocks = [c.region(p, own) if is_aside else c.region(own, p) for p in places]
        elif c.kind == segments.REDUCE_SCATTER:
            blocks = [c.region(own, own)]
        else:
            blocks = []
        regions = (ByteBlocks * max(1, len(blocks)))(*blocks)
        tables = _addresses(rows, group.segments)
        pointers = [segments.addresses([ctypes.addressof(x) for x in table]) for table in tables]
        state = CollectiveState(
            group=ctypes.addressof(group.struct),
            digest=digest,
            firings=ctypes.addressof(self._firings),
            op=c.kind,
            dtype=segments.DTYPES.index(c.dtype),
            by=segments.REDUCTIONS.index(c.by) if c.by else 0,
            itemsize=c.dtype.itemsize,
            num_elements=0 if self._given is None else self._given.size,
            is_aside=is_aside,
            input_bytes=0 if self._given is None else self._given.nbytes,
            row=row,
            input=address(self._given),
            output=address(self._left),
            inputs_of=ctypes.addressof(pointers[0]),
            outputs_of=ctypes.addressof(pointers[1]),
            regions=ctypes.addressof(regions),
        )
        self._group, self._connected = group, (state, (regions, tables, pointers))

    def disconnect(self) -> None:
        """Make every later call raise. The memory that C uses lives as long as this launch."""
        # The launch stays callable: a chain may hold it after the transport was closed.
        self._meet = _closed

    def __call__(self) -> None:
        """Meet. Raises PeerFailed where another rank does not come, or comes to something else."""
        if self._group is None or self._connected is None:
            raise InternalError(f"{self._collective} was launched before all ranks were ready")
        status = self._meet(ctypes.addressof(self._connected[0]))
        if status:
            raise self._group.error(self._collective, status, self._firings.value)


def _closed(meeting: int) -> int:
    raise InternalError("a collective was launched after its transport was closed")


def _addresses(
    rows: Sequence[Sequence[Row]], segments_by_rank: Sequence[Sequence[Segment]]
) -> tuple[list[ctypes.Array[ctypes.c_void_p]], ...]:
    """Return where the operands of each rank of a group are here, what is read and what is left."""
    tables: tuple[list[ctypes.Array[ctypes.c_void_p]], ...] = ([], [])
    for rank_rows, rank_segments in zip(rows, segments_by_rank, strict=True):
        bases = [segment.address for segment in rank_segments]
        for column, (segment, offset) in enumerate(((0, 1), (2, 3))):
            places = [bases[r[segment]] + r[offset] if r[segment] >= 0 else 0 for r in rank_rows]
            tables[column].append(segments.addresses(places))
    return tables


@dataclass(slots=True)
class _Bound:
    """A collective of this rank, its place in its lane, and the launches bound to it."""

    collective: Collective
    lane: CommunicatorKey
    place: tuple[int, int]
    firings: ctypes.c_uint64 = field(default_factory=ctypes.c_uint64)
    rows: list[Row] = field(default_factory=list)
    launches: list[CollectiveLaunch] = field(default_factory=list)


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
        gather: AllGatherObject,
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
        if not 0 <= rank < mesh.num_ranks <= segments.MAX_RANKS:
            raise DeviceError(
                f"rank {rank} of a mesh of {mesh} cannot be: ranks of one host are numbered from 0,"
                f" {segments.MAX_RANKS} at most"
            )
        self._library = segments.library(toolchain)
        self._deadline_ns = int(deadline_s * 1e9)
        self._own = OwnSegments()
        self._bound: dict[tuple[str, int], _Bound] = {}
        self._boards: list[StatusPage] = []
        self._lanes_of: list[list[CommunicatorKey]] = []
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
        # A mapping begins at a page, which most alignments divide.
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
        source = None if call.op == "receive" else inputs[0]  # what it has more are tokens
        target = None if call.op == "send" else outputs[0]
        operands = (source, target)
        if not all([array is None or array.flags.c_contiguous for array in operands]):
            raise DeviceError(f"{collective} moves rows that lie one after another")
        places = [
            (-1, 0) if array is None else self._own.place(address(array), array.nbytes)
            for array in operands
        ]
        row = (*places[0], *places[1])
        # Smaller operands are copied to the board, so they may lie in private memory.
        if collective.aside_bytes > STAGING_BYTES:
            _check_shared(collective, operands, row)
        ends = collective.ends
        lane = CommunicatorKey(axis, *((-1, *ends) if ends else (call.stream,)))
        bound = self._bound_of(collective, lane, call.actor)
        launch = CollectiveLaunch(collective, operands, bound.firings, self._library.af_meet)
        bound.rows.append(row)
        bound.launches.append(launch)
        return launch

    def _bound_of(self, collective: Collective, lane: CommunicatorKey, actor: str) -> _Bound:
        """Return the entry of a collective. Two of one order are of two programs of the plan."""
        key = (actor, collective.order)
        if key not in self._bound:
            others = [b for b in self._bound.values() if b.lane == lane]
            # Numbered as they are bound; ranks compare their texts, which shows other orders.
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
        try:
            self._own.allocate("board", StatusPage.size_bytes(len(self._lanes())))
        except MemoryError as error:
            raise OutOfMemory(
                f"rank {self._rank} of {self._mesh.num_ranks} has no memory to meet the others in:"
                f" {error}; a limit on memory or on the size of files is reached ('ulimit -v',"
                " 'ulimit -f', which counts for shared memory as well): raise it"
            ) from error
        collectives = [
            CollectiveDescriptor(b.lane, b.place, b.collective.text, tuple(b.rows))
            for b in self._bound.values()
        ]
        descriptor = RankDescriptor(
            this_host(), os.getpid(), self._own.offer(), str(self._mesh), tuple(collectives)
        )
        # Two meetings: files may be closed only after every rank has opened them.
        rows = self._gather("share memory for collectives", descriptor.row())
        offers = [RankDescriptor.of(value, rank) for rank, value in enumerate(rows)]
        # All ranks check the same offers, so all raise, or none does.
        check_hosts(offers)
        check_collectives(offers, self._all_groups())
        failure = ""
        try:
            mapped = [self._segments_of(rank, offer) for rank, offer in enumerate(offers)]
            for offer in offers:
                self._processes.append(open_pidfd(offer.pid))
        except OSError as error:
            failure = (
                f"rank {self._rank} cannot map the memory of the others: {error}; all ranks must be"
                " processes of one user, in one container, with a file descriptor for each other"
                " rank ('ulimit -n')"
            )
        answers = self._gather("map the memory of the others", failure)
        # All have answered, so all have mapped; descriptors are scarce, and mappings need none.
        self._own.close_files()
        for rank, text in enumerate(answers):
            if text:
                raise PeerFailed(str(text), rank=rank)
        with self._lock:
            self._connect(offers, mapped)
            if self._given_up is not None:
                # An abort that came before there were boards to mark.
                self._wake_all(*self._given_up)

    def _segments_of(self, rank: int, offer: RankDescriptor) -> list[Segment]:
        """Map what a rank offers: all of it for one that this one meets, else its board."""
        if rank == self._rank:
            return self._own.made
        meets = any([rank in lane.members(self._ranks_along(lane.axis)) for lane in self._lanes()])
        return map_all(offer.pid, offer.segments if meets else offer.segments[-1:])

    def _lanes(self) -> list[CommunicatorKey]:
        return sorted({bound.lane for bound in self._bound.values()})

    def _ranks_along(self, axis: int, rank: int | None = None) -> tuple[int, ...]:
        """Return the group of a rank, this one by default."""
        return self._mesh.group(self._rank if rank is None else rank, axis)

    def _all_groups(self) -> list[tuple[int, tuple[int, ...]]]:
        ranks = range(self._mesh.num_ranks)
        groups = [
            (axis, self._ranks_along(axis, rank))
            for axis in range(len(self._mesh.names))
            for rank in ranks
        ]
        return list(dict.fromkeys(groups))

    def _connect(self, offers: Sequence[RankDescriptor], mapped: Sequence[list[Segment]]) -> None:
        """Fill in where everything of other ranks is; launches may run from then on."""
        self._boards = [
            StatusPage(segments[-1], len(offer.lanes))
            for segments, offer in zip(mapped, offers, strict=True)
        ]
        self._lanes_of = [offer.lanes for offer in offers]
        for lane in self._lanes():
            ranks = lane.members(self._ranks_along(lane.axis))
            texts = [f"{lane} {c.place} {c.text}" for c in offers[self._rank].along(lane)]
            # Each digest covers all texts of the lane, so that ranks with other programs never
            # match.
            digests = [_digest(texts, place) for place in range(len(texts))]
            calls = sorted(
                [b for b in self._bound.values() if b.lane == lane], key=lambda b: b.place
            )
            group = GroupView(
                ranks,
                [offers[rank].lanes.index(lane) for rank in ranks],
                [mapped[rank] for rank in ranks],
                [self._boards[rank] for rank in ranks],
                [self._processes[rank] for rank in ranks],
                {d: str(b.collective) for d, b in zip(digests, calls, strict=True)},
                self._deadline_ns,
                self.abort,
                self._given_up_by,
                self._follow,
            )
            group.start(self._rank)
            for place, bound in enumerate(calls):
                rows = [offers[rank].along(lane)[place].rows for rank in ranks]
                for row, launch in enumerate(bound.launches):
                    launch.connect(group, digests[place], row, rows)

    # -- ending ----------------------------------------------------------------------------------

    def abort(self, reason: str, at_fault: int | None = None) -> None:
        """Wake whoever waits on any rank; see `Communicator.abort`."""
        with self._lock:
            # The first reason stays: those that follow are mostly consequences of it.
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
            # Atomic, and the first rank wins; + 1 because 0 means that nobody gave up.
            self._library.af_mark(self._boards[0].abort_word, self._rank + 1)
            # Every line of every board: a rank may sleep in any lane.
            for board in self._boards:
                for lane in range(board.num_lanes):
                    self._library.af_give_up(board.line(lane))

    def _follow(self, rank: int) -> list[int]:
        """Return the chain of ranks that wait for one another, from `rank` to the last."""
        chain = [rank]
        # Stops at a rank that was seen: ranks that wait in a circle must not be followed for ever.
        while (next_rank := self._waited_for(chain[-1])) not in (None, self._rank, *chain):
            chain.append(cast("int", next_rank))
        return chain

    def _waited_for(self, rank: int) -> int | None:
        """Return a rank that has arrived less often than this one in a lane of both, or None."""
        for number, lane in enumerate(self._lanes_of[rank]):
            came = self._boards[rank].arrived(number)
            for other in lane.members(self._ranks_along(lane.axis, rank)):
                if self._boards[other].arrived(self._lanes_of[other].index(lane)) < came:
                    return other
        return None

    def _given_up_by(self) -> PeerFailed:
        """Return the error of a rank that was woken: the first reason, and the rank at fault."""
        boards = self._boards
        rank = boards[0].marked_by() if boards else None
        if rank is None:
            return PeerFailed("the run was given up")
        text = f"rank {rank} gave the run up: {boards[rank].reason()}"
        return PeerFailed(text, rank=boards[rank].at_fault())


def _check_shared(collective: Collective, operands: Sequence[Array | None], row: Row) -> None:
    """Check that others can reach what they work on. Raises DeviceError."""
    # Large sums read the inputs of others; an all-reduce, and what moves, writes their outputs.
    is_read = collective.kind in (segments.ALL_REDUCE, segments.REDUCE_SCATTER)
    is_written = collective.kind != segments.REDUCE_SCATTER and collective.op != "send"
    accesses = ((is_read, operands[0], row[0]), (is_written, operands[1], row[2]))
    # Of an empty part there is nothing to reach.
    if any([is_met and place < 0 and x is not None and x.nbytes for is_met, x, place in accesses]):
        raise DeviceError(
            f"{collective} works on memory of this process alone; registers that ranks meet over"
            " lie in shared memory"
        )


def _digest(texts: Sequence[str], place: int) -> int:
    """Return a 64-bit hash of one collective's place and of the texts of all of its lane."""
    text = "\n".join([*texts, str(place)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
