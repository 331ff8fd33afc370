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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from actors.collectives import segments
from actors.collectives.handshake import (
    KIND_OF_OP,
    MEND,
    CollectiveDescriptor,
    CommunicatorKey,
    RankDescriptor,
    Row,
    aside_bytes,
    check_collectives,
    check_hosts,
    check_meshes,
    described,
    lane_of,
    offered,
    region,
    this_host,
)
from actors.collectives.segments import (
    PAGE_BYTES,
    STAGING_BYTES,
    Arrival,
    ByteBlocks,
    GroupState,
    OwnSegments,
    Segment,
    StatusPage,
    map_all,
    open_pidfd,
)
from actors.collectives.sum_order import sum_steps
from actors.kernels.common.host_memory import address
from actors.kernels.library.toolchain import Toolchain
from actors.machine.protocol import AllGatherObject, Array, Block, Launch
from compiler.contract.collective import RECEIVE, SEND, Collective
from compiler.contract.errors import DeviceError, InternalError, OutOfMemory, PeerFailed
from compiler.contract.placement import Mesh


@dataclass(slots=True)
class GroupView:
    """The group of ranks that share a lane, as one of its ranks sees it.

    `is_part` says that there are more of them, on other hosts. `lanes` are the lane's numbers on
    the board of each. `segments` are those of each rank as they
    are mapped here, with the board last; they live as long as this does. `texts` are its
    collectives by digest. `give_up` wakes every rank that sleeps, and `given_up` returns the error
    of a rank that was woken. `follow` returns the chain of ranks that a rank waits for.
    """

    ranks: tuple[int, ...]
    is_part: bool
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
        # Arrivals alternate between two entries: the peer may be at its next one already.
        came_to = self.boards[place].last_arrival(self.lanes[place], self.struct.num_arrivals & 1)
        return self.failure(
            kind, self.ranks[place], came_to, f"{described(collective)}, firing {firing}"
        )

    def failure(self, kind: int, rank: int, came_to: Arrival, here: str) -> PeerFailed:
        """Return the error for a rank of any host, and give the run up on all ranks of this one."""
        own = self.ranks[self.struct.own]
        other = self.texts.get(came_to.digest, "something unknown")
        # Who is late may itself wait for another: at fault is the one that waits for nobody.
        *waiting, rank = (own, *self.follow(rank)) if kind == segments.TIMED_OUT else (own, rank)
        before = "".join([f", for which rank {one} waits" for one in reversed(waiting[:-1])])
        messages = {
            segments.TIMED_OUT: (
                f"rank {rank} did not arrive within {self.deadline_ns / 1e9:g} s where rank"
                f" {waiting[-1]} waits{before}: {here}. Its process runs, but is stopped, hangs"
                " or is slow"
            ),
            segments.PEER_EXITED: f"the process of rank {rank} has ended; rank {own} waits for"
            f" it: {here}",
            segments.WRONG_COLLECTIVE: f"rank {rank} runs {other}, firing {came_to.firing},"
            f" where rank {own} runs {here}; {MEND}",
            segments.WRONG_FIRING: f"rank {rank} runs firing {came_to.firing} where rank {own}"
            f" runs {here}; {MEND}",
        }
        text = messages[kind]
        self.give_up(text, rank)
        return PeerFailed(text, rank=rank)


@dataclass(frozen=True, slots=True)
class CrossingLane:
    """A lane whose ranks are on several hosts, as one of them sees it.

    `number` is its place among the lanes of all ranks, `ranks` all that meet and `hosts` where they
    are. `view` is the group of those on this host. `calls` are its collectives, each with its
    launches.
    """

    number: int
    key: CommunicatorKey
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    view: GroupView
    calls: tuple[tuple[CollectiveLaunch, ...], ...]


