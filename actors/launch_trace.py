"""Every launch of a watched run, timed: what a chain spends its firing on.

Only where somebody asked for a trace: each launch goes through Python then, one by one, and is
noted in a ring that is allocated once. In the picture a launch lies inside its firing, named by
op, with the kernel, the module path and the user's line.
"""

from __future__ import annotations

import time
from array import array
from itertools import count
from typing import Any

from actors.protocol import Chain, Clock, Launch
from compiler.plan import Plan


class LaunchTrace:
    """A ring of the last `capacity` launches. Memory: 32 bytes per row."""

    __slots__ = ("_actors", "_capacity", "_clock", "_ends", "_launches", "_next", "_starts")

    def __init__(self, capacity: int = 1 << 16, clock: Clock = time.perf_counter_ns) -> None:
        zeros = bytes(8 * capacity)
        self._capacity = capacity
        self._clock = clock
        self._next = count()
        self._actors = array("q", zeros)
        self._launches = array("q", zeros)
        self._starts = array("q", zeros)
        self._ends = array("q", zeros)

    def watch(self, actor: int, chain: Chain) -> Chain:
        """Return a chain that does the same and notes each launch."""
        return tuple([self._watched(actor, index, launch) for index, launch in enumerate(chain)])

    def events(self, plan: Plan, origin_ns: int) -> list[dict[str, Any]]:
        """Return the launches as events of a Chrome trace. Call it when no launch runs."""
        events = []
        rows = zip(self._actors, self._launches, self._starts, self._ends, strict=True)
        for actor, index, start, end in sorted([row for row in rows if row[3]], key=lambda r: r[2]):
            entry = plan.actors[actor]
            if index >= len(entry.launches) or start < origin_ns:
                continue
            launch = entry.launches[index]
            events.append(
                {
                    "ph": "X",
                    "name": launch.label,
                    "cat": "launch",
                    "pid": 0,
                    "tid": int(entry.stream),
                    "ts": (start - origin_ns) / 1e3,
                    "dur": (end - start) / 1e3,
                    "args": {
                        "kernel": launch.kernel,
                        "scope": launch.scope,
                        "line": str(plan.sources[launch.source]),
                    },
                }
            )
        return events

    def _watched(self, actor: int, index: int, launch: Launch) -> Launch:
        clock, capacity, place = self._clock, self._capacity, self._next
        actors, launches, starts, ends = self._actors, self._launches, self._starts, self._ends

        def watched() -> None:
            start = clock()
            launch()
            end = clock()
            row = next(place) % capacity
            actors[row], launches[row], starts[row] = actor, index, start
            # A row with an end of 0 is not read: the end is written last.
            ends[row] = end

        return watched
