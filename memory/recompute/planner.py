"""The planner: the cheapest sequence found whose buffers, as placed, fit a byte budget.

`Selective` proposes sequences, whose buffers are placed in an arena; what counts is the arena.
Where it is too large, a sequence of as many bytes less is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum
from typing import Literal

from memory.liveness import align_up
from memory.offsets import plan_offsets
from memory.recompute.blocks import block_checkpointing
from memory.recompute.floor import Floor, floor_op
from memory.recompute.problem import Problem
from memory.recompute.selective import Selective
from memory.recompute.simulate import buffer_intervals

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
        found = self._fitting(budget_bytes)
        if found is None and self.smallest.peak_bytes <= budget_bytes:
            return self.smallest
        return found

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