class CollectiveLaunch(ctypes.Structure):
    """A bound launch: meets the other ranks each time that it is called. It is what meet.c reads.

    Attributes:
        collective: What it moves.
        lane: Whom it meets there.
        place: Of the first launch of a collective, the place of that among those of the lane.
        operands: Where what it reads and leaves lies.
        count: How often the collective was met for, by all of its launches together.
    """

    _fields_ = [
        ("group", ctypes.c_void_p),
        ("digest", ctypes.c_uint64),
        ("firings", ctypes.c_void_p),
        *[
            (name, ctypes.c_int64)
            for name in (
                "op", "dtype", "by", "itemsize", "num_elements", "is_aside", "input_bytes", "row",
            )
        ],
        *[
            (name, ctypes.c_void_p)
            for name in ("input", "output", "inputs_of", "outputs_of", "regions", "order")
        ],
    ]  # fmt: skip

    def __init__(
        self,
        collective: Collective,
        arrays: tuple[Array | None, Array | None],
        operands: Row,
        lane: CommunicatorKey,
        meet: Callable[[int], int],
    ) -> None:
        source, dtype = arrays[0], collective.reads.dtype
        super().__init__(
            op=KIND_OF_OP[collective.op],
            dtype=segments.DTYPES.index(dtype),
            by=segments.REDUCTIONS.index(collective.by) if collective.by else 0,
            itemsize=dtype.itemsize,
            num_elements=0 if source is None else source.size,
            is_aside=aside_bytes(collective) <= STAGING_BYTES,
            input_bytes=0 if source is None else source.nbytes,
            input=address(source),
            output=address(arrays[1]),
        )
        self.collective, self.operands, self.lane, self._meet = collective, operands, lane, meet
        self.place, self.count = (0, collective.order), ctypes.c_uint64()
        self._group: GroupView | None = None
        # C holds addresses of these only: Python must not free them.
        self._kept: tuple[object, ...] = (arrays,)

    def connect(
        self, group: GroupView, digest: int, row: int, rows: Sequence[Sequence[Row]]
    ) -> None:
        """Fill in where the operands of all ranks are.

        `rows` are those of the collective that each rank offers, `row` is this launch's among the
        own.
        """
        # C works on regions only where the whole group is on this host.
        blocks = [] if group.is_part else self._blocks(group)
        regions = (ByteBlocks * max(1, len(blocks)))(*blocks)
        tables = _addresses(rows, group.segments)
        pointers = [segments.addresses([ctypes.addressof(x) for x in table]) for table in tables]
        self.group, self.digest = ctypes.addressof(group.struct), digest
        self.firings, self.row = ctypes.addressof(self.count), row
        self.inputs_of, self.outputs_of = map(ctypes.addressof, pointers)
        steps = sum_steps(len(group.ranks))
        order = (ctypes.c_int32 * len(steps))(*steps)
        self.regions, self.order = ctypes.addressof(regions), ctypes.addressof(order)
        self._group, self._kept = group, (*self._kept, regions, tables, pointers, order)

    def _blocks(self, group: GroupView) -> list[ByteBlocks]:
        """Return the regions that move, one per rank or one; an all-reduce has none."""
        c, own, kind = self.collective, group.struct.own, KIND_OF_OP[self.collective.op]
        if kind == segments.TRANSFER:
            return [region(c, 0, 1)]
        if kind == segments.MOVE:
            places = range(len(group.ranks))
            # Small operands are read by each rank from the staging of all; large ones are written
            # by their owner to the outputs of all.
            ends = [(p, own) if self.is_aside else (own, p) for p in places]
            return [region(c, *pair) for pair in ends]
        return [region(c, own, own)] if kind == segments.REDUCE_SCATTER else []

    def meet_by(self, meet: Callable[[int], int]) -> None:
        """Meet by another function than C's; it takes the address of this and returns a status."""
        self._meet = meet

    def disconnect(self) -> None:
        """Make every later call raise. The memory that C uses lives as long as this launch."""
        # The launch stays callable: a chain may hold it after the transport was closed.
        self._meet = _closed

    def __call__(self) -> None:
        """Meet. Raises PeerFailed where another rank does not come, or comes to something else."""
        if self._group is None:
            what = described(self.collective)
            raise InternalError(f"{what} was launched before all ranks were ready")
        status = self._meet(ctypes.addressof(self))
        if status:
            raise self._group.error(self.collective, status, self.count.value)


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


