"""The loop: one run of a bound plan, as the rest of the program sees it.

A run has a dispatcher thread and a thread for every actor that may block (`actors.dispatch`,
`actors.worker`); these three files are the only place with threads. A run ends when every actor has
ended, when a firing failed, or by `close`. After a failure or `close` a source may still block in
user code; a thread cannot be killed, so it is waited for a short while and then left behind.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from actors.dispatch import Dispatcher
from actors.load import BoundPlan
from actors.protocol import Clock
from actors.timeline import Timeline
from actors.worker import Worker
from compiler.errors import ActorflowError

_report = logging.getLogger("actorflow").warning


@dataclass(frozen=True, slots=True)
class LoopStatistics:
    """What a run has done so far; tuples are by actor.

    `firings` were started; `busy_ns` is time in launches. `num_waits` counts how often an actor's
    thread found nothing to do, `num_dispatcher_waits` and `dispatcher_wait_ns` how often and how
    long the dispatcher did.
    """

    firings: tuple[int, ...]
    busy_ns: tuple[int, ...]
    num_waits: tuple[int, ...]
    num_dispatcher_waits: int
    dispatcher_wait_ns: int


def _nothing() -> None:
    """Prepare nothing."""


class Loop:
    """One run of a bound plan. Its methods may be called from any thread.

    Args:
        bound: What to run; it must outlive the loop and serve one loop at a time.
        timeline: Where to record firings, or None.
        clock: Nanoseconds; for statistics and timeline only.
        on_finished: Called once on the dispatcher's thread when the run is over in any way, before
            `wait` returns. What it raises becomes the failure of a run that had none. After a
            failure or `close` a source may still be running.
        prepare_thread: Called once on the dispatcher's thread before its first launch; what it
            raises fails the run.
        join_timeout_s: How long `close` waits for a port to let go of its thread.
        source_timeout_s: How long `close` waits for sources, instead.
        report: Receives a line of text for every source's thread that `close` leaves behind; by
            default a warning in the log "actorflow".
    """

    def __init__(
        self,
        bound: BoundPlan,
        *,
        timeline: Timeline | None = None,
        clock: Clock = time.perf_counter_ns,
        on_finished: Callable[[], object] | None = None,
        prepare_thread: Callable[[], object] = _nothing,
        join_timeout_s: float = 10.0,
        source_timeout_s: float = 2.0,
        report: Callable[[str], object] = _report,
    ) -> None:
        self._dispatcher = Dispatcher(bound, clock=clock, timeline=timeline)
        self._on_finished = on_finished
        self._prepare_thread = prepare_thread
        self._join_timeout_s = join_timeout_s
        self._source_timeout_s = source_timeout_s
        self._report = report
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._is_started = self._is_ended = self._is_closed = False
        self._steps_admitted = 0
        self._thread = threading.Thread(target=self._run, name="actorflow-dispatch", daemon=True)

    def start(self) -> None:
        """Start the threads. Raises RuntimeError when the loop was started or closed before."""
        with self._lock:
            if self._is_started or self._is_closed:
                raise RuntimeError("a loop runs once; make a new Loop for another run")
            self._is_started = True
            for worker in self._dispatcher.workers.values():
                worker.thread.start()
            self._thread.start()

    @property
    def steps_admitted(self) -> int:
        """Number of steps that were admitted."""
        return self._steps_admitted

    def admit(self, steps: int) -> None:
        """Permit `steps` more steps of every source.

        No effect when a source has no more data or the run is over. Raises ValueError for less than
        one step, RuntimeError after `end` or `close`.
        """
        if steps < 1:
            raise ValueError(f"expected one step or more to admit, got {steps}")
        with self._lock:
            if self._is_ended or self._is_closed:
                raise RuntimeError("steps were admitted after the end of the run was asked for")
            self._steps_admitted += steps
            self._dispatcher.command(partial(self._dispatcher.admit, steps))

    def end(self) -> None:
        """Let the run finish cleanly with the steps that are admitted. Idempotent."""
        with self._lock:
            if not self._is_ended:
                self._is_ended = True
                self._dispatcher.command(self._dispatcher.end_admission)

    stop_admission = end

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run is over; return whether every actor ended.

        False means that `timeout` seconds passed, or that the loop was closed before the end.
        Raises ActorFailed when a launch raised, with the original exception as its cause. A clean
        end waits for the batch that a source is fetching; a failure waits for no source.
        """
        if not self._over.wait(timeout):
            return False
        if self._dispatcher.failure is not None:
            raise self._dispatcher.failure
        return self._dispatcher.machine.is_finished

    def close(self) -> None:
        """End the run in whatever state it is, close the ports and join the threads. Idempotent.

        A source that blocks on although its port is closed is reported and its thread left behind;
        it may write into its slot whenever it wakes, so the bound plan must not run again then.

        Raises what a port's `close` raised, and ActorflowError when the port of any other actor
        does not let its thread go within the timeout.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        dispatcher = self._dispatcher
        dispatcher.is_closing = True
        dispatcher.command(dispatcher.halt)
        errors = [dispatcher.close_port(name) for name in list(dispatcher.open_ports)]
        if self._is_started:
            self._join()
        else:
            dispatcher.forget()
        self._over.set()
        for error in errors:
            if error is not None:
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

    def statistics(self) -> LoopStatistics:
        """Return what was done so far; exact once the run is over and no source is left behind."""
        dispatcher = self._dispatcher
        every = range(dispatcher.table.num_actors)
        busy, waits = list(dispatcher.busy_ns), [0 for _ in every]
        for actor, worker in dispatcher.workers.items():
            busy[actor], waits[actor] = worker.busy_ns, worker.num_waits
        firings = [dispatcher.machine.firing_index(actor) + 1 for actor in every]
        return LoopStatistics(
            tuple(firings), tuple(busy), tuple(waits), dispatcher.num_waits, dispatcher.wait_ns
        )

    def _run(self) -> None:
        dispatcher = self._dispatcher
        try:
            self._prepare_thread()
        except BaseException as error:
            dispatcher.failure = error
            dispatcher.halt()
        dispatcher.run()
        try:
            if self._on_finished is not None:
                self._on_finished()
        except BaseException as error:
            if dispatcher.failure is None:
                dispatcher.failure = error
        self._over.set()

    def _join(self) -> None:
        here = threading.current_thread()
        if self._thread is not here:
            self._thread.join()
        workers = [w for w in self._dispatcher.workers.values() if w.thread is not here]
        for worker in _still_alive([w for w in workers if w.is_source], self._source_timeout_s):
            # Its launch keeps the views that it fills, and a view keeps its arena: when it wakes it
            # writes into memory that is still its own, even after the plan was released.
            self._report(
                f"the data source {worker.name!r} is still blocked in its __next__; its thread is"
                " left behind"
            )
        others = [w for w in workers if not w.is_source]
        stuck = [w.name for w in _still_alive(others, self._join_timeout_s)]
        if stuck:
            raise ActorflowError(
                f"the ports of {stuck} did not let their threads go {self._join_timeout_s} s after"
                " close; a port's close must make a launch that blocks return or raise"
            )


def _still_alive(workers: list[Worker], timeout_s: float) -> list[Worker]:
    """Return the workers whose threads do not end within a time that they share."""
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        worker.thread.join(max(0.0, deadline - time.monotonic()))
    return [worker for worker in workers if worker.thread.is_alive()]
