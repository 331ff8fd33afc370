"""A sequence in slots, with its bytes kept exact under single edits.

Slot p is op p of the problem's own order, preceded by a group of forward ops that run again, each
once, ascending. Any recomputation of the problem's order has this form; what it leaves out is a
group that runs one op twice for the same slot.

A buffer is known by its *uses*: the slots that access it, some of which make it anew. Between two
uses it is live unless the later one makes it, so adding or removing one op changes the bytes of the
slots between two uses (a slice) and of the slots next to them (a walk through a few ops). A *gap*
is the time between two uses during which a buffer lies idle, and so could be dropped.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memory.liveness import IntArray
from memory.recompute.problem import Problem

Groups = tuple[tuple[int, tuple[int, ...]], ...]
"""The slots whose groups are not empty, ascending, each with its group."""


class RecomputeSchedule:
    """The problem's own order with groups of ops that run again; edits may be undone in any order.

    groups: per slot, the forward ops that run again before it, ascending. live: per slot, the most
    bytes live during it, exact after `settle`. duration: the time of all ops. changed: the buffers
    whose uses changed since whoever reads it last cleared it. Buffers without bytes do not appear.
    """

    def __init__(self, problem: Problem) -> None:
        sizes = problem.size_bytes
        self.problem = problem
        self.maker = problem.makers
        self.reads = [tuple([b for b in op.reads if sizes[b]]) for op in problem.ops]
        self.writes = [tuple([b for b in op.writes if sizes[b]]) for op in problem.ops]
        self.groups: list[list[int]] = [[] for _ in problem.ops]
        self.live = np.zeros(len(problem.ops), np.int64)
        self.duration = sum([op.duration for op in problem.ops])
        self.changed: dict[int, None] = dict.fromkeys(range(len(sizes)))
        self.uses: list[list[int]] = [[] for _ in sizes]
        self.makings: list[dict[int, None]] = [{} for _ in sizes]
        self._num_accesses: list[dict[int, int]] = [{} for _ in sizes]
        self._local = [0] * len(problem.ops)
        self._unsettled = dict.fromkeys(range(len(problem.ops)))
        for slot in range(len(problem.ops)):
            self._place(slot)
        self.settle()

    def _place(self, slot: int) -> None:
        """Account for the op that is the slot's own, which always runs."""
        for b in dict.fromkeys((*self.reads[slot], *self.writes[slot])):
            if self.uses[b]:
                # Only the slots between two uses: `_walk` counts the bytes within a slot of use.
                self.live[self.uses[b][-1] + 1 : slot] += self.problem.size_bytes[b]
                self._num_accesses[b][slot] = 1
            else:
                self.makings[b][slot] = None
            self.uses[b].append(slot)

    def restore(self, groups: Groups) -> None:
        """Set the groups to those of `snapshot`; O(edits between the two)."""
        target_groups = dict(groups)
        for slot, group in enumerate(self.groups):
            target = target_groups.get(slot, ())
            if group or target:
                for op in [op for op in group if op not in target]:
                    self.remove(op, slot)
                for op in [op for op in target if op not in group]:
                    self.add(op, slot)
        ops = self.problem.ops  # summed anew: float sums remember their history
        self.duration = sum([ops[i].duration for i in self.sequence])
        self.settle()

    def snapshot(self) -> Groups:
        """Return what `restore` takes."""
        return tuple([(slot, tuple(group)) for slot, group in enumerate(self.groups) if group])

    @property
    def sequence(self) -> tuple[int, ...]:
        """Return the ops in the order in which they run."""
        return tuple([i for slot, group in enumerate(self.groups) for i in (*group, slot)])

    @property
    def peak_bytes(self) -> int:
        """Return the most live bytes over all slots; call `settle` before."""
        return int(self.live.max(initial=0))

    def add(self, op: int, slot: int) -> None:
        """Run a forward op again before a slot's own op."""
        insort(self.groups[slot], op)
        self.duration += self.problem.ops[op].duration
        self._unsettled[slot] = None
        for b in self.reads[op]:
            self._access(b, slot)
        for b in self.writes[op]:
            self._make(b, slot)

    def remove(self, op: int, slot: int) -> None:
        """Take back `add`."""
        self.groups[slot].remove(op)
        self.duration -= self.problem.ops[op].duration
        self._unsettled[slot] = None
        for b in self.writes[op]:
            self._unmake(b, slot)
        for b in self.reads[op]:
            self._leave(b, slot)

    def settle(self) -> None:
        """Bring `live` up to date in the slots that edits have touched."""
        for slot in self._unsettled:
            local = self._walk(slot)
            self.live[slot] += local - self._local[slot]
            self._local[slot] = local
        self._unsettled.clear()

    def is_at_hand(self, buffer: int, slot: int) -> bool:
        """Return whether an op before this slot's own can read the buffer at no further bytes."""
        uses = self.uses[buffer]
        i = bisect_left(uses, slot)
        return i < len(uses) and (uses[i] == slot or uses[i] not in self.makings[buffer])

    def is_live_after(self, buffer: int, slot: int) -> bool:
        """Return whether a later slot reads the buffer as this one leaves it."""
        uses = self.uses[buffer]
        i = bisect_left(uses, slot) + 1
        return i < len(uses) and uses[i] not in self.makings[buffer]

    def is_idle(self, op: int) -> bool:
        """Return whether every output of a forward op is made again before anything reads it."""
        for b in self.writes[op]:
            uses = self.uses[b]
            if len(uses) == 1 or uses[1] not in self.makings[b]:
                return False
        return bool(self.writes[op])

    def use_before(self, buffer: int, slot: int) -> int:
        """Return the last slot before this one that accesses the buffer."""
        uses = self.uses[buffer]
        return uses[bisect_left(uses, slot) - 1]

    def num_accesses(self, buffer: int, slot: int) -> int:
        """Return how many ops of a slot access the buffer without making it anew."""
        return self._num_accesses[buffer].get(slot, 0)

    def _access(self, b: int, slot: int) -> None:
        counts = self._num_accesses[b]
        counts[slot] = counts.get(slot, 0) + 1
        # The slot uses the buffer already: its uses stay as they are.
        if counts[slot] > 1 or slot in self.makings[b]:
            return
        is_live, before = self._insert(b, slot)
        # It was live through this slot; `_walk` counts it there from now on.
        if is_live:
            self.live[slot] -= self.problem.size_bytes[b]
        else:
            # It was dropped after `before`: now it is kept until here.
            self.live[before + 1 : slot] += self.problem.size_bytes[b]

    def _leave(self, b: int, slot: int) -> None:
        counts = self._num_accesses[b]
        counts[slot] -= 1
        if counts[slot] > 0:
            return
        del counts[slot]
        if slot in self.makings[b]:
            return
        is_live, before = self._delete(b, slot)
        if is_live:
            self.live[slot] += self.problem.size_bytes[b]
        else:
            self.live[before + 1 : slot] -= self.problem.size_bytes[b]

    def _make(self, b: int, slot: int) -> None:
        size = self.problem.size_bytes[b]
        if slot in self._num_accesses[b]:
            # Made anew here, so it need not be kept from the use before.
            before = self.use_before(b, slot)
            self.live[before + 1 : slot] -= size
            self._mark_unsettled(b, before)
        else:
            is_live, before = self._insert(b, slot)
            if is_live:
                # It was live through this slot: it no longer is, from `before` up to here.
                self.live[before + 1 : slot + 1] -= size
        self.makings[b][slot] = None

    def _unmake(self, b: int, slot: int) -> None:
        size = self.problem.size_bytes[b]
        del self.makings[b][slot]
        if slot in self._num_accesses[b]:
            before = self.use_before(b, slot)
            self.live[before + 1 : slot] += size
            self._mark_unsettled(b, before)
        else:
            is_live, before = self._delete(b, slot)
            if is_live:
                self.live[before + 1 : slot + 1] += size

    def _insert(self, b: int, slot: int) -> tuple[bool, int]:
        """Enter a use; return whether the buffer was live through it, and the use before."""
        uses = self.uses[b]
        i = bisect_left(uses, slot)
        is_live = i < len(uses) and uses[i] not in self.makings[b]
        uses.insert(i, slot)
        self._mark_unsettled(b, uses[i - 1])
        return is_live, uses[i - 1]

    def _delete(self, b: int, slot: int) -> tuple[bool, int]:
        """Undo `_insert`; return whether the buffer is now live through, and the use before."""
        uses = self.uses[b]
        i = bisect_left(uses, slot)
        del uses[i]
        self._mark_unsettled(b, uses[i - 1])
        return i < len(uses) and uses[i] not in self.makings[b], uses[i - 1]

    def _mark_unsettled(self, b: int, slot: int) -> None:
        self._unsettled[slot] = None
        self.changed[b] = None

    def _walk(self, slot: int) -> int:
        """Return the most bytes that the buffers accessed in a slot and its scratch take."""
        sizes, makings = self.problem.size_bytes, self.makings
        ops = (*self.groups[slot], slot)
        # The last op of the slot that touches each buffer: later ones write over earlier ones.
        last = {b: k for k, i in enumerate(ops) for b in (*self.reads[i], *self.writes[i])}
        # What comes in is live from the start; what is made in this slot begins later.
        live = sum([sizes[b] for b in last if slot not in makings[b]])
        for b in last:
            if self.is_live_after(b, slot):
                # Read by a later slot: no op of this one is its last.
                last[b] = len(ops)
        most = 0
        for k, i in enumerate(ops):
            op = self.problem.ops[i]
            live += sum([sizes[b] for b in self.writes[i] if slot in makings[b]])
            shared = self._shared_bytes(op.in_place, last, k, slot) if op.in_place else 0
            most = max(most, live + op.temp_bytes - shared)
            touched = dict.fromkeys((*self.reads[i], *self.writes[i]))
            live -= sum([sizes[b] for b in touched if last[b] == k])
        return most

    def _shared_bytes(
        self, pairs: tuple[tuple[int, int], ...], last: dict[int, int], k: int, slot: int
    ) -> int:
        """Return the bytes that outputs take over from inputs that die in a slot's k-th op."""
        sizes = self.problem.size_bytes
        shared = 0
        paired_buffers: list[int] = []
        # An output takes over one input of its size that dies here, and each input is taken once.
        for out, old in pairs:
            if (
                out not in paired_buffers
                and old not in paired_buffers
                and last.get(old) == k
                and slot in self.makings[out]
                and sizes[out] == sizes[old]
            ):
                shared += sizes[out]
                paired_buffers += [out, old]
        return shared


