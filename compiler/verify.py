"""Prove a plan before it runs, from the plan alone, trusting nothing the lowering believed.

Checked: ids and ranges; every view inside its register; the balance equations of the rates have a
solution; one period of the token game completes with the slots given; recomputed from the launches
themselves, no two tensors that are live together overlap in an arena while the actors run one after
the other, and none while they do not, because actors that share bytes are in order
(`compiler.shared_bytes`); what copies a block of bytes copies its operands and nothing else
(`compiler.blocks`); each version has one maker, and every read, of a launch as of a sink,
finds the version that it names (`compiler.versions`).
"""

from __future__ import annotations

from itertools import accumulate

from compiler.accounting import account, slots_in
from compiler.blocks import check_blocks
from compiler.errors import CompileError, InternalError
from compiler.lowering.carried import Carried, CarriedCount
from compiler.places import Extent, extents_of
from compiler.plan import ActorKind, Plan, RegisterKind
from compiler.references import check_references
from compiler.shared_bytes import check_shared_bytes
from compiler.sub_plan import sub_plans
from compiler.types import RegisterId
from compiler.versions import play_chains
from memory.registers import RateEdge, RatesError, play_period, repetition_vector
from memory.verify import OverlapError, check_no_overlap


def verify_plan(plan: Plan) -> tuple[int, ...]:
    """Return the repetition vector (firings per period of each actor).

    Raises CompileError when the plan cannot live, InternalError when it contradicts itself.
    """
    for inner in sub_plans(plan):
        inner.check()
        verify_plan(inner.plan)
    check_references(plan)
    extents = extents_of(plan.views)
    _check_ranges(plan, extents)
    check_blocks(plan, extents)
    carried = play_chains(plan, extents)
    _check_memory(plan, _accessed_intervals(plan))
    check_shared_bytes(plan)
    _check_accounts(plan)
    _check_ends(plan)
    return _check_liveness(plan, carried)


def edges_of(plan: Plan) -> tuple[list[RateEdge], list[RegisterId]]:
    """Return the edges of the dataflow graph and, for each, its register."""
    edges: list[RateEdge] = []
    registers: list[RegisterId] = []
    consumers: dict[RegisterId, list[tuple[int, int]]] = {}
    for actor in plan.actors:
        for port in actor.inputs:
            consumers.setdefault(port.register, []).append((actor.id, port.rate))
    for actor in plan.actors:
        for port in actor.outputs:
            for consumer, rate in consumers.get(port.register, []):
                slots = plan.registers[port.register].num_slots
                edges.append(RateEdge(actor.id, consumer, port.rate, rate, slots))
                registers.append(port.register)
    return edges, registers


def _check_liveness(plan: Plan, carried: Carried) -> tuple[int, ...]:
    edges, registers = edges_of(plan)
    try:
        repetitions = repetition_vector(len(plan.actors), edges)
    except RatesError as error:
        raise CompileError(f"plan {plan.name!r}: {error}") from None
    count = CarriedCount(plan, carried, repetitions)
    watch = (count.visit, count.skip) if carried.reads else (None, None)
    deadlock = play_period(len(plan.actors), edges, repetitions, *watch)
    if deadlock is None:
        return repetitions
    waits = []
    for wait in deadlock.waits:
        actor = plan.actors[wait.actor].name
        register = plan.registers[registers[wait.edge]].name
        wanted = "free slots" if wait.is_for_slots else "tokens"
        waits.append(f"{actor} waits for {wait.needed} {wanted} of register {register!r}")
    cycle = " -> ".join(plan.registers[registers[e]].name for e in deadlock.cycle_edges)
    raise CompileError(
        f"plan {plan.name!r} deadlocks within one period: {'; '.join(waits)}; cycle: {cycle}."
        " Give the register that lacks a slot one more"
    )


