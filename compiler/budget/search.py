"""The search for a plan within a byte budget: launches that run again, host memory, or both.

Where a device has a link to the host, optimizer state and long-lived activations may live there.
Both ways are planned, and the one with the shorter estimated step wins. Where neither is enough
alone, all optimizer state goes to the host and recomputation does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from compiler.budget import offload
from compiler.budget.offload import state_names
from compiler.budget.recompute import describe
from compiler.contract.accounting import peak_launch
from compiler.contract.errors import BudgetError
from compiler.contract.placement import HOST_SIDE, SHARED
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Recomputation, launch_label
from compiler.contract.types import Phase, TensorType, ValueId
from compiler.graph.graph import Graph
from compiler.graph.target import BudgetChoice, CompileOptions, Hardware
from compiler.lowering.step_program import make_program
from compiler.storage.buffers import copy_info, draft_launches, launch_times
from compiler.storage.order import needed_per_step
from compiler.storage.storage import assign_storage
from memory.recompute.planner import Planner, RecomputePlan
from memory.report import exact_bytes

_KEPT = 4
"""Graphs and plans kept in memory: a plan of 100,000 launches takes hundreds of MB."""


class BudgetEvaluator:
    """An ordered graph with what becomes of it for every choice; none is measured twice.

    `rewrite` runs the budget passes for a choice. `lower` returns the plan of a graph that went
    through all passes.
    """

    def __init__(
        self,
        graph: Graph,
        hardware: Hardware,
        options: CompileOptions,
        rewrite: Callable[[BudgetChoice], Graph],
        lower: Callable[[Graph], Plan],
    ) -> None:
        self.graph = graph
        self.hardware = hardware
        self.options = options
        # Plans are large: only the last few are kept. Sizes and times are numbers: all are kept.
        rewritten = lru_cache(_KEPT)(rewrite)
        self.plan = lru_cache(_KEPT)(lambda choice: lower(rewritten(choice)))
        """Return the plan of a choice."""
        self.arena_bytes = lru_cache(None)(lambda choice: _fullest_bytes(self.plan(choice)))
        """Return the bytes on the device that holds the most; other memories have no budget."""
        self.step_ns = lru_cache(None)(
            lambda choice: (
                make_program(rewritten(choice), hardware, options.num_streams, 0).makespan_ns
            )
        )
        """Return the estimated time of a step, copies included."""


def fullest(plan: Plan) -> int:
    """Return the number of the arena, of those that devices compute in, that is the largest."""
    arenas = [i for i, arena in enumerate(plan.arenas) if arena.place == arena.device.place]
    # Of arenas of one size the first.
    return max(arenas, key=lambda i: (plan.arenas[i].size_bytes, -i))


def fullest_arenas(plan: Plan) -> tuple[int, ...]:
    """Return the numbers of that arena and, on the host, of the memory that ranks share."""
    number = fullest(plan)
    device = plan.arenas[number].device
    rows = enumerate(plan.arenas)
    return (number, *[i for i, a in rows if a.place == SHARED and a.device == device])


def _fullest_bytes(plan: Plan) -> int:
    return sum([plan.arenas[number].size_bytes for number in fullest_arenas(plan)])


# Launches that run again. The planner (`memory.recompute`) knows the bytes of one chain; the plan
# has more (variables, slots, staging, an evaluation). So the plan without recomputation is made
# first, and what it takes beside the planner's bytes is set aside. A plan counts as fitting only
# when its arena, as placed, does. After a miss the planner is asked for as many bytes less than it
# planned with, a few times.

MAX_ROUNDS = 4
"""Plans tried below the first one; every round takes off what the last one had too much."""


def fit_by_recompute(trials: BudgetEvaluator, base: BudgetChoice) -> tuple[BudgetChoice, Plan]:
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
        return base, _with_recompute_notes(trials, base, base)
    if options.recompute == "auto" and (not budget or size <= budget):
        return base, _with_recompute_notes(trials, base, base)
    return _RecomputeSearch(trials, base).run()


class _Fitting(NamedTuple):
    """A choice with the bytes of its arena; `planned` is None where nothing runs again."""

    choice: BudgetChoice
    size_bytes: int
    planned: RecomputePlan | None


class _RecomputeSearch:
    """One search for launches that run again so that a plan fits."""

    def __init__(self, trials: BudgetEvaluator, base: BudgetChoice) -> None:
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
        fitting = self._within(budget) or self._smallest()
        if fitting.size_bytes > budget:
            raise self._nothing_fits(fitting.size_bytes)
        return fitting.choice, _with_recompute_notes(
            self.trials, self.base, fitting.choice, fitting.planned
        )

    def _within(self, budget: int) -> _Fitting | None:
        """Return a choice whose arena, as placed, is within some bytes; None if none was found."""
        room = budget - self.beside
        for _ in range(MAX_ROUNDS):
            planned = self.planner.plan(max(room, 0))
            if planned is None:
                return None
            fitting = self._found(planned)
            excess_bytes = fitting.size_bytes - budget
            if excess_bytes <= 0:
                return fitting
            # Less than it planned with: for a little less room the same plan would come back.
            room = planned.peak_bytes - excess_bytes
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
        return choice, _with_recompute_notes(self.trials, self.base, choice, planned)

    def _smallest(self) -> _Fitting:
        """Return the smallest plan found: within a byte less than its size nothing is.

        On several streams more launches can take more bytes, so that saving everything is smallest.
        And what is planned for fewer bytes may be placed better than what needs the fewest.
        """
        saved = _Fitting(self.base, self.trials.arena_bytes(self.base), None)
        smallest = min(self._found(self.planner.smallest), saved, key=lambda x: x.size_bytes)
        # Each is smaller by a byte at least, so this ends.
        while smaller := self._within(smallest.size_bytes - 1):
            smallest = smaller
        return smallest

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


def _with_recompute_notes(
    trials: BudgetEvaluator,
    base: BudgetChoice,
    choice: BudgetChoice,
    found: RecomputePlan | None = None,
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


# Choose what goes to host memory so that the device's arena fits, at the least cost in time.
#
# There are two kinds of candidates: the optimizer state of an update, and an activation that lies
# idle between the forward pass and the backward pass. A copy pays when it hides behind compute: its
# way there and back is shorter than the time it has, and the link is not busy all step long.
#
# - **State** has the time since the update before. What cannot hide costs what the link is late,
#   and nothing else saves these bytes; so state far from other updates comes first.
# - **Activations** have their idle time. What cannot hide is chosen only where even running its
#   maker again takes longer. It seldom does: a value as wide as the model's hidden layer takes ten
#   times as long on a link of 55 GB/s as its matmul on a device of 400 TFLOP/s.
#
# Candidates are ranked by what they cost per byte, and those that cost nothing by how many bytes
# they free for how long. The shortest prefix of the ranking that fits is found by doubling and
# bisection, and so is that of the ranking of state alone, for all activations want the link at
# once; whether they fit, and how long a step takes then, is asked of the whole compiler.

MIN_ACTIVATION_BYTES = 1 << 20
"""Activations below it stay: each adds cuts of the compute stream, and saves next to nothing."""

MIN_IDLE_SHARE = 1 / 16
"""Activations that lie idle for a smaller part of the step stay.

