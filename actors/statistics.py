"""What a run has done so far and what it waited for, as a value.

Counts come from columns that the loop keeps anyway; the record is built when somebody asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actors.machine import Machine
from compiler.plan import Plan


@dataclass(frozen=True, slots=True)
class Waits:
    """How many firings began as soon as this came, because it was the last thing missing.

    `kind` is "input" (a token of `register`), "register" (a free slot of it: back-pressure) or
    "self" (the actor's own firing before; `register` is empty).
    """

    kind: str
    register: str
    count: int

    def __str__(self) -> str:
        return f"{self.kind} {self.register}" if self.register else self.kind


@dataclass(frozen=True, slots=True)
class ActorStatistics:
    """One actor. `firings` were started; `busy_ns` is time in its launches, of ended firings."""

    name: str
    stream: str
    firings: int
    busy_ns: int
    launches: int
    waits: tuple[Waits, ...]

    @property
    def ns_per_firing(self) -> float:
        """Mean time of a firing's chain of launches; 0 before the first."""
        return self.busy_ns / self.firings if self.firings else 0.0


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """One stream. `num_waits` counts how often its own thread found nothing to do."""

    name: str
    busy_ns: int
    num_waits: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """A run until now, or until its end; approximate while it goes on.

    Tuples follow the plan: its actors, its streams.
    """

    elapsed_ns: int
    actors: tuple[ActorStatistics, ...]
    streams: tuple[StreamStatistics, ...]

    def busy_share(self, stream: int, since: Statistics | None = None) -> float:
        """Return the share of time in which a stream was busy, from `since` (or the start) on."""
        elapsed_ns = self.elapsed_ns - (since.elapsed_ns if since is not None else 0)
        busy_ns = self.streams[stream].busy_ns
        if since is not None:
            busy_ns -= since.streams[stream].busy_ns
        return busy_ns / elapsed_ns if elapsed_ns > 0 else 0.0


def collect(
    plan: Plan,
    machine: Machine,
    *,
    elapsed_ns: int,
    busy_ns: Sequence[int],
    thread_waits: Mapping[str, int],
) -> Statistics:
    """Return the record of a run from its columns. Linear in actors and edges.

    `busy_ns` is by actor, `thread_waits` by name of the streams with a thread of their own.
    """
    actors = tuple([_actor(plan, machine, a, busy_ns[a]) for a in range(machine.table.num_actors)])
    streams = [
        StreamStatistics(
            stream.name,
            sum([busy_ns[a] for a, id_ in enumerate(machine.table.streams) if id_ == stream.id]),
            thread_waits.get(stream.name, 0),
        )
        for stream in plan.streams
    ]
    return Statistics(elapsed_ns, actors, tuple(streams))


def _actor(plan: Plan, machine: Machine, actor: int, busy_ns: int) -> ActorStatistics:
    entry = plan.actors[actor]
    firings = machine.firing_index(actor) + 1
    counts: dict[tuple[str, str], int] = {}
    for kind, register, count in machine.causes(actor):
        # A register has a row per consumer.
        counts[kind, register] = counts.get((kind, register), 0) + count
    return ActorStatistics(
        entry.name,
        plan.streams[entry.stream].name,
        firings,
        busy_ns,
        firings * max(1, len(entry.launches)),
        tuple([Waits(*key, count) for key, count in counts.items() if count]),
    )
