"""The loop: one run of a bound plan, as the rest of the program sees it.

A run has a dispatcher thread (which runs the compute stream, if there is only one), a worker thread
for every other stream (`actors.loop.dispatch`, `actors.loop.worker`) and, if it is watched, a
watchdog (`actors.loop.watchdog`); these files are the only place with threads. A driven run has
none: whoever admits a step runs it. A run ends when
every actor has ended, when a firing failed, or by `close`. After a failure or `close` a source may
still block in user code; a thread cannot be killed, so it is waited for a short while and then left
behind.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from actors.loop.admission import QuiescentCallback
from actors.loop.dispatch import Dispatcher, LoopOptions
from actors.loop.watchdog import MESSAGES_TOLD, RunSnapshot, Watchdog
from actors.loop.worker import Worker
from actors.machine.errors import ForkedRun
from actors.machine.history import Statistics, collect
from compiler.contract.errors import ActorflowError, DeviceError

if TYPE_CHECKING:
    from actors.loop.bound import BoundPlan

_GIVEN_UP_TIMEOUT_S = 0.5
"""How long `close` waits for ports that were given up: they had their time before."""

_AS_THEY_ARE = LoopOptions()


class Loop:
    """One run of a bound plan. Its methods may be called from any thread.

    Args:
        bound: What to run; it must outlive the loop and serve one loop at a time.
        options: How to run it, and who hears of it.
    """

    def __init__(self, bound: BoundPlan, options: LoopOptions = _AS_THEY_ARE) -> None:
        self._dispatcher = Dispatcher(bound, options)
        self._options = options
        self._clock = options.clock
        # Guards the flags below, and that no step is admitted after `end` or `close`.
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._is_started = self._is_ended = self._is_closed = self._is_joined = False
        self._start_ns = self._end_ns = 0
        # Threads do not survive a fork: in a child nothing would answer.
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="actorflow-dispatch", daemon=True)
        self._is_driven = options.drive is not None
        # Of a driven loop: held by the thread that runs it, whose identity stands beside it.
        self._turn, self._driver = threading.Lock(), 0
        # A driven loop runs after that, and without a lock: its launches may call any method here.
        self._post = self._dispatcher.inbox.call_soon_threadsafe
        self._watchdog: Watchdog | None = None
        watch = options.watch
        if watch is not None and watch.seconds > 0:
            self._watchdog = Watchdog(
                watch,
                progress=self._progress,
                examine=self.examine,
                wait=self._over.wait,
                report=options.report,
            )

    def start(self) -> None:
        """Start the threads; where that fails the loop is closed, and none of them stays.

        Raises RuntimeError when the loop was started or closed before, DeviceError when the system
        gives no thread.
        """
        with self._lock:
            if self._is_started or self._is_closed:
                raise RuntimeError("a loop runs once; make a new Loop for another run")
            self._is_started = True
            self._start_ns = self._clock()
        if self._is_driven:
            self._drive()
            return
        threads = self.threads()
        try:
            for thread in threads:
                thread.start()
        # BaseException: an interrupt between two starts must not leave threads behind.
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError):  # what `Thread.start` raises
                raise DeviceError(
                    f"the system refuses a thread to this run, which needs {len(threads)}"
                    f" ({error}); a limit on processes or on memory is reached (ulimit -u, ulimit"
                    " -v, the pids limit of a container): raise it, or end other work"
                ) from error
            raise

    def threads(self) -> list[threading.Thread]:
        """Return the threads of the run; the dispatcher first, for it ends those of the workers."""
        if self._is_driven:
            return []
        watchdog = [] if self._watchdog is None else [self._watchdog.thread]
        return [self._thread, *[worker.thread for worker in self._dispatcher.workers], *watchdog]

    @property
    def is_inherited(self) -> bool:
        """Whether this is a child forked from the process of the run, where its threads are not."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise ForkedRun where the run is inherited."""
        if self.is_inherited:
            raise ForkedRun(
                f"plan {self._dispatcher.bound.plan.name!r} is open in process {self._pid}, from"
                f" which this one, {os.getpid()}, was forked: the threads of the plan are in the"
                " parent, so this process can neither step nor read its values. Close the plan"
                " before the fork (job.close(model)), or start the process with"
                " multiprocessing's 'spawn'"
            )

    def check_caller(self) -> None:
        """Do what `check_process` does. Raises RuntimeError on the thread that runs the plan."""
        self.check_process()
        if self._driver == threading.get_ident() or threading.current_thread() is self._thread:
            raise RuntimeError(
                f"the thread that runs plan {self._dispatcher.bound.plan.name!r} would wait for"
                " itself: its values are not read or written, and it is not stepped or closed, by"
                " what its own step calls; do so after the step"
            )

    def admit(self, steps: int) -> None:
        """Permit `steps` more steps of every source.

        No effect when a source has no more data or the run is over. Raises ValueError for less than
        one step, RuntimeError after `end` or `close`.
        """
        self.check_process()
        if steps < 1:
            raise ValueError(f"expected one step or more to admit, got {steps}")
        with self._lock:
            if self._is_ended or self._is_closed:
                raise RuntimeError("steps were admitted after the end of the run was asked for")
            self._post(partial(self._dispatcher.admission.ask, steps))
        self._drive()

    def grant(self, steps: int, *, is_last: bool = False) -> None:
        """Permit a run with a window to begin `steps` steps in total; `is_last` forbids any more.

        For a coordinator of several ranks. A step begins when it is both admitted and granted.
        Grants only grow, so one may arrive twice or late. Without a window only `is_last` has an
        effect: the run ends cleanly after that step, or at once where it is past it already.
        Raises ValueError for a negative number.
        """
        self.check_process()
        if steps < 0:
            raise ValueError(f"expected to grant 0 steps or more in all, got {steps}")
        grant = partial(self._dispatcher.admission.grant, steps, is_last=is_last)
        self.call_soon_threadsafe(grant)

    def withhold(self) -> None:
        """Forget what was granted of steps that are not admitted yet."""
        self.call_soon_threadsafe(self._dispatcher.admission.withhold)

    def end(self) -> None:
        """Let the run finish cleanly with the steps that are admitted. Idempotent."""
        self.check_process()
        with self._lock:
            if not self._is_ended:
                self._is_ended = True
                self._post(self._dispatcher.admission.end)
        self._drive()

    def abort(self, error: BaseException) -> None:
        """End the run with an error, in whatever state it is, as if a launch had raised it.

        What runs finishes, nothing more starts, sources are not waited for, and `wait` raises the
        error. The first one counts, whether it came from here or from a launch. No effect on a run
        that is over or closed. Takes no lock, so a signal handler may call it.
        """
        self.check_process()
        self.call_soon_threadsafe(partial(self._dispatcher.abort_unless_over, error))

    def give_up_sources(self) -> None:
        """Let the run finish cleanly although sources block: as if they had no more data.

        Only those whose port says so (`AbandonablePort`); the others are waited for.
        """
        dispatcher = self._dispatcher
        self.call_soon_threadsafe(partial(dispatcher.give_up, dispatcher.ports.sources))

    def give_up_sinks(self) -> None:
        """Let the run go on without the sinks that block: they are handed nothing any more.

        Only those whose port says so (`AbandonablePort`); the others are waited for.
        """
        ports = self._dispatcher.ports
        self.call_soon_threadsafe(partial(self._dispatcher.give_up, ports.ported - ports.sources))

    def expect_cut(self) -> None:
        """Treat errors of launches as no failure from now on: another rank may have cut the run."""
        self._dispatcher.outcome.is_cut = True

    def cut(self) -> None:
        """End the run where it is, as `abort` does, but as no failure: `wait` returns False.

        Running launches are waited for, and their errors are ignored; the caller makes them return.
        """
        self.call_soon_threadsafe(self._dispatcher.cut)

    def ports_at(self) -> dict[str, str]:
        """Return where the threads of sources and sinks are ("file:line in function"), by actor."""
        running = [worker.in_flight() for worker in self._dispatcher.workers]
        names = self._dispatcher.machine.table.names
        ports = self._dispatcher.ports.ported
        return {names[r.actor]: r.where for r in running if r is not None and r.actor in ports}

    def call_soon_threadsafe(self, command: Callable[[], object]) -> None:
        """Have the dispatcher's thread call something, after the messages already sent.

        What it raises is a failure of the run. A run that is over calls nothing any more.
        """
        self._post(command)
        self._drive()

    def _drive(self) -> None:
        """Run what can run on this thread, unless another one does, which will then run this, too.

        A driven loop stands still between two commands: whoever sends one has it obeyed.
        """
        drive, dispatcher = self._options.drive, self._dispatcher
        if drive is None or not self._is_started:
            return
        # Who has the turn looks again when it has given it back, so that no command is left.
        while not (dispatcher.inbox.is_empty() or self._over.is_set()):
            if not self._turn.acquire(blocking=False):
                return
            try:
                self._driver = threading.get_ident()
                if drive(dispatcher.serve):
                    self._finish()
            finally:
                self._driver = 0
                self._turn.release()
                self._options.settle()

    def _wait_for_turn(self) -> None:
        """Have a driven loop that is halted end; one that this thread runs does so later."""
        while self._driver != threading.get_ident() and not self._over.is_set():
            with self._turn:  # of another thread, which may have looked before it was halted
                pass
            self._drive()

    def run_when_quiescent(self, visit: QuiescentCallback) -> None:
        """Make a visit on the dispatcher's thread, or dismiss it when the run ends before.

        Raises RuntimeError on that thread itself, where waiting for the visit would deadlock.
        """
        self.check_caller()
        self._dispatcher.run_when_quiescent(visit)
        self._drive()

    @property
    def is_idle(self) -> bool:
        """Whether no kernel of this run is running and none will."""
        return self._dispatcher.is_idle or self._is_joined

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, and its threads have ended."""
        return self._is_joined

    @property
    def is_cut(self) -> bool:
        """Whether the run was cut, in the middle of a step."""
        return self._dispatcher.outcome.is_cut

    @property
    def failure(self) -> BaseException | None:
        """What ended the run, or None."""
        return self._dispatcher.outcome.failure

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run is over; return whether every actor ended.

        False means that `timeout` seconds passed, or that the loop was closed before the end.
        Raises ActorFailed when a launch raised, with the original exception as its cause. A clean
        end waits for the batch that a source is fetching; a failure waits for no source.
        """
        self.check_process()
        if not self._over.wait(timeout):
            return False
        failure = self._dispatcher.outcome.failure
        if failure is not None:
            raise failure
        return self._dispatcher.machine.is_finished

    def close(self) -> None:
        """End the run in whatever state it is, close the ports and join the threads. Idempotent.

        A source that blocks on although its port is closed is reported and its thread left behind;
        it may write into its slot whenever it wakes, so the bound plan must not run again then.

        Raises what a port's `close` raised, and ActorflowError when any other stream's thread does
        not end within the timeout. Does nothing where the run is inherited.
        """
        if self.is_inherited:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        dispatcher = self._dispatcher
        # First the word that it is meant, then the ports: what a launch raises because its port is
        # closed would be a failure else.
        dispatcher.outcome.is_closing = True
        self.call_soon_threadsafe(dispatcher.halt)
        # Before the joins: a launch that blocks in a port returns only once the port is closed.
        errors = dispatcher.ports.close()
        try:
            if _is_started(self._thread):
                self._join()
            elif self._is_driven and self._is_started:
                self._wait_for_turn()
            else:
                # Never started: no thread does it at the end of its run.
                dispatcher.forget()
            self._is_joined = True
        finally:
            # Also where a join failed: whoever is in `wait` must not wait for ever.
            self._over.set()
            self._join_watchdog()
        # The first one; by now all ports are closed and all threads joined.
        for error in errors:
            raise error

    def __enter__(self) -> Loop:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def statistics(self) -> Statistics:
        """Return what was done so far; exact once the run is over and no source is left behind.

        Callable at any time. Linear in actors and edges; costs the run nothing until it is called.
        """
        dispatcher = self._dispatcher
        # 0 stands for a run that is not over: it is measured up to now.
        end_ns = self._end_ns or (self._clock() if self._is_started else 0)
        return collect(
            dispatcher.bound.plan,
            dispatcher.machine,
            elapsed_ns=end_ns - self._start_ns,
            busy_ns=dispatcher.activity.times.busy_ns,
            awaited_ns=dispatcher.awaited_ns,
            thread_waits={w.name: w.num_waits for w in dispatcher.workers},
        )

    def ended_firings(self) -> tuple[int, ...]:
        """Return how many firings of each actor are over, failed ones too; exact after the end."""
        dispatcher = self._dispatcher
        actors = range(dispatcher.machine.table.num_actors)
        ended = dispatcher.workers.ended_firings()
        return tuple([ended.get(a, dispatcher.machine.firing_index(a) + 1) for a in actors])

    def _progress(self) -> object:
        """Return a value that changes with every firing that begins or ends."""
        machine = self._dispatcher.machine
        actors = range(machine.table.num_actors)
        ended = [tuple(worker.firings) for worker in self._dispatcher.workers]
        return [(machine.firing_index(a), machine.state(a)) for a in actors], ended

    def examine(self) -> RunSnapshot:
        """Return what every actor does now; exact when nothing moves. For any thread."""
        dispatcher = self._dispatcher
        machine = dispatcher.machine
        actors = range(machine.table.num_actors)
        inline = dispatcher.in_flight(self._thread)
        running = [inline, *[worker.in_flight() for worker in dispatcher.workers]]
        ended = dispatcher.workers.ended_firings()
        return RunSnapshot(
            plan=dispatcher.bound.plan,
            table=machine.table,
            states=tuple([machine.state(a) for a in actors]),
            firings=tuple([machine.firing_index(a) + 1 for a in actors]),
            lacks=tuple([machine.missing_messages(a) for a in actors]),
            in_flight={r.actor: r for r in running if r is not None},
            is_delivered=tuple([ended.get(a, 0) <= machine.firing_index(a) for a in actors]),
            dispatcher=None if inline is None else inline.actor,
            is_halted=machine.is_halted,
            now_ns=self._clock(),
            messages=machine.last_messages(MESSAGES_TOLD),
        )

    def _run(self) -> None:
        self._dispatcher.run(self._options.prepare_thread)
        self._finish()

    def _finish(self) -> None:
        """Tell that the run is over, on the thread that ran it."""
        try:
            # Before `_over` is set: what it raises must be there when `wait` returns.
            if self._options.on_finished is not None:
                self._options.on_finished()
        except BaseException as error:
            self._dispatcher.outcome.fail(error)
        self._end_ns = self._clock()
        self._over.set()  # last: whoever wakes by it reads all that is above

    def _join_watchdog(self) -> None:
        """Join the watchdog within a limit, unless its own thread closes the loop."""
        watchdog = self._watchdog
        is_here = watchdog is None or watchdog.thread is threading.current_thread()
        if watchdog is not None and _is_started(watchdog.thread) and not is_here:
            watchdog.thread.join(self._options.join_timeout_s)

    def _join(self) -> None:
        here = threading.current_thread()
        # A run may be closed by a callback on one of its own threads, which cannot join itself.
        if self._thread is not here:
            self._thread.join()
        pool, ports = self._dispatcher.workers, self._dispatcher.ports
        table = self._dispatcher.machine.table
        workers = [w for w in pool if w.thread is not here and _is_started(w.thread)]
        given_up = [w for w in workers if ports.given_up.issuperset(w.actors)]
        sources = [w for w in workers if ports.sources_of(w.actors)]
        timeout_s = self._options.source_timeout_s
        alive = _still_alive([w for w in sources if w not in given_up], timeout_s)
        alive += _still_alive(given_up, min(_GIVEN_UP_TIMEOUT_S, timeout_s))
        for worker in alive:
            # Its launch keeps the views that it fills, and a view keeps its arena: when it wakes it
            # writes into memory that is still its own, even after the plan was released.
            names = ", ".join([repr(table.names[a]) for a in worker.actors])
            what = f"data source {names} is still blocked in its __next__"
            if worker not in sources:
                what = f"listener {names} has not returned"
            self._options.report(f"the {what}; its thread is abandoned")
        others = [w for w in workers if w not in sources and w not in given_up]
        timeout_s = self._options.join_timeout_s
        stuck = [w.name for w in _still_alive(others, timeout_s)]
        if stuck:
            raise ActorflowError(
                f"the threads of {stuck} did not end within {timeout_s} s after close; a"
                " port's close must make a launch that blocks return or raise, and a kernel must"
                " return"
            )


def _is_started(thread: threading.Thread) -> bool:
    return thread.ident is not None


def _still_alive(workers: list[Worker], timeout_s: float) -> list[Worker]:
    """Return the workers whose threads do not end within a time that they share."""
    # One deadline for all, so that ten blocked sources cost no more than one.
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        worker.thread.join(max(0.0, deadline - time.monotonic()))
    return [worker for worker in workers if worker.thread.is_alive()]
