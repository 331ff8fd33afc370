"""Selective recomputation: drop the buffers that cover most of the excess per time, on any graph.

The search edits one `RecomputeSchedule`. A *gap* is the time between two uses of a buffer during
which it lies idle. Dropping a gap runs the buffer's maker again just before the use that ends it,
together with what the maker reads and is no longer there, recursively; an input that fits is kept
longer instead. What reappears that way stays until its next use where that fits, which saves its
own run there; where it does not fit, the time between is a gap like any other. So nested
checkpoints arise without a chain of blocks being known.

Under a limit every slot has an excess of bytes, and a gap covers min(size, excess) in each of its
slots. Taking what covers most per time until nothing exceeds is the greedy algorithm for weighted
covering (Chvatal 1979). Times are judged lazily, from a guess over a sum to the edit itself, and an
edit that turns out dearer than the next gap is taken back. Afterwards runs that the limit no longer
demands are taken back, the longest first.
"""

from __future__ import annotations

from bisect import bisect_right
from math import isqrt

import numpy as np

from memory.liveness import IntArray
from memory.recompute.problem import Problem, without_idle_runs
from memory.recompute.schedule import DroppableGaps, FloatArray, Groups, RecomputeSchedule

_AIMS = (1.0, 0.97)
"""Fractions of the limit to drop to before runs are taken back below the limit itself: reaching a
little too far lets a cheaper set come back (up to 1 % of the step), further never paid."""

_EDITS_PER_OP, _LEAST_EDITS = 20, 3_000
"""Runs added or taken back, about 60 us each, before a descent gives up; descents that reach their
limit take up to 12 per op."""

_SMALLEST_EDITS = 60_000
"""Edits after which the search for the smallest sequence tries no other limit, about 4 s."""

_SHARE_OF_SAVED = 0.05
"""How much of the time that a drop saves elsewhere counts against it all the same: of drops that
cost alike the one that runs fewest ops again is nearly as good, far less work, and more certain."""

_POLISH_WORK = 1_000_000
"""Edits times ops for exchanging single runs, about half a second: up to 2 % of the step below what
a first descent finds on graphs that are no chain, next to nothing on chains."""

_NO_LIMIT = 1 << 62

Edit = tuple[bool, int, int]
"""(is the run added or else taken back, forward op, slot)."""


class Selective:
    """Answers budgets for one problem; what they share is built once.

    An answer depends on the budget alone, not on those asked before.
    """

    def __init__(self, problem: Problem) -> None:
        self._search = _SelectiveSearch(problem)

    def sequence(self, limit_bytes: int) -> tuple[int, ...] | None:
        """Return the fastest sequence found whose live bytes stay within a limit, None if none."""
        search, schedule = self._search, self._search.schedule
        best: tuple[float, Groups] | None = None
        for aim in _AIMS:
            search.start(())
            search.drop_to(int(limit_bytes * aim))
            if schedule.peak_bytes <= limit_bytes:
                search.refill(limit_bytes)
                if best is None or schedule.duration < best[0]:
                    best = (schedule.duration, schedule.snapshot())
        if best is None:
            return None
        search.start(best[1])
        search.polish(limit_bytes)
        return without_idle_runs(schedule.problem, schedule.sequence)

    def smallest(self, floor_bytes: int) -> tuple[int, ...]:
        """Return the sequence with the fewest live bytes found; none has fewer than the floor.

        Bisects roughly between the floor and saving everything, then asks for eighths of what is
        left: a descent to less may reach what one to more has missed. Each counts with what it
        reached.
        """
        search, schedule = self._search, self._search.schedule
        search.start(())
        best: tuple[int, Groups] = (schedule.peak_bytes, ())
        too_low, num_edits, eighth = floor_bytes - 1, 0, 0
        while num_edits < _SMALLEST_EDITS and eighth < 8:
            if best[0] - too_low > max(1, best[0] >> 4):
                limit = isqrt(best[0] * max(too_low, 1))  # deep models: far above their floor
            else:
                limit = floor_bytes + (best[0] - floor_bytes) * eighth // 8
                eighth += 1
            best, is_reached, edits = self._descend(limit, best)
            num_edits += edits
            if not is_reached:
                too_low = max(too_low, limit)
        search.start(best[1])
        search.refill(best[0])
        return without_idle_runs(schedule.problem, schedule.sequence)

    def _descend(
        self, limit: int, best: tuple[int, Groups]
    ) -> tuple[tuple[int, Groups], bool, int]:
        """Drop to a limit from saving everything; where that fails, from the best so far.

        Returns the best now, whether the limit was reached, and the edits it took.
        """
        search, schedule = self._search, self._search.schedule
        num_edits = 0
        for start in ((), best[1]):
            search.start(start)
            is_reached = search.drop_to(limit)
            num_edits += search.num_edits
            if schedule.peak_bytes < best[0]:
                best = (schedule.peak_bytes, schedule.snapshot())
            if is_reached:
                return best, True, num_edits
        return best, False, num_edits


