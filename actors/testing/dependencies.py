"""Take every dependency away that a planner made, one at a time, and see who misses it.

    python -m actors.testing.dependencies PLAN [PLAN ...] [--all]

A dependency is an edge between two actors (of data, of control, or a credit with rates), a slot of
a register, a token that is there at the start, or a wait for an event of a device. Without it a
plan must be found wrong: it is *refused*, because an actor has no input left or nobody can fire; it
*races* (`actors.race.race`); or it breaks a *promise* that no byte tells (`check_promises`). Or the
others *imply* it: what it lets wait comes after the same firing by another way, which is shown. Or
it is *kept* for a reason that stands in the plan and is one of `KEPT`. What is none of these is
*not missed*: it is one too many, or a check is missing. The command fails then.

A slot is taken for a dependency because it lets the producer wait: what is tried is one more, on
the bytes of the first. A token at the start is one wait less, so one more of those is tried, too.

Not tried is the end of a run, for which an executor keeps waits that the others imply until then
(`actors.race.waits`): those are only of the table's `all`.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

from actors.machine.table import ENDLESS, OUTSIDE, Edge, MachineTable
from actors.race.happens_before import FiringStamp, unroll
from actors.race.race import RaceError, check_order
from actors.race.waits import EventWait, Waits, asynchronous_streams, order_of_work, wait_table
from compiler.contract.errors import InternalError
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Actor, ActorKind, RegisterKind

# What a plan promises that no byte tells of, played on its table:
#
# - Who hears of a step's outputs may read the variables: a sink comes after the updates of the
#   steps that it hears of.
# - What has begun to change the variables can come to its end, though a listener waits for just
#   that: with one sink at rest all updates come to the same step.
# - A source reads what the steps admitted so far need, and no more.
# - Collectives come in their own order, whatever takes how long: on every rank the same.
# - What happens every n steps begins a resumed run in one step: tokens at the start agree.

_PERIODS = 4
"""Periods that are played: more than the slots of a promise hold."""


def check_promises(plan: Plan, table: MachineTable, order: MachineTable) -> None:
    """Check a table that has the actors of a plan. Raises InternalError naming who breaks what.

    `order` is what comes after what: see `actors.race.waits`.
    """
    writers = [int(actor.id) for actor in plan.actors if _is_update(plan, actor)]
    sinks = [int(actor.id) for actor in plan.actors if actor.kind is ActorKind.SINK]
    moments: list[list[FiringStamp]] = [[] for _ in range(order.num_actors)]
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


def _check_met(order: MachineTable, moments: list[list[FiringStamp]], meeting: list[int]) -> None:
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
    moments: list[list[FiringStamp]],
    sinks: list[int],
    writers: list[int],
) -> None:
    for sink in sinks:
        for writer in writers:
            sink_rate, writer_rate = order.repetitions[sink], order.repetitions[writer]
            early = max([_early(table, edge, writer_rate) for edge in table.edges])
            for firing, moment in enumerate(moments[sink]):
                last = (firing + 1) * writer_rate // sink_rate - 1 - early
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


_SHOWN = 100
"""Characters of what a check says of one dependency."""


KEPT = ("one step at a time", "a step that has begun can end, whoever listens")
"""Reasons of registers that hold without them too, in some plans: there a step and the next one
share no bytes, or all updates have room to end. A fence is not left out for that: whoever looks at
a run (`actors.loop.admission`) counts on a moment between two steps."""


class DependencyKind(Enum):
    """What a planner makes so that something waits."""

    DATA = "data edge"
    CONTROL = "control edge"
    CREDIT = "credit"
    SLOT = "slot"
    TOKEN = "initial token"
    EVENT = "wait of a stream"
    HOST = "wait of the host"


class Consequence(Enum):
    """What comes of a plan without a dependency."""

    REFUSED = "refused"
    RACE = "race"
    PROMISE = "promise"
    IMPLIED = "implied"
    KEPT = "kept"
    MISSED = "not missed"


@dataclass(frozen=True, slots=True)
class Dependency:
    """One thing that makes a firing wait. `edges` are its numbers in the table; or it is a `wait`.

    `text` names it, `reason` is why the plan has it.
    """

    kind: DependencyKind
    text: str
    reason: str
    edges: tuple[int, ...] = ()
    wait: tuple[int, EventWait] | None = None


@dataclass(frozen=True, slots=True)
class Removal:
    """A dependency, what comes of the plan without it, and how that shows."""

    dependency: Dependency
    consequence: Consequence
    text: str


@dataclass(frozen=True, slots=True)
class _PlanRun:
    """A plan as it runs: the table, and which firing waits for which event."""

    plan: Plan
    table: MachineTable
    waits: Waits

    @staticmethod
    def of(plan: Plan, table: MachineTable) -> _PlanRun:
        return _PlanRun(
            plan, table, wait_table(table, asynchronous_streams(plan), max_ahead=1).needed
        )

    @property
    def order(self) -> MachineTable:
        """What comes after what, on the host too as edges that only order."""
        return order_of_work(self.table, self.waits, asynchronous_streams(self.plan))


def removals(plan: Plan, initial: Mapping[str, int] | None = None) -> Iterator[Removal]:
    """Yield what comes of a plan without each of its dependencies.

    `initial` are tokens ready at the start, by register. Raises what `actors.race.race.check_races`
    raises of the whole plan.
    """
    run = _PlanRun.of(plan, MachineTable.of(plan, initial or {}))
    check_order(plan, run.table, run.order)
    check_promises(plan, run.table, run.order)
    for dependency in dependencies(run.plan, run.table, run.waits):
        yield _judged(run, dependency)


def dependencies(plan: Plan, table: MachineTable, waits: Waits) -> Iterator[Dependency]:
    """Yield all that makes a firing wait for another one."""
    kinds = {register.name: register.kind for register in plan.registers}
    reasons = {register.name: register.reason for register in plan.registers}
    of_register: dict[tuple[int, str], list[int]] = {}
    for number, edge in enumerate(table.edges):
        if edge.producer == OUTSIDE:
            continue
        of_register.setdefault((edge.producer, edge.name), []).append(number)
        kind = DependencyKind.DATA
        if kinds[edge.name] is RegisterKind.CONTROL:
            is_order = edge.produce == edge.consume == 1
            kind = DependencyKind.CONTROL if is_order else DependencyKind.CREDIT
        yield Dependency(kind, _edge_text(table, edge), reasons[edge.name], (number,))
    for (producer, name), numbers in of_register.items():
        edge = table.edges[numbers[0]]
        text = f"{edge.num_slots} slots of {name!r} from {table.names[producer]!r}"
        yield Dependency(DependencyKind.SLOT, text, reasons[name], tuple(numbers))
        if 0 < edge.initial < edge.num_slots:
            text = f"{edge.initial} initial tokens of {name!r}"
            yield Dependency(DependencyKind.TOKEN, text, reasons[name], tuple(numbers))
    streams = asynchronous_streams(plan)
    for actor, row in enumerate(waits):
        is_event = table.streams[actor] in streams
        kind = DependencyKind.EVENT if is_event else DependencyKind.HOST
        for wait in row:
            edge = table.edges[wait.edge]
            why = "token" if wait.is_input else "slot"
            text = f"{table.names[actor]!r} for {table.names[wait.actor]!r}, {why} of {edge.name!r}"
            yield Dependency(kind, text, reasons[edge.name], wait=(actor, wait))


def _edge_text(table: MachineTable, edge: Edge) -> str:
    return f"{edge.name!r} from {table.names[edge.producer]!r} to {table.names[edge.consumer]!r}"


def _judged(run: _PlanRun, dependency: Dependency) -> Removal:
    try:
        without = _without(run, dependency)
        check_order(run.plan, without.table, without.order)
    except RaceError as error:
        return Removal(dependency, Consequence.RACE, _race_text(error))
    except InternalError as error:
        return Removal(dependency, Consequence.REFUSED, _short(str(error)))
    try:
        check_promises(run.plan, without.table, without.order)
    except InternalError as error:
        return Removal(dependency, Consequence.PROMISE, _short(str(error)))
    ways = _ways(without.order, _lost(run, dependency))
    if all(ways):
        return Removal(dependency, Consequence.IMPLIED, "; ".join(ways))
    is_kept = any([dependency.reason.endswith(reason) for reason in KEPT])
    return Removal(
        dependency, Consequence.KEPT if is_kept else Consequence.MISSED, dependency.reason
    )


def _without(run: _PlanRun, dependency: Dependency) -> _PlanRun:
    """Return the run without a dependency. Raises InternalError when no machine can take it."""
    if dependency.wait is not None:
        actor, lost = dependency.wait
        row = tuple([wait for wait in run.waits[actor] if wait != lost])
        return replace(run, waits=(*run.waits[:actor], row, *run.waits[actor + 1 :]))
    edges = list(run.table.edges)
    for number in dependency.edges:
        edge = edges[number]
        if dependency.kind is DependencyKind.SLOT:
            edges[number] = replace(edge, num_slots=edge.num_slots + 1)
        elif dependency.kind is DependencyKind.TOKEN:
            edges[number] = replace(edge, initial=edge.initial + 1)
    table = replace(run.table, edges=tuple(edges))
    if dependency.kind not in (DependencyKind.SLOT, DependencyKind.TOKEN):
        table = _without_edge(table, dependency.edges[0])
    return _PlanRun.of(run.plan, table)


def _without_edge(table: MachineTable, number: int) -> MachineTable:
    consumer = table.edges[number].consumer
    if not table.inputs[consumer][1:] and table.admission[consumer] is None:
        # A source that has no input would be admitted, and by nobody.
        raise InternalError(f"actor {table.names[consumer]!r} has no input and never ends")
    inputs, outputs = [
        tuple([tuple([e for e in row if e != number]) for row in column])
        for column in (table.inputs, table.outputs)
    ]
    return replace(table, inputs=inputs, outputs=outputs)


def _race_text(error: RaceError) -> str:
    race = error.races[0]
    return f"{race.first.actor!r} and {race.second.actor!r} on {race.first.register!r}"


def _short(text: str) -> str:
    text = text.partition(" (this is a bug")[0]
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _lost(run: _PlanRun, dependency: Dependency) -> list[Edge]:
    """Return what is not ordered by a dependency any more, as edges that only order."""
    if dependency.wait is not None:
        actor, wait = dependency.wait
        initial = wait.times - 1 - wait.plus
        return [Edge("", wait.actor, actor, wait.over, wait.times, ENDLESS, initial)]
    lost = []
    for edge in [run.table.edges[number] for number in dependency.edges]:
        there = edge.num_slots - edge.initial
        tokens = replace(edge, num_slots=ENDLESS)
        slots = Edge("", edge.consumer, edge.producer, edge.consume, edge.produce, ENDLESS, there)
        lost += {
            DependencyKind.SLOT: [slots],
            DependencyKind.TOKEN: [tokens],
        }.get(dependency.kind, [tokens, slots])
    return lost


def _ways(order: MachineTable, lost: Sequence[Edge]) -> list[str]:
    """Return another way for each of some edges; "" where there is none."""
    periods = 4 + max([_lag(order, edge) for edge in (*order.edges, *lost)])
    moments: list[list[FiringStamp]] = [[] for _ in range(order.num_actors)]
    for actor, _, moment in unroll(order, periods, ENDLESS):
        moments[actor].append(moment)
    return [_way(order, moments, edge) for edge in lost]


def _way(order: MachineTable, moments: Sequence[Sequence[FiringStamp]], lost: Edge) -> str:
    """Return a way from the late firings of a consumer to what each of them was to come after."""
    writes = moments[lost.producer]
    past = [lost.made_by(firing) for firing in range(len(moments[lost.consumer]))]
    firings = [firing for firing, before in enumerate(past) if before < len(writes)]
    for firing in firings:
        clock = moments[lost.consumer][firing].clock
        if past[firing] >= 0 and not writes[past[firing]].is_before(clock):
            return ""
    return _path(order, (lost.consumer, firings[-1]), (lost.producer, past[firings[-1]]))


def _lag(order: MachineTable, edge: Edge) -> int:
    tokens = edge.produce * order.repetitions[edge.producer]
    return -(-edge.initial // tokens)


def _path(order: MachineTable, start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the actors on the shortest way back from a firing to another one, or a later one."""
    predecessor: dict[tuple[int, int], tuple[int, int] | None] = {start: None}
    front = deque([start])
    while front:
        place = front.popleft()
        actor, firing = place
        if actor == end[0] and firing >= end[1]:
            break
        past = [
            (order.edges[e].producer, order.edges[e].made_by(firing)) for e in order.inputs[actor]
        ]
        past.append((actor, firing - 1))
        for other in past:
            if other[1] >= 0 and other not in predecessor:
                predecessor[other] = place
                front.append(other)
    names: list[str] = []
    step: tuple[int, int] | None = place
    while step is not None:
        names.append(order.names[step[0]])
        step = predecessor[step]
    return " > ".join([name for i, name in enumerate(names) if i == 0 or names[i - 1] != name])


