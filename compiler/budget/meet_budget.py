"""Which way a plan meets its byte budget: running launches again, host memory, or both.

Where a device has a link to the host, optimizer state and long-lived activations may live there
(`compiler.budget.choose_offload`). Both ways are planned, and the one with the shorter estimated
step wins; where neither is enough alone, all optimizer state goes to the host and the rest is
recomputation's.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.accounting import peak_launch
from compiler.budget.choice import BudgetChoice
from compiler.budget.choose_offload import choose_offload, has_way
from compiler.budget.fit_budget import fit
from compiler.budget.offload import state_names
from compiler.budget.trials import Trials, fullest
from compiler.errors import BudgetError
from compiler.plan import Plan
from compiler.plan_memory import Recomputation
from memory.report import exact_bytes

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
    may_move = options.offload != "none" and has_way(trials.hardware)
    if not may_move or not budget or trials.arena_bytes(NOTHING) <= budget:
        return fit(trials, NOTHING)
    missed: list[BudgetError] = []
    again = _fitted(trials, NOTHING, missed)
    moved = choose_offload(trials)
    if trials.arena_bytes(moved) <= budget:
        extra = _extra_time(trials, moved)
        if again is None or extra <= again[1].recomputation[0].extra:
            return moved, _noted(trials, moved, extra)
    found = again or _fitted(trials, state_on_host, missed)
    if found is None:
        raise _nearest(trials, moved, missed)
    return found


def _fitted(
    trials: Trials, base: BudgetChoice, missed: list[BudgetError]
) -> tuple[BudgetChoice, Plan] | None:
    """Return what fits by recomputation, on top of a choice; else note what would."""
    try:
        return fit(trials, base)
    except BudgetError as error:
        missed.append(error)
        return None


def _nearest(trials: Trials, moved: BudgetChoice, missed: list[BudgetError]) -> BudgetError:
    """Return the error that names the smallest of the budgets that would do."""
    nearest = min(missed, key=lambda error: error.smallest_bytes)
    size, options = trials.arena_bytes(moved), trials.options
    if nearest.smallest_bytes <= size:
        return nearest
    return BudgetError(
        f"job {options.name!r} does not fit memory_budget {exact_bytes(options.memory_budget)}; the"
        f" smallest budget found feasible is {exact_bytes(size)}, with {len(moved.state)} variables"
        f" and {len(moved.activations)} activations in host memory{_peak(trials.plan(moved))}."
        " Raise the budget, or lower the batch size",
        smallest_bytes=size,
    )


def _peak(plan: Plan) -> str:
    """Return in words where the largest arena has the most bytes, and what of them is scratch."""
    memory = plan.memory[fullest(plan)]
    at = peak_launch(plan, memory)
    if at is None:
        return ""
    text = f"; its peak is at {at.label!r} ({plan.sources[at.source]})"
    scratch = memory.peak_workspace_bytes
    return text + (f", {exact_bytes(scratch)} of it as its kernel's workspace" if scratch else "")


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
