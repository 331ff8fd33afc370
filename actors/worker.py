"""The thread of one stream: it runs the chains of all its actors in the order of their starts.

It waits for a job in its mailbox, runs it, and posts one message to the dispatcher. It never polls
and never spins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from actors.errors import SourceExhausted
from actors.failure import Failure
from actors.in_flight import FiringNote, InFlight, Job
from actors.protocol import Clock, Launch
from actors.table import MachineTable
from actors.timeline import Timeline
from actors.transitions import Message, message


@dataclass(frozen=True, slots=True)
class FiringTimes:
    """Where the threads of a run note how long firings take.

    `clock` gives nanoseconds; `busy_ns` is the time in launches by actor, to which only the thread
    of an actor adds; `timeline` records firings, unless it is None.
    """

    clock: Clock
    busy_ns: list[int]
    timeline: Timeline | None


class Employer(Protocol):
    """Who hears from a worker, on the worker's thread."""

    @property
    def post(self) -> Callable[[int], object]:
        """Takes the message that ends a firing."""

    def note_failure(self, failure: Failure) -> None:
        """Take a failure, before its message."""

    def refuse(self, error: BaseException) -> None:
        """Take what kept the thread from beginning; it runs no job."""


class Worker:
    """The thread of one stream.

    `put` jobs for it to run; None ends the thread after the jobs before it. `firings[actor]` counts
    the firings that it has ended.

    Args:
        name: of the stream.
        actors: those of the stream.
        table: says which actors are sources.
        times: where firings are timed.
        note: where the thread says what it runs.
        employer: hears how firings end.
        prepare: called once on the thread before its first job.
    """

    def __init__(
        self,
        name: str,
        actors: tuple[int, ...],
        table: MachineTable,
        *,
        times: FiringTimes,
        note: FiringNote,
        employer: Employer,
        prepare: Callable[[], object],
    ) -> None:
        self.name = name
        self.actors = actors
        self.firings = [0] * table.num_actors
        self.num_waits = 0
        self._table = table
        self._times = times
        self._note = note
        self._employer = employer
        self._prepare = prepare
        self._mailbox: SimpleQueue[Job | None] = SimpleQueue()
        self.put = self._mailbox.put
        self.thread = threading.Thread(target=self._run, name=f"actorflow-{name}", daemon=True)

    def drop(self) -> tuple[int, ...]:
        """Take back the jobs that have not begun and return their actors.

        Callable from any thread, before the end is asked for.
        """
        dropped: list[int] = []
        while True:
            try:
                job = self._mailbox.get_nowait()
            except Empty:
                return tuple(dropped)
            if job is not None:
                dropped.append(job[0])

    def in_flight(self) -> InFlight | None:
        """Return what the thread is running, or None while it waits. Callable from any thread."""
        return self._note.look(self.thread, Worker._serve.__code__)

    def _run(self) -> None:
        try:
            self._prepare()
        except BaseException as error:
            self._employer.refuse(error)
        else:
            self._serve()

    def _serve(self) -> None:
        get, is_idle, post = self._mailbox.get, self._mailbox.empty, self._employer.post
        clock, busy_ns, timeline = self._times.clock, self._times.busy_ns, self._times.timeline
        firings, note = self.firings, self._note
        done = [message(Message.DONE, actor) for actor in range(len(firings))]
        launch: Launch | None = None
        while True:
            if is_idle():
                self.num_waits += 1
            job = get()
            if job is None:
                return
            note.since_ns = since = clock()
            actor, chain = job
            note.launches = launches = iter(chain)
            note.job = job  # last: whoever looks finds the rest
            code = done[actor]
            try:
                for launch in launches:
                    launch()
            except BaseException as error:
                code = self._fail(error, actor, note.launch())
            after = clock()
            busy_ns[actor] += after - since
            if timeline is not None:
                timeline.record(actor, firings[actor], since, after)
            firings[actor] += 1
            # Arrays must not live on while the thread waits, nor in the traceback of an error.
            note.job = note.launches = None
            del job, chain, launches
            launch = None
            post(code)  # last: the firing counts as over as soon as the dispatcher reads it

    def _fail(self, error: BaseException, actor: int, launch: int | None) -> int:
        if self._table.admission[actor] is not None and isinstance(error, SourceExhausted):
            return message(Message.EXHAUSTED, actor)
        self._employer.note_failure(Failure(actor, self.firings[actor], launch, error))
        return message(Message.FAILED, actor)
