"""Which firing waits for which, once actors run on streams of a device: arithmetic on edges.

A message says that a firing is *enqueued*; that it has *ended* must be waited for. Firing k of an
actor needs, of every input, the firing that produced its last token, and of every output, the
firing of the consumer that freed its last slot (write after read). With n tokens per firing at
either end both are linear in k: see `EventWait`.

**No wait is needed** within a stream, which is an order already, and for an actor on the host,
whose message is sent when the firing has ended.

**A wait is implied** when another predecessor of the same firing comes after the firing waited for,
in all firings; it is dropped. What comes after what is taken from the unrolled graph
(`actors.race.happens_before`), as far as it holds to the end of a run: along inputs only, because a
consumer whose inputs have ended hands slots back without a firing; and not through a flushed actor,
whose last firing lacks inputs. For the same reason another predecessor at a freed slot implies a
wait only if it is itself waited for: then the executor sees that it never came, and takes all
waits. Edges are missing at the start only, so what is implied in one late period is implied in all
(Lamport 1978; the transitive reduction of a DAG is unique: Aho, Garey & Ullman 1972).

**Events of an actor** are a ring, recorded in turn. A ring is long enough when no event is recorded
again while a firing that waits for it may still come. While firing k of a consumer has not ended,
only the slots of the firings before it are free again; while firing k of a producer has not ended,
only the tokens of those before it are there: that bounds how far the other end can have come.

`order_of_run` gives the order that these waits leave, as a graph for the race check.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from actors.machine.table import ENDLESS, Edge, MachineTable
from actors.race.happens_before import FiringStamp, downstream, unroll
from compiler.contract.placement import DeviceKind
from compiler.contract.plan import Plan
from compiler.contract.types import StreamId

_MAX_FIRINGS = 20_000
"""Firings unrolled at most to find implied waits; of a longer period every wait is kept."""


class EventWait(NamedTuple):
    """Firing k comes after firing (k * times + plus) // over of `actor`, or none if negative.

    `edge` is why: its token if `is_input`, else its slot.
    """

    actor: int
    times: int
    plus: int
    over: int
    edge: int
    is_input: bool

    def firing(self, k: int) -> int:
        """Return the firing that must have ended; negative: none."""
        return (k * self.times + self.plus) // self.over

    def flushed(self, missing: int) -> EventWait:
        """Return the wait of a last firing that takes `missing` tokens less than its rate."""
        return self._replace(plus=self.plus - missing) if self.is_input else self


@dataclass(frozen=True, slots=True)
class Throttle:
    """How far an actor's enqueued firings may be ahead of the device.

    Before every firing that is a multiple of `batch`, the one `window` before the last of the batch
    must have ended: so at most `window` firings are enqueued and not ended.
    """

    batch: int
    window: int

    def firing(self, k: int) -> int:
        """Return the firing that must have ended before firing k; negative: none."""
        return -1 if k % self.batch else k + self.batch - 1 - self.window


@dataclass(frozen=True, slots=True)
class WaitTable:
    """The waits of a run, in columns by actor.

    `needed` are the waits left after the implied ones are dropped, `all` those before, both without
    the ones that a stream or a host actor makes true. `num_events` is the length of the actor's
    ring, 0 for an actor on the host.
    """

    needed: tuple[tuple[EventWait, ...], ...]
    all: tuple[tuple[EventWait, ...], ...]
    num_events: tuple[int, ...]
    throttles: tuple[Throttle, ...]


def wait_table(table: MachineTable, device_streams: Collection[int], max_ahead: int) -> WaitTable:
    """Return the waits of all actors, those on `device_streams` being asynchronous.

    `max_ahead` is how many steps may be enqueued and not ended. Takes O(firings of a few periods *
    actors).
    """
    if not device_streams:  # a run on the host alone waits for no event: do not look for any
        none: tuple[tuple[EventWait, ...], ...] = ((),) * table.num_actors
        return WaitTable(none, none, (0,) * table.num_actors, ())
    actors = range(table.num_actors)
    is_on_device = [table.streams[a] in device_streams for a in actors]
    waits = [
        tuple(
            [
                w
                for w in predecessors(table, a)
                if is_on_device[w.actor]
                and not (is_on_device[a] and table.streams[a] == table.streams[w.actor])
            ]
        )
        for a in actors
    ]
    implied = _implied(table, waits)
    throttles = _throttles(table, max_ahead)
    # The throttle waits for events up to a window back: the ring holds at least these.
    num_events = [throttles[a].window if is_on_device[a] else 0 for a in actors]
    for row in waits:
        for wait in row:
            num_events[wait.actor] = max(num_events[wait.actor], _ring_length(table, wait))
    return WaitTable(
        tuple([tuple([w for w in row if (a, w) not in implied]) for a, row in enumerate(waits)]),
        tuple(waits),
        tuple(num_events),
        throttles,
    )


def predecessors(table: MachineTable, actor: int) -> tuple[EventWait, ...]:
    """Return what a firing comes after: one firing per edge, inputs first."""
    waits = []
    for index in table.inputs[actor]:
        e = table.edges[index]
        # The last token of firing k is number (k + 1) * consume - 1; initial tokens come first.
        plus = e.consume - 1 - e.initial
        waits.append(EventWait(e.producer, e.consume, plus, e.produce, index, is_input=True))
    for index in table.outputs[actor]:
        e = table.edges[index]
        # Rounded up, less one: the consumer's firing that frees the last slot taken.
        plus = e.initial + e.produce - e.num_slots - 1
        waits.append(EventWait(e.consumer, e.produce, plus, e.consume, index, is_input=False))
    return tuple(waits)


def _ring_length(table: MachineTable, wait: EventWait) -> int:
    """Return how many events of the awaited actor must be told apart.

    That is how many firings it can have started when a firing has not ended, less those before the
    one waited for; it comes round after `over` firings.
    """
    edge = table.edges[wait.edge]
    there = edge.num_slots - edge.initial if wait.is_input else edge.initial
    return max([(k * wait.times + there) // wait.over - wait.firing(k) for k in range(wait.over)])


def _throttles(table: MachineTable, max_ahead: int) -> tuple[Throttle, ...]:
    """Return the throttle of every actor: `max_ahead` steps, but never less than one firing."""
    per_step = [Fraction(n) for n in table.repetitions]
    for source in table.sources:
        for actor in [source, *sorted(downstream(table, source))]:
            share = Fraction(table.firings_per_step[source], table.repetitions[source])
            per_step[actor] = table.repetitions[actor] * share
    return tuple([Throttle(max(1, int(n)), max(1, ceil(max_ahead * n))) for n in per_step])


_Moments = Sequence[Sequence[FiringStamp]]
"""By actor and firing."""


def _implied(
    table: MachineTable, waits: Sequence[tuple[EventWait, ...]]
) -> set[tuple[int, EventWait]]:
    """Return the waits, with their actor, that others imply in every firing."""
    moments = _moments_of_inputs(table)
    implied: set[tuple[int, EventWait]] = set()
    for actor, row in enumerate(waits):
        # The last period: by then every edge has come into play, so later ones are alike.
        last = range(len(moments[actor]) - table.repetitions[actor], len(moments[actor]))
        if last.start < 0:
            continue
        # Inputs always come; of freed slots only those that are waited for: see above.
        certain_waits = [w for w in predecessors(table, actor) if w.is_input or w in row]
        for wait in row:
            if all([_is_implied(moments, wait, certain_waits, actor, k) for k in last]):
                implied.add((actor, wait))
    return implied


def _is_implied(
    moments: _Moments, wait: EventWait, seen: Sequence[EventWait], actor: int, k: int
) -> bool:
    """Return whether another predecessor of firing k comes after what `wait` is for."""
    firing = wait.firing(k)
    # The actor's own firing before has waited for it, or for something later.
    if k > 0 and _is_before(moments, wait.actor, firing, moments[actor][k - 1]):
        return True
    for other in seen:
        at = other.firing(k)
        if other.actor == wait.actor:
            # Of two equal waits the first stays: each may not be dropped for the other.
            if at > firing or (at == firing and seen.index(other) < seen.index(wait)):
                return True
        elif at >= 0 and _is_before(moments, wait.actor, firing, moments[other.actor][at]):
            return True
    return False


def _is_before(moments: _Moments, actor: int, firing: int, later: FiringStamp) -> bool:
    """Return whether a firing, or none if negative, happens before a moment."""
    if firing < 0:
        return True
    return firing < len(moments[actor]) and moments[actor][firing].is_before(later.clock)


def _moments_of_inputs(table: MachineTable) -> _Moments:
    """Return the moments of firings by inputs alone, until every edge has come into play.

    A flushed actor has no inputs here. There are none when a period is too long to be unrolled.
    """
    moments: list[list[FiringStamp]] = [[] for _ in range(table.num_actors)]
    laps = [
        (e.num_slots + e.initial) // (e.produce * table.repetitions[e.producer])
        for e in table.edges
        if e.producer >= 0
    ]
    periods = 3 + max(laps, default=0)
    # A wait too many costs a call per firing; a long unrolling would delay every load.
    if periods * sum(table.repetitions) <= _MAX_FIRINGS:
        # Without slots no freed one orders anything: what is left are the inputs.
        edges = tuple([replace(e, num_slots=ENDLESS) for e in table.edges])
        columns = zip(table.inputs, table.is_flushed, strict=True)
        inputs = tuple([() if is_flushed else row for row, is_flushed in columns])
        reduced = replace(table, edges=edges, inputs=inputs)
        for actor, _, moment in unroll(reduced, periods, ENDLESS):
            moments[actor].append(moment)
    return moments


# The order of a run whose streams are asynchronous is a graph of edges that only order. An actor on
# a device has two nodes in it: its own number is the work on the device, which is what touches
# bytes, and a number after all actors is the moment at which it is enqueued. What comes after what:
#
# - Messages order the host: a firing is enqueued, or begins on the host, after those whose messages
#   it needs are enqueued, or have ended on the host.
# - Work begins after it was enqueued.
# - Two firings on one stream of a device do their work in the order in which they are enqueued,
#   where a message between them says which that is. What no message orders may run either way
#   round.
# - A wait for an event: work on a stream, or a firing on the host, begins after the work that is
#   waited for. Nothing else is known of another stream, on whatever device it is.
#
# What is left out only orders more: that the host is no more than some steps ahead of the device,
# and that a stream which has waited once lets nothing pass that an earlier firing waited for.
#
# Not modelled is the end of a run, as in `actors.race.race`: there an actor that has ended hands
# slots back without a firing, and the executor takes all waits instead of the needed ones.

Waits = Sequence[tuple[EventWait, ...]]
"""By actor, what its firings wait for: `WaitTable.needed`."""


def asynchronous_streams(plan: Plan) -> tuple[StreamId, ...]:
    """Return the streams on which a firing is enqueued only: all that are not the host's."""
    return tuple([s.id for s in plan.streams if s.device.kind is not DeviceKind.HOST])


