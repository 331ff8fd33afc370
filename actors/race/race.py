"""Prove that every two accesses to the same bytes are ordered, or name the pair that is not.

**What orders.** The dataflow: `actors.race.happens_before` says which firing happens before which.
Launches inside a chain are ordered.

**Streams order nothing more.** Firings on one stream never overlap in time, but whatever the path
leaves open may run either way round: two firings without a path have a schedule with each of them
first, and that schedule, one firing at a time, is legal on one stream as on many. The dispatcher
takes one of them; which one is no property of the plan. So a conflict without a path is an error
on one stream too.

**On a device** a message says that a firing is enqueued, and only events say that it has ended. A
plan with streams of devices is checked as an executor runs it, on every device at once: by the
order of streams, the waits for events, and what the host waits for (`actors.race.waits`).

**How.** Bytes that the same actors access in the same phases are one class (`share_bytes`). The
firings of some periods are visited, each with its vector clock, and the accesses of a class are
compared (`actors.race.happens_before.Check`). Only once some pair is unordered are they visited
again, so that all actors that race are named.

**How many periods.** Edges are missing at the start only (of Free, and of initial tokens), so a
later pair without a path has its copy in the first turn of the slots; and two actors get no further
apart than the slots and tokens between them allow. Turn plus distance is enough for any length of
run. Of a long period, rounds that come round again are left out (`actors.race.happens_before`).

Guarantee: no two accesses of a run conflict unordered, up to the end of admission. Not modelled is
the end itself, where a flushed firing takes fewer tokens and slots come home unused. Not checked
is whether a value lives until its last reader: that is `compiler.verify.verify`, on registers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd, lcm
from typing import NamedTuple

from actors.machine.table import MachineTable
from actors.race.happens_before import (
    Check,
    Conflict,
    ConflictFinder,
    PhasedFiring,
    downstream,
    lags_behind,
    watch,
)
from actors.race.waits import order_of_run
from compiler.contract.errors import ActorflowError
from compiler.contract.plan import Plan, proof
from compiler.contract.plan_tables import PORTED, Actor, RegisterKind
from memory.registers import LONG_PERIOD

# Accesses are gathered per actor and view, because the launches of a firing are ordered among
# themselves. A sweep over addresses then cuts the arenas where an access begins or ends, and puts
# bytes that the same actors access in the same phases into one class; bytes of one actor drop out,
# and all variables of a plan end in one class.

_EDGES = (RegisterKind.DATA, RegisterKind.CONTROL)


class LaunchAccess(NamedTuple):
    """Bytes [start, end) and the firings that access them; the rest is for the message."""

    arena: int
    start: int
    end: int
    phase: PhasedFiring
    register: int
    slot: int
    op: str
    scope: str
    source: int


class ByteSegment(NamedTuple):
    """Bytes [start, end) that several actors access, with the numbers of their accesses."""

    arena: int
    start: int
    end: int
    accesses: tuple[int, ...]


SharedBytes = dict[tuple[PhasedFiring, ...], list[ByteSegment]]


def gather_accesses(plan: Plan) -> list[LaunchAccess]:
    """Return the accesses of all actors, each actor's in the order of its launches."""
    extents = [view.extent for view in plan.views]
    accesses: list[LaunchAccess] = []
    for actor in plan.actors:
        rates = {port.register: port.rate for port in actor.inputs + actor.outputs}
        seen: set[tuple[int, int, bool]] = set()
        for view, edge, is_write, op, scope, source in _operands(plan, actor):
            # Launches of a firing are ordered, so the first access of a view stands for all; an
            # empty view touches nothing.
            if (view, edge, is_write) in seen or extents[view][0] == extents[view][1]:
                continue
            seen.add((view, edge, is_write))
            register = plan.registers[plan.views[view].register]
            phases: tuple[tuple[int, int, int], ...] = ((0, 1, 0),)
            # Other registers have one slot, which every firing works on.
            if plan.registers[edge].kind in _EDGES:
                phases = _phases(plan.registers[edge].num_slots, rates.get(plan.registers[edge].id))
            for slot, modulus, residue in phases:
                slot %= register.num_slots
                start, end = [register.offsets_bytes[slot] + byte for byte in extents[view]]
                phase, id_ = PhasedFiring(actor.id, modulus, residue, is_write), register.id
                accesses.append(
                    LaunchAccess(register.arena, start, end, phase, id_, slot, op, scope, source)
                )
    return accesses