FloatArray = npt.NDArray[np.float64]


class DroppableGaps:
    """The droppable gaps as columns, one row each; the row of a gap that is gone has size 0.

    buffer: who lies idle. slot: the use that ends the gap. first: the first slot that dropping
    frees; [first, slot) is freed. size: bytes. cost: the time that dropping costs as far as known,
    at first that of the buffer's maker alone; whoever learns better writes it.
    """

    def __init__(self, schedule: RecomputeSchedule) -> None:
        self._schedule = schedule
        self._rows: list[dict[tuple[int, int], int]] = [{} for _ in schedule.problem.size_bytes]
        self._free: list[int] = []
        self._num_rows = 0
        self.buffer: IntArray = np.zeros(64, np.int64)
        self.first: IntArray = np.zeros(64, np.int64)
        self.slot: IntArray = np.zeros(64, np.int64)
        self.size: IntArray = np.zeros(64, np.int64)
        self.cost: FloatArray = np.zeros(64)

    def refresh(self) -> None:
        """Bring the rows up to date with the schedule; O(uses of the buffers that changed)."""
        schedule = self._schedule
        for b in schedule.changed:
            if schedule.maker[b] >= 0 and schedule.problem.size_bytes[b]:
                self._refresh_buffer(b)
        schedule.changed.clear()

    def rows(self, op: int, slot: int) -> list[int]:
        """Return the rows of the gaps that end at a slot and whose buffers the op makes."""
        rows = [self._rows[b] for b in self._schedule.writes[op]]
        return [row for gaps in rows for (_, end), row in gaps.items() if end == slot]

    def gains(self, excess: IntArray) -> FloatArray:
        """Return per row about how much excess dropping it covers, in bytes times slots.

        The excess of a slot is what its bytes exceed a limit by. O(rows + slots).
        """
        num_over = np.concatenate(([0], np.cumsum(excess > 0)))
        # A difference of prefix sums: the slots of [first, slot) that are over the limit.
        covered = num_over[self.slot] - num_over[self.first]
        gains: FloatArray = np.minimum(self.size, excess.max()) * covered.astype(np.float64)
        return gains

    def _refresh_buffer(self, b: int) -> None:
        uses, makings = self._schedule.uses[b], self._schedule.makings[b]
        old = self._rows[b]
        gaps = [
            (before, slot)
            for before, slot in pairwise(uses)
            if slot not in makings and slot > before + 1
        ]
        new = {gap: old[gap] for gap in gaps if gap in old}
        for gap, row in old.items():
            if gap not in new:
                self.size[row] = 0
                self._free.append(row)
        for gap in gaps:
            if gap not in new:
                new[gap] = self._enter(b, *gap)
        self._rows[b] = new

    def _enter(self, b: int, before: int, slot: int) -> int:
        row = self._free.pop() if self._free else self._num_rows
        if row == self._num_rows:
            self._num_rows += 1
            if row == self.size.size:
                self._grow()
        schedule = self._schedule
        self.buffer[row] = b
        # A slot with a group may end long after its last access to the buffer: that part counts.
        self.first[row] = before if schedule.groups[before] else before + 1
        self.slot[row] = slot
        self.size[row] = schedule.problem.size_bytes[b]
        self.cost[row] = schedule.problem.ops[schedule.maker[b]].duration
        return row

    def _grow(self) -> None:
        for name in ("buffer", "first", "slot", "size", "cost"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros_like(column))))