def order_of_run(plan: Plan, table: MachineTable) -> MachineTable:
    """Return what comes after what in a run of a plan: the table itself where all is on the host.

    The waits are those that an executor makes of the table.
    """
    streams = asynchronous_streams(plan)
    if not streams:
        return table
    return order_of_work(table, wait_table(table, streams, max_ahead=1).needed, streams)


def order_of_work(table: MachineTable, waits: Waits, streams: Collection[int]) -> MachineTable:
    """Return a table of edges without slots: the actors, and after them a node per enqueuing.

    `streams` are asynchronous. The result is for `actors.race.happens_before` and whoever asks it;
    no machine can run it.
    """
    number = table.num_actors
    devices = [a for a in range(number) if table.streams[a] in streams]
    queued = {actor: number + index for index, actor in enumerate(devices)}
    edges: list[Edge] = []
    for actor in range(number):
        for wait in predecessors(table, actor):
            start, before = queued.get(actor, actor), queued.get(wait.actor, wait.actor)
            edges.append(_after(table, wait, before, start))
            if actor in queued and table.streams[actor] == table.streams[wait.actor]:
                edges.append(_after(table, wait, wait.actor, actor))
        if actor in queued:
            edges.append(Edge(_ENQUEUED, queued[actor], actor, 1, 1, ENDLESS))
        edges += [_after(table, wait, wait.actor, actor) for wait in waits[actor]]
    inputs: list[list[int]] = [[] for _ in range(number + len(devices))]
    outputs: list[list[int]] = [[] for _ in range(number + len(devices))]
    for index, edge in enumerate(edges):
        inputs[edge.consumer].append(index)
        outputs[edge.producer].append(index)
    return replace(
        table,
        names=table.names + tuple([f"{table.names[a]}, enqueued" for a in devices]),
        edges=tuple(edges),
        inputs=tuple([tuple(row) for row in inputs]),
        outputs=tuple([tuple(row) for row in outputs]),
        admission=(None,) * (number + len(devices)),
        is_flushed=table.is_flushed + tuple([table.is_flushed[a] for a in devices]),
        is_detached=table.is_detached + (False,) * len(devices),
        streams=table.streams + (max(table.streams) + 1,) * len(devices),
        repetitions=table.repetitions + tuple([table.repetitions[a] for a in devices]),
        firings_per_step=table.firings_per_step + (0,) * len(devices),
    )


_ENQUEUED = "enqueued"
"""The name of the edge from the enqueuing of a firing to its work."""


def _after(table: MachineTable, wait: EventWait, before: int, after: int) -> Edge:
    """Return the edge that lets `after` come after what a wait is for, a firing of `before`.

    A slot that is handed back is a token the other way round, of which some are there at the start.
    """
    name, initial = table.edges[wait.edge].name, wait.times - 1 - wait.plus
    return Edge(name, before, after, wait.over, wait.times, ENDLESS, initial)
