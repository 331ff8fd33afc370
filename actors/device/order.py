"""The order of a run whose streams are asynchronous, as a graph of edges that only order.

A message of an actor on a device says that a firing is *enqueued*; that it has *ended* is another
event, later. So such an actor has two nodes here: its own number is the work on the device, which
is what touches bytes, and a number after all actors is the moment at which it is enqueued.

What comes after what:

- Messages order the host: a firing is enqueued, or begins on the host, after those whose messages
  it needs are enqueued, or have ended on the host.
- Work begins after it was enqueued.
- Two firings on one stream of a device do their work in the order in which they are enqueued,
  where a message between them says which that is. What no message orders may run either way round.
- A wait for an event: work on a stream, or a firing on the host, begins after the work that is
  waited for. Nothing else is known of another stream, on whatever device it is.

What is left out only orders more: that the host is no more than some steps ahead of the device, and
that a stream which has waited once lets nothing pass that an earlier firing waited for.

Not modelled is the end of a run, as in `actors.race`: there an actor that has ended hands slots
back without a firing, and the executor takes all waits instead of the needed ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from actors.device.waits import EventWait, predecessors, wait_table
from actors.table import ENDLESS, Edge, MachineTable
from compiler.placement import DeviceKind
from compiler.plan import Plan
from compiler.types import StreamId

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

    `streams` are asynchronous. The result is for `actors.clocks` and whoever asks it; no machine
    can run it.
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
