"""The dispatcher: one thread that owns the machine, runs inline chains and feeds the workers.

All messages from other threads come through one queue, the inbox, on which the dispatcher blocks
when there is nothing to run. Nothing polls, nothing spins.

Order of work: actors with a worker are handed over first, so that input and output overlap with
compute; then one inline chain runs; then its messages and the inbox are delivered, and again.

A failure halts the machine: what was started and has not begun is dropped, what runs finishes. Only
sources are not waited for: their ports are closed, and what one still brings is ignored, because a
source that blocks in user code and cannot be closed must not keep the error from being shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, repeat
from operator import length_hint
from queue import SimpleQueue
from traceback import clear_frames

from actors.errors import SourceExhausted
from actors.failure import Failure, explain
from actors.load import BoundPlan, Chain
from actors.machine import Machine
from actors.protocol import Clock
from actors.table import MachineTable
from actors.timeline import Timeline
from actors.transitions import KIND_MASK, Message, message, subject_of
from actors.worker import Worker
from compiler.errors import InternalError
from compiler.plan import ActorKind

_COMMAND = -1
"""In the inbox: look at the commands. Messages of the machine are never negative."""

_EXHAUSTED, _FAILED = int(Message.EXHAUSTED), int(Message.FAILED)


class Dispatcher:
    """Drives one run. All methods belong to its thread, except `command` and `close_port`.

    `failure` is what ended the run, or None. `is_closing` says that the run's end was asked for:
    what launches raise from then on is no failure, and workers are not waited for.
    """

    def __init__(self, bound: BoundPlan, *, clock: Clock, timeline: Timeline | None) -> None:
        self.table = MachineTable.of(bound.plan)
        self.machine = Machine(self.table)
        self.failure: BaseException | None = None
        self.is_closing = False
        self.busy_ns = [0] * self.table.num_actors
        self.num_waits = 0
        self.wait_ns = 0
        self.open_ports = dict(bound.ports)
        self._bound = bound
        self._clock = clock
        self._timeline = timeline
        self._inbox: SimpleQueue[int] = SimpleQueue()
        self._commands: deque[Callable[[], object]] = deque()
        self._reported: deque[Failure] = deque()
        self._sources = frozenset(self.table.sources)
        self._running: set[int] = set()
        self._is_exhausted = self._is_ending = False
        self._chains: list[Iterator[Chain]] = [
            cycle(phases) if len(phases) > 1 else repeat(phases[0]) for phases in bound.chains
        ]
        self.workers = self._make_workers()

    def _make_workers(self) -> dict[int, Worker]:
        by_stream: dict[int, str] = {}
        workers: dict[int, Worker] = {}
        for actor, name in enumerate(self.table.names):
            if not self.table.is_detached[actor]:
                continue
            other = by_stream.setdefault(self.table.streams[actor], name)
            if other != name:
                raise InternalError(
                    f"actors {other!r} and {name!r} share a host thread's stream; expected one each"
                )
            workers[actor] = Worker(
                actor,
                name,
                is_source=self._bound.plan.actors[actor].kind is ActorKind.SOURCE,
                post=self._inbox.put,
                report=self._reported.append,
                clock=self._clock,
                timeline=self._timeline,
            )
        return workers

    # -- for any thread --------------------------------------------------------------------------

    def command(self, command: Callable[[], object]) -> None:
        """Have the dispatcher's thread call something, after the messages already sent."""
        self._commands.append(command)
        self._inbox.put(_COMMAND)

    def close_port(self, name: str) -> BaseException | None:
        """Close a port unless it was closed before; return what it raised."""
        port = self.open_ports.pop(name, None)
        try:
            if port is not None:
                port.close()
        except BaseException as error:
            return error
        return None

    # -- commands --------------------------------------------------------------------------------

    def admit(self, steps: int) -> None:
        """Permit more steps of every source; no effect when one has no more data."""
        if not self._is_exhausted:
            for source in self.table.sources:
                self.machine.admit(source, steps * self.table.firings_per_step[source])

    def end_admission(self) -> None:
        """Let every source end with what is admitted."""
        self._is_ending = True
        for source in self.table.sources:
            self.machine.end_admission(source)

    def halt(self) -> None:
        """Run nothing more, not even what was started and has not begun."""
        self.machine.halt()
        self.machine.fireable.clear()
        self.machine.detached.clear()
        self.machine.flushing.clear()

    def forget(self) -> None:
        """Let go of launches and errors: whoever keeps the loop, or its failure, keeps no arena."""
        self._chains.clear()
        self._reported.clear()

    # -- the thread ------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until every actor has ended, a firing failed, or the run is closed."""
        try:
            self._serve()
            self.machine.validate()
        except BaseException as error:
            if self.failure is None:
                self.failure = error
            # No launch raised this: the frames are the dispatcher's own, and know the last chain.
            clear_frames(error.__traceback__)
            self.halt()
            self._close_sources()
        self.forget()
        for worker in self.workers.values():
            worker.put(None)

    def _serve(self) -> None:
        machine, chains, workers, inbox = self.machine, self._chains, self.workers, self._inbox
        fireable, detached, flushing = machine.fireable, machine.detached, machine.flushing
        outbox, take, receive = machine.outbox, machine.outbox.popleft, machine.receive
        next_fireable, is_quiet = fireable.popleft, inbox.empty
        clock, busy_ns, timeline = self._clock, self.busy_ns, self._timeline
        done = [message(Message.DONE, actor) for actor in range(self.table.num_actors)]
        now = clock()
        while True:
            while outbox:
                receive(take())
            if not is_quiet():
                self._take(inbox.get())
                continue
            while detached:
                actor = detached.popleft()
                self._running.add(actor)
                workers[actor].put(next(chains[actor]))
                now = clock()
            if fireable:
                actor = next_fireable()
                chain = next(chains[actor])
                launches = iter(chain)
                try:
                    for launch in launches:
                        launch()
                except BaseException as error:
                    launch_index = len(chain) - length_hint(launches) - 1
                    # The traceback keeps this frame, and what it knows, as long as the error lives.
                    del chain, launches, launch
                    self._fail_firing(actor, launch_index, error)
                    continue
                before, now = now, clock()
                busy_ns[actor] += now - before
                if timeline is not None:
                    timeline.record(actor, machine.firing_index(actor), before, now)
                receive(done[actor])
            elif flushing:
                self._prepare_flush(flushing.popleft())
            elif self._is_over():
                return
            else:
                self._check_progress()
                before = clock()
                code = inbox.get()
                now = clock()
                self.num_waits += 1
                self.wait_ns += now - before
                self._take(code)

    def _take(self, code: int) -> None:
        """Take what came through the inbox."""
        if code == _COMMAND:
            self._commands.popleft()()
            return
        self._running.remove(subject_of(code))
        self._receive(code)

    def _receive(self, code: int) -> None:
        """Let the machine take the end of a firing."""
        self.machine.receive(code)
        kind = code & KIND_MASK
        if kind == _EXHAUSTED:
            self._end_other_sources(subject_of(code))
        elif kind == _FAILED:
            self.halt()
            self._explain(self._reported.popleft())
            self._close_sources()

    def _is_over(self) -> bool:
        if self.machine.is_halted:
            return self.is_closing or self._running <= self._sources
        return self.machine.is_finished

    def _check_progress(self) -> None:
        """Raise rather than wait for a message that nobody can send any more."""
        if self._is_ending and not self._running and self._inbox.empty():
            raise InternalError("the plan cannot finish: " + self.machine.stall())

    def _explain(self, failure: Failure) -> None:
        """Keep the first failure; what a launch raises because its port was closed is none."""
        if self.failure is None and not self.is_closing:
            story = self.machine.story(failure.actor)
            self.failure = explain(self._bound.plan, failure, story)

    def _end_other_sources(self, exhausted: int) -> None:
        """Let the other sources come as far as the one that has no more data, and no farther."""
        self._is_exhausted = self._is_ending = True
        per_step = self.table.firings_per_step
        steps = -(-(self.machine.firing_index(exhausted) + 1) // per_step[exhausted])
        for source in self.table.sources:
            self.machine.end_admission(source, limit=steps * per_step[source])

    def _prepare_flush(self, actor: int) -> None:
        """Bind the last firing of an actor and let it run like any other."""
        machine = self.machine
        firing, tokens = machine.firing_index(actor), machine.flush_tokens(actor)
        try:
            chain = self._bound.bind_flush(actor, firing, tokens)
        except Exception as error:
            chain = (partial(_raise, error),)
        self._chains[actor] = repeat(chain)
        (machine.detached if actor in self.workers else machine.fireable).append(actor)

    def _fail_firing(self, actor: int, launch: int, error: BaseException) -> None:
        """Report what an inline chain raised."""
        if self.table.admission[actor] is not None and isinstance(error, SourceExhausted):
            self._receive(message(Message.EXHAUSTED, actor))
            return
        self._reported.append(Failure(actor, self.machine.firing_index(actor), launch, error))
        self._receive(message(Message.FAILED, actor))

    def _close_sources(self) -> None:
        for source in self.table.sources:
            error = self.close_port(self.table.names[source])
            if error is not None and self.failure is not None:
                self.failure.add_note(f"closing a source then raised {error!r}")


def _raise(error: Exception) -> None:
    raise error
