"""The fences around the batches of a pipeline's stage; see `compiler.lowering.pipelines`."""

from __future__ import annotations

from collections.abc import Sequence

from compiler.lowering.actor_graph import ActorGraph
from compiler.lowering.chains import StreamKey
from compiler.lowering.step_program import StepProgram
from compiler.ops.sources import VARIABLE
from compiler.placement import StreamRole
from compiler.plan import ActorKind
from compiler.types import ValueId


def hold_batches(program: StepProgram, actors: ActorGraph, numbers: Sequence[int]) -> int:
    """Let a stage go forward while it has slots; return how far its ends may be apart.

    `numbers` are the actors of the program's chains. What a batch sends back may still be on its
    way when the next one takes its slot, and what comes for one more may be on its way before.
    """
    of_batch = [
        n
        for n, chain in zip(numbers, program.chains, strict=True)
        if not chain.is_per_step and not chain.is_beside
    ]
    own = [n for n in of_batch if actors.drafts[n].kind is not ActorKind.COMM]
    first = [n for n in own if not any([actors.is_before(m, n) for m in own])]
    last = [n for n in own if not any([actors.is_before(n, m) for m in own])]
    reason = f"{program.in_flight}: batches under way"
    for n in first:
        for m in [m for m in last if m != n]:
            name = f"{actors.drafts[n].name}.next.{actors.drafts[m].name}"
            actors.control(name, n, m, reason, program.in_flight)
    for one, other in _turns(program):
        a, b = numbers[one], numbers[other]
        name = f"{actors.drafts[a].name}.turn.{actors.drafts[b].name}"
        actors.control(name, a, b, "1: one batch after the other hands a variable on")
    for own in _meetings(program):
        a, b = numbers[own[0]], numbers[own[-1]]
        if not actors.has_edge(a, b):
            name = f"{actors.drafts[a].name}.turn.{actors.drafts[b].name}"
            actors.control(name, a, b, "1: ranks meet for one batch after the other")
    return program.in_flight + 2


def _meetings(program: StepProgram) -> list[list[int]]:
    """Return the chains of a batch on each stream between ranks, in order, where they are several.

    Within a batch they go in their order; ranks must come to the next batch's after these.
    """
    found: dict[StreamKey, list[int]] = {}
    for number, chain in enumerate(program.chains):
        if chain.stream.role is StreamRole.COMM and not chain.is_per_step:
            found.setdefault(chain.stream, []).append(number)
    return [own for own in found.values() if len(own) > 1]


def _turns(program: StepProgram) -> list[tuple[int, int]]:
    """Return pairs of chains of a batch, of which the first waits for the other of the last batch.

    They touch one variable that batches write, and one of them writes it.
    """
    root = program.storage.root
    variables = {n.outputs[0] for n in program.graph.nodes if n.op is VARIABLE}
    touching: dict[ValueId, dict[int, bool]] = {}
    for number, chain in enumerate(program.chains):
        if chain.is_per_step:
            continue
        for node in [program.drafts[i].node for i in chain.launches]:
            written = {root[node.inputs[over]] for _, over in node.writes}
            for value in variables.intersection([root[v] for v in node.inputs]):
                own = touching.setdefault(value, {})
                own[number] = own.get(number, False) or value in written
    found = {
        (one, other): None
        for own in touching.values()
        for one in own
        for other in own
        if one < other and (own[one] or own[other])
    }
    return list(found)
