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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compiler.budget import offload, spill
from compiler.graph import Graph
from compiler.lowering.buffers import copy_info
from compiler.lowering.chains import MESSAGE_NS
from compiler.lowering.launch_times import launch_times
from compiler.lowering.step_program import make_program
from compiler.ops.copies import Copies
from compiler.rates import needed_per_step
from compiler.target import Target, link_of
from compiler.types import TensorType, ValueId

MIN_ACTIVATION_BYTES = 1 << 20
"""Activations below it stay: each adds cuts of the compute stream, and saves next to nothing."""

MIN_IDLE_SHARE = 1 / 16
"""Activations that lie idle for a smaller part of the step stay.

They hold few bytes at any one time, and cannot share a bucket with others: a bucket ends where its
first value is read again.
"""


@dataclass(frozen=True, slots=True)
class OffloadChoice:
    """What goes to host memory: optimizer state by name, activations by value.

    `arena_bytes` is what the device's arena takes then; `step_ns` is the estimated time of a step,
    copies included.
    """

    state: tuple[str, ...]
    activations: tuple[ValueId, ...]
    arena_bytes: int
    step_ns: float


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What goes together, its bytes, its time on the link, and the time that it has for that.

    `most_ns`: the time that saving the bytes in another way takes; None if there is none.
    """

    state: tuple[str, ...]
    activation: ValueId | None
    size_bytes: int
    in_ns: float
    out_ns: float
    spare_ns: float
    most_ns: float | None

    @property
    def late_ns(self) -> float:
        """Time by which the copies are longer than what they have."""
        return max(0.0, self.in_ns + self.out_ns + 2 * MESSAGE_NS - self.spare_ns)


def apply_offload(graph: Graph, choice: OffloadChoice, target: Target) -> Graph:
    """Return the ordered graph with what was chosen in host memory."""
    return spill.run(offload.run(graph, choice.state, target), choice.activations, target)


def choose_offload(
    graph: Graph,
    target: Target,
    budget_bytes: int,
    arena_bytes: Callable[[Graph], int],
    *,
    num_streams: int = 1,
) -> OffloadChoice:
    """Return the cheapest choice that brings the arena to a number of bytes, or near it.

    Nothing where it fits already, or the target has no link. Where no choice fits, the one with the
    fewest bytes of those tried: the caller compares. Asks `arena_bytes` at most about
    4 log2(candidates) times.

    Args:
        graph: went through all passes up to `order`.
        target: its `link` says what copies cost.
        budget_bytes: what the device's arena may take.
        arena_bytes: lowers a graph and returns the size of its device arena.
        num_streams: compute streams of the plan.
    """

    def measure(chosen: Sequence[_Candidate]) -> OffloadChoice:
        return _measured(graph, chosen, target, arena_bytes, num_streams)

    def cost(choice: OffloadChoice) -> tuple[int, float, int]:
        return max(choice.arena_bytes - budget_bytes, 0), choice.step_ns, -choice.arena_bytes

    nothing = measure(())
    if nothing.arena_bytes <= budget_bytes or link_of(target) is None:
        return nothing
    ranked = _rank(_candidates(graph, target, nothing.step_ns), nothing.step_ns)
    state = [candidate for candidate in ranked if candidate.state]
    rows = [state, ranked] if 0 < len(state) < len(ranked) else [ranked]
    return min([nothing, *[_search(row, budget_bytes, measure) for row in rows]], key=cost)


def _search(
    ranked: Sequence[_Candidate],
    budget_bytes: int,
    measure: Callable[[Sequence[_Candidate]], OffloadChoice],
) -> OffloadChoice:
    """Return the shortest beginning of a row that fits, else the smallest that was tried."""
    too_few, enough = 0, min(1, len(ranked))
    best = measure(ranked[:enough])
    while enough < len(ranked) and best.arena_bytes > budget_bytes:
        too_few, enough = enough, min(2 * enough, len(ranked))
        best = min(best, measure(ranked[:enough]), key=lambda choice: choice.arena_bytes)
    while enough - too_few > 1 and best.arena_bytes <= budget_bytes:
        middle = (too_few + enough) // 2
        choice = measure(ranked[:middle])
        if choice.arena_bytes <= budget_bytes:
            enough, best = middle, choice
        else:
            too_few = middle
    return best


def _measured(
    graph: Graph,
    chosen: Sequence[_Candidate],
    target: Target,
    arena_bytes: Callable[[Graph], int],
    num_streams: int,
) -> OffloadChoice:
    state = tuple([name for candidate in chosen for name in candidate.state])
    activations = tuple([c.activation for c in chosen if c.activation is not None])
    choice = OffloadChoice(state, activations, 0, 0.0)
    changed = apply_offload(graph, choice, target)
    step_ns = make_program(changed, target, num_streams, 0).makespan_ns
    return OffloadChoice(state, activations, arena_bytes(changed), step_ns)


def _candidates(graph: Graph, target: Target, step_ns: float) -> list[_Candidate]:
    """Return all candidates, state first, each kind in order of time."""
    found: list[_Candidate] = []
    early = offload.with_early_updates(graph)
    updates = offload.state_updates(early)
    if updates:
        rate = needed_per_step(early)[updates[0].node]
        times = launch_times(early, target, is_per_step=rate)
        free_ns = 0.0
        for update in updates:
            node = early.nodes[update.node]
            types = [early.types[node.inputs[position]] for position in update.positions]
            spare_ns = times.begin_ns[update.node] - free_ns
            free_ns = times.begin_ns[update.node]
            found.append(_candidate(update.names, None, types, spare_ns, None, target))
    for idle in spill.idle_values(graph, target):
        type_ = graph.types[idle.value]
        is_long = idle.idle_ns >= MIN_IDLE_SHARE * step_ns
        if is_long and type_.size_bytes >= MIN_ACTIVATION_BYTES:
            found.append(_candidate((), idle.value, [type_], idle.idle_ns, idle.made_ns, target))
    return found


def _candidate(
    state: tuple[str, ...],
    activation: ValueId | None,
    types: list[TensorType],
    spare_ns: float,
    most_ns: float | None,
    target: Target,
) -> _Candidate:
    in_ns, out_ns = [
        sum([copy_info(target, way, type_).duration_ns for type_ in types])
        for way in (Copies.IN, Copies.OUT)
    ]
    size = sum([type_.size_bytes for type_ in types])
    return _Candidate(state, activation, size, in_ns, out_ns, spare_ns, most_ns)


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
