"""What a run lets in from outside: steps, data through its ports, and visits to its memory.

Whoever runs a plan asks for steps; a window, where there is one, is granted from outside. So a
coordinator of several ranks holds them all within it: no rank begins a step that it has not granted
to each. Grants are totals and only grow, so that one that comes twice, or late, changes nothing.
Only a plan that takes its turn forgets what it was granted before: it counts from another step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from actors.machine.machine import Machine
from actors.machine.protocol import AbandonablePort, HostPort
from actors.machine.transitions import State
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import PORTED, ActorKind

_UNLIMITED = 1 << 62


class Admission:
    """Admits the sources of a machine. Belongs to the thread that owns the machine.

    `is_over` says that no source is admitted any more.

    Args:
        machine: the run.
        window: steps granted from the start, or None for no limit.
    """

    __slots__ = (
        "_admitted", "_asked", "_granted", "_is_end_asked", "_last", "_machine", "_sources",
        "is_over",
    )  # fmt: skip

    def __init__(self, machine: Machine, window: int | None) -> None:
        self._machine, table = machine, machine.table
        self._sources = [(source, table.firings_per_step[source]) for source in table.sources]
        self._granted = _UNLIMITED if window is None else window
        self._last = _UNLIMITED
        self._asked = self._admitted = 0
        self._is_end_asked = self.is_over = False

    def ask(self, steps: int) -> None:
        """Ask for more steps of every source; no effect once admission is over."""
        self._asked += steps
        self._advance()

    def grant(self, steps: int, *, is_last: bool) -> None:
        """Permit `steps` steps in total; with `is_last`, the run never begins more than these."""
        self._granted = max(self._granted, steps)
        if is_last:
            self._last = min(self._last, steps)
        self._advance()

    def withhold(self) -> None:
        """Take back what was granted of steps that are not asked for yet."""
        self._granted = self._admitted

    def end(self) -> None:
        """End every source after the steps asked for so far, once all of them are granted."""
        self._is_end_asked = True
        self._advance()

    def end_with(self, exhausted: int) -> None:
        """Let the other sources reach the step of the exhausted source, and no later step."""
        self.is_over = True
        machine = self._machine
        # Rounded up: a step that was begun is completed by the other sources.
        begun = machine.firing_index(exhausted) + 1
        steps = -(-begun // machine.table.firings_per_step[exhausted])
        for source, per_step in self._sources:
            machine.end_admission(source, limit=steps * per_step)

    def _advance(self) -> None:
        if self.is_over:
            return
        machine = self._machine
        # All three are totals since the start, so their order of arrival does not matter.
        until = min(self._asked, self._granted, self._last)
        if until > self._admitted:
            steps, self._admitted = until - self._admitted, until
            for source, per_step in self._sources:
                machine.admit(source, steps * per_step)
        is_done = self._is_end_asked and self._admitted >= self._asked
        if is_done or self._admitted >= self._last:
            self.is_over = True
            for source, _ in self._sources:
                machine.end_admission(source)


class OpenPorts:
    """The ports of one run; each is closed once, from any thread.

    `sources` and `ported` (sources and sinks) are actors of the plan. `given_up` are those for
    which nobody waits any more: it belongs to the dispatcher's thread, and so does `abandon`.
    """

    def __init__(self, plan: Plan, ports: Mapping[str, HostPort]) -> None:
        self._names = {int(a.id): a.name for a in plan.actors if a.kind in PORTED}
        self._ports = ports
        self._open = dict(ports)
        self.given_up: set[int] = set()
        self.ported = frozenset(self._names)
        self.sources = frozenset([int(a.id) for a in plan.actors if a.kind is ActorKind.SOURCE])

    def abandon(self, actor: int) -> bool:
        """Give up a port that blocks in a firing, if it can be; return whether it was now."""
        port = self._ports[self._names[actor]]
        if actor in self.given_up or not isinstance(port, AbandonablePort) or not port.abandon():
            return False
        self.given_up.add(actor)
        return True

    def close(self) -> tuple[BaseException, ...]:
        """Close all ports that are open; return what they raised."""
        return self._close(list(self._open))

    def close_sources(self) -> tuple[BaseException, ...]:
        """Close the sources that are open; return what they raised."""
        return self._close([self._names[source] for source in sorted(self.sources)])

    def sources_of(self, actors: Iterable[int]) -> tuple[str, ...]:
        """Return the names of those of some actors that are sources."""
        return tuple([self._names[actor] for actor in actors if actor in self.sources])

    def _close(self, names: Iterable[str]) -> tuple[BaseException, ...]:
        errors = []
        for name in names:
            port = self._open.pop(name, None)  # atomic: two threads may come at once
            try:
                if port is not None:
                    port.close()
            # Every port is closed whatever one of them raises; the caller reports the errors.
            except BaseException as error:
                errors.append(error)
        return tuple(errors)


# A run's variables change in place, on threads of its own. Whoever wants to read or write them
# while it goes on gives the dispatcher a visit (`Loop.run_when_quiescent`), which is made on the
# dispatcher's thread between two messages: nothing starts meanwhile. Visits are looked at before
# messages are delivered. So the end of a step is such a place even where the next step is about to
# start: the message that would start it still waits. Nothing is held back, and the machine knows
# nothing of it.
#
# A visit can be asked for by a thread that the run waits for (a listener that has not returned). It
# is made nevertheless, if what must come to rest does so without that listener.

_UNDER_WAY = (State.FIRING, State.FLUSHING)


@dataclass(frozen=True, slots=True)
class QuiescentCondition:
    """When a visit can be made.

    None of the actors `still` is running. `rounds` are groups of pairs (actor, firings per round):
    the actors of a group have ended as many rounds each, at least `least`, and none has begun
    another one. With `is_idle` nothing is about to start.
    """

    still: frozenset[int]
    rounds: tuple[tuple[tuple[int, int], ...], ...] = ()
    least: int = 0
    is_idle: bool = False


class QuiescentCallback:
    """One visit: `look` is called once on the dispatcher's thread, or never.

    Args:
        rest: when it can be made.
        look: what to do then; what it raises, `wait` raises.
    """

    def __init__(self, rest: QuiescentCondition, look: Callable[[], object]) -> None:
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


def is_quiescent_for(machine: Machine, running: Set[int], rest: QuiescentCondition) -> bool:
    """Whether a visit can be made; what was started and not handed over does not run."""
    if not running.isdisjoint(rest.still):
        return False
    starting = (machine.outbox, machine.fireable, machine.detached, machine.flushing)
    if rest.is_idle and any(starting):
        return False
    for group in rest.rounds:
        ended = [
            # Ended firings: those that started, less the one under way.
            (machine.firing_index(a) + 1 - (machine.state(a) in _UNDER_WAY), count)
            for a, count in group
        ]
        firings, count = ended[0]
        rounds = firings // count
        if rounds < rest.least or any([firings != rounds * count for firings, count in ended]):
            return False
    return True


class QuiescentQueue:
    """The visits that wait in one run. The dispatcher checks `waiting` before each delivery."""

    def __init__(self) -> None:
        self.waiting: deque[QuiescentCallback] = deque()
        self._door = threading.RLock()  # a finalizer may visit from within
        self.is_shut = False

    def admit(self, visit: QuiescentCallback, wake: Callable[[], object]) -> None:
        """Queue a visit and wake the dispatcher, or dismiss it when the run is over; any thread."""
        with self._door:
            if not self.is_shut:
                self.waiting.append(visit)
                wake()
                return
        visit.dismiss()

    def shut(self) -> None:
        """Dismiss the visits that wait, and every later one."""
        # Shut before they are sent away: one that comes later is dismissed by `admit`.
        with self._door:
            self.is_shut = True
        # Nobody appends any more, so the queue is emptied without the lock.
        while self.waiting:
            self.waiting.popleft().dismiss()

    def receive(self, can_make: Callable[[QuiescentCondition], bool], *, is_over: bool) -> None:
        """Make the visits that can be made now; when the run is over, dismiss the others."""
        # Each at most once: those that are rotated to the back are asked again at the next
        # occasion.
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
