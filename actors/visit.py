"""A visit: something done in a run's memory from outside, where no firing can be met half-way.

A run's variables change in place, on threads of its own. Whoever wants to read or write them while
it goes on gives the dispatcher a visit (`actors.loop.Loop.visit`), which is made on the
dispatcher's thread between two messages: nothing starts meanwhile. Visits are looked at before
messages are delivered. So the end of a step is such a place even where the next step is about to
start: the message that would start it still waits. Nothing is held back, and the machine knows
nothing of it.

A visit can be asked for by a thread that the run waits for (a listener that has not returned). It
is made nevertheless, if what must come to rest does so without that listener.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass

from actors.machine import Machine
from actors.transitions import State

_UNDER_WAY = (State.FIRING, State.FLUSHING)


@dataclass(frozen=True, slots=True)
class Rest:
    """When a visit can be made.

    None of the actors `still` is running. `rounds` are groups of pairs (actor, firings per round):
    the actors of a group have ended as many rounds each, and none has begun another one.
    """

    still: frozenset[int]
    rounds: tuple[tuple[tuple[int, int], ...], ...] = ()


class Visit:
    """One visit: `look` is called once on the dispatcher's thread, or never.

    Args:
        rest: when it can be made.
        look: what to do then; what it raises, `wait` raises.
    """

    def __init__(self, rest: Rest, look: Callable[[], object]) -> None:
        self.rest = rest
        self._look = look
        self._is_made = False
        self._error: BaseException | None = None
        self._is_over = threading.Event()

    def make(self) -> None:
        """Look; the run goes on whatever comes of it."""
        try:
            self._look()
        except BaseException as error:
            self._error = error
        self._is_made = True
        self._is_over.set()

    def dismiss(self) -> None:
        """Note that the run is over and nobody will look."""
        self._is_over.set()

    def wait(self) -> bool:
        """Block until the visit was made or the run is over; return whether it was made."""
        self._is_over.wait()
        if self._error is not None:
            raise self._error
        return self._is_made


def is_at_rest(machine: Machine, running: Set[int], rest: Rest) -> bool:
    """Whether a visit can be made; what was started and not handed over does not run."""
    if not running.isdisjoint(rest.still):
        return False
    for group in rest.rounds:
        ended = [
            (machine.firing_index(a) + 1 - (machine.state(a) in _UNDER_WAY), count)
            for a, count in group
        ]
        firings, count = ended[0]
        rounds = firings // count
        if any([firings != rounds * count for firings, count in ended]):
            return False
    return True


class Visitors:
    """Those who wait for a visit to one run. `waiting` is empty or not: the dispatcher looks."""

    def __init__(self) -> None:
        self.waiting: deque[Visit] = deque()
        self._door = threading.RLock()  # a finalizer may visit from within
        self.is_shut = False

    def admit(self, visit: Visit, wake: Callable[[], object]) -> None:
        """Let a visit wait and wake the dispatcher, or dismiss it when nobody comes; any thread."""
        with self._door:
            if not self.is_shut:
                self.waiting.append(visit)
                wake()
                return
        visit.dismiss()

    def shut(self) -> None:
        """Dismiss those who wait, and everybody who comes later."""
        # Shut before they are sent away: one that comes later is dismissed by `admit`.
        with self._door:
            self.is_shut = True
        while self.waiting:
            self.waiting.popleft().dismiss()

    def receive(self, can_make: Callable[[Rest], bool], *, is_over: bool) -> None:
        """Make the visits that can be made now; when the run is over, dismiss the others."""
        for _ in range(len(self.waiting)):
            visit = self.waiting[0]
            if can_make(visit.rest):
                visit.make()
            elif is_over:
                visit.dismiss()
            else:
                self.waiting.rotate(-1)
                continue
            self.waiting.popleft()
