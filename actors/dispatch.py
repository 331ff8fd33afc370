"""The dispatcher: one thread that owns the machine, runs inline chains and feeds the workers.

All messages from other threads come through one queue, the inbox, on which the dispatcher blocks
when there is nothing to run. Nothing polls, nothing spins.

Order of work: actors of a stream with a thread are handed over to its worker first, so that input
and output overlap with compute; then one inline chain runs; then its messages and the inbox are
delivered, and again. A plan that computes on several streams runs nothing inline: messages would
wait for the end of the inline chain, and with them the other streams (measured: 20 ms of either of
two streams took 42 ms a step that way, and 22 ms with a thread each).

A failure halts the machine: what was started and has not begun is dropped, in the workers' hands
too; what runs finishes. Only sources are not waited for: their ports are closed, and what one still
brings is ignored, because a source that blocks in user code and cannot be closed must not keep the
error from being shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle, repeat
from operator import length_hint
from queue import SimpleQueue
from threading import RLock, Thread
from traceback import clear_frames
from typing import TYPE_CHECKING, TypeVar

from actors.device.protocol import DeviceFailure
from actors.errors import SourceExhausted
from actors.failure import Failure, blamed, explain, traced
from actors.in_flight import NOBODY, InFlight, in_flight, launch_number
from actors.machine import Machine
from actors.protocol import Chain, Clock, GivesUp
from actors.table import MachineTable
from actors.timeline import Timeline
from actors.transitions import KIND_MASK, Message, State, message, subject_of
from actors.visit import Rest, Visit
from actors.worker import Job, Worker
from compiler.errors import InternalError
from compiler.plan import PORTED, ActorKind, Plan

if TYPE_CHECKING:
    from actors.bound import BoundPlan

_COMMAND = -1
"""In the inbox: look at the commands. Messages of the machine are never negative."""


Item = TypeVar("Item")

_DONE, _EXHAUSTED, _FAILED = int(Message.DONE), int(Message.EXHAUSTED), int(Message.FAILED)
_UNDER_WAY = (State.FIRING, State.FLUSHING)


class Dispatcher:
    """Drives one run. All methods belong to its thread, except those marked for any thread.

    `failure` is what ended the run, or None. `is_closing` says that the run's end was asked for:
    what launches raise from then on is no failure, and workers are not waited for. `busy_ns` is the
    time in launches by actor. `ported` are sources and sinks; `given_up` the sources for which
    nobody waits any more.
    """

    def __init__(
        self,
        bound: BoundPlan,
        *,
        clock: Clock,
        timeline: Timeline | None,
        prepare_thread: Callable[[], object],
        initial: Mapping[str, int],
    ) -> None:
        self.plan = bound.plan
        self.table = _with_threads(bound.plan, MachineTable.of(bound.plan, initial))
        self.machine = Machine(self.table)
        self.failure: BaseException | None = None
        self.is_closing = False
        self.busy_ns = [0] * self.table.num_actors
        self.open_ports = dict(bound.ports)
        self._bound = bound
        self._clock = clock
        self._timeline = timeline
        self._prepare = prepare_thread
        self._inbox: SimpleQueue[int] = SimpleQueue()
        self._commands: deque[Callable[[], object]] = deque()
        self._failures: dict[int, Failure] = {}
        self._sources = frozenset([a.id for a in self.plan.actors if a.kind is ActorKind.SOURCE])
        self.ported = frozenset([a.id for a in self.plan.actors if a.kind in PORTED])
        self._running: set[int] = set()
        self.given_up: set[int] = set()
        self._visitors: deque[Visit] = deque()
        self._door = RLock()  # a finalizer may visit from within
        self._is_shut = False
        self._is_exhausted = self._is_ending = False
        self._chains: list[Iterator[Chain]] = [_forever(phases) for phases in bound.chains]
        self._jobs: dict[int, Iterator[Job]] = {
            actor: _forever(tuple([(actor, chain) for chain in phases]))
            for actor, phases in enumerate(bound.chains)
            if self.table.is_detached[actor]
        }
        by_stream: dict[int, list[int]] = {}
        for actor in self._jobs:
            by_stream.setdefault(self.table.streams[actor], []).append(actor)
        self.workers = tuple(
            [self._make_worker(stream, tuple(actors)) for stream, actors in by_stream.items()]
        )
        self._put: dict[int, Callable[[Job], object]] = {
            actor: worker.put for worker in self.workers for actor in worker.actors
        }

    def _make_worker(self, stream: int, actors: tuple[int, ...]) -> Worker:
        has_compute = any(self.plan.actors[a].kind not in PORTED for a in actors)
        return Worker(
            self.plan.streams[stream].name,
            actors,
            self.table,
            busy_ns=self.busy_ns,
            prepare=self._prepare if has_compute else _nothing,
            refuse=lambda error: self.command(partial(self.abort, error)),
            post=self._inbox.put,
            report=self._note_failure,
            clock=self._clock,
            timeline=self._timeline,
        )

    # -- for any thread --------------------------------------------------------------------------

    def command(self, command: Callable[[], object]) -> None:
        """Have the dispatcher's thread call something, after the messages already sent."""
        # In this order: who takes the message finds the command. Both are atomic in CPython, so a
        # signal handler may come in between, and no lock is needed that it could wait for.
        self._commands.append(command)
        self._inbox.put(_COMMAND)

    def visit(self, visit: Visit) -> None:
        """Have a visit made as soon as its actors are at rest, or dismissed when the run is over.

        A failed run is over for visitors when none of its kernels runs any more.
        """
        with self._door:
            if not self._is_shut:
                self._visitors.append(visit)
                self.command(_nothing)  # it may be waiting
                return
        visit.dismiss()

    @property
    def is_still(self) -> bool:
        """Whether no kernel runs and none will; a closed run may leave some behind."""
        return (self.machine.is_halted or self._is_shut) and self._running <= self.ported

    def close_port(self, name: str) -> BaseException | None:
        """Close a port unless it was closed before; return what it raised."""
        port = self.open_ports.pop(name, None)
        try:
            if port is not None:
                port.close()
        except BaseException as error:
            return error
        return None

    def in_flight(self, thread: Thread) -> InFlight | None:
        """Return the inline chain that runs on the dispatcher's thread, or None; for any thread."""
        return in_flight(thread, Dispatcher._serve.__code__)

    def sources_on(self, worker: Worker) -> tuple[str, ...]:
        """Return the names of the sources on a worker's stream; for any thread."""
        return tuple([self.table.names[a] for a in worker.actors if a in self._sources])

    def _note_failure(self, failure: Failure) -> None:
        """Keep a failure until its message arrives; for any thread."""
        self._failures[failure.actor] = failure

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
        for worker in self.workers:
            self._running.difference_update(worker.drop())

    def give_up_sources(self) -> None:
        """Wait no longer for sources that block in a firing; what they still bring is ignored.

        One that is admitted is exhausted. One that fires for another actor, which waits for all
        that it was promised, fires on here, and its launches bring what they like.
        """
        for actor in sorted(self._sources - self.given_up):
            port = self._bound.ports[self.table.names[actor]]
            if not isinstance(port, GivesUp) or not port.give_up():
                continue
            self.given_up.add(actor)
            if self.table.admission[actor] is not None:
                self._running.remove(actor)
                self._receive(message(Message.EXHAUSTED, actor))
            else:
                self._put[actor] = self._fire_here
                phases = self._bound.chains[actor]
                self._fire_here((actor, phases[self.machine.firing_index(actor) % len(phases)]))

    def _fire_here(self, job: Job) -> None:
        """Run the firing of a source that was given up, in the place of its thread."""
        actor, chain = job
        for launch in chain:
            launch()
        self._inbox.put(message(Message.DONE, actor))

    def abort(self, error: BaseException) -> None:
        """Fail the run with an error that no launch raised."""
        if self.failure is None:
            self.failure = error
        self.halt()
        self._close_sources()

    def forget(self) -> None:
        """Let go of launches and errors: whoever keeps the loop, or its failure, keeps no arena."""
        # Shut before the visitors are sent away: one that comes later is dismissed by `visit`.
        with self._door:
            self._is_shut = True
        while self._visitors:
            self._visitors.popleft().dismiss()
        self._chains.clear()
        self._jobs.clear()
        self._failures.clear()

    # -- the thread ------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until every actor has ended, a firing failed, or the run is closed."""
        try:
            if not all(self.table.is_detached):
                self._prepare()
        except BaseException as error:
            self.abort(error)
        try:
            self._serve()
            self.machine.validate()
            self._bound.synchronize()
        except DeviceFailure as failure:
            self.halt()
            self._explain(blamed(failure))
        except BaseException as error:
            # No launch raised this: the frames are the dispatcher's own, and know the last chain.
            clear_frames(error.__traceback__)
            self.abort(error)
        self.forget()
        for worker in self.workers:
            worker.put(None)

    def _serve(self) -> None:
        machine, chains, jobs, inbox = self.machine, self._chains, self._jobs, self._inbox
        fireable, detached, flushing = machine.fireable, machine.detached, machine.flushing
        outbox, receive = machine.outbox, machine.receive
        next_fireable, is_quiet, visitors = fireable.popleft, inbox.empty, self._visitors
        clock, busy_ns, timeline, put = self._clock, self.busy_ns, self._timeline, self._put
        done = [message(Message.DONE, actor) for actor in range(self.table.num_actors)]
        # `in_flight` reads actor, chain, launches and since from here. What the loop needs stands
        # in locals: this is most of what a firing costs beside its launches.
        since = clock()
        while True:
            if visitors:
                self._receive_visitors()
            if outbox:
                machine.deliver(outbox)
                outbox.clear()
            # What another thread has ended is taken before a chain runs here, which may take long:
            # what it makes ready on other streams would wait meanwhile.
            if not is_quiet():
                self._take(inbox.get())
                continue
            while detached:  # other threads get their work before this one is busy with its own
                actor = detached.popleft()
                self._running.add(actor)
                put[actor](next(jobs[actor]))
                since = clock()
            if fireable:
                actor = next_fireable()
                chain = next(chains[actor])
                launches = iter(chain)
                try:
                    for launch in launches:
                        launch()
                except BaseException as error:
                    launch_index = launch_number(chain, len(chain) - length_hint(launches) - 1)
                    # The traceback keeps this frame, and what it knows, as long as the error lives.
                    del chain, launches, launch
                    self._fail_firing(actor, launch_index, error)
                    continue
                before, since = since, clock()
                busy_ns[actor] += since - before
                if timeline is not None:
                    timeline.record(actor, machine.firing_index(actor), before, since)
                receive(done[actor])
            elif flushing:
                self._prepare_flush(flushing.popleft())
            elif self._is_over():
                return
            else:
                self._check_progress()
                actor = NOBODY
                code = inbox.get()
                since = clock()
                self._take(code)

    def _take(self, code: int) -> None:
        """Take what came through the inbox."""
        if code == _COMMAND:
            self._commands.popleft()()
            return
        if code & KIND_MASK != _DONE and subject_of(code) in self.given_up:
            return  # its thread came back after all
        self._running.remove(subject_of(code))
        self._receive(code)

    def _receive_visitors(self) -> None:
        """Make the visits that can be made now; in a failed run, let those go that never can."""
        visitors = self._visitors
        for _ in range(len(visitors)):
            visit = visitors[0]
            if not self.machine.is_halted and self._is_at_rest(visit.rest):
                self._bound.synchronize()
                visit.make()
            elif self.machine.is_halted and self.is_still:
                visit.dismiss()
            else:
                visitors.rotate(-1)
                continue
            visitors.popleft()

    def _is_at_rest(self, rest: Rest) -> bool:
        """Whether a visit can be made; what was started and not handed over does not run."""
        machine = self.machine
        if not self._running.isdisjoint(rest.still):
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

    def _receive(self, code: int) -> None:
        """Let the machine take the end of a firing."""
        self.machine.receive(code)
        kind = code & KIND_MASK
        if kind == _EXHAUSTED:
            self._end_other_sources(subject_of(code))
        elif kind == _FAILED:
            self.halt()
            self._explain(traced(self._failures.pop(subject_of(code))))
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
        """Keep the first failure and note the others on it.

        What a launch raises because its port was closed is none.
        """
        if self.is_closing:
            return
        if self.failure is None:
            self.failure = explain(self.plan, failure, self.machine.story(failure.actor))
        elif failure.actor not in self._sources:
            self.failure.add_note(f"at the same time {explain(self.plan, failure, ())}")

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
        if self.table.is_detached[actor]:
            self._jobs[actor] = repeat((actor, chain))
            machine.detached.append(actor)
        else:
            self._chains[actor] = repeat(chain)
            machine.fireable.append(actor)

    def _fail_firing(self, actor: int, launch: int, error: BaseException) -> None:
        """Report what an inline chain raised."""
        if self.table.admission[actor] is not None and isinstance(error, SourceExhausted):
            self._receive(message(Message.EXHAUSTED, actor))
            return
        self._note_failure(Failure(actor, self.machine.firing_index(actor), launch, error))
        self._receive(message(Message.FAILED, actor))

    def _close_sources(self) -> None:
        for source in sorted(self._sources):
            error = self.close_port(self.table.names[source])
            if error is not None and self.failure is not None:
                self.failure.add_note(f"closing a source then raised {error!r}")


def _with_threads(plan: Plan, table: MachineTable) -> MachineTable:
    """Return the table with a thread for every stream if several of them compute."""
    if any(table.is_detached[a.id] and a.kind not in PORTED for a in plan.actors):
        return replace(table, is_detached=(True,) * table.num_actors)
    return table


def _forever(phases: tuple[Item, ...]) -> Iterator[Item]:
    """Return what firing 0, 1, 2, ... runs; one phase needs no cycle."""
    return cycle(phases) if len(phases) > 1 else repeat(phases[0])


def _raise(error: Exception) -> None:
    raise error


def _nothing() -> None:
    """Prepare nothing: a thread without kernels is the user's."""