class SharedMemory:
    """A rank's end of the transport; see `Communicator`.

    Args:
        rank: Which rank of the mesh this is.
        mesh: All ranks.
        gather: How ranks tell each other where their memory is; called twice, in `ready`.
        toolchain: What builds the C half.
        host: What the ranks of this host are told apart by; "" where all ranks must be on it.
        deadline_s: How long a launch waits for the others before it raises.
        registers: Segments of each rank of this host that are mapped already, for another plan on
            the same memory; None for a plan that allocates its own.

    Attributes:
        rank, mesh, has_clean_abort: See `Communicator`.
        library: The functions of meet.c.
        crossings: After `ready`, the lanes whose ranks are on several hosts: launches there need
            a function that meets the others (`CollectiveLaunch.meet_by`).
        num_lanes: How many lanes all ranks have together.
        has_crossings: Whether any rank has such a lane, of which all ranks know.

    Raises DeviceError without a C compiler, or for a rank that is not in the mesh.
    """

    has_clean_abort = True

    def __init__(
        self,
        rank: int,
        mesh: Mesh,
        gather: AllGatherObject,
        toolchain: Toolchain | None,
        *,
        host: str = "",
        deadline_s: float = 300.0,
        registers: dict[int, list[Segment]] | None = None,
    ) -> None:
        if toolchain is None:
            raise DeviceError(
                f"rank {rank} of {mesh.num_ranks} needs a C compiler for collectives: install cc,"
                " gcc or clang, or name one as CC"
            )
        self.rank, self.mesh, self._gather = rank, mesh, gather
        num_here = 1 if host else mesh.num_ranks
        if not 0 <= rank < mesh.num_ranks or num_here > segments.MAX_RANKS:
            raise DeviceError(
                f"rank {rank} is not in the mesh {mesh}, or above the {segments.MAX_RANKS} ranks"
                " that one host can have; ranks are numbered from 0"
            )
        self._host = host
        self.crossings: list[CrossingLane] = []
        self.num_lanes, self.has_crossings = 0, False
        self.library = segments.library(toolchain)
        self._deadline_ns = int(deadline_s * 1e9)
        self._toolchain = toolchain
        # Filled by `ready`, and kept by those who have more plans on it.
        self._registers = {} if registers is None else registers
        self._own = OwnSegments([*self._registers.get(rank, ())])
        self._groups: list[GroupView] = []
        # By actor and order: the launches of a collective, one for each set of slots.
        self._bound: dict[tuple[str, int], list[CollectiveLaunch]] = {}
        # By rank, of those on this host.
        self._boards: dict[int, StatusPage] = {}
        self._lanes_of: dict[int, list[CommunicatorKey]] = {}
        self._processes: dict[int, int] = {}
        self._given_up: tuple[str, int] | None = None
        # Reentrant: the collector may drop a run of this thread while it gives this one up.
        self._lock = threading.RLock()

    @property
    def waited_ns(self) -> int:
        """How long this rank has waited for others; see `Communicator`."""
        return sum([int(group.struct.waited_ns) for group in self._groups])

    # -- binding ---------------------------------------------------------------------------------

    def allocate(self, size_bytes: int, alignment: int) -> Block:
        """Return memory that other ranks will map; see `Communicator.allocate`."""
        # A mapping begins at a page, which most alignments divide.
        spare = alignment if PAGE_BYTES % alignment else 0
        segment = self._own.allocate("registers", size_bytes + spare)
        start = -segment.address % alignment
        return segment.array[start : start + size_bytes]

    def beside(self) -> Callable[[], SharedMemory]:
        """Return what makes ends on the same memory; see `Communicator.beside`."""
        # Not a method of this end, which would keep its boards.
        return partial(
            SharedMemory, self.rank, self.mesh, self._gather, self._toolchain,
            host=self._host, deadline_s=self._deadline_ns / 1e9, registers=self._registers,
        )  # fmt: skip

    def bind(
        self, collective: Collective, inputs: tuple[Array, ...], outputs: tuple[Array, ...]
    ) -> Launch:
        """Return the launch of a collective; see `Communicator.bind`."""
        lane = lane_of(collective, self.mesh, self.rank)
        source = None if collective.op == RECEIVE else inputs[0]  # what it has more are tokens
        target = None if collective.op == SEND else outputs[0]
        operands = (source, target)
        if not all([array is None or array.flags.c_contiguous for array in operands]):
            raise DeviceError(f"{described(collective)} moves rows that lie one after another")
        places = [
            (-1, 0) if array is None else self._own.place(address(array), array.nbytes)
            for array in operands
        ]
        row = (*places[0], *places[1])
        # Smaller operands are copied to the board, so they may lie in private memory.
        if aside_bytes(collective) > STAGING_BYTES:
            _check_shared(collective, operands, row)
        launch = CollectiveLaunch(collective, operands, row, lane, self.library.af_meet)
        launches = self._bound.setdefault((collective.site.actor, collective.order), [])
        launches.append(launch)
        first = launches[0]
        launch.count = first.count
        if first.collective != collective:
            raise InternalError(
                f"actor {collective.site.actor!r} has {described(first.collective)} and"
                f" {described(collective)} in one place"
            )
        return launch

    # -- agreement -------------------------------------------------------------------------------

    def ready(self) -> None:
        """Meet all ranks once, agree and map their memory; see `Communicator.ready`."""
        try:
            self._own.allocate("board", StatusPage.size_bytes(len(self._lanes())))
        except MemoryError as error:
            raise OutOfMemory(
                f"rank {self.rank} of {self.mesh.num_ranks} has no shared memory for"
                f" collectives: {error}; a limit on memory or on the size of files is reached"
                " ('ulimit -v', 'ulimit -f', which counts for shared memory as well): raise it"
            ) from error
        collectives = tuple(self._descriptors())
        new = self._own.offer()[len(self._registers.get(self.rank, ())) :]
        descriptor = RankDescriptor(
            self._host or this_host(), os.getpid(), new, str(self.mesh), collectives
        )
        # Two meetings: files may be closed only after every rank has opened them.
        rows = self._gather("share memory for collectives", descriptor.row())
        offers = [RankDescriptor.of(value, rank) for rank, value in enumerate(rows)]
        # All ranks check the same offers, so all raise, or none does.
        if not self._host:
            check_hosts(offers)
        check_meshes(offers)
        check_collectives(offers, self.mesh.groups())
        own_host, failure = offers[self.rank].host, ""
        here = [rank for rank, offer in enumerate(offers) if offer.host == own_host]
        try:
            mapped = {rank: self._segments_of(rank, offers[rank]) for rank in here}
            for rank in here:
                self._processes[rank] = open_pidfd(offers[rank].pid)
        except OSError as error:
            failure = (
                f"rank {self.rank} cannot map the memory of the other ranks: {error}; all ranks"
                " must be processes of one user, in one container, with a file descriptor for"
                " each other rank ('ulimit -n')"
            )
        answers = self._gather("map the memory of the others", failure)
        # All have answered, so all have mapped; descriptors are scarce, and mappings need none.
        self._own.close_files()
        for rank, text in enumerate(answers):
            if text:
                raise PeerFailed(str(text), rank=rank)
        self._registers.update({rank: made[:-1] for rank, made in mapped.items()})
        with self._lock:
            self._connect(offers, mapped)
            if self._given_up is not None:
                # An abort that came before there were boards to mark.
                self._wake_all(*self._given_up)

    def _descriptors(self) -> Iterator[CollectiveDescriptor]:
        """Yield what the other ranks are told of each collective, and give it its place.

        Two of one order are of two programs of the plan. They are numbered as they were bound;
        ranks compare their texts, which shows other orders.
        """
        counts, coordinates = Counter[object](), self.mesh.coordinates(self.rank)
        for first, *others in self._bound.values():
            order, lane = first.collective.order, first.lane
            first.place = counts[lane, order], order
            counts[lane, order] += 1
            text = offered(first.collective, coordinates[lane.axis])
            rows = (first.operands, *[launch.operands for launch in others])
            yield CollectiveDescriptor(lane, first.place, text, rows)

    def _segments_of(self, rank: int, offer: RankDescriptor) -> list[Segment]:
        """Return what is mapped of a rank, and map what it offers: of one never met its board."""
        if rank == self.rank:
            return self._own.made
        # Of all that this one may meet in any plan, as those beside this one may have other lanes.
        may_meet = any([rank in self._ranks_along(axis) for axis in range(len(self.mesh.names))])
        new = map_all(offer.pid, offer.segments if may_meet else offer.segments[-1:])
        return [*self._registers.get(rank, ()), *new]

    def _lanes(self) -> list[CommunicatorKey]:
        return sorted({launches[0].lane for launches in self._bound.values()})

    def _ranks_along(self, axis: int, rank: int | None = None) -> tuple[int, ...]:
        """Return the group of a rank, this one by default."""
        return self.mesh.group(self.rank if rank is None else rank, axis)

    def _connect(
        self, offers: Sequence[RankDescriptor], mapped: Mapping[int, list[Segment]]
    ) -> None:
        """Fill in where everything of other ranks is; launches may run from then on."""
        for rank, own_segments in mapped.items():
            self._lanes_of[rank] = offers[rank].lanes
            self._boards[rank] = StatusPage(own_segments[-1], len(self._lanes_of[rank]))
        lanes = sorted({lane for offer in offers for lane in offer.lanes})
        self.num_lanes, hosts = len(lanes), [offer.host for offer in offers]
        self.has_crossings = any(
            [
                len({hosts[member] for member in lane.members(self._ranks_along(lane.axis, rank))})
                > 1
                for rank, offer in enumerate(offers)
                for lane in offer.lanes
            ]
        )
        for lane in self._lanes():
            members = lane.members(self._ranks_along(lane.axis))
            ranks = tuple([rank for rank in members if rank in mapped])
            texts = [f"{lane} {c.place} {c.text}" for c in offers[self.rank].along(lane)]
            # Each digest covers all texts of the lane, so that ranks with other programs never
            # match.
            digests = [_digest(texts, place) for place in range(len(texts))]
            calls = sorted(
                [own for own in self._bound.values() if own[0].lane == lane],
                key=lambda own: own[0].place,
            )
            group = GroupView(
                ranks,
                ranks != members,
                [offers[rank].lanes.index(lane) for rank in ranks],
                [mapped[rank] for rank in ranks],
                [self._boards[rank] for rank in ranks],
                [self._processes[rank] for rank in ranks],
                {d: described(own[0].collective) for d, own in zip(digests, calls, strict=True)},
                self._deadline_ns,
                self.abort,
                self._given_up_by,
                self._follow,
            )
            group.start(self.rank)
            self._groups.append(group)
            for place, launches in enumerate(calls):
                rows = [offers[rank].along(lane)[place].rows for rank in ranks]
                for row, launch in enumerate(launches):
                    launch.connect(group, digests[place], row, rows)
            if group.is_part:
                there = tuple([hosts[rank] for rank in members])
                bound = tuple([tuple(launches) for launches in calls])
                self.crossings.append(
                    CrossingLane(lanes.index(lane), lane, members, there, group, bound)
                )

    # -- ending ----------------------------------------------------------------------------------

    def abort(self, reason: str, at_fault: int | None = None) -> None:
        """Wake whoever waits on a rank of this host; see `Communicator.abort`."""
        with self._lock:
            # The first reason stays: those that follow are mostly consequences of it.
            if self._given_up is None:
                self._given_up = reason, self.rank if at_fault is None else at_fault
                self._wake_all(*self._given_up)

    def close(self) -> None:
        """Let go of other ranks' memory; see `Communicator.close`."""
        with self._lock:
            for launches in self._bound.values():
                for launch in launches:
                    launch.disconnect()
            for fd in self._processes.values():
                if fd >= 0:
                    os.close(fd)
            self._own.close_files()
            self._boards, self._processes, self._own = {}, {}, OwnSegments()
            self._registers = {}
            self._bound.clear()
            self.crossings.clear()
            self._groups.clear()

    def _wake_all(self, reason: str, at_fault: int) -> None:
        if not self._boards:
            return  # nobody sleeps yet; `ready` does it
        try:
            self._boards[self.rank].write_reason(reason, at_fault)
        finally:  # or they would sleep until the deadline
            # Atomic, and the first rank wins; + 1 because 0 means that nobody gave up.
            self.library.af_mark(self._first_board().abort_word, self.rank + 1)
            # Every line of every board: a rank may sleep in any lane.
            for board in self._boards.values():
                for lane in range(board.num_lanes):
                    self.library.af_give_up(board.line(lane))

    def _first_board(self) -> StatusPage:
        """Return the board that has the mark of who gave up: that of the host's first rank."""
        return self._boards[min(self._boards)]

    def _follow(self, rank: int) -> list[int]:
        """Return the chain of ranks that wait for one another, from `rank` to the last."""
        chain = [rank]
        # Stops at a rank that was seen: ranks that wait in a circle must not be followed for ever.
        while (next_rank := self._waited_for(chain[-1])) not in (None, self.rank, *chain):
            chain.append(cast("int", next_rank))
        return chain

    def _waited_for(self, rank: int) -> int | None:
        """Return a rank that has arrived less often than this one in a lane of both, or None."""
        if rank not in self._boards:
            return None  # on another host, of which nothing is seen
        if (far := self._boards[rank].waits_for()) is not None:
            return far
        for number, lane in enumerate(self._lanes_of[rank]):
            came = self._boards[rank].arrived(number)
            for other in lane.members(self._ranks_along(lane.axis, rank)):
                if (
                    other in self._boards
                    and self._boards[other].arrived(self._lanes_of[other].index(lane)) < came
                ):
                    return other
        return None

    def _given_up_by(self) -> PeerFailed:
        """Return the error of a rank that was woken: the first reason, and the rank at fault."""
        boards = self._boards
        rank = self._first_board().marked_by() if boards else None
        if rank is None:
            return PeerFailed("the run was aborted")
        text = f"rank {rank} aborted the run: {boards[rank].reason()}"
        return PeerFailed(text, rank=boards[rank].at_fault())


def _check_shared(collective: Collective, operands: Sequence[Array | None], row: Row) -> None:
    """Check that others can reach what they work on. Raises DeviceError."""
    # Large sums read the inputs of others; an all-reduce, and what moves, writes their outputs.
    kind = KIND_OF_OP[collective.op]
    is_read = kind in (segments.ALL_REDUCE, segments.REDUCE_SCATTER)
    is_written = kind != segments.REDUCE_SCATTER and collective.op != SEND
    accesses = ((is_read, operands[0], row[0]), (is_written, operands[1], row[2]))
    # Of an empty part there is nothing to reach.
    if any([is_met and place < 0 and x is not None and x.nbytes for is_met, x, place in accesses]):
        raise DeviceError(
            f"{described(collective)} uses private memory of this process; the registers of a"
            " collective are in shared memory"
        )


def _digest(texts: Sequence[str], place: int) -> int:
    """Return a 64-bit hash of one collective's place and of the texts of all of its lane."""
    text = "\n".join([*texts, str(place)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
