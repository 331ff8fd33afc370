"""A thread of its own for one actor that may block: data, metrics, checkpoints.

It waits for a chain in its mailbox, runs it, and posts one message to the dispatcher. It never
polls and never spins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import length_hint
from queue import SimpleQueue

from actors.errors import SourceExhausted
from actors.failure import Failure
from actors.load import Chain
from actors.protocol import Clock, Launch
from actors.timeline import Timeline
from actors.transitions import Message, message


class Worker:
    """The thread of one actor.

    `put` chains for it to run, in order of the actor's firings; None ends the thread after the
    chains before it. `post` takes its messages, `report` its failures, each before the message.
    """

    def __init__(
        self,
        actor: int,
        name: str,
        *,
        is_source: bool,
        post: Callable[[int], object],
        report: Callable[[Failure], object],
        clock: Clock,
        timeline: Timeline | None,
    ) -> None:
        self.actor = actor
        self.name = name
        self.busy_ns = 0
        self.num_waits = 0
        self.is_source = is_source
        self._post = post
        self._report = report
        self._clock = clock
        self._timeline = timeline
        self._mailbox: SimpleQueue[Chain | None] = SimpleQueue()
        self.put = self._mailbox.put
        self.thread = threading.Thread(target=self._run, name=f"actorflow-{name}", daemon=True)

    def _run(self) -> None:
        actor, clock, timeline = self.actor, self._clock, self._timeline
        done = message(Message.DONE, actor)
        firing = 0
        launch: Launch | None = None
        while True:
            if self._mailbox.empty():
                self.num_waits += 1
            chain = self._mailbox.get()
            if chain is None:
                return
            code = done
            launches = iter(chain)
            before = clock()
            try:
                for launch in launches:
                    launch()
            except BaseException as error:
                code = self._fail(error, firing, len(chain) - length_hint(launches) - 1)
            after = clock()
            self.busy_ns += after - before
            if timeline is not None:
                timeline.record(actor, firing, before, after)
            firing += 1
            # Arrays must not live on while the thread waits, nor in the traceback of an error.
            del chain, launches
            launch = None
            self._post(code)

    def _fail(self, error: BaseException, firing: int, launch: int) -> int:
        if self.is_source and isinstance(error, SourceExhausted):
            return message(Message.EXHAUSTED, self.actor)
        self._report(Failure(self.actor, firing, launch, error))
        return message(Message.FAILED, self.actor)