def table_of(found: Sequence[Removal]) -> dict[DependencyKind, dict[Consequence, int]]:
    """Return how many dependencies of each kind had each consequence."""
    counts: dict[DependencyKind, dict[Consequence, int]] = {}
    for removal in found:
        row = counts.setdefault(removal.dependency.kind, dict.fromkeys(Consequence, 0))
        row[removal.consequence] += 1
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the plans of some files; return 1 when something is not missed."""
    parser = argparse.ArgumentParser(
        prog="python -m actors.testing.dependencies", description=__doc__
    )
    parser.add_argument("plans", nargs="+", type=Path)
    parser.add_argument("--all", action="store_true", help="print each dependency")
    options = parser.parse_args(arguments)
    is_clean = True
    for path in options.plans:
        all_removals = list(removals(Plan.load(path)))
        print(f"{path}: {len(all_removals)} dependencies")
        head = " | ".join([consequence.value for consequence in Consequence])
        print(f"| kind | {head} |\n|---{'|---:' * len(Consequence)}|")
        for kind, row in table_of(all_removals).items():
            print(f"| {kind.value} | {' | '.join([str(n) for n in row.values()])} |")
        for removal in all_removals:
            if options.all or removal.consequence is Consequence.MISSED:
                print(
                    f"{removal.consequence.value}: {removal.dependency.kind.value}"
                    f" {removal.dependency.text}: {removal.text}"
                )
        is_clean = is_clean and all([r.consequence is not Consequence.MISSED for r in all_removals])
    return not is_clean


if __name__ == "__main__":
    sys.exit(main())