They hold few bytes at any one time, and cannot share a bucket with others: a bucket ends where its
first value is read again.
"""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What goes together, its bytes, its time on the link, and the time that it has for that.

    `most_ns`: the time that saving the bytes in another way takes; None if there is none.
    `messages_ns`: what the two waits for the copies cost.
    """

    state: tuple[str, ...]
    activation: ValueId | None
    size_bytes: int
    in_ns: float
    out_ns: float
    spare_ns: float
    most_ns: float | None
    messages_ns: float

    @property
    def late_ns(self) -> float:
        """Time by which the copies are longer than what they have."""
        return max(0.0, self.in_ns + self.out_ns + self.messages_ns - self.spare_ns)


def choose_offload(trials: BudgetEvaluator) -> BudgetChoice:
    """Return the cheapest choice that brings the arena under the options' budget, or near it.

    Nothing where it fits already, or the target has no link. Where no choice fits, the one with the
    fewest bytes of those tried: the caller compares. Tries about 4 log2(candidates) at most.
    """
    budget = trials.options.memory_budget

    def cost(choice: BudgetChoice) -> tuple[int, float, int]:
        size = trials.arena_bytes(choice)
        return max(size - budget, 0), trials.step_ns(choice), -size

    nothing = BudgetChoice()
    if trials.arena_bytes(nothing) <= budget or not has_way(trials.hardware):
        return nothing
    step_ns = trials.step_ns(nothing)
    ranked = _rank(_candidates(trials.graph, trials.hardware, step_ns), step_ns)
    state = [candidate for candidate in ranked if candidate.state]
    rows = [state, ranked] if 0 < len(state) < len(ranked) else [ranked]
    return min([nothing, *[_search(row, trials) for row in rows]], key=cost)


