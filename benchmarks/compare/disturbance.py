"""What a turn lost: time that other guests of the host stole, and cores that others used.

Read from /proc/stat (proc(5), "steal") and /proc/pressure/cpu (the kernel's accounting/psi) before
and after the turn, so that it costs the turn nothing. Stolen time is no engine's doing, so a turn
that lost more than `LIMIT` is run again. What other processes here used, and waiting for a core,
which is an engine's own where it has more threads than there are cores, is only reported.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

LIMIT = 0.02
_IDLE, _STEAL, _COUNTED = slice(3, 5), 7, 8
"""Places of idle and of stolen ticks in a line of /proc/stat; from the last, all count twice."""


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Counters of the host at one moment; None where the system does not tell."""

    stolen_ticks: int | None
    busy_ticks: int
    all_ticks: int
    waited_us: int | None
    at_ns: int

    @property
    def untold(self) -> tuple[str, ...]:
        """What is not known here, as sentences."""
        stolen = "stolen time is not known: /proc/stat has no steal"
        waited = "waiting for cores is not known: there is no /proc/pressure/cpu"
        pairs = ((stolen, self.stolen_ticks), (waited, self.waited_us))
        return tuple([text for text, number in pairs if number is None])


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Shares from 0 to 1, None where the system does not tell.

    Of the cores' time: what was stolen, and what other processes than the engine used. Of the time:
    while a task waited for a core.
    """

    stolen: float | None = None
    waiting: float | None = None
    others: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether more was stolen than a turn may lose."""
        return (self.stolen or 0.0) > LIMIT


def read_host_times(proc: Path = Path("/proc")) -> HostTimes:
    """Read the counters of now."""
    at_ns = time.monotonic_ns()
    cores = _words(proc / "stat", "cpu")[:_COUNTED]
    some = dict([word.split("=", 1) for word in _words(proc / "pressure" / "cpu", "some")])
    ticks = [int(word) for word in cores]
    stolen = ticks[_STEAL] if len(ticks) == _COUNTED else None
    busy = sum(ticks) - sum(ticks[_IDLE]) - (stolen or 0)
    return HostTimes(stolen, busy, sum(ticks), int(some["total"]) if some else None, at_ns)


def disturbance_between(before: HostTimes, after: HostTimes, own_s: float = 0.0) -> Disturbance:
    """Return what happened between two readings, of which the engine had `own_s` of the cores."""
    stolen = waiting = others = None
    if ticks := after.all_ticks - before.all_ticks:
        busy = after.busy_ticks - before.busy_ticks
        others = max(0.0, busy - own_s * os.sysconf("SC_CLK_TCK")) / ticks
    if before.stolen_ticks is not None and after.stolen_ticks is not None:
        stolen = (after.stolen_ticks - before.stolen_ticks) / max(1, ticks)
    if before.waited_us is not None and after.waited_us is not None:
        waiting = (after.waited_us - before.waited_us) * 1e3 / max(1, after.at_ns - before.at_ns)
    return Disturbance(stolen, waiting, others)


def _words(file: Path, first: str) -> list[str]:
    """Return the words that follow the first one of a line, none where there is no such line."""
    try:
        lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except OSError:
        return []
    return next((words[1:] for words in lines if words[:1] == [first]), [])
