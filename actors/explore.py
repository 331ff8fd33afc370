"""Run a machine through a random order of events, to find the order that breaks it.

Messages are delivered in any order across edges and in order on each edge; a firing may take
longer than any message. What the order may not change (who fires, how often, which token is read
where) is for the observer to check.

Source: deterministic simulation testing (FoundationDB; Zhou et al., SIGMOD 2021): one seeded
scheduler picks the next event, so a seed replays a run.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from random import Random
from typing import Protocol

from actors.machine import Machine
from actors.transitions import KIND_MASK, Message, message, subject_of


class Observer(Protocol):
    """Plays the actors' bodies."""

    def started(self, actor: int, firing: int) -> None:
        """Begin a firing: read and write slots from now on."""
        ...

    def finished(self, actor: int, firing: int) -> Message:
        """End a firing with DONE, FAILED or EXHAUSTED."""
        ...


def channel_of(code: int) -> int:
    """Return the channel of a message about an edge: messages of one channel keep their order."""
    is_forward = code & KIND_MASK in (Message.READY, Message.END)
    return subject_of(code) << 1 | is_forward


def explore(machine: Machine, rng: Random, observer: Observer, *, is_checked: bool = True) -> int:
    """Run until nothing runs and nothing is under way; return the number of events.

    `is_checked` validates the machine after every event. Raises what the machine and the observer
    raise.
    """
    channels: dict[int, deque[int]] = {}
    loaded: list[deque[int]] = []
    running: list[int] = []
    haste = rng.random()
    num_events = 0
    while True:
        _collect(machine, channels, loaded, running, observer)
        if is_checked:
            machine.validate(chain.from_iterable(loaded))
        if not loaded and not running:
            return num_events
        num_events += 1
        if not running or (loaded and rng.random() < haste):
            index = rng.randrange(len(loaded))
            code = loaded[index].popleft()
            if not loaded[index]:
                loaded[index] = loaded[-1]
                loaded.pop()
        else:
            index = rng.randrange(len(running))
            actor = running[index]
            running[index] = running[-1]
            running.pop()
            code = message(observer.finished(actor, machine.firing_index(actor)), actor)
        machine.receive(code)


def _collect(
    machine: Machine,
    channels: dict[int, deque[int]],
    loaded: list[deque[int]],
    running: list[int],
    observer: Observer,
) -> None:
    """Move what the machine sent and started into the scheduler's hands."""
    while machine.outbox:
        code = machine.outbox.popleft()
        channel = channels.setdefault(channel_of(code), deque())
        if not channel:
            loaded.append(channel)
        channel.append(code)
    for started in (machine.detached, machine.fireable, machine.flushing):
        while started:
            actor = started.popleft()
            running.append(actor)
            observer.started(actor, machine.firing_index(actor))
