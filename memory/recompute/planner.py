"""The planner: the cheapest sequence found whose buffers, as placed, fit a byte budget.

`Selective` proposes sequences, whose buffers are placed in an arena; what counts is the arena.
Where it is too large, a sequence of as many bytes less is asked for. `block_checkpointing` makes
the one sequence of recompute='blocks', whatever it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum
from typing import Literal

from memory.liveness import align_up
from memory.offsets import plan_offsets
from memory.recompute.problem import Floor, Problem, buffer_intervals, floor_op
from memory.recompute.selective import Selective

# Checkpointing by blocks: what lies between two articulation points runs again as a whole.
#
# A *cut* lies between two forward ops where exactly one buffer made before is read by a forward op
# after it. The other ops keep their order, so a cut counts only where they can be cut as well: what
# was made after it has its last reader before what was made before it, the crossing buffer
# excepted, has its first. From that reader on comes the *stage* of the block before the cut.
#
# No pairing of forward and backward is given; both follow from who reads what. Small buffers
# (statistics, a loss, a mask) do not decide where cuts are: they are held as long as someone reads.
# Nor does what is made once (a weight that ranks gather): it cannot run again, and is held anyway.

SMALL_PART = 64
"""Small is one part in so many of the size that half of the forward pass's bytes reach."""


def block_checkpointing(problem: Problem) -> tuple[int, ...] | None:
    """Return the sequence in which every block saves its output alone; None without two blocks.

    Before its stage a block runs again, as far as the stage needs it. The last block's stage
    follows at once, so that block keeps everything. O(E).
    """
    order = _late_order(problem)
    problem = replace(problem, ops=tuple([problem.ops[i] for i in order]))
    blocks = _blocks(problem)
    if not blocks:
        return None
    again: dict[int, list[int]] = {}
    first, stage_end = 0, len(problem.ops)
    # Blocks ascend, and their stages descend from the end of the ops.
    for stage, end in blocks.items():
        again[stage] = _needed(problem, range(first, end), range(stage, stage_end))
        first, stage_end = end, stage
    return tuple([order[i] for slot in problem.store_all for i in (*again.get(slot, ()), slot)])


def _late_order(problem: Problem) -> tuple[int, ...]:
    """Return the ops in order, but what only forward ones feed, and may wait, before its reader.

    Where it stood it might be in the stage of another block, and the two would count as one.
    """
    num_forward = problem.num_forward
    is_forward = [False] * len(problem.size_bytes)
    order = list(range(num_forward))
    for b in [b for i in order for b in problem.ops[i].writes]:
        is_forward[b] = True
    waiting: dict[int, int] = {}  # by what is made: the op
    for i in range(num_forward, len(problem.ops)):
        op = problem.ops[i]
        is_first = bool(op.writes) and waiting.keys().isdisjoint(op.writes)
        if op.may_wait and is_first and all([is_forward[b] for b in op.reads]):
            waiting |= dict.fromkeys(op.writes, i)
            continue
        makers = {waiting[b] for b in (*op.reads, *op.writes) if b in waiting}
        if makers:
            waiting = {b: maker for b, maker in waiting.items() if maker not in makers}
        order += [*sorted(makers), i]
    return (*order, *sorted({*waiting.values()}))


def _blocks(problem: Problem) -> dict[int, int]:
    """Return where the stage of each block but the last begins, and where its forward ops end.

    In forward order. Of blocks whose stages would begin with one op only the first has ops there,
    so they count as one.
    """
    num_forward, num_ops = problem.num_forward, len(problem.ops)
    once_buffers = {b for op in problem.ops if op.is_once for b in op.writes}
    large = _large_buffers(problem) - once_buffers
    last_forward, first_other, last_other = _readers(problem)
    latest = num_forward - 1  # the last op that reads what was made after
    low = [0] * num_forward
    # Backwards: `latest` is the last reader of what the ops after i made.
    for i in reversed(range(num_forward)):
        low[i] = latest + 1
        latest = max([latest, *[last_other[b] for b in problem.ops[i].writes if b in large]])
    blocks: dict[int, int] = {}
    crossing = dict[int, None]()
    high = num_ops
    for i in range(num_forward - 1):
        op = problem.ops[i]
        crossing |= dict.fromkeys([b for b in op.writes if b in large])
        # A buffer crosses a cut as long as a forward op still reads it.
        for b in [b for b in (*op.reads, *op.writes) if b in crossing and last_forward[b] <= i]:
            del crossing[b]
            high = min(high, first_other[b])
        if len(crossing) == 1 and low[i] <= high:
            blocks[high] = i + 1
    return blocks


def _needed(problem: Problem, block: range, stage: range) -> list[int]:
    """Return the forward ops of a block that make what its stage reads, and what they need."""
    inputs = dict.fromkeys([b for i in stage for b in problem.ops[i].reads])
    ops: list[int] = []
    for i in reversed(block):
        op = problem.ops[i]
        if not op.is_once and any([b in inputs and problem.size_bytes[b] for b in op.writes]):
            ops.append(i)
            inputs |= dict.fromkeys(op.reads)
    return ops[::-1]