class _SelectiveSearch:
    """Drops gaps of one schedule, and takes runs back, under a limit on live bytes."""

    def __init__(self, problem: Problem) -> None:
        self.schedule = RecomputeSchedule(problem)
        self._gaps = DroppableGaps(self.schedule)
        self._duration = [op.duration for op in problem.ops]
        # No cost is 0: gains are divided by costs.
        self._least_cost = max(1e-9 * self.schedule.duration, 1e-30)
        self.most_edits = max(_EDITS_PER_OP * len(problem.ops), _LEAST_EDITS)
        self.num_edits = 0

    def start(self, groups: Groups) -> None:
        """Begin at a plan, with nothing learnt and no edits counted."""
        self.schedule.restore(groups)
        self.schedule.changed = dict.fromkeys(range(len(self.schedule.problem.size_bytes)))
        self._gaps = DroppableGaps(self.schedule)
        self.num_edits = 0

    def drop_to(self, limit: int, *, spared: tuple[int, int] | None = None) -> bool:
        """Drop gaps until no slot exceeds the limit; return whether that was reached.

        spared: a forward op and a slot before which it must not run again first.
        """
        while self.num_edits < self.most_edits:
            excess = self._excess(limit)
            if not excess.any():
                return True
            self._gaps.refresh()
            gains = self._gaps.gains(excess)
            if spared is not None:
                gains[self._gaps.rows(*spared)] = 0.0
            if not self._drop_best(gains, int(excess.sum()), limit):
                return False
        return False

    def _excess(self, limit: int) -> IntArray:
        excess: IntArray = np.maximum(self.schedule.live - limit, 0)
        return excess

    def _drop_best(self, gains: FloatArray, total: int, limit: int) -> bool:
        """Drop the gap that covers most per time; False where no gap lowers the total excess."""
        gaps, schedule = self._gaps, self.schedule
        while self.num_edits < self.most_edits:
            row = int((gains / np.maximum(gaps.cost, self._least_cost)).argmax())
            gain = float(gains[row])
            if gain <= 0:
                return False
            slot = int(gaps.slot[row])
            ops = self._closure(int(gaps.buffer[row]), slot, limit)
            guess = self._cost(ops, slot, limit)
            # Lazy: the first cost was a guess from below, so the best row is looked at again with a
            # dearer one.
            if guess > gaps.cost[row] * (1 + 1e-9):
                gaps.cost[row] = guess
                continue
            before = schedule.duration
            was_idle = schedule.is_idle(ops[0])
            edits = self._run_again(ops, slot, limit)
            cost = schedule.duration - before
            if schedule.is_idle(ops[0]) and not was_idle:
                cost -= self._duration[ops[0]]  # its first run only moved
            cost = max(cost, self._least_cost)
            gains[row] = 0.0
            # The total did not fall: the drop only moved the excess elsewhere.
            if int(self._excess(limit).sum()) >= total:
                self._undo(edits)
                continue
            next_best = float((gains / np.maximum(gaps.cost, self._least_cost)).max())
            # No dearer than guessed, or still the best gain per time: the drop stands.
            if cost <= guess * 1.001 or gain / cost >= next_best:
                return True
            self._undo(edits)
            gains[row] = gain
            gaps.cost[row] = cost
        return False

    def _closure(self, buffer: int, slot: int, limit: int) -> list[int]:
        """Return the ops to run again so that a slot finds the buffer made anew."""
        schedule = self.schedule
        sizes = schedule.problem.size_bytes
        ops = {schedule.maker[buffer]: None}
        todo = list(ops)
        for op in todo:  # grows while it is walked
            for b in schedule.reads[op]:
                if schedule.maker[b] in ops or schedule.is_at_hand(b, slot):
                    continue
                if schedule.maker[b] < 0:  # kept, whether it fits or not
                    continue
                if not self._fits(schedule.use_before(b, slot), slot, sizes[b], limit):
                    ops[schedule.maker[b]] = None
                    todo.append(schedule.maker[b])
        return todo

    def _fits(self, before: int, slot: int, size: int, limit: int) -> bool:
        """Return whether so many more bytes stay within the limit between two slots."""
        between = self.schedule.live[before + 1 : slot]
        return between.size == 0 or int(between.max()) + size <= limit

    def _cost(self, ops: list[int], slot: int, limit: int) -> float:
        """Return about how much longer a step takes: each run alone, less the runs it saves."""
        cost = sum([self._duration[op] for op in ops])
        saved = [op for op in ops[1:] if self._saved_slot(op, slot, limit) is not None]
        if self._would_idle(ops[0], slot):
            saved.append(ops[0])
        return cost - (1 - _SHARE_OF_SAVED) * sum([self._duration[op] for op in saved])

    def _would_idle(self, op: int, slot: int) -> bool:
        """Return whether nothing reads the first run of `op` if it runs again before this slot."""
        uses = [self.schedule.uses[b] for b in self.schedule.writes[op]]
        return all([len(u) > 1 and u[1] >= slot for u in uses])

    def _saved_slot(self, op: int, slot: int, limit: int) -> int | None:
        """Return the next slot that need not run `op` if this one runs it and its bytes stay."""
        schedule = self.schedule
        following, size = len(schedule.groups), 0
        for b in schedule.writes[op]:
            uses = schedule.uses[b]
            i = bisect_right(uses, slot)
            if i < len(uses) and uses[i] in schedule.makings[b]:
                following = min(following, uses[i])
            size += schedule.problem.size_bytes[b]
        if following == len(schedule.groups) or not self._fits(slot, following, size, limit):
            return None
        return following

    def _run_again(self, ops: list[int], slot: int, limit: int) -> list[Edit]:
        """Run ops again before a slot, and take back the later runs that this saves."""
        edits: list[Edit] = []
        for op in ops:
            self._edit(True, op, slot, edits)
        self.schedule.settle()
        for op in ops:
            following = self._saved_slot(op, slot, limit)
            if following is not None:
                edits += self._take_back(op, following, limit)
        return edits

    def _edit(self, is_added: bool, op: int, slot: int, edits: list[Edit]) -> None:
        if is_added:
            self.schedule.add(op, slot)
        else:
            self.schedule.remove(op, slot)
        self.num_edits += 1
        edits.append((is_added, op, slot))

    def _undo(self, edits: list[Edit]) -> None:
        # In reverse order, for later edits rest on earlier ones.
        for is_added, op, slot in reversed(edits):
            self._edit(not is_added, op, slot, [])
        self.schedule.settle()

    def _take_back(self, op: int, slot: int, limit: int) -> list[Edit]:
        """Take back a run, and those only it reads from; return the edits, none if bytes lack."""
        schedule = self.schedule
        sizes = schedule.problem.size_bytes
        for b in schedule.writes[op]:
            if schedule.num_accesses(b, slot) and not self._fits(
                schedule.use_before(b, slot), slot, sizes[b], limit
            ):
                return []
        before = int(self._excess(limit).sum())
        edits: list[Edit] = []
        self._edit(False, op, slot, edits)
        for _, removed_op, _ in edits:  # grows while it is walked
            for b in schedule.reads[removed_op]:
                maker = schedule.maker[b]
                if maker in schedule.groups[slot] and not self._is_read(maker, slot):
                    self._edit(False, maker, slot, edits)
        schedule.settle()
        if int(self._excess(limit).sum()) > before:
            self._undo(edits)
            return []
        return edits

    def _is_read(self, op: int, slot: int) -> bool:
        """Return whether anything reads what a run in this slot makes."""
        schedule = self.schedule
        return any(
            [
                schedule.num_accesses(b, slot) or schedule.is_live_after(b, slot)
                for b in schedule.writes[op]
            ]
        )

    def refill(self, limit: int) -> None:
        """Take back every run that the limit allows to, the longest first."""
        groups = self.schedule.groups
        runs = [
            (-self._duration[op], slot, op) for slot, group in enumerate(groups) for op in group
        ]
        for _, slot, op in sorted(runs):
            if op in groups[slot]:
                self._take_back(op, slot, limit)

    def polish(self, limit: int) -> None:
        """Take back each run although bytes lack, and drop something else; keep what is faster."""
        schedule = self.schedule
        best, groups = schedule.duration, schedule.snapshot()
        work = _POLISH_WORK // max(1, len(self._duration))
        most = self.num_edits + min(work, self.most_edits // 2)
        runs = [(-self._duration[op], slot, op) for slot, group in groups for op in group]
        for _, slot, op in sorted(runs):
            if self.num_edits >= most:
                break
            if op not in schedule.groups[slot]:
                continue
            self._take_back(op, slot, _NO_LIMIT)
            if self.drop_to(limit, spared=(op, slot)):
                self.refill(limit)
            if schedule.peak_bytes <= limit and schedule.duration < best - self._least_cost:
                best, groups = schedule.duration, schedule.snapshot()
            else:
                schedule.restore(groups)