def has_way(hardware: Hardware) -> bool:
    """Whether any of the devices has a link to the host's memory."""
    links = [hardware.link(device, HOST_SIDE) for device in range(len(hardware.devices))]
    return any([link is not None for link in links])


def _search(ranked: Sequence[_Candidate], trials: BudgetEvaluator) -> BudgetChoice:
    """Return the shortest beginning of a row that fits, else the smallest that was tried."""
    budget = trials.options.memory_budget
    # `too_few` is known not to fit; `enough` fits, or is all there is.
    too_few, enough = 0, min(1, len(ranked))
    best = _chosen(ranked[:enough])
    while enough < len(ranked) and trials.arena_bytes(best) > budget:
        too_few, enough = enough, min(2 * enough, len(ranked))
        best = min(best, _chosen(ranked[:enough]), key=trials.arena_bytes)
    # More candidates mostly mean fewer bytes. Where they do not, `best` still fits.
    while enough - too_few > 1 and trials.arena_bytes(best) <= budget:
        middle = (too_few + enough) // 2
        choice = _chosen(ranked[:middle])
        if trials.arena_bytes(choice) <= budget:
            enough, best = middle, choice
        else:
            too_few = middle
    return best


def _chosen(candidates: Sequence[_Candidate]) -> BudgetChoice:
    state = tuple([name for candidate in candidates for name in candidate.state])
    activations = tuple([c.activation for c in candidates if c.activation is not None])
    return BudgetChoice(state=state, activations=activations)


def _candidates(graph: Graph, hardware: Hardware, step_ns: float) -> list[_Candidate]:
    """Return all candidates, state first, each kind in order of time."""
    candidates: list[_Candidate] = []
    early = offload.with_early_updates(graph)
    updates = offload.state_updates(early)
    if updates:
        rate = needed_per_step(early)[updates[0].node]
        times = launch_times(early, hardware, is_per_step=rate)
        free_ns = 0.0
        for update in updates:
            node = early.nodes[update.node]
            types = [early.types[node.inputs[position]] for position in update.positions]
            # From the update before to this one: its copies run in that time.
            spare_ns = times.begin_ns[update.node] - free_ns
            free_ns = times.begin_ns[update.node]
            if hardware.link(node.device, HOST_SIDE) is not None:
                candidates.append(
                    _candidate(update.names, None, types, spare_ns, None, hardware, node.device)
                )
    for idle in offload.idle_values(graph, hardware):
        type_ = graph.types[idle.value]
        is_long = idle.idle_ns >= MIN_IDLE_SHARE * step_ns
        device = graph.nodes[idle.maker].device
        is_worth_it = is_long and type_.size_bytes >= MIN_ACTIVATION_BYTES
        if is_worth_it and hardware.link(device, HOST_SIDE) is not None:
            times_ns = idle.idle_ns, idle.made_ns
            candidates.append(_candidate((), idle.value, [type_], *times_ns, hardware, device))
    return candidates


