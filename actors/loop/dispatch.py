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

import logging
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from itertools import cycle, repeat
from threading import Thread
from traceback import clear_frames
from typing import TYPE_CHECKING, TypeVar

from actors.loop.admission import (
    Admission,
    OpenPorts,
    QuiescentCallback,
    QuiescentCondition,
    QuiescentQueue,
    is_quiescent_for,
)
from actors.loop.failure import Failure, RunOutcome, failed_launch
from actors.loop.inbox import COMMAND, Inbox
from actors.loop.timeline import Timeline
from actors.loop.watchdog import WatchdogOptions
from actors.loop.worker import (
    FiringTimes,
    Job,
    RunningLaunch,
    ThreadActivity,
    WorkerCallbacks,
    WorkerPool,
)
from actors.machine.errors import SourceExhausted
from actors.machine.machine import Machine
from actors.machine.protocol import Clock, DeviceFailure
from actors.machine.transitions import KIND_BITS, KIND_MASK, Message, message, subject_of
from compiler.contract.errors import InternalError
from compiler.contract.plan_tables import PORTED

if TYPE_CHECKING:
    from actors.loop.bound import BoundPlan


def _do_nothing() -> None:
    """Do nothing."""


def _report(text: str) -> None:
    logging.getLogger("actorflow").warning("%s", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """What a `Loop` is told beside its plan.

    Args:
        timeline: Where to record firings, or None.
        clock: Nanoseconds; for statistics and timeline only.
        on_finished: Called once on the dispatcher's thread when the run is over in any way, before
            `wait` returns. What it raises becomes the failure of a run that had none. After a
            failure or `close` a source may still be running.
        on_failure: Called once on the dispatcher's thread as soon as the run has failed, with the
            error, while kernels and sinks that run are still waited for. It must not block: what
            they wait for elsewhere, and will not come any more, it makes them stop waiting for.
        prepare_thread: Called once on every thread that runs kernels, before its first launch; what
            it raises fails the run. The threads of sources and sinks are the user's.
        window: Steps that may begin before more are granted (`Loop.grant`), or None for no limit.
        watch: How to report that the run stands still, or None.
        join_timeout_s: How long `close` waits for a port to let go of its thread.
        drive: Makes the loop a driven one: it has no thread, and whoever calls it runs what can
            run, one thread at a time. This is called with what does so, and returns what that
            returns. For a plan that was loaded for one thread.
        settle: Called on the thread that ran a driven loop when it may be asked for anything again.
            What it raises is the caller's.
        source_timeout_s: How long `close` waits for sources, instead.
        report: Receives a text for every source's thread that `close` leaves behind, and for every
            stall; by default a warning in the log "actorflow".
    """

    timeline: Timeline | None = None
    clock: Clock = time.perf_counter_ns
    on_finished: Callable[[], object] | None = None
    on_failure: Callable[[BaseException], object] | None = None
    prepare_thread: Callable[[], object] = _do_nothing
    window: int | None = None
    watch: WatchdogOptions | None = None
    join_timeout_s: float = 10.0
    drive: Callable[[Callable[[], bool]], bool] | None = None
    settle: Callable[[], object] = _do_nothing
    source_timeout_s: float = 2.0
    report: Callable[[str], object] = _report


Item = TypeVar("Item")

_DONE, _EXHAUSTED, _FAILED = int(Message.DONE), int(Message.EXHAUSTED), int(Message.FAILED)


class Dispatcher:
    """Drives one run. All methods belong to its thread, except those marked for any thread.

    Every message and every command passes through `_serve`. What it decides by has an owner each:
    the `machine` says what fires, the `inbox` brings what other threads say, `workers` have the
    firings that run elsewhere, `outcome` knows how the run ends, `admission`, `ports` and visits
    let in what comes from outside.
    """

    def __init__(self, bound: BoundPlan, options: LoopOptions) -> None:
        plan = bound.plan
        self.bound = bound
        self.machine = Machine(bound.table)
        self.inbox = Inbox()
        self.ports = OpenPorts(plan, bound.ports)
        self.outcome = RunOutcome(plan, self.ports.sources)
        self._on_failure = options.on_failure
        self._is_driven = options.drive is not None
        self.admission = Admission(self.machine, options.window)
        self._visitors = QuiescentQueue()
        times = FiringTimes(options.clock, [0] * bound.table.num_actors, options.timeline)
        num_launches = [1 if a.kind in PORTED else len(a.launches) for a in plan.actors]
        new_activity = partial(ThreadActivity, num_launches, times)
        self.activity = new_activity()
        # By actor: how long this thread stood idle until it ended, and a chain could run.
        self.awaited_ns = [0] * bound.table.num_actors
        self.workers = WorkerPool(
            plan,
            bound.table,
            new_activity,
            WorkerCallbacks(self.inbox.post, self.outcome.report, self._fail_start),
            options.prepare_thread,
        )
        self._done = [message(Message.DONE, actor) for actor in range(bound.table.num_actors)]
        # Pairs are built once: `next` then gives a firing its job without making an object.
        self._jobs: list[Iterator[Job]] = [
            _forever(tuple([(actor, chain) for chain in phases]))
            for actor, phases in enumerate(bound.chains)
        ]

    # -- for any thread --------------------------------------------------------------------------

    def run_when_quiescent(self, visit: QuiescentCallback) -> None:
        """Have a visit made as soon as its actors are at rest, or dismissed when the run is over.

        A failed run is over for visitors when none of its kernels runs any more.
        """
        self._visitors.admit(
            visit, lambda: self.inbox.call_soon_threadsafe(_nothing)
        )  # it may be waiting

    @property
    def is_idle(self) -> bool:
        """Whether no kernel runs and none will; a closed run may leave some behind."""
        is_shut = self._visitors.is_shut
        # Ports run no kernels, so a source or sink that still blocks does not count.
        return (self.machine.is_halted or is_shut) and self.workers.running <= self.ports.ported

    def in_flight(self, thread: Thread) -> RunningLaunch | None:
        """Return the inline chain that runs on the dispatcher's thread, or None; for any thread."""
        return self.activity.look(thread, Dispatcher._serve.__code__)

    def _fail_start(self, error: BaseException) -> None:
        """Fail the run with the error that kept a worker's thread from starting; for any thread."""
        self.inbox.call_soon_threadsafe(partial(self.abort, error))

    # -- commands --------------------------------------------------------------------------------

    def halt(self) -> None:
        """Run nothing more, not even what was started and has not begun."""
        self.machine.halt()
        # What was started and never handed over has no thread; only what a worker has begun ends.
        self.machine.fireable.clear()
        self.machine.detached.clear()
        self.machine.flushing.clear()
        self.workers.drop()

    def give_up(self, ported: Set[int]) -> None:
        """Stop waiting for ports that block in a firing; what they still deliver is ignored.

        An admitted source counts as exhausted. A sink, or a source driven by another actor, goes on
        firing on this thread, because its neighbours wait for every token that they were promised.
        """
        for actor in sorted(ported):
            if not self.ports.abandon(actor):
                continue
            # An abandoned launch raises when it wakes; `take` ignores the message about that.
            if self.machine.table.admission[actor] is not None:
                self.workers.running.remove(actor)
                self.receive(message(Message.EXHAUSTED, actor))
            else:
                # Later firings run here at once, and so does the one that was under way.
                self.workers.put[actor] = self._fire_here
                firing = self.machine.firing_index(actor)
                self._fire_here((actor, self.bound.begun(actor, firing)))

    def _fire_here(self, job: Job) -> None:
        """Run the firing of a port that was given up, in the place of its thread."""
        actor, chain = job
        for launch in chain:
            launch()
        self.inbox.post(message(Message.DONE, actor))

    def cut(self) -> None:
        """End the run where it is, which is no failure: what runs ends, whatever it raises."""
        self.outcome.is_cut = True
        # What they still raise is ignored: it belongs to no step any more.
        self.ports.given_up |= self.ports.sources
        self.halt()
        self._close_sources()

    def abort(self, error: BaseException) -> None:
        """Fail the run with an error that no launch raised."""
        self.outcome.fail(error)
        self.halt()
        self._tell_failure()
        self._close_sources()

    def abort_unless_over(self, error: BaseException) -> None:
        """Fail the run with an error from outside, unless it has ended or is being closed."""
        if not (self.outcome.is_closing or self.machine.is_finished):
            self.abort(error)

    def forget(self) -> None:
        """Drop launches and errors, so that a kept loop or failure keeps no arena alive."""
        self._visitors.shut()
        self._jobs.clear()
        self.outcome.forget_reported()
        self.activity.clear()

    # -- the thread ------------------------------------------------------------------------------

    def run(self, prepare: Callable[[], object]) -> None:
        """Run until every actor has ended, a firing failed, or the run is closed.

        `prepare` is called first where chains run on this thread; workers prepare their own.
        """
        try:
            if not all(self.machine.table.is_detached):
                prepare()
        except BaseException as error:
            self.abort(error)
        self.serve()

    def serve(self) -> bool:
        """Run until the run is over, a driven one until nothing can run; return whether it is over.

        What a launch or this thread raises is the failure of the run.
        """
        try:
            if not self._serve():
                return False
            # Linear, once per run: a machine that is over accounts for every slot, or a bug is
            # reported.
            self.machine.validate()
            self.bound.synchronize()
        except DeviceFailure as failure:
            self.halt()
            self._fail_by(failed_launch(failure))
            self._tell_failure()
        except BaseException as error:
            # No launch raised this: the frames are the dispatcher's own, and know the last chain.
            clear_frames(error.__traceback__)
            self.abort(error)
        self.forget()
        # Last: the mailbox is first in, first out, so the jobs before None still run.
        self.workers.end()
        return True

    def _serve(self) -> bool:
        machine, columns, jobs = self.machine, self.machine.columns, self._jobs
        inbox, workers, note, done = self.inbox, self.workers, self.activity, self._done
        fireable, detached, flushing = machine.fireable, machine.detached, machine.flushing
        next_fireable, next_detached = fireable.popleft, detached.popleft
        outbox, is_quiet, get = machine.outbox, inbox.is_empty, inbox.get
        visitors, running, put = self._visitors.waiting, workers.running, workers.put
        clock, busy_ns, timeline = note.times.clock, note.times.busy_ns, note.times.timeline
        # In locals, and a firing calls nothing of ours but the machine: most of its cost lies here.
        since, pause_ns, waker = clock(), 0, 0
        while True:
            if visitors:
                self._receive_visitors()
            if outbox:
                machine.deliver(outbox)
                outbox.clear()
            # Before a chain runs here, for which what is ready on other streams would wait.
            if not is_quiet():
                code = get()
                if code & KIND_MASK == _DONE:
                    waker = code >> KIND_BITS  # as `subject_of`, without a call
                    running.remove(waker)
                    outbox.append(code)
                else:
                    note.job = None
                    self.take(code)
                continue
            while detached:  # other threads get their work before this one is busy with its own
                actor = next_detached()
                running.add(actor)
                put[actor](next(jobs[actor]))
                since = clock()
            if fireable:
                if pause_ns:  # for whoever ended last
                    self.awaited_ns[waker], pause_ns = self.awaited_ns[waker] + pause_ns, 0
                job = next(jobs[next_fireable()])
                actor, chain = job
                # `job` is set last: a watchdog that sees it finds time and launches of this firing.
                note.since_ns = since
                note.launches = launches = iter(chain)
                note.job = job
                try:
                    for launch in launches:
                        launch()
                except BaseException as error:
                    launch_index = note.launch()
                    note.clear()
                    # The traceback keeps this frame as long as the error lives.
                    del job, chain, launches, launch
                    self._fail_firing(actor, launch_index, error)
                    continue
                # One reading of the clock per firing: the end of this one is the start of the next.
                before, since = since, clock()
                busy_ns[actor] += since - before
                if timeline is not None:
                    timeline.record(actor, machine.firing_index(actor), before, since)
                outbox.append(done[actor])
            elif flushing:
                self._prepare_flush(flushing.popleft())
            else:
                # Nothing starts any more: who waits for that is not woken by a message.
                if visitors:
                    self._receive_visitors()
                if (columns.is_halted or not columns.num_open) and self._is_over():
                    return True
                if self.admission.is_over:
                    self.check_progress()
                note.job = None
                if self._is_driven and is_quiet():  # what is to come, another call will bring
                    return False
                code = get()
                before, since = since, clock()
                if code & KIND_MASK == _DONE:
                    pause_ns += since - before
                    waker = code >> KIND_BITS
                    running.remove(waker)
                    outbox.append(code)
                else:
                    pause_ns = 0
                    self.take(code)

    def take(self, code: int) -> None:
        """Take what came through the inbox."""
        if code == COMMAND:
            # Each COMMAND in the inbox stands for one entry, appended before it.
            self.inbox.take_command()()
            return
        if code & KIND_MASK != _DONE and subject_of(code) in self.ports.given_up:
            return  # its thread came back after all
        self.workers.running.remove(subject_of(code))
        self.receive(code)

    def _receive_visitors(self) -> None:
        """Make the visits that are possible now; dismiss those that a failed run can never make."""
        machine = self.machine
        if machine.outbox:
            # The end of a firing, and not yet what it leads to: that might start the next step.
            machine.receive(machine.outbox.pop(0))
        # A failed run makes no visit: its variables may be of half a step.
        is_over = machine.is_halted and self.is_idle
        self._visitors.receive(self._can_visit, is_over=is_over)

    def _can_visit(self, rest: QuiescentCondition) -> bool:
        if self.machine.is_halted or not is_quiescent_for(self.machine, self.workers.running, rest):
            return False
        self.bound.synchronize()
        return True

    def receive(self, code: int) -> None:
        """Let the machine take the end of a firing, and act on its kind."""
        self.machine.receive(code)
        kind = code & KIND_MASK
        if kind == _EXHAUSTED:
            # All sources end on the same step, or a sink would wait for data that never comes.
            self.admission.end_with(subject_of(code))
        elif kind == _FAILED:
            self.halt()
            self._fail_by(self.outcome.take_reported(subject_of(code)))
            self._tell_failure()
            self._close_sources()

    def _is_over(self) -> bool:
        if self.machine.is_halted:
            # Halted: kernels and sinks are waited for, sources in user code are not.
            return self.outcome.is_closing or self.workers.running <= self.ports.sources
        return self.machine.is_finished

    def check_progress(self) -> None:
        """Raise rather than wait for a message that nobody can send any more."""
        if self.admission.is_over and not self.workers.running and self.inbox.is_empty():
            raise InternalError("the plan cannot finish: " + self.machine.stall())

    def _tell_failure(self) -> None:
        """Have whoever waits for more than this run stop that, the first time that it failed."""
        failure, tell = self.outcome.failure, self._on_failure
        if failure is not None and tell is not None:
            self._on_failure = None
            tell(failure)

    def _fail_by(self, failure: Failure) -> None:
        self.outcome.fail_by(failure, self.machine.story(failure.actor))

    def _prepare_flush(self, actor: int) -> None:
        """Bind the last firing of an actor and let it run like any other."""
        machine = self.machine
        firing, tokens = machine.firing_index(actor), machine.flush_tokens(actor)
        try:
            chain = self.bound.bind_flush(actor, firing, tokens)
        # What a port's `bind` raises is raised again by the launch, as a failure of this firing.
        except Exception as error:
            chain = (partial(_raise, error),)
        # Replaces the phases: it is the actor's last firing.
        self._jobs[actor] = repeat((actor, chain))
        is_detached = machine.table.is_detached[actor]
        (machine.detached if is_detached else machine.fireable).append(actor)

    def _fail_firing(self, actor: int, launch: int | None, error: BaseException) -> None:
        """Report what an inline chain raised."""
        # Only an admitted source may run out; from any other actor the same error is a failure.
        if self.machine.table.admission[actor] is not None and isinstance(error, SourceExhausted):
            self.receive(message(Message.EXHAUSTED, actor))
            return
        self.outcome.report(Failure(actor, self.machine.firing_index(actor), launch, error))
        self.receive(message(Message.FAILED, actor))

    def _close_sources(self) -> None:
        self.outcome.note_closing(self.ports.close_sources())


def _forever(phases: tuple[Item, ...]) -> Iterator[Item]:
    """Return what firing 0, 1, 2, ... runs; one phase needs no cycle."""
    return cycle(phases) if len(phases) > 1 else repeat(phases[0])


def _raise(error: Exception) -> None:
    raise error


def _nothing() -> None:
    """Do nothing but wake the dispatcher."""
