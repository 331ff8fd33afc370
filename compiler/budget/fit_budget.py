"""Make a plan fit a byte budget: compile, and where it is too large, let forward launches repeat.

The planner (`memory.recompute`) knows the bytes of one chain; the plan has more (variables, slots,
staging, an evaluation). So the plan without recomputation is made first, and what it takes beside
the planner's bytes is set aside. A plan counts as fitting only when its arena, as placed, does.
After a miss the planner is asked for as many bytes less than it planned with, a few times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from compiler.budget.choice import BudgetChoice
from compiler.budget.recompute import describe
from compiler.budget.trials import Trials, fullest, fullest_arenas
from compiler.errors import BudgetError
from compiler.labels import launch_label
from compiler.lowering.buffers import draft_launches
from compiler.lowering.storage import assign_storage
from compiler.plan import Plan
from compiler.plan_memory import Recomputation
from compiler.types import Phase
from memory.recompute.planner import Planner, RecomputePlan
from memory.report import exact_bytes

MAX_ROUNDS = 4
"""Plans tried below the first one; every round takes off what the last one had too much."""


def fit(trials: Trials, base: BudgetChoice) -> tuple[BudgetChoice, Plan]:
    """Return a choice with its plan within the options' `memory_budget` bytes of arena.

    `base` is chosen already, and stays so. Raises BudgetError where nothing fits: with the smallest
    budget that does, the op that sets the floor, and its line.
    """
    options, budget = trials.options, trials.options.memory_budget
    size = trials.arena_bytes(base)
    if options.recompute == "none" and size > budget > 0:
        raise BudgetError(
            f"job {options.name!r} needs {exact_bytes(size)} without recomputation, and"
            f" memory_budget is {exact_bytes(budget)}: leave recompute='none' out, or raise the"
            " budget",
            smallest_bytes=size,
        )
    if options.recompute == "none":
        return base, _noted(trials, base, base)
    if options.recompute == "auto" and (not budget or size <= budget):
        return base, _noted(trials, base, base)
    return _RecomputeSearch(trials, base).run()


class _Fitting(NamedTuple):
    """A choice with the bytes of its arena; `planned` is None where nothing runs again."""

    choice: BudgetChoice
    size_bytes: int
    planned: RecomputePlan | None


class _RecomputeSearch:
    """One search for launches that run again so that a plan fits."""

    def __init__(self, trials: Trials, base: BudgetChoice) -> None:
        self.trials, self.base, self.options = trials, base, trials.options
        graph = trials.graph
        drafts = draft_launches(graph, assign_storage(graph), trials.hardware)
        self.described = describe(graph, drafts)
        alignment = trials.hardware.targets[0].alignment
        self.planner = Planner(self.described.problem, alignment=alignment)
        plan = trials.plan(base)
        self.device = plan.arenas[fullest(plan)].device
        memory = [plan.memory[number] for number in fullest_arenas(plan)]
        self.kept_bytes = sum(
            [m.variable_bytes + m.constant_bytes + m.staging_bytes + m.slot_bytes for m in memory]
        )
        # At least what is kept. Of what lies between chains the planner knows the most, so the rest
        # is the difference of the two, unless its order, all forward launches first, needs more.
        beyond = trials.arena_bytes(base) - self.planner.store_all.peak_bytes
        self.beside = max(self.kept_bytes, beyond)

    def run(self) -> tuple[BudgetChoice, Plan]:
        if self.options.recompute == "blocks":
            return self._blocks()
        budget = self.options.memory_budget
        found = self._within(budget) or self._smallest()
        if found.size_bytes > budget:
            raise self._nothing_fits(found.size_bytes)
        return found.choice, _noted(self.trials, self.base, found.choice, found.planned)

    def _within(self, budget: int) -> _Fitting | None:
        """Return a choice whose arena, as placed, is within some bytes; None if none was found."""
        room = budget - self.beside
        for _ in range(MAX_ROUNDS):
            planned = self.planner.plan(max(room, 0))
            if planned is None:
                return None
            found = self._found(planned)
            missed = found.size_bytes - budget
            if missed <= 0:
                return found
            # Less than it planned with: for a little less room the same plan would come back.
            room = planned.peak_bytes - missed
        return None

    def _blocks(self) -> tuple[BudgetChoice, Plan]:
        choice, size, planned = self._found(self.planner.blocks)
        budget = self.options.memory_budget
        if size > budget > 0:
            raise BudgetError(
                f"job {self.options.name!r} needs {exact_bytes(size)} with recompute='blocks', and"
                f" memory_budget is {exact_bytes(budget)}: recompute='auto' may find more, or"
                " raise the budget",
                smallest_bytes=size,
            )
        return choice, _noted(self.trials, self.base, choice, planned)

    def _smallest(self) -> _Fitting:
        """Return the smallest plan found: within a byte less than its size nothing is.

        On several streams more launches can take more bytes, so that saving everything is smallest.
        And what is planned for fewer bytes may be placed better than what needs the fewest.
        """
        saved = _Fitting(self.base, self.trials.arena_bytes(self.base), None)
        found = min(self._found(self.planner.smallest), saved, key=lambda x: x.size_bytes)
        while smaller := self._within(found.size_bytes - 1):
            found = smaller
        return found

    def _nothing_fits(self, size: int) -> BudgetError:
        """Return the error for a budget below the smallest size found."""
        budget = self.options.memory_budget
        op, floor = self.planner.floor
        scratch = self.described.problem.ops[op].temp_bytes
        node = self.trials.graph.nodes[self.described.nodes[op]]
        where = launch_label(node.op.name, node.attrs, node.scope)
        of_device = f" of {self.device}" if len(self.options.devices) > 1 else ""
        return BudgetError(
            f"{node.source}: job {self.options.name!r} does not fit memory_budget"
            f" {exact_bytes(budget)}{of_device}; the smallest budget found feasible is"
            f" {exact_bytes(size)}. Variables, batches and results take"
            f" {exact_bytes(self.kept_bytes)} of it"
            + (f", and {where!r} alone needs {exact_bytes(floor)} at once" if floor else "")
            + (f", {exact_bytes(scratch)} of that as its kernel's workspace" if scratch else "")
            + ". Raise the budget, or lower the batch size",
            smallest_bytes=size,
        )

    def _found(self, planned: RecomputePlan) -> _Fitting:
        launches = tuple([self.described.nodes[op] for op in planned.sequence])
        choice = replace(self.base, launches=launches)
        return _Fitting(choice, self.trials.arena_bytes(choice), planned)


def _noted(
    trials: Trials, base: BudgetChoice, choice: BudgetChoice, found: RecomputePlan | None = None
) -> Plan:
    """Return the plan with what was decided, where anything was asked for."""
    plan, budget = trials.plan(choice), trials.options.memory_budget
    if not budget and found is None:
        return plan
    again = [x for a in plan.actors for x in a.launches if x.phase is Phase.RECOMPUTE]
    note = Recomputation(
        budget_bytes=budget,
        store_all_bytes=trials.arena_bytes(base),
        num_launches=len(again),
        extra=found.extra if found else 0.0,
        method=found.method if found else "store all",
        certificate=found.certificate if found else "fits without recomputation",
    )
    return replace(plan, recomputation=(note,))
