"""Prove a plan before it runs, from the plan alone; no fact of the lowering is trusted.

Checked: ids and ranges; every view inside its register; the balance equations of the rates have a
solution; one period of the token game completes with the slots given; recomputed from the launches
themselves, no two tensors that are live together overlap in an arena while the actors run one after
the other, and none while they do not, because actors that share bytes are in order
(`check_shared_bytes`); what copies a block of bytes copies its operands and nothing else
(`check_blocks`); each version has one maker, and every read, of a launch as of a sink, finds the
version that it names (`compiler.verify.versions`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from compiler.contract.accounting import account, slots_in
from compiler.contract.errors import CompileError, InternalError
from compiler.contract.plan import Plan, check_references, proof, sub_plans
from compiler.contract.plan_tables import ActorKind, Launch, RegisterKind
from compiler.contract.types import RegisterId
from compiler.graph.target import in_words
from compiler.ops.primitives.transfer import COPY_BLOCK
from compiler.verify.places import LoopCarried, LoopCarriedCount, StridedRange, extents_of
from compiler.verify.versions import interpret_chains
from memory.registers import RateEdge, RatesError, play_period, repetition_vector
from memory.verify import OverlapError, check_no_overlap

# A launch that copies a block (`COPY_BLOCK`) names tensors, and moves the bytes from the first to
# the end of the last. So each has to lie as far from the first as its copy does from the first
# copy, and nothing else may lie in the bytes that are written. Bytes between tensors are read
# along, whoever has them, and nobody reads what is made of them.


def check_blocks(plan: Plan, extents: Sequence[StridedRange]) -> None:
    """Check all launches of a plan that copy blocks; `extents` are those of its views.

    What is read from one register after another lies in one slot each. O(views + operands).

    Raises InternalError naming the launch that copies anything else.
    """
    blocks = [
        launch for actor in plan.actors for launch in actor.launches if launch.op == COPY_BLOCK.name
    ]
    if not blocks:
        return
    shown: dict[RegisterId, list[int]] = {}
    for index, view in enumerate(plan.views):
        shown.setdefault(view.register, []).append(index)
    for launch in blocks:
        fault = _fault(plan, extents, launch, shown)
        if fault:
            line = plan.sources[launch.source]
            raise InternalError(f"{launch.op} of {launch.scope!r} ({line}) {fault}")


def _fault(
    plan: Plan,
    extents: Sequence[StridedRange],
    launch: Launch,
    shown: dict[RegisterId, list[int]],
) -> str:
    """Return what is wrong with a block, or nothing."""
    if not launch.inputs or len(launch.inputs) != len(launch.outputs):
        return "has another number of tensors than of copies"
    homes = [{plan.views[v].register for v in views} for views in (launch.inputs, launch.outputs)]
    if any([plan.registers[register].num_slots != 1 for register in (*homes[0], *homes[1])]):
        return "lies in registers of several slots"
    if len({plan.registers[r].arena for r in homes[0]}) > 1 or len(homes[1]) > 1:
        return "reads several arenas, or fills several registers"
    if not all([extents[view].is_dense for view in (*launch.inputs, *launch.outputs)]):
        return "copies what has gaps"
    starts = [[_address(plan, v) for v in views] for views in (launch.inputs, launch.outputs)]
    distances = [[address - row[0] for address in row] for row in starts]
    if distances[0] != distances[1]:
        return "has copies that do not lie as the tensors do"
    written = [extents[view] for view in launch.outputs]
    if any([before.end > after.start for before, after in pairwise(written)]):
        return "has copies that are not one after another"
    begin, end = written[0].start, written[-1].end
    if dict(launch.attrs).get("size_bytes") != end - begin:
        return f"moves other bytes than the {end - begin} that its tensors take"
    (register,) = homes[1]
    inside = [v for v in shown[register] if extents[v].start < end and begin < extents[v].end]
    if not {*inside} <= {*launch.outputs}:
        return "writes over what lies between its copies"
    return ""


def _address(plan: Plan, view: int) -> int:
    """Return where a view begins in its arena."""
    window = plan.views[view]
    return plan.registers[window.register].offsets_bytes[0] + window.offset_bytes


# Two registers that lie over each other belong to one actor, whose launches are ordered, or to two
# groups of actors: then a path of edges must lead from every actor that touches the one to every
# actor that touches the other, so that the first tensor is dead before the second is born. That
# holds within one period; from one period to the next, `actors.race.race` follows the credits that
# come back.

_Group = tuple[int, ...]
"""The actors that touch a register."""

_Range = tuple[int, int, int, RegisterId]
"""Arena, first byte, end, and the register that lies there."""


def check_shared_bytes(plan: Plan) -> None:
    """Check a plan. Raises InternalError naming registers and actors that nothing orders.

    Near-linear in registers: to be in order is transitive, so each group is compared only with its
    neighbours among those that share a byte with it.
    """
    touching = _touching(plan)
    groups: dict[tuple[int, ...], list[_Range]] = {}
    for register in plan.registers:
        actors = tuple(sorted(touching.get(register.id, ())))
        if not register.size_bytes or not actors:
            continue
        groups.setdefault(actors, []).extend(
            [
                (register.arena, offset, offset + register.size_bytes, register.id)
                for offset in register.offsets_bytes
            ]
        )
    if len(groups) < 2:
        return
    reach = _reach(plan)
    for earlier, later, first, second in _neighbours(groups, _in_order(groups, reach)):
        if not all([a == b or reach[a] >> b & 1 for a in earlier for b in later]):
            names = [repr(plan.registers[r].name) for r in (first, second)]
            owners = [", ".join([plan.actors[a].name for a in group]) for group in (earlier, later)]
            raise InternalError(
                f"registers {names[0]} of {owners[0]} and {names[1]} of {owners[1]} share bytes,"
                " and no path of edges orders these actors"
            )


def _touching(plan: Plan) -> dict[RegisterId, set[int]]:
    touching: dict[RegisterId, set[int]] = {}
    for actor in plan.actors:
        for port in actor.inputs + actor.outputs:
            touching.setdefault(port.register, set()).add(actor.id)
        for launch in actor.launches:
            scratch = () if launch.workspace is None else (launch.workspace,)
            for view in (*launch.inputs, *launch.outputs, *scratch):
                touching.setdefault(plan.views[view].register, set()).add(actor.id)
    return touching


def _in_order(groups: Iterable[_Group], reach: Sequence[int]) -> list[_Group]:
    """Return groups so that of two that are in order the earlier comes first.

    What leads to an actor leads to all that the actor leads to, and so to more.
    """
    rank = [-bits.bit_count() for bits in reach]
    ranks = {group: [rank[a] for a in group] for group in groups}
    return sorted(groups, key=lambda group: (min(ranks[group]), max(ranks[group])))


def _neighbours(
    groups: Mapping[_Group, list[_Range]], in_order: Sequence[_Group]
) -> Iterable[tuple[_Group, _Group, RegisterId, RegisterId]]:
    """Yield groups that lie over each other with none between them, the earlier first.

    A sweep over addresses keeps the groups that are under it in their order; whatever comes between
    two neighbours, or goes, makes new neighbours, or leaves some that are in order by way of it.
    """
    number = {group: i for i, group in enumerate(in_order)}
    events = [
        (arena, address, is_start, number[group], register)
        for group, ranges in groups.items()
        for arena, start, end, register in ranges
        for address, is_start in ((start, True), (end, False))
    ]
    under: list[int] = []
    registers: dict[int, list[RegisterId]] = {}
    # At one address False sorts before True: what ends there is gone when another one begins.
    for _, _, is_start, here, register in sorted(events):
        place = bisect_left(under, here)
        if not is_start:
            registers[here].remove(register)
            if not registers[here]:
                del under[place]
            continue
        registers.setdefault(here, []).append(register)
        if len(registers[here]) > 1:
            continue
        # Slices, for there may be no neighbour on a side.
        for other in under[max(0, place - 1) : place]:
            yield in_order[other], in_order[here], registers[other][0], register
        for other in under[place : place + 1]:
            yield in_order[here], in_order[other], register, registers[other][0]
        under.insert(place, here)


def _reach(plan: Plan) -> list[int]:
    """Return, per actor, a bit for every actor that a path of edges leads to."""
    consumers: dict[RegisterId, list[int]] = {}
    for actor in plan.actors:
        for port in actor.inputs:
            consumers.setdefault(port.register, []).append(actor.id)
    after = [
        sorted({c for port in actor.outputs for c in consumers.get(port.register, [])})
        for actor in plan.actors
    ]
    reach = [0] * len(plan.actors)
    # From the last actor back: where edges lead to higher numbers one pass settles all.
    is_settled = False
    while not is_settled:
        is_settled = True
        for index in range(len(after) - 1, -1, -1):
            bits = reach[index]
            for consumer in after[index]:
                bits |= reach[consumer] | 1 << consumer
            is_settled = is_settled and bits == reach[index]
            reach[index] = bits
    return reach


@proof
def verify_plan(plan: Plan) -> tuple[int, ...]:
    """Return the repetition vector (firings per period of each actor).

    Raises CompileError when the plan cannot live, InternalError when it contradicts itself.
    """
    for inner in sub_plans(plan):
        inner.check()
        verify_plan(inner.plan)
    # Before the rest, which indexes one table by the numbers of another.
    check_references(plan)
    extents = extents_of(plan.views)
    _check_ranges(plan, extents)
    check_blocks(plan, extents)
    carried = interpret_chains(plan, extents)
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


MAX_FIRINGS = 1 << 24
"""Firings of one period, all actors together; a real one has 10^6."""

INTERVALS = ("snapshot_every", "evaluate_every", "metrics_every")
"""Options of a plan that say after how many steps something happens."""


def _check_period(plan: Plan, firings: int) -> None:
    """Raise CompileError for a period that is too long to be played."""
    if firings <= MAX_FIRINGS:
        return
    intervals = [(name, plan.option(name, 0)) for name in INTERVALS]
    settings = [
        f"{in_words(name, count)[0]} is {count:,}"
        for name, count in intervals
        if isinstance(count, int) and count > 1
    ]
    reason = f" ({' and '.join(settings)}; choose multiples of one another)" if settings else ""
    raise CompileError(
        f"plan {plan.name!r}: a period, the steps until all intervals coincide, has {firings:,}"
        f" firings, and a proof takes {MAX_FIRINGS:,} at most{reason}"
    )


def _check_liveness(plan: Plan, carried: LoopCarried) -> tuple[int, ...]:
    edges, registers = edges_of(plan)
    try:
        repetitions = repetition_vector(len(plan.actors), edges)
    except RatesError as error:
        raise CompileError(f"plan {plan.name!r}: {error}") from None
    _check_period(plan, sum(repetitions))  # before it is played, which takes that long
    count = LoopCarriedCount(plan, carried, repetitions)
    # Firings are counted only where a read depends on how often another actor has fired.
    watch = (count.visit, count.skip) if carried.reads else (None, None)
    deadlock = play_period(len(plan.actors), edges, repetitions, *watch)
    if deadlock is None:
        return repetitions
    waits = []
    for wait in deadlock.waits:
        actor = plan.actors[wait.actor].name
        register = plan.registers[registers[wait.edge]].name
        resource = "free slots" if wait.is_for_slots else "tokens"
        waits.append(f"{actor} waits for {wait.needed} {resource} of register {register!r}")
    cycle = " -> ".join(plan.registers[registers[e]].name for e in deadlock.cycle_edges)
    raise CompileError(
        f"plan {plan.name!r} deadlocks within one period: {'; '.join(waits)}; cycle: {cycle}."
        " Give the register that lacks a slot one more"
    )


def _check_ends(plan: Plan) -> None:
    """Check that sinks produce nothing, and that only sinks read the extra firing at the end.

    Any other reader would run a batch, or an evaluation, more than was asked for. A copy that only
    sinks read may stand in between: it brings them what that firing made.
    """
    others = [actor for actor in plan.actors if actor.kind is not ActorKind.SINK]
    reads = {port.register for actor in others for port in actor.inputs}
    for actor in plan.actors:
        if actor.kind is ActorKind.SINK and actor.outputs:
            raise InternalError(f"sink {actor.name!r} produces something")
    flushed = [actor for actor in plan.actors if actor.is_flushed]
    maker_of = {port.register: actor for actor in flushed for port in actor.outputs}
    for actor in others:
        is_out = not any([port.register in reads for port in actor.outputs])
        if actor.kind is ActorKind.COPY and is_out:
            continue
        for port in actor.inputs:
            if port.register in maker_of:
                raise InternalError(
                    f"{maker_of[port.register].name!r} fires once more at the end of a run, and"
                    f" {actor.name!r} would go by it"
                )


def _check_ranges(plan: Plan, extents: list[StridedRange]) -> None:
    for register in plan.registers:
        arena = plan.arenas[register.arena]
        # A set: a register of credits may have millions of slots, all at one offset.
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
            raise InternalError(
                f"the memory account of {device} differs from the sum of its registers"
            )


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
                # Launches come in order: the first start stays, the end grows.
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
    for register, ports in touching.items():
        is_between = all([rate == 1 and plan.actors[a].launches for a, rate in ports])
        if is_between and plan.registers[register].num_slots == 1:
            actors = [a for a, _ in ports]
            spans[register] = (ends[min(actors)], ends[max(actors) + 1])
    return spans


def _check_memory(plan: Plan, spans: dict[RegisterId, tuple[int, int]]) -> None:
    horizon = max(1, sum([len(a.launches) for a in plan.actors]))
    for index, arena in enumerate(plan.arenas):
        slots = slots_in(plan, index)
        lives = [spans.get(register.id, (0, horizon)) for register, _ in slots]
        for place, (register, _) in enumerate(slots):
            # Nothing accesses it, so that the interval it states is all there is to go by.
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
            overlapping = [slots[i] for i in error.buffers]
            culprits = ", ".join([f"{register.name}[{slot}]" for register, slot in overlapping])
            raise InternalError(f"registers {culprits}: {error}") from None
