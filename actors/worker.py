"""The thread of one stream: it runs the chains of all its actors in the order of their starts.

It waits for a job in its mailbox, runs it, and posts one message to the dispatcher. It never polls
and never spins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import length_hint
from queue import Empty, SimpleQueue

from actors.errors import SourceExhausted
from actors.failure import Failure
from actors.in_flight import NOBODY, InFlight, in_flight, launch_number
from actors.protocol import Chain, Clock, Launch
from actors.table import MachineTable
from actors.timeline import Timeline
from actors.transitions import Message, message

Job = tuple[int, Chain]
"""An actor with the chain of one of its phases; built once per run, not per firing."""


class Worker:
    """The thread of one stream.

    `put` jobs for it to run; None ends the thread after the jobs before it. `firings[actor]` counts
    the firings that it has ended.

    Args:
        name: of the stream.
        actors: those of the stream.
        table: says which actors are sources.
        busy_ns: by actor; the time in launches is added to the entries of its own.
        prepare: called once on the thread before its first job.
        refuse: takes what `prepare` raised; no job is run then.
        post: takes the message that ends a firing.
        report: takes a failure, before its message.
        clock: nanoseconds.
        timeline: where firings are recorded, or None.
    """

    def __init__(
        self,
        name: str,
        actors: tuple[int, ...],
        table: MachineTable,
        *,
        busy_ns: list[int],
        prepare: Callable[[], object],
        refuse: Callable[[BaseException], object],
        post: Callable[[int], object],
        report: Callable[[Failure], object],
        clock: Clock,
        timeline: Timeline | None,
    ) -> None:
        self.name = name
        self.actors = actors
        self.firings = [0] * table.num_actors
        self.num_waits = 0
        self._table = table
        self._busy_ns = busy_ns
        self._prepare = prepare
        self._refuse = refuse
        self._post = post
        self._report = report
        self._clock = clock
        self._timeline = timeline
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
        return in_flight(self.thread, Worker._serve.__code__)

    def _run(self) -> None:
        try:
            self._prepare()
        except BaseException as error:
            self._refuse(error)
        else:
            self._serve()

    def _serve(self) -> None:
        get, is_idle, clock, post = self._mailbox.get, self._mailbox.empty, self._clock, self._post
        busy_ns, firings, timeline = self._busy_ns, self.firings, self._timeline
        done = [message(Message.DONE, actor) for actor in range(len(firings))]
        launch: Launch | None = None
        while True:
            # `in_flight` reads actor, chain, launches and since from here.
            actor = NOBODY
            if is_idle():
                self.num_waits += 1
            job = get()
            if job is None:
                return
            since = clock()
            actor, chain = job
            launches = iter(chain)
            code = done[actor]
            try:
                for launch in launches:
                    launch()
            except BaseException as error:
                code = self._fail(
                    error, actor, launch_number(chain, len(chain) - length_hint(launches) - 1)
                )
            after = clock()
            busy_ns[actor] += after - since
            if timeline is not None:
                timeline.record(actor, firings[actor], since, after)
            firings[actor] += 1
            # Arrays must not live on while the thread waits, nor in the traceback of an error.
            del job, chain, launches
            launch = None
            post(code)  # last: the firing counts as over as soon as the dispatcher reads it

    def _fail(self, error: BaseException, actor: int, launch: int) -> int:
        if self._table.admission[actor] is not None and isinstance(error, SourceExhausted):
            return message(Message.EXHAUSTED, actor)
        self._report(Failure(actor, self.firings[actor], launch, error))
        return message(Message.FAILED, actor)
