"""The counters of a trace: ready slots of each register, and live bytes of each arena.

Both follow from what is recorded anyway. A register's slot is ready from the end of the firing that
filled it to the start of the one that reads it. Live bytes are those of the plan at the launch that
runs: what lies in an arena throughout, and temporaries from their first to their last launch.

There is an event where a value changes, and of many the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from actors.machine.history import Row
from actors.machine.table import OUTSIDE, Edge, MachineTable
from compiler.contract.accounting import chain_launches
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import RegisterKind
from memory.liveness import align_up, live_bytes

_MOST_EVENTS = 1 << 17
"""Of each of the two kinds."""

Change = tuple[int, str, str, int]
"""Nanoseconds, name of the counter, name of its series, and the value from then on."""


def slot_counters(rows: Sequence[Row], table: MachineTable, origin_ns: int) -> list[dict[str, Any]]:
    """Return how many slots of each register are ready for each of its readers.

    A register whose maker or reader left no row, though older rows are forgotten, has no counter.
    """
    by_actor: dict[int, list[Row]] = {}
    for row in rows:
        by_actor.setdefault(row[0], []).append(row)
    is_whole = all([min([row[1] for row in own]) == 0 for own in by_actor.values()])
    changes: list[Change] = []
    for edge in table.edges:
        produced, consumed = by_actor.get(edge.producer, []), by_actor.get(edge.consumer, [])
        is_known = is_whole or (produced and consumed)
        if is_known and edge.producer != OUTSIDE:
            reader = table.names[edge.consumer]
            counted = _ready(edge, produced, consumed)
            changes += [(at, f"register {edge.name}", reader, value) for at, value in counted]
    return _events(changes, origin_ns)


def _ready(
    edge: Edge, produced: Sequence[Row], consumed: Sequence[Row]
) -> Iterator[tuple[int, int]]:
    """Yield when the number of ready slots changes, and what it is then."""
    first_produced = min([row[1] for row in produced], default=0)
    first_consumed = min([row[1] for row in consumed], default=0)
    ready = edge.initial + first_produced * edge.produce - first_consumed * edge.consume
    steps = [(end, edge.produce) for _, _, _, end in produced]
    steps += [(start, -edge.consume) for _, _, start, _ in consumed]
    # What is filled at a moment can be read at that moment.
    for at, change in sorted(steps, key=lambda step: (step[0], -step[1])):
        ready += change
        yield at, max(0, ready)  # a flushed firing takes what there is, if it is less


def byte_counters(launches: Iterable[Row], plan: Plan, origin_ns: int) -> list[dict[str, Any]]:
    """Return the live bytes of each arena over launches: actor, index in its chain, start, end."""
    arenas = [_ArenaBytes(plan, arena) for arena in range(len(plan.arenas))]
    chains = [len(actor.launches) for actor in plan.actors]
    changes: list[Change] = []
    for actor, index, start, end in launches:
        for arena in arenas:
            changes += arena.at(start, actor, index)
            if index == chains[actor] - 1:
                changes += arena.at(end, actor, None)
    return _events(changes, origin_ns)


class _ArenaBytes:
    """The live bytes of one arena, while chains run."""

    def __init__(self, plan: Plan, arena: int) -> None:
        # As in the account of an arena: a slot reaches to the next multiple of the alignment.
        alignment = plan.arenas[arena].alignment
        own = [
            (register, align_up(register.size_bytes, alignment) * register.num_slots)
            for register in plan.registers
            if register.arena == arena
        ]
        temporary = [(r.interval, size) for r, size in own if r.kind is RegisterKind.TEMPORARY]
        self._name = f"live bytes of {plan.arenas[arena].device}"
        self._always = sum([size for r, size in own if r.kind is not RegisterKind.TEMPORARY])
        times, live = live_bytes(
            [begin for (begin, _), _ in temporary],
            [end for (_, end), _ in temporary],
            [size for _, size in temporary],
        )
        profile = dict(zip(times.tolist(), live.tolist(), strict=True))
        # By actor and index in its chain; intervals count the launches of all chains.
        self._live: dict[tuple[int, int], int] = {}
        now = 0
        begins: dict[int, int] = {}
        for place, (actor, _) in enumerate(chain_launches(plan)):
            now = profile.get(place, now)
            self._live[actor.id, place - begins.setdefault(actor.id, place)] = now
        self._running: dict[int, int] = {}
        self._last: int | None = None

    def at(self, time_ns: int, actor: int, index: int | None) -> list[Change]:
        """Return the change when an actor comes to a launch of its chain, or past the last."""
        self._running[actor] = 0 if index is None else self._live.get((actor, index), 0)
        value = self._always + sum(self._running.values())
        if value == self._last:
            return []
        self._last = value
        return [(time_ns, self._name, "bytes", value)]


def _events(changes: list[Change], origin_ns: int) -> list[dict[str, Any]]:
    changes.sort(key=lambda change: change[0])
    return [
        {"ph": "C", "name": name, "ts": (at - origin_ns) / 1e3, "args": {series: value}}
        for at, name, series, value in changes[-_MOST_EVENTS:]
    ]
