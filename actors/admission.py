"""How many steps the sources of a run may take: what was asked for, within a window.

Whoever runs a plan asks for steps; a window, where there is one, is granted from outside. So a
coordinator of several ranks holds them all within it: no rank begins a step that it has not granted
to each. Grants are totals and only grow, so that one that comes twice, or late, changes nothing.
"""

from __future__ import annotations

from actors.machine import Machine

_UNLIMITED = 1 << 62


class Admission:
    """Admits the sources of a machine. Belongs to the thread that owns the machine.

    `is_over` says that no source is admitted any more.

    Args:
        machine: the run.
        window: steps granted from the start, or None for no limit.
    """

    __slots__ = ("_admitted", "_asked", "_granted", "_is_end_asked", "_last", "_machine", "is_over")

    def __init__(self, machine: Machine, window: int | None) -> None:
        self._machine = machine
        self._granted = _UNLIMITED if window is None else window
        self._last = _UNLIMITED
        self._asked = self._admitted = 0
        self._is_end_asked = self.is_over = False

    def ask(self, steps: int) -> None:
        """Ask for more steps of every source; no effect once admission is over."""
        self._asked += steps
        self._advance()

    def grant(self, steps: int, *, is_last: bool) -> None:
        """Permit the run to begin so many steps in all; with `is_last`, never any more."""
        self._granted = max(self._granted, steps)
        if is_last:
            self._last = min(self._last, steps)
        self._advance()

    def end(self) -> None:
        """Let every source end with what was asked for until now, as soon as that is granted."""
        self._is_end_asked = True
        self._advance()

    def end_with(self, exhausted: int) -> None:
        """Let the other sources come as far as the one that has no more data, and no farther."""
        self.is_over = True
        machine, per_step = self._machine, self._machine.table.firings_per_step
        steps = -(-(machine.firing_index(exhausted) + 1) // per_step[exhausted])
        for source in machine.table.sources:
            machine.end_admission(source, limit=steps * per_step[source])

    def _advance(self) -> None:
        if self.is_over:
            return
        machine, table = self._machine, self._machine.table
        until = min(self._asked, self._granted, self._last)
        if until > self._admitted:
            steps, self._admitted = until - self._admitted, until
            for source in table.sources:
                machine.admit(source, steps * table.firings_per_step[source])
        is_done = self._is_end_asked and self._admitted >= self._asked
        if is_done or self._admitted >= self._last:
            self.is_over = True
            for source in table.sources:
                machine.end_admission(source)
