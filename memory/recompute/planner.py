"""The planner: the cheapest sequence found whose buffers, as placed, fit a byte budget.

Candidates are saving everything, selective recomputation, and dynamic programming over the blocks
of a chain. Each is a sequence, simulated exactly and placed in an arena; what counts is the arena.
A candidate that the placement makes too large is asked again for as many bytes less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from memory.liveness import align_up
from memory.offsets import plan_offsets
from memory.recompute.chain import ChainTable, block_checkpointing, chain_plans
from memory.recompute.floor import Floor, floor_op
from memory.recompute.problem import Problem
from memory.recompute.selective import Selective
from memory.recompute.simulate import buffer_intervals, simulate
from memory.report import exact_bytes

Method = Literal["store all", "selective", "chain", "blocks"]

Policy = Literal["auto", "none", "blocks"]
"""auto: the cheapest that fits. none: nothing runs again. blocks: each block of a chain saves its
output alone."""

_ROUNDS = 4
"""How often a method is asked again after a placement that missed the budget."""


_SMALL_PROBLEM = 500
"""Ops of a problem for which the smallest plan is looked for more than once."""


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """A sequence and what it costs.

    peak_bytes: the arena that its buffers need, as placed. live_bytes: its most live bytes, with
    sizes rounded up to the alignment; no placement goes below. duration: the time of all ops that
    run. extra: how much longer that is than without recomputation, as a fraction. certificate: what
    is proved about the plan, in words.
    """

    sequence: tuple[int, ...]
    peak_bytes: int
    live_bytes: int
    duration: float
    extra: float
    method: Method
    certificate: str


class Infeasible(ValueError):
    """No plan was found within a budget.

    smallest_bytes: the smallest arena found by any method. op, floor_bytes: the op that needs most
    bytes at once, and those bytes: no plan goes below.
    """

    def __init__(self, budget_bytes: int, smallest_bytes: int, floor: Floor) -> None:
        self.smallest_bytes = smallest_bytes
        self.op = floor.op
        self.floor_bytes = floor.size_bytes
        found = "no plan fits" if budget_bytes < floor.size_bytes else "no plan was found that fits"
        super().__init__(
            f"{found} {exact_bytes(budget_bytes)}; the smallest one found needs"
            f" {exact_bytes(smallest_bytes)}. Op {floor.op} alone needs"
            f" {exact_bytes(floor.size_bytes)} at once, and no plan goes below: raise the budget,"
            " or make that op smaller"
        )


class Planner:
    """Plans one problem for any number of budgets; what they share is computed once.

    An answer depends on its arguments alone, never on what was asked before.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        alignment: int = 64,
        find_chain: Callable[[Problem], ChainTable | None] = chain_plans,
    ) -> None:
        self._problem = _aligned(problem, alignment)
        self._alignment = alignment
        self._find_chain = find_chain
        self._base_duration = simulate(self._problem, self._problem.store_all).duration

    @cached_property
    def store_all(self) -> RecomputePlan:
        """Return the plan without recomputation."""
        return self._judge(self._problem.store_all, "store all")

    @cached_property
    def floor(self) -> Floor:
        """Return the op that needs most bytes at once; no plan goes below."""
        return floor_op(self._problem)

    def plan(self, budget_bytes: int, *, policy: Policy = "auto") -> RecomputePlan:
        """Return the cheapest plan found whose arena fits the budget.

        Policies "none" and "blocks" leave nothing to choose: a budget of 0 asks for their plan
        whatever it needs.

        Raises:
            Infeasible: no plan was found that fits.
        """
        if policy == "auto":
            return self._cheapest(budget_bytes)
        found = self.store_all if policy == "none" else self._blocks
        if found.peak_bytes > budget_bytes > 0:
            raise Infeasible(budget_bytes, self.smallest().peak_bytes, self.floor)
        return found

    def curve(self, budgets: Sequence[int]) -> tuple[RecomputePlan | None, ...]:
        """Return a plan per budget, None where none was found; more bytes never cost more time.

        A plan for fewer bytes stands in where the search for more finds a slower one.
        """
        found: dict[int, RecomputePlan | None] = {}
        best: RecomputePlan | None = None
        for budget in sorted(budgets):
            try:
                plan = self.plan(budget)
            except Infeasible:
                found[budget] = None
                continue
            best = plan if best is None or plan.duration <= best.duration else best
            found[budget] = best
        return tuple([found[budget] for budget in budgets])

    def smallest(self) -> RecomputePlan:
        """Return the plan with the smallest arena found by any method."""
        return self._smallest

    def _cheapest(self, budget_bytes: int) -> RecomputePlan:
        if self.store_all.peak_bytes <= budget_bytes:
            return self.store_all
        found = self._proposed(budget_bytes)
        if found is not None:
            return found
        if self.smallest().peak_bytes <= budget_bytes:
            return self.smallest()
        raise Infeasible(budget_bytes, self.smallest().peak_bytes, self.floor)

    def _proposed(self, budget_bytes: int) -> RecomputePlan | None:
        """Return the cheaper one of what the two methods propose, None where neither fits."""
        if budget_bytes < self.floor.size_bytes:
            return None
        found = [
            self._fitting("selective", self._selective.sequence, budget_bytes),
            self._fitting("chain", self._chain_sequence, budget_bytes),
        ]
        plans = [plan for plan in found if plan is not None]
        return min(plans, key=lambda plan: (plan.duration, plan.peak_bytes)) if plans else None

    def _fitting(
        self, method: Method, propose: Callable[[int], tuple[int, ...] | None], budget_bytes: int
    ) -> RecomputePlan | None:
        """Return a method's plan, asked for fewer live bytes where the placement missed."""
        limit = budget_bytes
        for _ in range(_ROUNDS):
            if limit < self.floor.size_bytes:
                return None
            sequence = propose(limit)
            if sequence is None:
                return None
            plan = self._judge(sequence, method)
            if plan.peak_bytes <= budget_bytes:
                return plan
            limit -= plan.peak_bytes - budget_bytes
        return None

    def _chain_sequence(self, limit_bytes: int) -> tuple[int, ...] | None:
        """Return the chain's sequence, less the runs that the limit does not demand."""
        sequence = self._chain.sequence(limit_bytes) if self._chain else None
        if sequence is None:
            return None
        refilled = self._selective.refilled(sequence, limit_bytes)
        return sequence if refilled is None else refilled

    @cached_property
    def _selective(self) -> Selective:
        return Selective(self._problem)

    @cached_property
    def _chain(self) -> ChainTable | None:
        return self._find_chain(self._problem)

    @cached_property
    def _blocks(self) -> RecomputePlan:
        sequence = block_checkpointing(self._problem)
        if sequence is None:
            certificate = "no chain of blocks: policy 'blocks' has nothing to run again"
            return replace(self.store_all, certificate=certificate)
        return self._judge(sequence, "blocks")

    @cached_property
    def _smallest(self) -> RecomputePlan:
        plans = [self.store_all]
        plans.append(self._judge(self._selective.smallest(self.floor.size_bytes), "selective"))
        least = self._chain.sequence(self._chain.least_bytes) if self._chain else None
        if least is not None:
            plans.append(self._judge(least, "chain"))
        smallest = min(plans, key=lambda plan: (plan.peak_bytes, plan.duration))
        # What is cheapest within fewer bytes may need fewer still: a greedy is not monotone.
        for _ in range(_ROUNDS if len(self._problem.ops) <= _SMALL_PROBLEM else 0):
            smaller = self._proposed(smallest.peak_bytes - self._alignment)
            if smaller is None:
                break
            smallest = smaller
        return smallest

    def _judge(self, sequence: tuple[int, ...], method: Method) -> RecomputePlan:
        """Simulate and place a sequence."""
        usage = simulate(self._problem, sequence)
        arena = plan_offsets(*buffer_intervals(self._problem, sequence), alignment=self._alignment)
        base = self._base_duration
        return RecomputePlan(
            sequence=sequence,
            peak_bytes=arena.peak_bytes,
            live_bytes=usage.peak_bytes,
            duration=usage.duration,
            extra=usage.duration / base - 1 if base else 0.0,
            method=method,
            certificate=_CERTIFICATES[method],
        )


_CERTIFICATES: dict[Method, str] = {
    "store all": "nothing runs again: optimal",
    "selective": "greedy over single buffers, simulated exactly; no proof of optimality",
    "chain": "optimal over the declared blocks and options at slot resolution, then runs taken"
    " back; simulated exactly",
    "blocks": "every block saves its output alone, as asked for",
}


def _aligned(problem: Problem, alignment: int) -> Problem:
    """Return the problem with every size rounded up, as the arena will hold it."""
    return replace(
        problem,
        ops=tuple(
            [replace(op, temp_bytes=align_up(op.temp_bytes, alignment)) for op in problem.ops]
        ),
        size_bytes=tuple([align_up(size, alignment) for size in problem.size_bytes]),
    )