def _operands(plan: Plan, actor: Actor) -> Iterator[tuple[int, int, bool, str, str, int]]:
    """Yield view, the register whose slots it follows, is_write, op, scope and line."""
    if actor.kind in PORTED:
        kind = actor.kind.value
        for ports, is_write in ((actor.inputs, False), (actor.outputs, True)):
            registers = {port.register for port in ports}
            for field in plan.fields:
                if field.register in registers:
                    yield field.view, field.register, is_write, kind, field.name, field.source
        return
    for launch in actor.launches:
        workspace = () if launch.workspace is None else (launch.workspace,)
        for views, is_write in ((launch.inputs, False), (launch.outputs + workspace, True)):
            for view in views:
                register = plan.views[view].register
                yield view, register, is_write, launch.op, launch.scope, launch.source


def _phases(num_slots: int, rate: int | None) -> tuple[tuple[int, int, int], ...]:
    """Return (slot, modulus, residue) for every slot and every firing that works on it.

    Without a port (rate None), which no loader accepts, each firing is taken to access every slot.
    """
    if rate is None:
        return tuple([(slot, 1, 0) for slot in range(num_slots)])
    # After so many firings the actor is at its first slot again.
    modulus = num_slots // gcd(num_slots, rate)
    return tuple(
        [
            ((residue * rate + token) % num_slots, modulus, residue)
            for residue in range(modulus)
            for token in range(rate)
        ]
    )


def share_bytes(accesses: Sequence[LaunchAccess]) -> SharedBytes:
    """Return the segments that two actors access and one writes, by the phases of all accesses."""
    # A sweep line; ends (0) sort before starts (1) of one address, because intervals are half-open.
    events = [(t.arena, t.start, 1, i) for i, t in enumerate(accesses)]
    events += [(t.arena, t.end, 0, i) for i, t in enumerate(accesses)]
    events.sort()
    classes: SharedBytes = {}
    active: set[int] = set()
    actors: Counter[int] = Counter()
    previous = 0
    for arena, address, is_start, index in events:
        # Accesses of one actor are ordered by its firings; at least two are needed for a race.
        if len(actors) > 1 and address > previous:
            # Equal phases share one key: a million bytes of one pattern are compared once.
            key = tuple(sorted({accesses[i].phase for i in active}))
            if any([phase.is_write for phase in key]):
                segment = ByteSegment(arena, previous, address, tuple(sorted(active)))
                classes.setdefault(key, []).append(segment)
        previous = address
        actor = accesses[index].phase.actor
        if is_start:
            active.add(index)
            actors[actor] += 1
        else:
            active.remove(index)
            actors[actor] -= 1
            if not actors[actor]:
                del actors[actor]
    return classes


@dataclass(frozen=True, slots=True)
class UnrollLimits:
    """How much of a run is visited.

    `max_firings` are visited at most, in a few seconds. Where an actor has more than `long_period`
    firings in a period, what comes round again is not visited.
    """

    max_firings: int = 400_000
    long_period: int = LONG_PERIOD


_USUAL = UnrollLimits()

_NUM_NAMED = 8
"""Races named in a message; `RaceError.races` has all."""


