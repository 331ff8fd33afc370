"""Which way a plan meets its byte budget: running launches again, host memory, or both.

Where a device has a link to the host, optimizer state and long-lived activations may live there
(`compiler.budget.choose_offload`). Both ways are planned, and the one with the shorter estimated
step wins; where neither is enough alone, all optimizer state goes to the host and the rest is
recomputation's.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.budget import offload
from compiler.budget.choose_offload import OffloadChoice, apply_offload, choose_offload
from compiler.budget.fit_budget import Lower, arena_bytes, fit
from compiler.errors import BudgetError
from compiler.graph import Graph
from compiler.lowering.step_program import make_program
from compiler.options import CompileOptions
from compiler.passes.check import check
from compiler.plan import Plan, Recomputation
from compiler.target import Target, link_of


def meet_budget(
    graph: Graph, target: Target, options: CompileOptions, lower: Lower
) -> tuple[Graph, Plan]:
    """Return an ordered graph and its plan, within `options.memory_budget` if one is given.

    Raises BudgetError where nothing fits.
    """

    def with_state_on_host(ordered: Graph) -> Plan:
        return lower(offload.run(ordered, offload.state_names(ordered), target))

    if options.offload == "optimizer":
        return fit(graph, target, options, with_state_on_host)
    budget = options.memory_budget
    if options.offload == "none" or not budget or link_of(target) is None:
        return fit(graph, target, options, lower)
    if arena_bytes(lower(graph)) <= budget:
        return fit(graph, target, options, lower)
    again = _recomputed(graph, target, options, lower)
    moved = choose_offload(
        graph, target, budget, lambda g: arena_bytes(lower(g)), num_streams=options.num_streams
    )
    step_ns = make_program(graph, target, options.num_streams, 0).makespan_ns
    if moved.arena_bytes <= budget and (
        again is None or moved.step_ns <= step_ns * (1 + again[1].recomputation[0].extra)
    ):
        return _moved(graph, target, options, lower, moved, step_ns)
    return again or fit(graph, target, options, with_state_on_host)


def _recomputed(
    graph: Graph, target: Target, options: CompileOptions, lower: Lower
) -> tuple[Graph, Plan] | None:
    try:
        return fit(graph, target, options, lower)
    except BudgetError:
        return None


def _moved(
    graph: Graph,
    target: Target,
    options: CompileOptions,
    lower: Lower,
    choice: OffloadChoice,
    step_ns: float,
) -> tuple[Graph, Plan]:
    changed = apply_offload(graph, choice, target)
    if options.verify:
        check(changed, "offload")
    note = Recomputation(
        budget_bytes=options.memory_budget,
        store_all_bytes=arena_bytes(lower(graph)),
        num_launches=0,
        extra=max(choice.step_ns / step_ns - 1, 0.0) if step_ns else 0.0,
        method="offload",
        certificate=f"{len(choice.state)} variables and {len(choice.activations)} activations live"
        " in host memory; the shortest beginning of a ranked row that fits",
    )
    return changed, replace(lower(changed), recomputation=(note,))