def _check_ends(plan: Plan) -> None:
    """Check that nothing goes by a sink, or by the one firing more at the end of a run but sinks.

    It would else be a batch, or an evaluation, more than was asked for. A copy that only sinks read
    may stand in between: it brings them what that firing made.
    """
    others = [actor for actor in plan.actors if actor.kind is not ActorKind.SINK]
    read = {port.register for actor in others for port in actor.inputs}
    for actor in plan.actors:
        if actor.kind is ActorKind.SINK and actor.outputs:
            raise InternalError(f"sink {actor.name!r} produces something")
    flushed = [actor for actor in plan.actors if actor.is_flushed]
    made = {port.register: actor for actor in flushed for port in actor.outputs}
    for actor in others:
        is_out = not any([port.register in read for port in actor.outputs])
        if actor.kind is ActorKind.COPY and is_out:
            continue
        for port in actor.inputs:
            if port.register in made:
                raise InternalError(
                    f"{made[port.register].name!r} fires once more at the end of a run, and"
                    f" {actor.name!r} would go by it"
                )


def _check_ranges(plan: Plan, extents: list[Extent]) -> None:
    for register in plan.registers:
        arena = plan.arenas[register.arena]
        for offset in set(register.offsets_bytes):
            if offset % arena.alignment or offset + register.size_bytes > arena.size_bytes:
                raise InternalError(f"register {register.name!r} lies outside its arena")
    for view, extent in zip(plan.views, extents, strict=True):
        if extent.start < 0 or extent.end > plan.registers[view.register].size_bytes:
            name = plan.registers[view.register].name
            raise InternalError(f"a view {view.type} reaches beyond register {name!r}")


def _check_accounts(plan: Plan) -> None:
    for index, stated in enumerate(plan.memory):
        if account(plan, index, stated.lower_bound_bytes, stated.text) != stated:
            device = plan.arenas[index].device
            raise InternalError(f"the account of {device} is not what its registers add up to")


def _accessed_intervals(plan: Plan) -> dict[RegisterId, tuple[int, int]]:
    """Return first and last access, half-open, of registers that do not live through the plan.

    In launches of all chains, one after the other. A TEMPORARY register has one owner. A DATA or
    CONTROL register between two chains lives from the start of its producer to the end of its last
    consumer, if it has one slot; with more it lives on.
    """
    spans: dict[RegisterId, tuple[int, int]] = {}
    registers, register_of = plan.registers, [view.register for view in plan.views]
    launches = [launch for actor in plan.actors for launch in actor.launches]
    for index, launch in enumerate(launches):
        scratch = () if launch.workspace is None else (launch.workspace,)
        for view in (*launch.inputs, *launch.outputs, *scratch):
            register = register_of[view]
            if registers[register].kind is RegisterKind.TEMPORARY:
                spans[register] = (spans.get(register, (index, 0))[0], index + 1)
    return spans | _spans_between_chains(plan)


def _spans_between_chains(plan: Plan) -> dict[RegisterId, tuple[int, int]]:
    """Return the spans of registers with one slot whose actors all run launches at one rate."""
    ends = list(accumulate([len(actor.launches) for actor in plan.actors], initial=0))
    touching: dict[RegisterId, list[tuple[int, int]]] = {}
    for actor in plan.actors:
        for port in actor.inputs + actor.outputs:
            touching.setdefault(port.register, []).append((actor.id, port.rate))
    spans: dict[RegisterId, tuple[int, int]] = {}
    for register, touched in touching.items():
        is_between = all([rate == 1 and plan.actors[a].launches for a, rate in touched])
        if is_between and plan.registers[register].num_slots == 1:
            actors = [a for a, _ in touched]
            spans[register] = (ends[min(actors)], ends[max(actors) + 1])
    return spans


def _check_memory(plan: Plan, spans: dict[RegisterId, tuple[int, int]]) -> None:
    horizon = max(1, sum([len(a.launches) for a in plan.actors]))
    for index, arena in enumerate(plan.arenas):
        slots = slots_in(plan, index)
        lives = [spans.get(register.id, (0, horizon)) for register, _ in slots]
        for place, (register, _) in enumerate(slots):
            if register.kind is RegisterKind.TEMPORARY and register.id not in spans:
                lives[place] = register.interval
        try:
            check_no_overlap(
                [register.offsets_bytes[slot] for register, slot in slots],
                [start for start, _ in lives],
                [end for _, end in lives],
                [register.size_bytes for register, _ in slots],
                arena.size_bytes,
                alignment=arena.alignment,
            )
        except OverlapError as error:
            found = [slots[i] for i in error.buffers]
            culprits = ", ".join([f"{register.name}[{slot}]" for register, slot in found])
            raise InternalError(f"registers {culprits}: {error}") from None
