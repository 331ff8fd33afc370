"""What a plan's control registers hold when a training goes on after some steps."""

from __future__ import annotations

from compiler.plan import ActorKind, Plan, RegisterKind
from compiler.verify import edges_of
from memory.registers import RateEdge, repetition_vector


def credits_after(plan: Plan, steps: int) -> dict[str, int]:
    """Return the credits that control registers hold after some steps, by name.

    What comes every n steps counts them over all runs of a training, not from the start of this
    one; but a sink begins anew, for the outputs of earlier steps went to the run before.
    """
    edges, registers = edges_of(plan)
    fired = _firings(plan, edges, steps * plan.int_option("accumulate", 1))
    held: dict[str, int] = {}
    for edge, register in zip(edges, registers, strict=True):
        tokens = fired[edge.producer] * edge.produce - fired[edge.consumer] * edge.consume
        is_sink = plan.actors[edge.consumer].kind is ActorKind.SINK
        if tokens and plan.registers[register].kind is RegisterKind.CONTROL and not is_sink:
            held[plan.registers[register].name] = tokens
    return held


def _firings(plan: Plan, edges: list[RateEdge], batches: int) -> list[int]:
    """Return how often each actor fires on some batches, when all that can fire has fired.

    An evaluation has all its firings or none, so these are no shares of a period.
    """
    feeder = next(a.id for a in plan.actors if a.name == "data")
    repetitions = repetition_vector(len(plan.actors), edges)
    fired = [-(-batches * count // repetitions[feeder]) for count in repetitions]
    is_settled = False
    while not is_settled:
        is_settled = True
        for edge in edges:
            possible = fired[edge.producer] * edge.produce // edge.consume
            if fired[edge.consumer] > possible:
                fired[edge.consumer] = possible
                is_settled = False
    return fired
