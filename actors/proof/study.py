"""A plan to be searched in every order of events, and a fault to be found by it."""

from __future__ import annotations

from dataclasses import dataclass

from actors.table import MachineTable
from actors.transitions import Message


@dataclass(frozen=True, slots=True)
class Study:
    """What is to be tried on a plan.

    Every source is admitted up to `firings` times its firings per step; it may find no more data at
    any firing if `is_exhausting`, and its admission may end with any lower limit if `is_limited`.
    Each actor in `failing` may fail at any firing.
    """

    table: MachineTable
    firings: int
    is_exhausting: bool = False
    is_limited: bool = False
    failing: tuple[int, ...] = ()

    def permits(self, source: int) -> int:
        """Return how often a source is admitted at most."""
        return self.firings * self.table.firings_per_step[source]


@dataclass(frozen=True, slots=True)
class Bug:
    """A fault to seed into the reactions, in the place of one message to send."""

    lost: Message | None = None
    doubled: Message | None = None


NO_BUG = Bug()
