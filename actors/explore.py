"""Run a machine through a random order of events, to find the order that breaks it.

Messages are delivered in any order across channels and in order on each; a firing may take longer
than any message; firings of one stream run one at a time, in the order in which they were started;
commands come at any moment. In half of the runs one channel or one actor is starved: it gets its
turn only when nothing else can happen. What the order may not change (who fires, how often, which
token is read where) is for the observer to check.

Source: deterministic simulation testing (FoundationDB; Zhou et al., SIGMOD 2021): one seeded
scheduler picks the next event, so a seed replays a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from random import Random
from typing import TYPE_CHECKING

from actors.machine import Machine
from actors.transitions import KIND_MASK, Message, message, subject_of

if TYPE_CHECKING:
    from actors.proof.oracle import StampedSlots

_NOBODY = -1


def channel_of(code: int) -> int:
    """Return the channel of a message about an edge: messages of one channel keep their order."""
    is_forward = code & KIND_MASK in (Message.READY, Message.END)
    return subject_of(code) << 1 | is_forward


def explore(
    machine: Machine,
    rng: Random,
    observer: StampedSlots,
    commands: Iterable[Callable[[], object]] = (),
    *,
    is_checked: bool = True,
    before_message: Callable[[int], object] = lambda code: None,
) -> int:
    """Run until nothing runs, nothing is under way and no command is left; count the events.

    The observer plays the actors' bodies: it hears when a firing has `started`, and says how it has
    `finished`: with DONE, FAILED or EXHAUSTED. `commands` are called in order, at random moments.
    `is_checked` validates the machine after every event. `before_message` sees each message before
    the machine takes it. Raises what the machine, the observer and the commands raise.
    """
    draw = rng.random
    schedule = _PendingEvents(machine, rng, observer)
    loaded, running, left = schedule.loaded, schedule.running, deque(commands)
    pace = draw() ** 3 if draw() < 0.75 else 1.0
    haste = draw()
    num_events = 0
    while True:
        schedule.collect()
        if is_checked:
            machine.validate(chain.from_iterable(loaded))
        if left and (not (loaded or running) or draw() < pace):
            left.popleft()()
        elif loaded and (not running or draw() < haste):
            code = schedule.deliver()
            before_message(code)
            machine.receive(code)
        elif running:
            machine.receive(schedule.finish())
        else:
            return num_events
        num_events += 1


class _PendingEvents:
    """What can happen next: `loaded` are the channels that hold messages, `running` the firings."""

    __slots__ = (
        "_channels", "_draw", "_lazy", "_machine", "_observer", "_queues", "_slow", "loaded",
        "running",
    )  # fmt: skip

    def __init__(self, machine: Machine, rng: Random, observer: StampedSlots) -> None:
        table = machine.table
        self._draw = rng.random
        self._machine = machine
        self._observer = observer
        self._channels: list[deque[int]] = [deque() for _ in range(2 * len(table.edges))]
        self._queues: list[deque[int]] = [deque() for _ in range(max(table.streams) + 1)]
        self.loaded: list[deque[int]] = []
        self.running: list[int] = []
        victim = rng.random()
        num_channels = len(self._channels)
        self._slow = self._channels[int(victim * 4 * num_channels)] if victim < 0.25 else None
        self._lazy = int(rng.random() * table.num_actors) if 0.25 <= victim < 0.5 else _NOBODY

    def collect(self) -> None:
        """Take over what the machine sent and started."""
        machine = self._machine
        for code in machine.outbox:
            channel = self._channels[channel_of(code)]
            if not channel:
                self.loaded.append(channel)
            channel.append(code)
        machine.outbox.clear()
        for started in (machine.detached, machine.fireable, machine.flushing):
            while started:
                actor = started.popleft()
                queue = self._queues[machine.table.streams[actor]]
                queue.append(actor)
                if len(queue) == 1:
                    self._begin(actor)

    def deliver(self) -> int:
        """Take the oldest message of a channel."""
        loaded = self.loaded
        index = int(self._draw() * len(loaded))
        if loaded[index] is self._slow:
            index -= 1
        channel = loaded[index]
        code = channel.popleft()
        if not channel:
            loaded[index] = loaded[-1]
            loaded.pop()
        return code

    def finish(self) -> int:
        """End a firing and let the next one of its stream begin."""
        running = self.running
        index = int(self._draw() * len(running))
        if running[index] == self._lazy:
            index -= 1
        actor = running[index]
        running[index] = running[-1]
        running.pop()
        queue = self._queues[self._machine.table.streams[actor]]
        queue.popleft()
        kind = self._observer.finished(actor, self._machine.firing_index(actor))
        if queue:
            self._begin(queue[0])
        return message(kind, actor)

    def _begin(self, actor: int) -> None:
        self.running.append(actor)
        self._observer.started(actor, self._machine.firing_index(actor))
