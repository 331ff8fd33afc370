"""Choose what goes to host memory so that the device's arena fits, at the least cost in time.

There are two kinds of candidates: the optimizer state of an update, and an activation that lies
idle between the forward pass and the backward pass. A copy pays when it hides behind compute: its
way there and back is shorter than the time it has, and the link is not busy all step long.

- **State** has the time since the update before. What cannot hide costs what the link is late,
  and nothing else saves these bytes; so state far from other updates comes first.
- **Activations** have their idle time. What cannot hide is chosen only where even running its maker
  again takes longer. It seldom does: a value as wide as the model's hidden layer takes ten times as
  long on a link of 55 GB/s as its matmul on a device of 400 TFLOP/s.

Candidates are ranked by what they cost per byte, and those that cost nothing by how many bytes they
free for how long. The shortest beginning of that row that fits is found by doubling and bisection,
and so is that of the row of state alone, for all activations want the link at once; whether they
fit, and how long a step takes then, is asked of the whole compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.budget import offload, spill
from compiler.budget.choice import BudgetChoice
from compiler.budget.trials import Trials
from compiler.graph import Graph
from compiler.lowering.buffers import copy_info
from compiler.lowering.launch_times import launch_times
from compiler.placement import HOST_SIDE
from compiler.rates import needed_per_step
from compiler.target import Hardware
from compiler.types import TensorType, ValueId

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


def choose_offload(trials: Trials) -> BudgetChoice:
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


def _search(ranked: Sequence[_Candidate], trials: Trials) -> BudgetChoice:
    """Return the shortest beginning of a row that fits, else the smallest that was tried."""
    budget = trials.options.memory_budget
    too_few, enough = 0, min(1, len(ranked))
    best = _chosen(ranked[:enough])
    while enough < len(ranked) and trials.arena_bytes(best) > budget:
        too_few, enough = enough, min(2 * enough, len(ranked))
        best = min(best, _chosen(ranked[:enough]), key=trials.arena_bytes)
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
    found: list[_Candidate] = []
    early = offload.with_early_updates(graph)
    updates = offload.state_updates(early)
    if updates:
        rate = needed_per_step(early)[updates[0].node]
        times = launch_times(early, hardware, is_per_step=rate)
        free_ns = 0.0
        for update in updates:
            node = early.nodes[update.node]
            types = [early.types[node.inputs[position]] for position in update.positions]
            spare_ns = times.begin_ns[update.node] - free_ns
            free_ns = times.begin_ns[update.node]
            if hardware.link(node.device, HOST_SIDE) is not None:
                found.append(
                    _candidate(update.names, None, types, spare_ns, None, hardware, node.device)
                )
    for idle in spill.idle_values(graph, hardware):
        type_ = graph.types[idle.value]
        is_long = idle.idle_ns >= MIN_IDLE_SHARE * step_ns
        device = graph.nodes[idle.maker].device
        is_worth_it = is_long and type_.size_bytes >= MIN_ACTIVATION_BYTES
        if is_worth_it and hardware.link(device, HOST_SIDE) is not None:
            times_ns = idle.idle_ns, idle.made_ns
            found.append(_candidate((), idle.value, [type_], *times_ns, hardware, device))
    return found


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