def _candidate(
    state: tuple[str, ...],
    activation: ValueId | None,
    types: list[TensorType],
    spare_ns: float,
    most_ns: float | None,
    hardware: Hardware,
    device: int,
) -> _Candidate:
    in_ns, out_ns = [
        sum([copy_info(hardware, *ends, type_).duration_ns for type_ in types])
        for ends in ((HOST_SIDE, device), (device, HOST_SIDE))
    ]
    size = sum([type_.size_bytes for type_ in types])
    return _Candidate(
        state,
        activation,
        size,
        in_ns,
        out_ns,
        spare_ns,
        most_ns,
        2 * hardware.message_ns(device, device),
    )


def _rank(candidates: Sequence[_Candidate], step_ns: float) -> list[_Candidate]:
    """Return the candidates that pay, the cheapest per byte first.

    Of those that cost nothing, state goes first, then what frees most bytes for the longest. A
    candidate that would keep the link busy for longer than a step cannot hide.
    """
    order = sorted(
        candidates,
        key=lambda c: (
            c.late_ns / c.size_bytes,
            c.most_ns is not None,
            -c.size_bytes * c.spare_ns,
        ),
    )
    ranked: list[_Candidate] = []
    in_ns = out_ns = 0.0
    for candidate in order:
        # Both directions of a link run at once, so each has its own time.
        is_hidden = (
            not candidate.late_ns
            and in_ns + candidate.in_ns <= step_ns
            and out_ns + candidate.out_ns <= step_ns
        )
        cost_ns = candidate.in_ns + candidate.out_ns
        if is_hidden or candidate.most_ns is None or cost_ns < candidate.most_ns:
            ranked.append(candidate)
            in_ns += candidate.in_ns
            out_ns += candidate.out_ns
    return ranked


NOTHING = BudgetChoice()


def meet_budget(trials: BudgetEvaluator) -> tuple[BudgetChoice, Plan]:
    """Return what was chosen and its plan, within the options' `memory_budget` if one is given.

    Raises BudgetError where nothing fits.
    """
    options = trials.options
    budget = options.memory_budget
    state_on_host = BudgetChoice(state=state_names(trials.graph))
    if options.offload == "optimizer":
        return fit_by_recompute(trials, state_on_host)
    may_move = options.offload != "none" and has_way(trials.hardware)
    if not may_move or not budget or trials.arena_bytes(NOTHING) <= budget:
        return fit_by_recompute(trials, NOTHING)
    errors: list[BudgetError] = []
    recomputed = _fitted(trials, NOTHING, errors)
    offloaded = choose_offload(trials)
    if trials.arena_bytes(offloaded) <= budget:
        extra = _extra_time(trials, offloaded)
        if recomputed is None or extra <= recomputed[1].recomputation[0].extra:
            return offloaded, _with_choice_notes(trials, offloaded, extra)
    fallback = recomputed or _fitted(trials, state_on_host, errors)
    if fallback is None:
        raise _nearest(trials, offloaded, errors)
    return fallback


def _fitted(
    trials: BudgetEvaluator, base: BudgetChoice, missed: list[BudgetError]
) -> tuple[BudgetChoice, Plan] | None:
    """Return what fits by recomputation, on top of a choice; else note what would."""
    try:
        return fit_by_recompute(trials, base)
    except BudgetError as error:
        missed.append(error)
        return None


def _nearest(
    trials: BudgetEvaluator, moved: BudgetChoice, missed: list[BudgetError]
) -> BudgetError:
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


def _extra_time(trials: BudgetEvaluator, choice: BudgetChoice) -> float:
    """Return what a step takes longer by, as a share of the step that saves all on the device."""
    step_ns = trials.step_ns(NOTHING)
    return trials.step_ns(choice) / step_ns - 1 if step_ns else 0.0


def _with_choice_notes(trials: BudgetEvaluator, choice: BudgetChoice, extra: float) -> Plan:
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
