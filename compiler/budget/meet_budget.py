"""Which way a plan meets its byte budget: running launches again, host memory, or both.

Where a device has a link to the host, optimizer state and long-lived activations may live there
(`compiler.budget.choose_offload`). Both ways are planned, and the one with the shorter estimated
step wins; where neither is enough alone, all optimizer state goes to the host and the rest is
recomputation's.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.budget.choice import BudgetChoice
from compiler.budget.choose_offload import choose_offload
from compiler.budget.fit_budget import fit
from compiler.budget.offload import state_names
from compiler.budget.trials import Trials
from compiler.errors import BudgetError
from compiler.placement import HOST_SIDE
from compiler.plan import Plan
from compiler.plan_memory import Recomputation

NOTHING = BudgetChoice()


def meet_budget(trials: Trials) -> tuple[BudgetChoice, Plan]:
    """Return what was chosen and its plan, within the options' `memory_budget` if one is given.

    Raises BudgetError where nothing fits.
    """
    options = trials.options
    budget = options.memory_budget
    state_on_host = BudgetChoice(state=state_names(trials.graph))
    if options.offload == "optimizer":
        return fit(trials, state_on_host)
    has_way = options.offload != "none" and trials.hardware.link(0, HOST_SIDE) is not None
    if not has_way or not budget or trials.arena_bytes(NOTHING) <= budget:
        return fit(trials, NOTHING)
    again = _recomputed(trials)
    moved = choose_offload(trials)
    if trials.arena_bytes(moved) <= budget:
        extra = _extra_time(trials, moved)
        if again is None or extra <= again[1].recomputation[0].extra:
            return moved, _noted(trials, moved, extra)
    return again or fit(trials, state_on_host)


def _recomputed(trials: Trials) -> tuple[BudgetChoice, Plan] | None:
    try:
        return fit(trials, NOTHING)
    except BudgetError:
        return None


def _extra_time(trials: Trials, choice: BudgetChoice) -> float:
    """Return what a step takes longer by, as a share of the step that saves all on the device."""
    step_ns = trials.step_ns(NOTHING)
    return trials.step_ns(choice) / step_ns - 1 if step_ns else 0.0


def _noted(trials: Trials, choice: BudgetChoice, extra: float) -> Plan:
    note = Recomputation(
        budget_bytes=trials.options.memory_budget,
        store_all_bytes=trials.arena_bytes(NOTHING),
        num_launches=0,
        extra=max(extra, 0.0),
        method="offload",
        certificate=f"{len(choice.state)} variables and {len(choice.activations)} activations live"
        " in host memory; the shortest beginning of a ranked row that fits",
    )
    return replace(trials.plan(choice), recomputation=(note,))
