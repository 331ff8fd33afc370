"""Which firing of an actor graph happens before which: vector clocks over unrolled periods.

A firing happens before another when a path of these edges leads from its end to the other's start:
the order of an actor's own firings; *Ready*, from the firing that produces a token to the one that
consumes it; *Free*, from the firing of each consumer that hands a slot back to the firing of the
producer that takes it again. What has no path may run in either order or at the same time.

Source: Fidge, "Timestamps in message-passing systems that preserve the partial ordering", 1988;
Mattern, "Virtual time and global states of distributed systems", 1989.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from actors.table import OUTSIDE, MachineTable
from compiler.errors import InternalError

Clock = tuple[int, ...]
"""How many firings of each actor end before this one starts."""


def unroll(table: MachineTable, periods: int, limit: int) -> Iterator[tuple[int, int, Clock]]:
    """Yield actor, firing and clock, each after all that happens before it.

    Stops after `periods`, or once `limit` firings are reached. Keeps all clocks: one int per firing
    and actor. Raises InternalError when no actor can fire.
    """
    every = range(table.num_actors)
    clocks: list[list[Clock]] = [[] for _ in every]
    open_ = list(every)
    budget = limit
    while open_ and budget > 0:
        before = budget
        for actor in open_:
            firing = len(clocks[actor])
            clock = _clock_of(table, clocks, actor, firing)
            if clock is not None:
                clocks[actor].append(clock)
                budget -= 1
                yield actor, firing, clock
        if budget == before:
            names = ", ".join([repr(table.names[actor]) for actor in open_])
            raise InternalError(f"the actor graph deadlocks: {names} wait for one another")
        open_ = [a for a in open_ if len(clocks[a]) < periods * table.repetitions[a]]


def _clock_of(
    table: MachineTable, clocks: list[list[Clock]], actor: int, firing: int
) -> Clock | None:
    """Return the clock of a firing, or None while something before it has not been visited."""
    past: list[tuple[int, int]] = [(actor, firing - 1)]
    for index in table.inputs[actor]:
        edge = table.edges[index]
        past.append(
            (edge.producer, ((firing + 1) * edge.consume - edge.initial - 1) // edge.produce)
        )
    for index in table.outputs[actor]:
        edge = table.edges[index]
        freed = (firing + 1) * edge.produce + edge.initial - edge.num_slots
        past.append((edge.consumer, -(-freed // edge.consume) - 1))
    clock = [0] * table.num_actors
    for other, last in past:
        if last < 0:
            continue
        if last >= len(clocks[other]):
            return None
        clock = list(map(max, clock, clocks[other][last]))
        clock[other] = max(clock[other], last + 1)
    return tuple(clock)


def lags_behind(table: MachineTable, origin: int, *, is_reversed: bool = False) -> dict[int, int]:
    """Return, per actor, a bound on how many periods it can be behind a firing of `origin`.

    A firing in period x comes after one in period x - lag of each of its producers, with the
    initial tokens of the edge giving the lag, and of each of its consumers, with its slots giving
    it. `is_reversed` bounds how many periods `origin` can be behind a firing of each actor instead.
    """
    steps: list[list[tuple[int, int]]] = [[] for _ in range(table.num_actors)]
    for edge in table.edges:
        if edge.producer == OUTSIDE:
            continue
        tokens = edge.produce * table.repetitions[edge.producer]
        freed = edge.num_slots - edge.initial + edge.consume - edge.produce
        pairs = (
            (edge.consumer, edge.producer, -(-edge.initial // tokens)),
            (edge.producer, edge.consumer, max(-(-freed // tokens), 0)),
        )
        for ahead, behind, lag in pairs:
            start, end = (behind, ahead) if is_reversed else (ahead, behind)
            steps[start].append((lag, end))
    lags: dict[int, int] = {}
    heap = [(0, origin)]
    while heap:
        lag, actor = heappop(heap)
        if actor in lags:
            continue
        lags[actor] = lag
        for step, other in steps[actor]:
            if other not in lags:
                heappush(heap, (lag + step, other))
    return lags


def downstream(table: MachineTable, origin: int) -> set[int]:
    """Return the actors that tokens of `origin` lead to; itself is one of them on a cycle only."""
    found: set[int] = set()
    front = [origin]
    for actor in front:
        for index in table.outputs[actor]:
            consumer = table.edges[index].consumer
            if consumer not in found:
                found.add(consumer)
                front.append(consumer)
    return found
