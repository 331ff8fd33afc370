"""Make a plan fit a byte budget: compile, and where it is too large, let forward launches repeat.

The planner (`memory.recompute`) knows the bytes of one chain; the plan has more (variables, slots,
staging, an evaluation). So the plan without recomputation is made first, and what it takes beside
the planner's bytes is set aside. A plan counts as fitting only when its arena, as placed, does; a
miss lowers the planner's share by as much, a few times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from compiler.budget.recompute import Described, describe, repeat
from compiler.errors import BudgetError
from compiler.graph import Graph
from compiler.lowering.buffers import draft_launches
from compiler.lowering.storage import assign_storage
from compiler.options import CompileOptions
from compiler.passes.check import check
from compiler.plan import Plan, Recomputation
from compiler.target import Target
from compiler.types import Phase
from memory.recompute.planner import Infeasible, Planner, RecomputePlan
from memory.report import exact_bytes

MAX_ROUNDS = 4
"""Plans tried below the first one; every round takes off what the last one had too much."""

Lower = Callable[[Graph], Plan]
"""Return the plan of a graph that went through all passes."""


def fit(graph: Graph, target: Target, options: CompileOptions, lower: Lower) -> tuple[Graph, Plan]:
    """Return an ordered graph and its plan within `options.memory_budget` bytes of arena.

    Raises BudgetError where nothing fits: with the smallest budget that does, the op that sets the
    floor, and its line.
    """
    plan = lower(graph)
    budget = options.memory_budget
    size = arena_bytes(plan)
    if options.recompute == "auto" and (not budget or size <= budget):
        return graph, _noted(plan, options, size)
    if options.recompute == "none":
        if size > budget > 0:
            raise BudgetError(
                f"job {options.name!r} needs {exact_bytes(size)} without recomputation, and"
                f" memory_budget is {exact_bytes(budget)}: leave recompute='none' out, or raise the"
                " budget",
                smallest_bytes=size,
            )
        return graph, _noted(plan, options, size)
    return _Fitting(graph, target, options, lower, plan).run()


class _Fitting:
    """One search for a plan that fits."""

    def __init__(
        self, graph: Graph, target: Target, options: CompileOptions, lower: Lower, plan: Plan
    ) -> None:
        self.graph = graph
        self.options = options
        self.lower = lower
        self.store_all = plan
        drafts = draft_launches(graph, assign_storage(graph), target)
        self.described: Described = describe(graph, drafts, options.alignment)
        self.planner = Planner(self.described.problem, alignment=options.alignment)
        self.beside = arena_bytes(plan) - self.planner.store_all.peak_bytes

    def run(self) -> tuple[Graph, Plan]:
        if self.options.recompute == "blocks":
            return self._blocks()
        budget = self.options.memory_budget
        room = budget - self.beside
        for _ in range(MAX_ROUNDS):
            try:
                found = self.planner.plan(max(room, 0))
            except Infeasible:
                break
            graph, plan = self._lowered(found)
            missed = arena_bytes(plan) - budget
            if missed <= 0:
                return graph, _noted(plan, self.options, arena_bytes(self.store_all), found)
            room -= missed
        return self._smallest()

    def _blocks(self) -> tuple[Graph, Plan]:
        found = self.planner.plan(0, policy="blocks")
        graph, plan = self._lowered(found)
        size, budget = arena_bytes(plan), self.options.memory_budget
        if size > budget > 0:
            raise BudgetError(
                f"job {self.options.name!r} needs {exact_bytes(size)} with recompute='blocks', and"
                f" memory_budget is {exact_bytes(budget)}: recompute='auto' may find more, or"
                " raise the budget",
                smallest_bytes=size,
            )
        return graph, _noted(plan, self.options, arena_bytes(self.store_all), found)

    def _smallest(self) -> tuple[Graph, Plan]:
        """Return the smallest plan there is, if it fits after all; else say what would.

        On several streams more launches can take more bytes, so that saving everything is smallest.
        """
        found = self.planner.smallest()
        graph, plan = self._lowered(found)
        size, budget = arena_bytes(plan), self.options.memory_budget
        if size <= budget:
            return graph, _noted(plan, self.options, arena_bytes(self.store_all), found)
        size = min(size, arena_bytes(self.store_all))
        op, floor = self.planner.floor
        node = self.graph.nodes[self.described.nodes[op]]
        where = f"{node.scope}: {node.op}" if node.scope else str(node.op)
        raise BudgetError(
            f"{node.source}: job {self.options.name!r} does not fit memory_budget"
            f" {exact_bytes(budget)}; the smallest budget found feasible is {exact_bytes(size)}."
            f" Variables, batches and results take {exact_bytes(max(self.beside, 0))} of it"
            + (f", and {where!r} alone needs {exact_bytes(floor)} at once" if floor else "")
            + ". Raise the budget, or lower the batch size",
            smallest_bytes=size,
        )

    def _lowered(self, found: RecomputePlan) -> tuple[Graph, Plan]:
        graph = repeat(self.graph, self.described, found.sequence)
        if self.options.verify:
            check(graph, "recompute")
        return graph, self.lower(graph)


def arena_bytes(plan: Plan) -> int:
    """Return the bytes on the device that computes; an arena of another kind is not budgeted."""
    return plan.arenas[0].size_bytes


def _noted(
    plan: Plan, options: CompileOptions, store_all_bytes: int, found: RecomputePlan | None = None
) -> Plan:
    """Return the plan with what was decided, where anything was asked for."""
    if not options.memory_budget and found is None:
        return plan
    again = [x for a in plan.actors for x in a.launches if x.phase is Phase.RECOMPUTE]
    note = Recomputation(
        budget_bytes=options.memory_budget,
        store_all_bytes=store_all_bytes,
        num_launches=len(again),
        extra=found.extra if found else 0.0,
        method=found.method if found else "store all",
        certificate=found.certificate if found else "fits without recomputation",
    )
    return replace(plan, recomputation=(note,))
