"""Every launch of a watched run, timed: what a chain spends its firing on.

Only where somebody asked for a trace: each launch goes through Python then, one by one, and is
noted in a ring like that of the firings. In the picture a launch lies inside its firing, named by
op, with the kernel, the module path and the user's line.
"""

from __future__ import annotations

import time
from typing import Any

from actors.protocol import Chain, Clock, Launch
from actors.timeline import Timeline
from compiler.plan import Launch as PlannedLaunch
from compiler.plan import Plan


class LaunchTrace:
    """The last `capacity` launches, by actor and number in its chain."""

    __slots__ = ("_clock", "_ring")

    def __init__(self, capacity: int = 1 << 16, clock: Clock = time.perf_counter_ns) -> None:
        self._ring = Timeline(capacity)
        self._clock = clock

    def watch(self, actor: int, chain: Chain) -> Chain:
        """Return a chain that does the same and notes each launch."""
        return tuple([self._watched(actor, index, launch) for index, launch in enumerate(chain)])

    def events(self, plan: Plan, origin_ns: int) -> list[dict[str, Any]]:
        """Return the launches as events of a Chrome trace. Call it when no launch runs."""
        events = []
        for actor, index, start, end in self._ring.rows():
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
                        **_variables(launch),
                    },
                }
            )
        return events

    def _watched(self, actor: int, index: int, launch: Launch) -> Launch:
        clock, record = self._clock, self._ring.record

        def watched() -> None:
            start = clock()
            launch()
            record(actor, index, start, clock())

        return watched


def _variables(launch: PlannedLaunch) -> dict[str, str]:
    """Return the names of the variables that a launch updates, where it updates several."""
    names = dict(launch.attrs).get("variables")
    return {"variables": ", ".join(map(str, names))} if isinstance(names, tuple) else {}
