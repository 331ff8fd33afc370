"""One collective whose ranks are on several hosts: what each rank adds, sends and receives.

The ranks of a host meet in their shared memory as always, and between that arrival and the one at
the end messages cross. Of a sum each place of the group owns a part of the elements: on every other
host one rank, the *counterpart* of the owner, adds there what the tree of the sum has whole below
one node (`sum_order`), and sends those sums; the owner adds them to its host's own operands, writes
the result to all ranks of its host, and sends it to the counterparts, which do the same on theirs.
So each host sends and receives twice (H - 1) / H of the operand for H hosts. What is gathered goes
to one counterpart per host, what is exchanged straight to its rank.

Operands that are copied aside (see `meet.c`) may lie in private memory, and their time is that of
the messages: there every place owns all elements, so that one message each way is enough.

All buffers are made by `ready`: nothing is allocated per firing.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from actors.collectives import segments
from actors.collectives.handshake import KIND_OF_OP, described, input_shape, output_shape, region
from actors.collectives.pieces import (
    PARTS,
    PIECE_BYTES,
    RESULTS,
    Incoming,
    MessageBuffers,
    Outgoing,
    PointToPoint,
    Waiting,
    address_of,
)
from actors.collectives.segments import Arrival, ByteBlocks, SumByPieces
from actors.collectives.shared_memory import CollectiveLaunch, CrossingLane
from actors.collectives.sum_order import partial_steps, subtrees, total_steps
from compiler.contract.collective import Collective
from compiler.contract.errors import DeviceError, PeerFailed
from compiler.contract.types import DType


class Crossing:
    """A collective of this rank on a lane whose ranks are on several hosts.

    Called with the address of a launch, it does what `af_meet` does where all are on one host, and
    returns a status as that does. Raises PeerFailed where a rank of another host does not come, or
    comes for something else.

    Args:
        lane: who meets, and where each is.
        launches: those of the collective.
        transport: how messages get to other hosts.
        library: the functions of meet.c.
        first_tag: the tag of `PARTS`; that of `RESULTS` is the next.
        pool: the buffers of the lane, by direction, tag and peers.
    """

    def __init__(
        self,
        lane: CrossingLane,
        launches: Sequence[CollectiveLaunch],
        transport: PointToPoint,
        library: ctypes.CDLL,
        first_tag: int,
        pool: dict[tuple[object, ...], MessageBuffers],
    ) -> None:
        launch = launches[0]
        self.collective, self.digest, self.firing = launch.collective, int(launch.digest), 0
        self.transport, self._library, self._pool = transport, library, pool
        self._lane, self._count, self._first_tag = lane, launch.count, first_tag
        self._is_aside = bool(launch.is_aside)
        self._places = GroupPlacement(lane)
        if len(lane.ranks) > segments.MAX_SOURCES:
            raise DeviceError(
                f"{described(self.collective)} is for {len(lane.ranks)} ranks on several hosts,"
                f" which can be {segments.MAX_SOURCES} at most; cut the mesh along another axis"
            )
        num_here = len(lane.view.ranks)
        self._from, self._to = pointers(num_here), pointers(num_here)
        # C holds addresses of these only.
        self._kept: list[object] = []
        self._before: list[Callable[[], None]] = []
        self._flows: list[Outgoing | Incoming] = []
        {
            segments.ALL_REDUCE: self._reduce,
            segments.REDUCE_SCATTER: self._reduce,
            segments.MOVE: self._move,
            segments.TRANSFER: self._transfer,
        }[KIND_OF_OP[self.collective.op]]()

    def __call__(self, meeting: int) -> int:
        """Meet, as `af_meet`."""
        self.firing = self._count.value
        status: int = self._library.af_begin(meeting, self._from, self._to)
        if status:
            return status
        for do in self._before:
            do()
        is_over = self._exchange()
        return int(self._library.af_end(meeting)) if is_over else segments.ABORTED

    # -- messages --------------------------------------------------------------------------------

    def _exchange(self) -> bool:
        """Run all messages of a firing; return False where the run was given up."""
        for flow in self._flows:
            flow.start()
        flows, waiting = [flow for flow in self._flows if not flow.is_done], Waiting(self._lane)
        try:
            while flows:
                # A list, not a generator: each of them has its turn.
                if any([flow.step(self) for flow in flows]):
                    waiting.end()
                    flows = [flow for flow in flows if not flow.is_done]
                    continue
                if waiting.is_given_up():
                    self._abandon()
                    return False
                # Who does not send is to blame sooner than who does not take.
                late = next((flow for flow in flows if isinstance(flow, Incoming)), flows[0])
                if waiting.is_late(late.waits_for()):
                    raise self._failure(segments.TIMED_OUT, late.waits_for(), (0, 0))
        except BaseException:  # whatever it is, the messages are of no use any more
            self._abandon()
            raise
        finally:
            waiting.end()
        return True

    def check(self, peer: int, header: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        """Check what a message is of. Raises PeerFailed."""
        if header == wanted:
            return
        is_firing = header[0] == wanted[0] and header[1] != wanted[1]
        kind = segments.WRONG_FIRING if is_firing else segments.WRONG_COLLECTIVE
        raise self._failure(kind, peer, header)

    def _failure(self, kind: int, peer: int, header: Sequence[int]) -> PeerFailed:
        here = f"{described(self.collective)}, firing {self.firing}"
        return self._lane.view.failure(kind, peer, Arrival(header[0], header[1]), here)

    def _abandon(self) -> None:
        for flow in self._flows:
            for request in flow.requests():
                self.transport.abandon(request)
            flow.under_way.clear()

    def _buffers(self, *key: object, peers: Sequence[int], size_bytes: int) -> MessageBuffers:
        # What goes to several peers is the same for all.
        num_arrays = len(peers) if key[0] == "in" else 1
        buffers = self._pool.setdefault((*key, *peers), MessageBuffers(num_arrays))
        buffers.reserve(size_bytes)
        return buffers

    def _send(
        self,
        kind: int,
        peers: Sequence[int],
        pieces: Sequence[tuple[int, int]],
        unit_bytes: int,
        make: Callable[[int, int, int], None],
        after: Incoming | None = None,
    ) -> None:
        most = unit_bytes * max([end - begin for begin, end in pieces], default=0)
        buffers = self._buffers("out", kind, peers=peers, size_bytes=most)
        tag = self._first_tag + kind
        self._flows.append(Outgoing(tuple(peers), tag, pieces, unit_bytes, buffers, make, after))

    def _receive(
        self,
        kind: int,
        peers: Sequence[int],
        pieces: Sequence[tuple[int, int]],
        unit_bytes: Sequence[int],
        take: Callable[[int, int, Sequence[int]], None],
    ) -> Incoming:
        most = max(unit_bytes) * max([end - begin for begin, end in pieces], default=0)
        buffers = self._buffers("in", kind, peers=peers, size_bytes=most)
        tag = self._first_tag + kind
        incoming = Incoming(tuple(peers), tag, pieces, unit_bytes, buffers, take)
        self._flows.append(incoming)
        return incoming

    # -- sums ------------------------------------------------------------------------------------

    def _reduce(self) -> None:
        """Plan a sum: owners, the sums that cross to them, and the results that cross back."""
        places, is_spread = self._places, self.collective.op == "all_reduce" and not self._is_aside
        units = [self._unit_bytes(subtree) for subtree in places.subtrees]
        for owner in places.foreign:
            if places.counterpart(owner, places.own_host) == places.own:
                self._add_for(owner, units, is_spread)
        others = [h for h in places.all_hosts if h != places.own_host]
        helpers = [places.counterpart(places.own, host) for host in others]
        ranks = [self._lane.ranks[place] for place in helpers]
        sizes = [
            sum([u for u, s in zip(units, places.subtrees, strict=True) if places.is_at(s, host)])
            for host in others
        ]
        pieces, total = self._pieces(places.own), self._total(others, units, is_spread)
        incoming = self._receive(PARTS, ranks, pieces, sizes, total)
        if is_spread:
            itemsize = self.collective.reads.dtype.itemsize

            def make(begin: int, end: int, message: int) -> None:
                start = self._to[places.own_index] + begin * itemsize
                ctypes.memmove(message, start, (end - begin) * itemsize)

            self._send(RESULTS, ranks, pieces, itemsize, make, incoming)

    def _add_for(self, owner: int, units: Sequence[int], is_spread: bool) -> None:
        """Send the sums of this host to an owner on another one, and receive what comes of them."""
        places, rank = self._places, self._lane.ranks[owner]
        own = [s for s in places.subtrees if places.is_at(s, places.own_host)]
        sums = []
        for subtree in own:
            is_sum = len(subtree) > 1
            steps = partial_steps(subtree, places.index_here)
            sums.append(self._sum(owner, steps, [], int(not is_sum), is_packed=True))
        sizes = [self._unit_bytes(subtree) for subtree in own]
        target = pointers(1)

        def make(begin: int, end: int, message: int) -> None:
            for part, unit_bytes in zip(sums, sizes, strict=True):
                target[0] = message
                self._library.af_sum(ctypes.addressof(part), self._from, target, begin, end)
                message += (end - begin) * unit_bytes

        pieces = self._pieces(owner)
        self._send(PARTS, (rank,), pieces, sum(sizes), make)
        if is_spread:
            itemsize = self.collective.reads.dtype.itemsize

            def take(begin: int, end: int, messages: Sequence[int]) -> None:
                for start in self._to:
                    ctypes.memmove(start + begin * itemsize, messages[0], (end - begin) * itemsize)

            self._receive(RESULTS, (rank,), pieces, (itemsize,), take)

    def _total(
        self, others: Sequence[str], units: Sequence[int], is_spread: bool
    ) -> Callable[[int, int, Sequence[int]], None]:
        """Return what adds the sums of other hosts to this one's operands."""
        places, num_here = self._places, len(self._from)
        pairs = zip(places.subtrees, units, strict=True)
        foreign = [(s, unit) for s, unit in pairs if not places.is_at(s, places.own_host)]
        steps = total_steps(self._lane.hosts, places.own_host, places.index_here, num_here)
        num_to = num_here if is_spread else 1
        part = self._sum(places.own, steps, [unit for _, unit in foreign], num_to, is_packed=False)
        sources, own_target = pointers(num_here + len(foreign)), pointers(1)

        def total(begin: int, end: int, messages: Sequence[int]) -> None:
            ctypes.memmove(sources, self._from, ctypes.sizeof(self._from))
            starts = dict(zip(others, messages, strict=True))
            for number, (subtree, unit_bytes) in enumerate(foreign, num_here):
                host = self._lane.hosts[subtree.start]
                sources[number] = starts[host]
                starts[host] += (end - begin) * unit_bytes
            own_target[0] = self._to[places.own_index]
            targets = self._to if is_spread else own_target
            self._library.af_sum(ctypes.addressof(part), sources, targets, begin, end)

        return total

    def _unit_bytes(self, subtree: range) -> int:
        """Return the bytes of an element that crosses: a sum in the type that is added, or not."""
        dtype = self.collective.reads.dtype
        return sum_bytes(dtype) if len(subtree) > 1 else dtype.itemsize

    def _pieces(self, owner: int) -> list[tuple[int, int]]:
        """Return the elements that a place owns, in pieces."""
        c, dtype = self.collective, self.collective.reads.dtype
        begin, end = 0, c.reads.num_elements
        if c.op == "reduce_scatter":
            end = math.prod(output_shape(c, owner))
        elif not self._is_aside:
            count, num_places = end, len(self._lane.ranks)
            begin, end = count * owner // num_places, count * (owner + 1) // num_places
        return pieces_of(begin, end, PIECE_BYTES // sum_bytes(dtype))

    def _sum(
        self, owner: int, steps: Sequence[int], foreign: Sequence[int], num_to: int, is_packed: bool
    ) -> SumByPieces:
        """Return a sum of what a place owns: of local operands, and of `foreign` units of bytes."""
        c, dtype, num_here = self.collective, self.collective.reads.dtype, len(self._from)
        order = (ctypes.c_int32 * len(steps))(*steps)
        packed = (ctypes.c_int64 * (num_here + len(foreign)))(*[0] * num_here, *foreign)
        rows = ByteBlocks()
        rows.run_bytes = c.reads.size_bytes
        if c.op == "reduce_scatter":
            rows = region(c, owner, owner)
        self._kept += [order, packed]
        return SumByPieces(
            segments.DTYPES.index(dtype), segments.REDUCTIONS.index(c.by), dtype.itemsize,
            sum_bytes(dtype), len(packed), num_to, max(1, rows.run_bytes // dtype.itemsize),
            rows.from_offset, rows.from_strides[0], rows.to_offset, rows.to_strides[0],
            int(is_packed), ctypes.addressof(order), ctypes.addressof(packed),
        )  # fmt: skip

    # -- moves -----------------------------------------------------------------------------------

    def _move(self) -> None:
        """Plan an all-gather or an all-to-all."""
        c, places = self.collective, self._places
        own, index = places.own, places.own_index
        for other in places.here:
            ends = (other, own) if self._is_aside else (own, other)
            self._before.append(
                partial(self._copy_here, places.index_here[other], region(c, *ends))
            )
        if c.op == "all_to_all":
            for other in places.foreign:
                self._send_block(other, region(c, own, other))
                self._receive_blocks(other, [(index, dense_block(region(c, other, own)))])
            return
        size_bytes = sized(c, own)
        # Aside every rank receives for itself, else one for all ranks of its host.
        receivers = [
            place
            for place in places.foreign
            if self._is_aside or places.counterpart(own, self._lane.hosts[place]) == place
        ]
        peers = [self._lane.ranks[place] for place in receivers]

        def make(begin: int, end: int, message: int) -> None:
            ctypes.memmove(message, self._from[index] + begin, end - begin)

        self._send(PARTS, peers, pieces_of(0, size_bytes, PIECE_BYTES), 1, make)
        for other in places.foreign:
            targets = (own,) if self._is_aside else places.here
            if self._is_aside or places.counterpart(other, places.own_host) == own:
                blocks = [(places.index_here[n], region(c, other, n)) for n in targets]
                self._receive_blocks(other, blocks, sized(c, other))

    def _transfer(self) -> None:
        """Plan what one rank sends to another: the first of the lane to the other one."""
        block = region(self.collective, 0, 1)
        if self._places.own == 0:
            self._send_block(1, block)
        else:
            self._receive_blocks(0, [(0, dense_block(block))])

    def _copy_here(self, other: int, block: ByteBlocks) -> None:
        """Copy between the operands of this rank and another one of the host."""
        own = self._places.own_index
        ends = (own, other) if self._is_aside else (other, own)
        self._library.af_copy(self._to[ends[0]], self._from[ends[1]], ctypes.addressof(block))

    def _send_block(self, place: int, block: ByteBlocks) -> None:
        """Send a block of the own operand, packed before the first piece goes."""
        own, dense = self._places.own_index, dense_block(block, is_target=True)
        size_bytes = block_bytes(block)
        scratch = np.zeros(max(1, size_bytes), np.uint8)
        start = address_of(scratch)
        self._kept += [scratch, dense]
        self._before.append(
            lambda: self._library.af_copy(start, self._from[own], ctypes.addressof(dense))
        )

        def make(begin: int, end: int, message: int) -> None:
            ctypes.memmove(message, start + begin, end - begin)

        pieces = pieces_of(0, size_bytes, PIECE_BYTES)
        self._send(PARTS, (self._lane.ranks[place],), pieces, 1, make)

    def _receive_blocks(
        self, place: int, blocks: Sequence[tuple[int, ByteBlocks]], size_bytes: int | None = None
    ) -> None:
        """Receive bytes, and write them to operands of this host when all are there."""
        size_bytes = block_bytes(blocks[0][1]) if size_bytes is None else size_bytes
        scratch = np.zeros(max(1, size_bytes), np.uint8)
        start = address_of(scratch)
        self._kept += [scratch, *blocks]

        def take(begin: int, end: int, messages: Sequence[int]) -> None:
            ctypes.memmove(start + begin, messages[0], end - begin)
            if end == size_bytes:
                for index, block in blocks:
                    self._library.af_copy(self._to[index], start, ctypes.addressof(block))

        pieces = pieces_of(0, size_bytes, PIECE_BYTES)
        self._receive(PARTS, (self._lane.ranks[place],), pieces, (1,), take)


class GroupPlacement:
    """Where the places of a group are: `own`, those `here`, and those on other hosts.

    `index_here` is the number of a place among those of this host, -1 for others; `subtrees` is
    what each host can add by itself.
    """

    def __init__(self, lane: CrossingLane) -> None:
        hosts, view = lane.hosts, lane.view
        self.own_index = int(view.struct.own)
        self.own = lane.ranks.index(view.ranks[self.own_index])
        self.own_host = hosts[self.own]
        self.all_hosts = tuple(dict.fromkeys(hosts))
        self.subtrees, self._hosts = subtrees(hosts), hosts
        self._members = {
            host: [n for n, at in enumerate(hosts) if at == host] for host in self.all_hosts
        }
        self.here = tuple(self._members[self.own_host])
        self.foreign = [n for n, at in enumerate(hosts) if at != self.own_host]
        self.index_here = [self.here.index(n) if n in self.here else -1 for n in range(len(hosts))]

    def counterpart(self, place: int, host: str) -> int:
        """Return the place on a host that works for a place of another host."""
        members = self._members[host]
        return members[place % len(members)]

    def is_at(self, subtree: range, host: str) -> bool:
        """Whether a subtree is of a host."""
        return self._hosts[subtree.start] == host


def pointers(count: int) -> ctypes.Array[ctypes.c_int64]:
    """Return room for so many addresses; of `ctypes.c_void_p` a null would be None."""
    return (ctypes.c_int64 * count)()


def sum_bytes(dtype: DType) -> int:
    """Return the bytes of an element as it is added: halves are in float32."""
    return 4 if dtype in (DType.FLOAT16, DType.BFLOAT16) else dtype.itemsize


def pieces_of(begin: int, end: int, most: int) -> list[tuple[int, int]]:
    """Return [begin, end) in pieces of at most so many."""
    return [(start, min(start + most, end)) for start in range(begin, end, most)]


def sized(collective: Collective, place: int) -> int:
    """Return the bytes that a place gives."""
    return math.prod(input_shape(collective, place)) * collective.reads.dtype.itemsize


def block_bytes(block: ByteBlocks) -> int:
    """Return the bytes of a block."""
    return math.prod([int(n) for n in block.extents]) * int(block.run_bytes)


def dense_block(block: ByteBlocks, is_target: bool = False) -> ByteBlocks:
    """Return a block that is read from bytes one after another, or written to such."""
    _, middle, last = block.extents
    run = block.run_bytes
    dense = (ctypes.c_int64 * 3)(middle * last * run, last * run, run)
    if is_target:
        return ByteBlocks(block.extents, block.from_strides, dense, block.from_offset, 0, run)
    return ByteBlocks(block.extents, dense, block.to_strides, 0, block.to_offset, run)