@dataclass(frozen=True, slots=True)
class ByteAccess:
    """What one firing does to one slot of a register; `op` is the first launch that does it.

    Of a source or sink, `op` is its kind and `scope` the name of the field.
    """

    actor: str
    firing: int
    op: str
    scope: str
    source: str
    register: str
    slot: int
    is_write: bool

    def __str__(self) -> str:
        scope = f" in {self.scope!r}" if self.scope else ""
        verb = "writes" if self.is_write else "reads"
        return (
            f"{self.actor!r} firing {self.firing}: {self.op}{scope} ({self.source}) {verb}"
            f" register {self.register!r} slot {self.slot}"
        )


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to bytes [start_bytes, end_bytes) of an arena that nothing orders.

    `missing` names the two ends of a control edge that would order them, producer first, with its
    `rates`. With the fewest slots that these allow, the two actors take turns. `is_enqueued`: the
    messages do order them, so that they are enqueued in turn, but no event makes the device wait.
    """

    first: ByteAccess
    second: ByteAccess
    arena: int
    start_bytes: int
    end_bytes: int
    is_same_stream: bool
    missing: tuple[str, str]
    rates: tuple[int, int]
    is_enqueued: bool = False

    @property
    def num_slots(self) -> int:
        """Slots of the missing edge; its rates have no common divisor."""
        return sum(self.rates) - 1

    def __str__(self) -> str:
        how = "either way round on one stream" if self.is_same_stream else "at the same time"
        is_one_place = (self.first.register, self.first.slot) == (
            self.second.register,
            self.second.slot,
        )
        where = (
            f"bytes [{self.start_bytes}, {self.end_bytes}) of arena {self.arena}\n"
            f"    {self.first}\n    {self.second}\n"
        )
        if self.is_enqueued:
            return (
                f"{where}    they are enqueued in order, and nothing waits until the first of them"
                " has ended: a wait for its event is missing"
            )
        return (
            f"{where}    nothing orders them: they may run {how}; add a control edge from"
            f" {self.missing[0]!r} to {self.missing[1]!r} (rates {self.rates[0]} and"
            f" {self.rates[1]}, {self.num_slots} slots)"
            + ("" if is_one_place else ", or give both bytes of their own")
        )


_Conflicts = Mapping[tuple[int, int, int], Conflict]
"""By class of bytes and the two actors."""


class RaceError(ActorflowError):
    """Conflicting accesses without an order; `races` is in the order of addresses."""

    def __init__(self, message: str, races: tuple[Race, ...]) -> None:
        super().__init__(message)
        self.races = races


@dataclass(frozen=True, slots=True)
class RaceReport:
    """How much was checked. `num_classes` are classes of bytes that several actors share.

    `num_lines` is how many numbers a clock has in the end, `num_pairs` how often two were compared.
    `is_exhaustive` is False when the limits cut the visit short of what proves any length of run.
    """

    periods: int
    num_firings: int
    num_accesses: int
    num_classes: int
    num_lines: int
    num_pairs: int
    is_exhaustive: bool


@proof
def check_races(plan: Plan) -> RaceReport:
    """Check that every pair of conflicting accesses of a run is ordered: `check_unrolled`."""
    return check_unrolled(plan)


def check_unrolled(
    plan: Plan,
    periods: int = 3,
    initial: Mapping[str, int] | None = None,
    *,
    limits: UnrollLimits = _USUAL,
) -> RaceReport:
    """Check that every pair of conflicting accesses of so many periods is ordered.

    Takes O(accesses log accesses + firings * (edges * lines + shared classes)): the lines of
    `actors.race.happens_before` are as many as there are streams where a stream's firings are in
    order.

    Args:
        plan: A plan that can be loaded.
        periods: At least so many periods are unrolled; more where slots need more to come round.
        initial: Tokens ready at the start, by control register: see `actors.machine.table.Edge`.
        limits: How much of them is visited.

    Raises:
        RaceError: Some pair is unordered. All actors that race are named in pairs, once per pair of
            registers, with the first launch of either that accesses the bytes.
        InternalError: The actor graph does not balance or deadlocks.
    """
    table = MachineTable.of(plan, initial or {})
    return check_order(plan, table, order_of_run(plan, table), periods, limits=limits)


def check_order(
    plan: Plan,
    table: MachineTable,
    order: MachineTable,
    periods: int = 3,
    *,
    limits: UnrollLimits = _USUAL,
) -> RaceReport:
    """Check the accesses of a plan in an order of its own, which need not be that of its table.

    `order` has an edge for all that comes after something, and perhaps more nodes than `table`.
    Raises as `check_unrolled`.
    """
    accesses = gather_accesses(plan)
    shared = share_bytes(accesses)
    classes = tuple(shared)
    depth = max([periods, *_depths(order, classes)])
    check = Check(order, classes)
    show = partial(watch, limit=limits.max_firings, long_period=limits.long_period)
    show(order, depth, phases=check.phases, watcher=check)
    if check.is_racy:
        conflicts = _conflicts(show, order, depth, check, classes)
        # Of two that messages order, a device was not told so.
        unordered = conflicts if order is table else _conflicts(show, table, depth, check, classes)
        races = _name(plan, table, accesses, tuple(shared.values()), conflicts, unordered)
        raise RaceError(_message(plan, races), races)
    return RaceReport(
        depth,
        check.num_firings,
        len(accesses),
        len(classes),
        check.num_lines,
        check.num_pairs,
        check.num_firings + check.num_left_out == depth * sum(order.repetitions),
    )


def _conflicts(
    show: Callable[..., None],
    order: MachineTable,
    depth: int,
    check: Check,
    classes: Sequence[tuple[PhasedFiring, ...]],
) -> _Conflicts:
    """Return the first conflict of each class of bytes and pair of actors."""
    finder = ConflictFinder(order, classes)
    # Of nodes that touch no bytes a table has none.
    show(order, depth, phases=check.phases[: order.num_actors], watcher=finder)
    return finder.conflicts


def _depths(table: MachineTable, classes: tuple[tuple[PhasedFiring, ...], ...]) -> Iterator[int]:
    """Yield after how many periods each class of bytes can show no new pair of accesses.

    Slots and repetitions come round together after the least common multiple. Beyond that, the one
    firing of an unordered pair can be only so many periods ahead of the other: no further than by
    way of a third actor, which is the one that accesses most classes; and what has no way to it or
    from it is looked at by itself.
    """
    count = Counter([phase.actor for phases in classes for phase in set(phases)])
    if not count:
        return
    # Two searches from one hub bound all pairs; one search per pair would be quadratic in actors.
    # The lowest of equals, so that the depth does not depend on the order of a dict.
    hub = max(count, key=lambda actor: (count[actor], -actor))
    behind, ahead = lags_behind(table, hub), lags_behind(table, hub, is_reversed=True)
    apart = {
        actor: (lags_behind(table, actor), lags_behind(table, actor, is_reversed=True))
        for actor in sorted(count)
        if actor not in behind or actor not in ahead
    }
    for phases in classes:
        round_ = lcm(*[t.modulus // gcd(t.modulus, table.repetitions[t.actor]) for t in phases])
        actors = sorted({phase.actor for phase in phases})
        yield (
            round_
            + max([ahead.get(actor, 0) for actor in actors])
            + max([behind.get(actor, 0) for actor in actors])
        )
        for lags in [lags for actor in actors for lags in apart.get(actor, ())]:
            yield round_ + max([lags.get(actor, 0) for actor in actors])


def _name(
    plan: Plan,
    table: MachineTable,
    accesses: Sequence[LaunchAccess],
    classes: Sequence[list[ByteSegment]],
    conflicts: _Conflicts,
    unordered: Container[tuple[int, int, int]],
) -> tuple[Race, ...]:
    """Return the conflicts as `Race`s, each pair of actors and registers once, by address.

    `unordered` holds the conflicts that messages do not order either.
    """
    races: dict[tuple[tuple[int, int], ...], Race] = {}
    for place, conflict in conflicts.items():
        for segment in classes[conflict.bytes_class]:
            members = [accesses[i] for i in segment.accesses]
            first = next(t for t in members if t.phase == conflict.first)
            second = next(t for t in members if t.phase == conflict.second)
            key = tuple(sorted([(t.phase.actor, t.register) for t in (first, second)]))
            if key not in races:
                race = _race(plan, table, conflict, first, second)
                races[key] = race if place in unordered else replace(race, is_enqueued=True)
    return tuple(sorted(races.values(), key=lambda race: (race.arena, race.start_bytes)))


def _race(
    plan: Plan, table: MachineTable, conflict: Conflict, first: LaunchAccess, second: LaunchAccess
) -> Race:
    producer, consumer = _missing(table, first.phase, second.phase)
    repetitions = table.repetitions[producer], table.repetitions[consumer]
    common = gcd(*repetitions)
    return Race(
        _access(plan, first, conflict.first_firing),
        _access(plan, second, conflict.second_firing),
        first.arena,
        max(first.start, second.start),
        min(first.end, second.end),
        table.streams[first.phase.actor] == table.streams[second.phase.actor],
        (table.names[producer], table.names[consumer]),
        (repetitions[1] // common, repetitions[0] // common),
    )


def _missing(table: MachineTable, first: PhasedFiring, second: PhasedFiring) -> tuple[int, int]:
    """Return producer and consumer of the edge to add: along the tokens, else to the reader."""
    producer, consumer = first.actor, second.actor
    if consumer in downstream(table, producer):
        return producer, consumer
    # An edge against the flow of tokens would close a cycle without initial tokens.
    if producer in downstream(table, consumer) or (second.is_write and not first.is_write):
        return consumer, producer
    return producer, consumer


def _access(plan: Plan, access: LaunchAccess, firing: int) -> ByteAccess:
    return ByteAccess(
        plan.actors[access.phase.actor].name,
        firing,
        access.op,
        access.scope,
        str(plan.sources[access.source]),
        plan.registers[access.register].name,
        access.slot,
        access.phase.is_write,
    )


def _message(plan: Plan, races: tuple[Race, ...]) -> str:
    named = "\n  ".join([str(race) for race in races[:_NUM_NAMED]])
    more = f"\n  and {len(races) - _NUM_NAMED} more" if len(races) > _NUM_NAMED else ""
    count = "a race" if len(races) == 1 else f"{len(races)} races"
    return f"plan {plan.name!r} has {count}:\n  {named}{more}"