def _large_buffers(problem: Problem) -> frozenset[int]:
    """Return the buffers of the forward pass that decide where cuts are."""
    forward_buffers = [b for op in problem.ops[: problem.num_forward] for b in op.writes]
    bytes_left, size = sum([problem.size_bytes[b] for b in forward_buffers]) // 2, 0
    # The median by bytes: half of them lie in buffers of this size or smaller.
    for size in sorted([problem.size_bytes[b] for b in forward_buffers]):
        bytes_left -= size
        if bytes_left <= 0:
            break
    return frozenset([b for b in forward_buffers if problem.size_bytes[b] > size // SMALL_PART])


def _readers(problem: Problem) -> tuple[list[int], list[int], list[int]]:
    """Return per buffer its last forward reader, and the first and the last of the other ones.

    Where there is none: its maker, the number of all ops, and -1.
    """
    num_buffers = len(problem.size_bytes)
    last_forward = list(problem.makers)
    first_other, last_other = [len(problem.ops)] * num_buffers, [-1] * num_buffers
    for i, op in enumerate(problem.ops):
        for b in op.reads:
            if i < problem.num_forward:
                last_forward[b] = i
            else:
                first_other[b] = min(first_other[b], i)
                last_other[b] = i
    return last_forward, first_other, last_other


Method = Literal["store all", "selective", "blocks"]

_ROUNDS = 4
"""How often `Selective` is asked again after a placement that missed the budget."""

_SMALL_PROBLEM = 500
"""Ops of a problem for which the smallest plan is looked for more than once."""

_CERTIFICATES: dict[Method, str] = {
    "store all": "nothing runs again: optimal",
    "selective": "greedy over idle gaps, simulated exactly; no proof of optimality",
    "blocks": "every block saves its output alone, as asked for",
}


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """A sequence and what it costs.

    peak_bytes: the arena that its buffers need, as placed. duration: the time of all ops that run.
    extra: how much longer that is than without recomputation, as a fraction. certificate: what is
    proved about the plan, in words.
    """

    sequence: tuple[int, ...]
    peak_bytes: int
    duration: float
    extra: float
    method: Method
    certificate: str


class Planner:
    """Plans one problem for any number of budgets; what they share is computed once.

    An answer depends on its arguments alone, never on what was asked before.
    """

    def __init__(self, problem: Problem, *, alignment: int = 64) -> None:
        self._problem = _aligned(problem, alignment)
        self._alignment = alignment
        # To the last bit, whatever order they run in: what runs more never takes less.
        self._base_duration = fsum([op.duration for op in problem.ops])

    @cached_property
    def store_all(self) -> RecomputePlan:
        """The plan without recomputation."""
        return self._judge(self._problem.store_all, "store all")

    @cached_property
    def floor(self) -> Floor:
        """The op that needs most bytes at once; no plan goes below."""
        return floor_op(self._problem)

    @cached_property
    def blocks(self) -> RecomputePlan:
        """The plan in which each block saves its output alone, whatever that needs."""
        sequence = block_checkpointing(self._problem)
        if sequence is None:
            certificate = "no two blocks: recompute='blocks' has nothing to run again"
            return replace(self.store_all, certificate=certificate)
        return self._judge(sequence, "blocks")

    def plan(self, budget_bytes: int) -> RecomputePlan | None:
        """Return the cheapest plan found whose arena fits the budget; None where none was found."""
        if self.store_all.peak_bytes <= budget_bytes:
            return self.store_all
        cheapest = self._fitting(budget_bytes)
        if cheapest is None and self.smallest.peak_bytes <= budget_bytes:
            return self.smallest
        return cheapest

    @cached_property
    def smallest(self) -> RecomputePlan:
        """The plan with the smallest arena found."""
        least = self._judge(self._selective.smallest(self.floor.size_bytes), "selective")
        smallest = min(self.store_all, least, key=lambda plan: (plan.peak_bytes, plan.duration))
        # What is cheapest within fewer bytes may need fewer still: a greedy is not monotone.
        for _ in range(_ROUNDS if len(self._problem.ops) <= _SMALL_PROBLEM else 0):
            smaller = self._fitting(smallest.peak_bytes - self._alignment)
            if smaller is None:
                break
            smallest = smaller
        return smallest

    def _fitting(self, budget_bytes: int) -> RecomputePlan | None:
        """Return a plan of `Selective`, asked for fewer live bytes where the placement missed."""
        limit = budget_bytes
        for _ in range(_ROUNDS):
            sequence = None
            if limit >= self.floor.size_bytes:
                sequence = self._selective.sequence(limit)
            if sequence is None:
                return None
            plan = self._judge(sequence, "selective")
            if plan.peak_bytes <= budget_bytes:
                return plan
            # As much lower as the placement missed by.
            limit -= plan.peak_bytes - budget_bytes
        return None

    @cached_property
    def _selective(self) -> Selective:
        return Selective(self._problem)

    def _judge(self, sequence: tuple[int, ...], method: Method) -> RecomputePlan:
        """Place the buffers of a sequence."""
        duration = fsum([self._problem.ops[i].duration for i in sequence])
        arena = plan_offsets(*buffer_intervals(self._problem, sequence), alignment=self._alignment)
        base = self._base_duration
        extra = duration / base - 1 if base else 0.0
        certificate = _CERTIFICATES[method]
        return RecomputePlan(sequence, arena.peak_bytes, duration, extra, method, certificate)


def _aligned(problem: Problem, alignment: int) -> Problem:
    """Return the problem with every size rounded up, as the arena will hold it."""
    return replace(
        problem,
        ops=tuple(
            [replace(op, temp_bytes=align_up(op.temp_bytes, alignment)) for op in problem.ops]
        ),
        size_bytes=tuple([align_up(size, alignment) for size in problem.size_bytes]),
    )
