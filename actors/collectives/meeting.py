"""The ranks of one group, and the launches in which one of them meets the others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from actors.collectives import native
from actors.collectives.agreement import MEND, Row
from actors.collectives.board import ASIDE_BYTES, Board
from actors.collectives.collective import Collective
from actors.collectives.native import ByteBlocks, GroupState, MeetingState
from actors.collectives.segments import Segment
from actors.kernels.native.launch import address
from actors.protocol import Array
from compiler.errors import InternalError, PeerFailed


@dataclass(slots=True)
class GroupView:
    """The ranks that meet in a lane, as one of them sees them.

    `lanes` are the lane's numbers on the board of each. `segments` are those of each rank as they
    are mapped here, with the board last; they live as long as this does. `texts` are its
    collectives by digest; `give_up` has everyone wake who sleeps anywhere, and `given_up` is the
    error of who was woken.
    """

    ranks: tuple[int, ...]
    lanes: Sequence[int]
    segments: Sequence[Sequence[Segment]]
    boards: Sequence[Board]
    processes: Sequence[int]
    texts: Mapping[int, str]
    deadline_ns: int
    give_up: Callable[[str, int], None]
    given_up: Callable[[], PeerFailed]
    struct: GroupState = field(init=False)
    _kept: tuple[object, ...] = field(init=False)

    def start(self, rank: int) -> None:
        """Make what C sees of it."""
        boards = list(zip(self.boards, self.lanes, strict=True))
        lines = native.addresses([board.line(lane) for board, lane in boards])
        aside = native.addresses([board.aside(lane) for board, lane in boards])
        processes = (ctypes.c_int32 * len(self.ranks))(*self.processes)
        self._kept = (lines, aside, processes)
        self.struct = GroupState(
            len(self.ranks), self.ranks.index(rank), self.deadline_ns, ASIDE_BYTES, 0, 0, 0,
            *[ctypes.addressof(array) for array in (lines, aside, processes)],
        )  # fmt: skip

    def error(self, collective: Collective, status: int, firing: int) -> PeerFailed:
        """Return the error of a launch that ended with a status, and have all others end too."""
        kind, place = status & 255, status >> 8
        if kind == native.GIVEN_UP:
            return self.given_up()
        own, rank = self.ranks[self.struct.own], self.ranks[place]
        here = f"{collective}, firing {firing}"
        came_to = self.boards[place].came_to(self.lanes[place], self.struct.num_arrivals & 1)
        other = self.texts.get(came_to.digest, "something unknown")
        said = {
            native.LATE: f"rank {rank} did not come within {self.deadline_ns / 1e9:g} s to where"
            f" rank {own} waits: {here}. Its process lives, but is stopped, hangs or is slow",
            native.GONE: f"the process of rank {rank} has ended; rank {own} waits for it: {here}",
            native.ELSEWHERE: f"rank {rank} came to {other}, firing {came_to.firing}, where rank"
            f" {own} came to {here}; {MEND}",
            native.OTHER_FIRING: f"rank {rank} came to firing {came_to.firing} where rank {own}"
            f" came to {here}; {MEND}",
        }
        text = said[kind]
        self.give_up(text, rank)
        return PeerFailed(text, rank=rank)


class MeetLaunch:
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
        self._connected: tuple[MeetingState, tuple[object, ...]] | None = None

    def connect(
        self, group: GroupView, digest: int, row: int, rows: Sequence[Sequence[Row]]
    ) -> None:
        """Fill in where the operands of all ranks are.

        `rows` are those of the collective that each rank offers, `row` is this launch's among the
        own.
        """
        c, own = self._collective, group.struct.own
        is_aside = c.aside_bytes <= ASIDE_BYTES
        if c.kind == native.TRANSFER:
            found = [c.region(0, 1)]
        elif c.kind == native.MOVE:
            places = range(len(group.ranks))
            found = [c.region(p, own) if is_aside else c.region(own, p) for p in places]
        elif c.kind == native.REDUCE_SCATTER:
            found = [c.region(own, own)]
        else:
            found = []
        regions = (ByteBlocks * max(1, len(found)))(*found)
        tables = _addresses(rows, group.segments)
        pointers = [native.addresses([ctypes.addressof(of) for of in table]) for table in tables]
        meeting = MeetingState(
            group=ctypes.addressof(group.struct),
            digest=digest,
            firings=ctypes.addressof(self._firings),
            op=c.kind,
            dtype=native.DTYPES.index(c.dtype),
            by=native.REDUCTIONS.index(c.by) if c.by else 0,
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
        self._group, self._connected = group, (meeting, (regions, tables, pointers))

    def disconnect(self) -> None:
        """Let a call raise from now on. What C worked on lives as long as this launch."""
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
    rows: Sequence[Sequence[Row]], segments: Sequence[Sequence[Segment]]
) -> tuple[list[ctypes.Array[ctypes.c_void_p]], ...]:
    """Return where the operands of each rank of a group are here, what is read and what is left."""
    found: tuple[list[ctypes.Array[ctypes.c_void_p]], ...] = ([], [])
    for own, mapped in zip(rows, segments, strict=True):
        at = [segment.address for segment in mapped]
        for column, (segment, offset) in enumerate(((0, 1), (2, 3))):
            places = [at[r[segment]] + r[offset] if r[segment] >= 0 else 0 for r in own]
            found[column].append(native.addresses(places))
    return found
