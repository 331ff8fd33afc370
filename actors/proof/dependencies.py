"""Take every dependency away that a planner made, one at a time, and see who misses it.

    python -m actors.proof.dependencies PLAN [PLAN ...] [--all]

A dependency is an edge between two actors (of data, of control, or a credit with rates), a slot of
a register, a token that is there at the start, or a wait for an event of a device. Without it a
plan must be found wrong: it is *refused*, because an actor has no input left or nobody can fire; it
*races* (`actors.race`); or it breaks a *promise* that no byte tells (`actors.proof.promises`). Or
the others *imply* it: what it lets wait comes after the same firing by another way, which is shown.
Or it is *kept* for a reason that stands in the plan and is one of `KEPT`. What is none of these is
*not missed*: it is one too many, or a check is missing. The command fails then.

A slot is taken for a dependency because it lets the producer wait: what is tried is one more, on
the bytes of the first. A token at the start is one wait less, so one more of those is tried, too.

Not tried is the end of a run, for which an executor keeps waits that the others imply until then
(`actors.device.waits`): those are only of the table's `all`.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from actors.clocks import unroll
from actors.device.order import Waits, asynchronous_streams, order_of_work
from actors.device.waits import EventWait, wait_table
from actors.proof.promises import check_promises
from actors.race import RaceError, check_order
from actors.rounds import Moment
from actors.table import ENDLESS, OUTSIDE, Edge, MachineTable
from compiler.errors import InternalError
from compiler.plan import Plan, RegisterKind

_SHOWN = 100
"""Characters of what a check says of one dependency."""


KEPT = ("one step at a time", "a step that has begun can end, whoever listens")
"""Reasons of registers that hold without them too, in some plans: there a step and the next one
share no bytes, or all updates have room to end. A fence is not left out for that: whoever looks at
a run (`actors.visit`) counts on a moment between two steps."""


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

    `initial` are tokens ready at the start, by register. Raises what `actors.race.check_races`
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


# -- without one of them -------------------------------------------------------------------------


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


# -- what the others imply -----------------------------------------------------------------------


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
    moments: list[list[Moment]] = [[] for _ in range(order.num_actors)]
    for actor, _, moment in unroll(order, periods, ENDLESS):
        moments[actor].append(moment)
    return [_way(order, moments, edge) for edge in lost]


def _way(order: MachineTable, moments: Sequence[Sequence[Moment]], lost: Edge) -> str:
    """Return a way from the late firings of a consumer to what each of them was to come after."""
    made = moments[lost.producer]
    past = [lost.made_by(firing) for firing in range(len(moments[lost.consumer]))]
    known = [firing for firing, before in enumerate(past) if before < len(made)]
    for firing in known:
        clock = moments[lost.consumer][firing].clock
        if past[firing] >= 0 and not made[past[firing]].is_before(clock):
            return ""
    return _path(order, (lost.consumer, known[-1]), (lost.producer, past[known[-1]]))


def _lag(order: MachineTable, edge: Edge) -> int:
    tokens = edge.produce * order.repetitions[edge.producer]
    return -(-edge.initial // tokens)


def _path(order: MachineTable, start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the actors on the shortest way back from a firing to another one, or a later one."""
    came: dict[tuple[int, int], tuple[int, int] | None] = {start: None}
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
            if other[1] >= 0 and other not in came:
                came[other] = place
                front.append(other)
    names: list[str] = []
    step: tuple[int, int] | None = place
    while step is not None:
        names.append(order.names[step[0]])
        step = came[step]
    return " > ".join([name for i, name in enumerate(names) if i == 0 or names[i - 1] != name])


# -- the command ---------------------------------------------------------------------------------


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
        prog="python -m actors.proof.dependencies", description=__doc__
    )
    parser.add_argument("plans", nargs="+", type=Path)
    parser.add_argument("--all", action="store_true", help="print each dependency")
    options = parser.parse_args(arguments)
    is_clean = True
    for path in options.plans:
        found = list(removals(Plan.load(path)))
        print(f"{path}: {len(found)} dependencies")
        head = " | ".join([consequence.value for consequence in Consequence])
        print(f"| kind | {head} |\n|---{'|---:' * len(Consequence)}|")
        for kind, row in table_of(found).items():
            print(f"| {kind.value} | {' | '.join([str(n) for n in row.values()])} |")
        for removal in found:
            if options.all or removal.consequence is Consequence.MISSED:
                print(
                    f"{removal.consequence.value}: {removal.dependency.kind.value}"
                    f" {removal.dependency.text}: {removal.text}"
                )
        is_clean = is_clean and all([r.consequence is not Consequence.MISSED for r in found])
    return not is_clean


if __name__ == "__main__":
    sys.exit(main())
