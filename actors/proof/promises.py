"""What a plan promises that no byte tells of, played on its table.

- Who hears of a step's outputs may read the variables: a sink comes after the updates of the steps
  that it hears of.
- What has begun to change the variables can come to its end, though a listener waits for just
  that: with one sink at rest all updates come to the same step.
- A source reads what the steps admitted so far need, and no more.
- Collectives come in their own order, whatever takes how long: on every rank the same.
- What happens every n steps begins a resumed run in one step: tokens at the start agree.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from actors.clocks import unroll
from actors.rounds import Moment
from actors.table import ENDLESS, Edge, MachineTable
from compiler.errors import InternalError
from compiler.plan import Actor, ActorKind, Plan

_PERIODS = 4
"""Periods that are played: more than the slots of a promise hold."""


def check_promises(plan: Plan, table: MachineTable, order: MachineTable) -> None:
    """Check a table that has the actors of a plan. Raises InternalError naming who breaks what.

    `order` is what comes after what: see `actors.device.order`.
    """
    writers = [int(actor.id) for actor in plan.actors if _is_update(plan, actor)]
    sinks = [int(actor.id) for actor in plan.actors if actor.kind is ActorKind.SINK]
    moments: list[list[Moment]] = [[] for _ in range(order.num_actors)]
    for actor, _, moment in unroll(order, _PERIODS, ENDLESS):
        moments[actor].append(moment)
    _check_told(table, order, moments, sinks, writers)
    _check_met(order, moments, [int(a.id) for a in plan.actors if a.kind is ActorKind.COMM])
    for sink in sinks:
        _check_ends(table, sink, writers)
    _check_read(plan, table)
    _check_starts(table)


def _is_update(plan: Plan, actor: Actor) -> bool:
    """Return whether an actor changes what outlives a step."""
    state = {variable.view for variable in plan.state}
    registers = {plan.views[view].register for view in state}
    written = {plan.views[view].register for launch in actor.launches for view in launch.outputs}
    return not registers.isdisjoint(written)


def _check_met(order: MachineTable, moments: list[list[Moment]], meeting: list[int]) -> None:
    """Check that actors which meet other ranks fire one after another, as they are numbered."""
    for one, other in pairwise(meeting):
        if order.repetitions[one] != order.repetitions[other]:
            continue  # of sums over batches, and of batches: what is summed orders them
        for before, after in zip(moments[one], moments[other], strict=False):
            if not before.is_before(after.clock):
                raise InternalError(
                    f"nothing says that {order.names[one]!r} meets other ranks before"
                    f" {order.names[other]!r} does"
                )


def _check_told(
    table: MachineTable,
    order: MachineTable,
    moments: list[list[Moment]],
    sinks: list[int],
    writers: list[int],
) -> None:
    for sink in sinks:
        for writer in writers:
            own, its = order.repetitions[sink], order.repetitions[writer]
            early = max([_early(table, edge, its) for edge in table.edges])
            for firing, moment in enumerate(moments[sink]):
                last = (firing + 1) * its // own - 1 - early
                if last >= 0 and not moments[writer][last].is_before(moment.clock):
                    raise InternalError(
                        f"{order.names[sink]!r} hears of a step before {order.names[writer]!r} has"
                        " changed the variables"
                    )


def _early(table: MachineTable, edge: Edge, firings: int) -> int:
    """Return how much of a period, in firings, the tokens at the start stand for."""
    return -(-edge.initial * firings // (edge.produce * table.repetitions[edge.producer]))


def _check_ends(table: MachineTable, sink: int, writers: list[int]) -> None:
    admitted = {s: _PERIODS * table.repetitions[s] for s in table.sources}
    fired = _played(table, admitted, {sink})
    shares = {(fired[w] / table.repetitions[w]): w for w in writers}
    if len(shares) > 1:
        names = " and ".join([repr(table.names[w]) for w in sorted(shares.values())])
        raise InternalError(f"while {table.names[sink]!r} rests, {names} stop in different steps")


def _check_read(plan: Plan, table: MachineTable) -> None:
    for actor in plan.actors:
        if actor.kind is ActorKind.SOURCE and table.admission[actor.id] is None:
            fired = _played(table, dict.fromkeys(table.sources, 0), set())
            if fired[actor.id]:
                raise InternalError(f"{actor.name!r} reads before any step is admitted")


def _check_starts(table: MachineTable) -> None:
    for actor, row in enumerate(table.inputs):
        edges = [table.edges[e] for e in row if table.edges[e].initial]
        shares = {Fraction(e.initial, e.produce * table.repetitions[e.producer]) for e in edges}
        if len(shares) > 1:
            names = " and ".join([repr(edge.name) for edge in edges])
            raise InternalError(
                f"{table.names[actor]!r} starts with tokens of {names} that stand for different"
                " steps"
            )


def _played(table: MachineTable, admitted: dict[int, int], resting: set[int]) -> list[int]:
    """Return how often each actor fires until nobody can, some not at all."""
    fired = [0] * table.num_actors
    is_moving = True
    while is_moving:
        is_moving = False
        for actor in range(table.num_actors):
            while actor not in resting and _can_fire(table, fired, actor, admitted):
                fired[actor] += 1
                is_moving = True
    return fired


def _can_fire(table: MachineTable, fired: list[int], actor: int, admitted: dict[int, int]) -> bool:
    if fired[actor] >= admitted.get(actor, ENDLESS):
        return False
    edges = table.edges
    return all(
        [edges[e].made_by(fired[actor]) < fired[edges[e].producer] for e in table.inputs[actor]]
    ) and all(
        [edges[e].freed_by(fired[actor]) < fired[edges[e].consumer] for e in table.outputs[actor]]
    )
