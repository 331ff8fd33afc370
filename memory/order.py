"""Execution order: run the ops so that fewer bytes are alive at the worst moment.

List scheduling: of the ops whose predecessors have run, take the one that frees the most bytes
beyond those it allocates; where none frees anything, the original order decides, so nothing moves
without a gain. A weight's update thus runs as soon as its gradient exists and frees it, and of dW
and dX the one that frees an activation goes first. Choosing the least growth always is a second
policy: better where branches compete, far worse where many ops are ready from the start.

Greedy scheduling has no guarantee, so `better_order` measures each proposal exactly and keeps the
original unless one is better: by its peak, and at equal peaks by its bytes x steps. The second
matters to who plans further from here: recomputation takes the peak away and meets what is below.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import chain

import numpy.typing as npt

from memory.liveness import IntArray, as_column, lifetimes, lower_bound


class Policy(Enum):
    """What moves an op ahead of its place in the original order."""

    FREES_FIRST = "frees first"
    """Only ops that free more than they allocate move, to the earliest step that allows them."""

    LEAST_GROWTH = "least growth"
    """At every step the op with the smallest growth of live bytes runs."""


@dataclass(frozen=True, slots=True)
class OrderChoice:
    """An execution order and what it is worth.

    order: the ops by step. peak_bytes: its most live bytes. original_peak_bytes: those of the
    original order, never smaller. policy: the one that proposed the order; None where the original
    stays.
    """

    order: tuple[int, ...]
    peak_bytes: int
    original_peak_bytes: int
    policy: Policy | None


@dataclass(frozen=True, slots=True)
class _Ops:
    """The ops with what follows from their own order, worked out once for all proposals.

    touched: the distinct buffers of each op. first_writer: per buffer the op that brings it to
    life; -1 where it is live from the start or never. successors, num_before: the edges.
    """

    reads: Sequence[Sequence[int]]
    writes: Sequence[Sequence[int]]
    size: IntArray
    keep_alive: Collection[int]
    touched: list[tuple[int, ...]]
    first_writer: list[int]
    successors: list[list[int]]
    num_before: list[int]

    @classmethod
    def of(
        cls,
        num_ops: int,
        reads: Sequence[Sequence[int]],
        writes: Sequence[Sequence[int]],
        sizes: npt.ArrayLike,
        predecessors: Sequence[Sequence[int]],
        keep_alive: Collection[int],
    ) -> _Ops:
        size = as_column(sizes, "sizes")
        touched = _touched(num_ops, reads, writes, size.size, keep_alive)
        first_writer = _first_writers(reads, writes, size.size)
        successors, num_before = _dependences(num_ops, reads, writes, predecessors, size.size)
        return cls(reads, writes, size, keep_alive, touched, first_writer, successors, num_before)

    def in_order(self, policy: Policy) -> tuple[int, ...]:
        """Return a legal order of the ops with, as a rule, fewer live bytes. O(E log E)."""
        num_waiting = self.num_before.copy()
        growth = _Growth(self.touched, self.first_writer, self.size.tolist(), self.keep_alive)
        clamps = policy is Policy.FREES_FIRST

        def priority(op: int) -> tuple[int, int]:
            grows = growth.of_op[op]
            # The op's number breaks ties: what gains nothing stays in its own order.
            return (min(grows, 0) if clamps else grows, op)

        is_done = [False] * len(num_waiting)
        ready = [priority(op) for op, waits in enumerate(num_waiting) if waits == 0]
        heapify(ready)
        order = []
        while ready:
            op = heappop(ready)[1]
            if is_done[op]:  # an entry from before its growth fell
                continue
            is_done[op] = True
            order.append(op)
            for follower in self.successors[op]:
                num_waiting[follower] -= 1
                if num_waiting[follower] == 0:
                    heappush(ready, priority(follower))
            for changed in growth.run(op):
                if num_waiting[changed] == 0:
                    heappush(ready, priority(changed))
        return tuple(order)

    def usage(self, order: Sequence[int]) -> tuple[int, float]:
        """Return the most live bytes of an order, and its bytes x steps."""
        # A buffer that is read before any write of it was there from the start.
        read_buffers = dict.fromkeys(chain.from_iterable(self.reads))
        live_in = [b for b in (*read_buffers, *self.keep_alive) if self.first_writer[b] < 0]
        lower, upper = lifetimes(
            len(order),
            [self.reads[op] for op in order],
            [self.writes[op] for op in order],
            self.size.size,
            live_in=live_in,
            live_out=self.keep_alive,
        )
        peak = lower_bound(lower, upper, self.size)[0]
        return peak, float(((upper - lower) * self.size.astype(float)).sum())


def better_order(
    num_ops: int,
    reads: Sequence[Sequence[int]],
    writes: Sequence[Sequence[int]],
    sizes: npt.ArrayLike,
    predecessors: Sequence[Sequence[int]] = (),
    *,
    keep_alive: Collection[int] = (),
) -> OrderChoice:
    """Simulate the original order and that of each policy; return the one with the smallest peak.

    Of equal peaks the one with fewer bytes x steps wins, and of equal ones the original.

    The ops' own order must be legal; it defines who reads what: every read stays between the writes
    it was between, and every write keeps its place among the reads and writes of its buffer. A
    buffer whose first access reads it is live from the start. O(E log E) for E reads, writes and
    edges.

    Args:
        num_ops: the number of ops, 0 .. num_ops - 1 in their own order.
        reads: per op, the buffers it reads.
        writes: per op, the buffers it writes, scratch memory included.
        sizes: bytes per buffer.
        predecessors: per op, ops that must run before it beyond what the buffers demand; () for
            none.
        keep_alive: buffers that are read after the last op, and so are never freed.

    Raises:
        ValueError: a column has the wrong length, a buffer does not exist, or a predecessor comes
            after its op in the original order.
    """
    ops = _Ops.of(num_ops, reads, writes, sizes, predecessors, keep_alive)
    original = tuple(range(num_ops))
    peak, area = ops.usage(original)
    best, least = OrderChoice(original, peak, peak, None), (peak, area)
    for policy in Policy:
        order = ops.in_order(policy)
        if order == original:
            continue
        proposed = ops.usage(order)
        # Tuples compare by peak, then by bytes x steps: strictly less, so ties keep the original.
        if proposed < least:
            best, least = OrderChoice(order, proposed[0], peak, policy), proposed
    return best


def _touched(
    num_ops: int,
    reads: Sequence[Sequence[int]],
    writes: Sequence[Sequence[int]],
    num_buffers: int,
    keep_alive: Collection[int],
) -> list[tuple[int, ...]]:
    """Return the distinct buffers of each op, after checking that all buffers exist."""
    for name, column in (("reads", reads), ("writes", writes)):
        if len(column) != num_ops:
            raise ValueError(f"expected {name} for {num_ops} ops, got {len(column)}")
    touched = [tuple(dict.fromkeys((*reads[op], *writes[op]))) for op in range(num_ops)]
    for op, buffers in enumerate(touched):
        for b in buffers:
            if not 0 <= b < num_buffers:
                raise ValueError(f"op {op} names buffer {b}, but there are {num_buffers} sizes")
    for b in keep_alive:
        if not 0 <= b < num_buffers:
            raise ValueError(f"keep_alive names buffer {b}, but there are {num_buffers} sizes")
    return touched


def _first_writers(
    reads: Sequence[Sequence[int]], writes: Sequence[Sequence[int]], num_buffers: int
) -> list[int]:
    """Return the op that brings each buffer to life; -1 if it is live from the start or never."""
    first = [-1] * num_buffers
    is_seen = [False] * num_buffers
    for op in range(len(writes)):
        for b in reads[op]:
            is_seen[b] = True
        for b in writes[op]:
            if not is_seen[b]:
                is_seen[b] = True
                first[b] = op
    return first


def _dependences(
    num_ops: int,
    reads: Sequence[Sequence[int]],
    writes: Sequence[Sequence[int]],
    predecessors: Sequence[Sequence[int]],
    num_buffers: int,
) -> tuple[list[list[int]], list[int]]:
    """Return the successors of each op and the number of edges into it.

    Edges: last writer to reader, readers to the next writer, writer to writer, and those given.
    """
    if predecessors and len(predecessors) != num_ops:
        raise ValueError(f"expected predecessors for {num_ops} ops, got {len(predecessors)}")
    successors: list[list[int]] = [[] for _ in range(num_ops)]
    num_before = [0] * num_ops
    last_writer = [-1] * num_buffers
    readers: list[list[int]] = [[] for _ in range(num_buffers)]
    for op in range(num_ops):
        # Duplicates do no harm: both counts, of edges out and in, have them.
        before = list(predecessors[op]) if predecessors else []
        for p in before:
            if not 0 <= p < op:
                raise ValueError(
                    f"op {p} must run before op {op}, but comes after it in the original order"
                )
        before += [last_writer[b] for b in reads[op]]
        for b in writes[op]:
            before.append(last_writer[b])
            before += readers[b]
            last_writer[b] = op
            readers[b].clear()
        for b in reads[op]:
            readers[b].append(op)
        for p in before:
            if p >= 0 and p != op:
                successors[p].append(op)
                num_before[op] += 1
    return successors, num_before


class _Growth:
    """Bytes by which live memory grows when an op runs next: allocated minus freed.

    A buffer is allocated by its first writer, whom every order keeps, and freed by whoever is left
    to touch it last. So an op's growth changes only when it becomes the last one of a buffer, and
    only falls.
    """

    __slots__ = ("_is_kept", "_num_left", "_size", "_sum_left", "_touched", "of_op")

    def __init__(
        self,
        touched: list[tuple[int, ...]],
        first_writer: list[int],
        size: list[int],
        keep_alive: Collection[int],
    ) -> None:
        self._touched = touched
        self._size = size
        self._is_kept = [False] * len(size)
        for b in keep_alive:
            self._is_kept[b] = True
        self._num_left = [0] * len(size)
        self._sum_left = [0] * len(size)  # of the ops left: when one is left, the sum names it
        for op, buffers in enumerate(touched):
            for b in buffers:
                self._num_left[b] += 1
                self._sum_left[b] += op
        self.of_op = [0] * len(touched)
        for b, op in enumerate(first_writer):
            if op >= 0:
                self.of_op[op] += size[b]
        for b, op in enumerate(self._sum_left):
            if self._num_left[b] == 1 and not self._is_kept[b]:
                self.of_op[op] -= size[b]

    def run(self, op: int) -> list[int]:
        """Account for `op`; return the ops whose growth fell."""
        changed = []
        for b in self._touched[op]:
            self._num_left[b] -= 1
            self._sum_left[b] -= op
            if self._num_left[b] == 1 and not self._is_kept[b] and self._size[b]:
                last = self._sum_left[b]
                self.of_op[last] -= self._size[b]
                changed.append(last)
        return changed
