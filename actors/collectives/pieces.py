"""Messages between hosts: pieces of an operand, some of them under way at once.

A message is a header, which says what its sender came for, and a piece. A rank runs what it sends
and what it receives side by side, each by steps that never block (`Outgoing`, `Incoming`), until
all are done, the run is given up, or a rank is late.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from actors.collectives.shared_memory import CrossingLane
from actors.machine.protocol import Array

PIECE_BYTES = 1 << 20
"""Of a message at most, for each sum that it carries."""

WINDOW = 3
"""Pieces that are under way at once: one is added while others cross."""

HEADER = struct.Struct("<QQQQ")
"""Digest of the collective, its firing, the piece, and the bytes that follow."""

PARTS, RESULTS = range(2)
"""Kinds of messages of a lane, each with a tag: those of one are received in order."""

_LOOKS = 30  # before a rank that waits sleeps for the first time
_SLEEP_S, _MOST_SLEEP_S = 20e-6, 200e-6
_MOST_AWAKE_NS = 100_000_000


class PointToPoint(Protocol):
    """Messages between ranks on any hosts; no call blocks. Those with one tag arrive in order."""

    @property
    def bytes_sent(self) -> int:
        """How many bytes this rank has sent."""
        ...

    def isend(self, data: Array, peer: int, tag: int) -> Any:
        """Begin to send; return a request. `data` stays as it is until that is done."""
        ...

    def irecv(self, data: Array, peer: int, tag: int) -> Any:
        """Begin to receive a message of at most these bytes; return a request."""
        ...

    def is_done(self, request: Any) -> bool:
        """Whether a request is done. Raises PeerFailed where it never will be."""
        ...

    def abandon(self, request: Any) -> None:
        """Give up a request that is not done."""
        ...


@dataclass(slots=True)
class MessageBuffers:
    """The messages of one kind between this rank and some peers, for all collectives of a lane."""

    num_peers: int
    size_bytes: int = 0
    arrays: list[list[Array]] = field(default_factory=list)

    def reserve(self, size_bytes: int) -> None:
        """Make room for a message of so many bytes after its header."""
        self.size_bytes = max(self.size_bytes, HEADER.size + size_bytes)

    def allocate(self, size_bytes: int) -> None:
        """Make the memory, of so many bytes for each message."""
        self.arrays = [
            [np.zeros(size_bytes, np.uint8) for _ in range(self.num_peers)] for _ in range(WINDOW)
        ]


class Firing(Protocol):
    """What messages of one firing have in common."""

    digest: int
    firing: int
    transport: PointToPoint

    def check(self, peer: int, header: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        """Raise PeerFailed where a peer came for something else."""


@dataclass(slots=True)
class Outgoing:
    """Pieces that go to some peers, all the same; `make(begin, end, address)` fills a message."""

    peers: tuple[int, ...]
    tag: int
    pieces: Sequence[tuple[int, int]]
    unit_bytes: int
    buffers: MessageBuffers
    make: Callable[[int, int, int], None]
    after: Incoming | None = None  # a piece goes once that one has taken it
    next: int = 0
    under_way: deque[list[Any]] = field(default_factory=deque)

    @property
    def is_done(self) -> bool:
        """Whether all has been sent."""
        return self.next == len(self.pieces) and not self.under_way

    def waits_for(self) -> int:
        """Return a peer that has not taken all."""
        return self.peers[0]

    def start(self) -> None:
        """Begin another firing."""
        self.next = 0

    def step(self, at: Firing) -> bool:
        """Do what can be done now; return whether there was something."""
        before = self.next, len(self.under_way)
        while self.under_way and all([at.transport.is_done(r) for r in self.under_way[0]]):
            self.under_way.popleft()
        most = len(self.pieces) if self.after is None else self.after.taken
        while self.next < most and len(self.under_way) < WINDOW:
            begin, end = self.pieces[self.next]
            message = self.buffers.arrays[self.next % WINDOW][0]
            size_bytes = (end - begin) * self.unit_bytes
            HEADER.pack_into(message.data, 0, at.digest, at.firing, self.next, size_bytes)
            self.make(begin, end, address_of(message) + HEADER.size)
            data = message[: HEADER.size + size_bytes]
            # One by one: of those that were begun before one fails, all are given up.
            requests: list[Any] = []
            self.under_way.append(requests)
            for peer in self.peers:
                requests.append(at.transport.isend(data, peer, self.tag))  # noqa: PERF401
            self.next += 1
        return before != (self.next, len(self.under_way))

    def requests(self) -> list[Any]:
        """Return what is under way."""
        return [request for requests in self.under_way for request in requests]


@dataclass(slots=True)
class Incoming:
    """Pieces that come from some peers, one of each at a time; `take(begin, end, addresses)`."""

    peers: tuple[int, ...]
    tag: int
    pieces: Sequence[tuple[int, int]]
    unit_bytes: Sequence[int]  # by peer
    buffers: MessageBuffers
    take: Callable[[int, int, Sequence[int]], None]
    posted: int = 0
    taken: int = 0
    under_way: deque[list[Any]] = field(default_factory=deque)

    @property
    def is_done(self) -> bool:
        """Whether all has come."""
        return self.taken == len(self.pieces)

    def waits_for(self) -> int:
        """Return a peer of which the next piece has not come."""
        waiting = zip(self.under_way[0], self.peers, strict=True) if self.under_way else ()
        return next((peer for request, peer in waiting if request is not None), self.peers[0])

    def start(self) -> None:
        """Begin another firing."""
        self.posted = self.taken = 0

    def step(self, at: Firing) -> bool:
        """Do what can be done now; return whether there was something."""
        before = self.posted, self.taken
        while self.posted < min(len(self.pieces), self.taken + WINDOW):
            arrays = self.buffers.arrays[self.posted % WINDOW]
            posted: list[Any] = []
            self.under_way.append(posted)
            for array, peer in zip(arrays, self.peers, strict=True):
                posted.append(at.transport.irecv(array, peer, self.tag))
            self.posted += 1
        if self.under_way:
            requests = self.under_way[0]
            arrays = self.buffers.arrays[self.taken % WINDOW]
            begin, end = self.pieces[self.taken]
            for n, request in enumerate(requests):
                if request is not None and at.transport.is_done(request):
                    requests[n] = None
                    wanted = at.digest, at.firing, self.taken, (end - begin) * self.unit_bytes[n]
                    at.check(self.peers[n], HEADER.unpack_from(arrays[n].data), wanted)
            if not any([request is not None for request in requests]):
                self.under_way.popleft()
                self.take(begin, end, [address_of(x) + HEADER.size for x in arrays])
                self.taken += 1
        return before != (self.posted, self.taken)

    def requests(self) -> list[Any]:
        """Return what is under way."""
        return [r for requests in self.under_way for r in requests if r is not None]


def address_of(array: Array) -> int:
    """Return where an array begins."""
    start: int = array.__array_interface__["data"][0]
    return start


class Waiting:
    """How long a rank has waited for messages, and whether it may stop."""

    def __init__(self, lane: CrossingLane) -> None:
        view = lane.view
        self._group = view.struct
        self._deadline_ns, self._board = view.deadline_ns, view.boards[view.struct.own]
        self._word = ctypes.c_uint32.from_address(view.boards[0].line(view.lanes[0]))
        self._num_looks, self._sleep_s, self._waited_ns, self._since = 0, _SLEEP_S, 0, 0

    def end(self) -> None:
        """Forget what was waited: something has come."""
        if self._num_looks:
            self._board.note_waiting(None)
            self._group.waited_ns += self._waited_ns
            self._num_looks, self._sleep_s, self._waited_ns = 0, _SLEEP_S, 0

    def is_given_up(self) -> bool:
        """Whether the run was given up on this host."""
        return bool(self._word.value & 1)

    def is_late(self, rank: int) -> bool:
        """Wait a little for a rank; return whether the deadline is over."""
        now_ns = time.monotonic_ns()
        if self._num_looks:
            # Who was stopped itself has waited no longer than it was awake.
            self._waited_ns += min(now_ns - self._since, _MOST_AWAKE_NS)
        else:
            self._board.note_waiting(rank)
        self._num_looks, self._since = self._num_looks + 1, now_ns
        if self._num_looks > _LOOKS:
            time.sleep(self._sleep_s)
            self._sleep_s = min(1.5 * self._sleep_s, _MOST_SLEEP_S)
        return self._waited_ns >= self._deadline_ns
