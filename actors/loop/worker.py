"""The threads of streams, what each runs at this moment, and the pool of all of them.

A worker runs the chains of all actors of its stream in the order of their starts. It waits for a
job in its mailbox, runs it, and posts one message to the dispatcher. It never polls and never
spins.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import length_hint
from pathlib import Path
from queue import Empty, SimpleQueue
from types import CodeType
from typing import NoReturn

from actors.loop.failure import Failure
from actors.loop.timeline import Timeline
from actors.machine.errors import SourceExhausted
from actors.machine.protocol import Chain, Clock, Launch
from actors.machine.table import MachineTable
from actors.machine.thread_stacks import MAX_CALLS, thread_stacks
from actors.machine.transitions import Message, message
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import PORTED

# A thread that runs chains has one `ThreadActivity` and writes in it, once per firing, references
# that it has anyway; that is all that being watched costs until somebody asks, which is when a run
# stalls or a launch fails. Frames of the thread are read only for the calls of user code below a
# chain, never for what the loop itself knows.

Job = tuple[int, Chain]
"""An actor with the chain of one of its phases; built once per run, not per firing."""

_INNERMOST = 8
_LIBRARIES = (str(Path(threading.__file__).parent), "<frozen ")


@dataclass(frozen=True, slots=True)
class RunningLaunch:
    """A launch that is running.

    `launch` is its number in the plan's chain, None where the chain does not tell. `since_ns` is
    when its chain began, on the loop's clock. `stack` are the innermost calls of the thread below
    the chain, as "file:line in function", innermost first; a launch in C has none.
    """

    actor: int
    launch: int | None
    since_ns: int
    stack: tuple[str, ...]

    @property
    def where(self) -> str:
        """The innermost call outside of libraries, which is the one that its author knows."""
        calls = [c for c in self.stack if not c.startswith(_LIBRARIES) and "site-packages" not in c]
        return (*calls, *self.stack, "")[0]


@dataclass(frozen=True, slots=True)
class FiringTimes:
    """Where the threads of a run note how long firings take.

    `clock` gives nanoseconds; `busy_ns` is the time in launches by actor, to which only the thread
    of an actor adds; `timeline` records firings, unless it is None.
    """

    clock: Clock
    busy_ns: list[int]
    timeline: Timeline | None


class ThreadActivity:
    """What a thread runs: `job` (None while it waits), `launches` (the iterator over its chain).

    Its thread writes the attributes; `since_ns` is when the chain began. Any thread may look.

    Args:
        num_launches: by actor, as many as a chain of the plan has; 1 for a port.
        times: where the thread notes its firings when they are over.
    """

    __slots__ = ("_num_launches", "job", "launches", "since_ns", "times")

    def __init__(self, num_launches: Sequence[int], times: FiringTimes) -> None:
        self._num_launches = num_launches
        self.times = times
        self.job: Job | None = None
        self.launches: Iterator[Launch] | None = None
        self.since_ns = 0

    def clear(self) -> None:
        """Note that nothing runs, and drop the chain."""
        self.job = self.launches = None

    def launch(self) -> int | None:
        """Return the number of the launch that runs or has failed, or None where it is unknown."""
        job, launches = self.job, self.launches
        if job is None or launches is None:
            return None
        actor, chain = job
        # The iterator has taken the launch that runs; `length_hint` counts those after it, without
        # a counter that each launch would have to advance.
        item = max(0, len(chain) - length_hint(launches) - 1)
        return launch_number(chain, item, self._num_launches[actor])

    def look(self, thread: threading.Thread, code: CodeType) -> RunningLaunch | None:
        """Return what the thread runs, with its calls below the function with this code, or None.

        The thread goes on meanwhile: the answer is exact for one that is stuck.
        """
        job = self.job
        if job is None:
            return None
        return RunningLaunch(job[0], self.launch(), self.since_ns, _calls_below(thread, code))


def _calls_below(thread: threading.Thread, code: CodeType) -> tuple[str, ...]:
    """Return the innermost calls of a thread down to a function; () where it is not in it."""
    # The thread runs on, so names and lines are exact only where it is stuck.
    stack = thread_stacks().get(thread.ident or 0, ())
    calls: list[str] = []
    for call in stack:
        if call.file == code.co_filename and call.function in (code.co_name, code.co_qualname):
            return tuple(calls[:_INNERMOST])
        calls.append(f"{call.file}:{call.line} in {call.function}")
    # A deep recursion hides where it began.
    return tuple(calls[:_INNERMOST]) if len(stack) >= MAX_CALLS else ()


def launch_number(chain: Chain, item: int, num_launches: int) -> int | None:
    """Return the number in the plan of the launch that runs, or failed, in an item of a chain.

    A device may make one item of several launches: it says how many they are (`num_launches`) and
    which one runs (`running`). None where items do not account for all launches of the plan, or the
    one that runs does not know. O(items); only failures and stalls ask.
    """
    counts = [getattr(launch, "num_launches", 1) for launch in chain]
    # A device may join launches and not say how many: then an item's place tells no launch.
    if sum(counts) != num_launches or item >= len(chain):
        return None
    running: int | None = getattr(chain[item], "running", 0)
    return None if running is None else sum(counts[:item]) + running


@dataclass(frozen=True, slots=True)
class WorkerCallbacks:
    """What a worker calls, on its own thread.

    Args:
        post: takes the message that ends a firing.
        report: takes a failure, before its message.
        fail_start: takes the error that kept the thread from starting; it runs no job.
    """

    post: Callable[[int], object]
    report: Callable[[Failure], object]
    fail_start: Callable[[BaseException], object]


# A function of the user's that a worker calls may fork. Of the child's threads there is this one
# alone, so that it would wait for the dispatcher for ever, once it has left that function.

# A list, so that threads hold the cell in a local and compare an int per firing.
_forks = [0]
"""How many forks lie between the first process and this one."""


def _count_fork() -> None:
    _forks[0] += 1


os.register_at_fork(after_in_child=_count_fork)


def _end_child(error: BaseException | None) -> NoReturn:
    """End a forked child that left the user's function: by an error or an exit, or told so."""
    if isinstance(error, SourceExhausted):  # as a port says what its source raised
        error = error.__cause__
    status: object = 1
    if isinstance(error, SystemExit):
        status = 0 if error.code is None else error.code
        if not isinstance(status, int):
            # As the interpreter does for sys.exit(text): the text is printed, the status is 1.
            print(status, file=sys.stderr)
            status = 1
    elif error is not None and not isinstance(error, StopIteration):
        traceback.print_exception(error)
    else:
        print(
            f"actorflow: process {os.getpid()} was forked in a callback of a run and returned"
            f" from it: the run and its threads are in process {os.getppid()}. End such a child"
            " with sys.exit or os._exit, or start it with multiprocessing's 'spawn'",
            file=sys.stderr,
        )
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    # Not sys.exit, which ends this thread alone; no exit handler of the parent's may run here.
    os._exit(int(status) & 255)  # type: ignore[call-overload]  # an int by now


class Worker:
    """The thread of one stream.

    `put` jobs for it to run, into its `mailbox`; None ends the thread after the jobs before it.
    `firings[actor]` counts the firings that it has ended.

    Args:
        name: Name of the stream.
        actors: Actors of the stream.
        table: Tells which actors are sources.
        activity: Holds what the thread runs at this moment, and receives its times.
        callbacks: Are told how each firing ends.
        prepare: called once on the thread before its first job.
    """

    def __init__(
        self,
        name: str,
        actors: tuple[int, ...],
        table: MachineTable,
        *,
        activity: ThreadActivity,
        callbacks: WorkerCallbacks,
        prepare: Callable[[], object],
    ) -> None:
        self.name = name
        self.actors = actors
        self.firings = [0] * table.num_actors
        self.num_waits = 0
        self._table = table
        self._activity = activity
        self._callbacks = callbacks
        self._prepare = prepare
        self.mailbox: SimpleQueue[Job | None] = SimpleQueue()
        self.put = self.mailbox.put
        self.thread = threading.Thread(target=self._run, name=f"actorflow-{name}", daemon=True)

    def drop(self) -> tuple[int, ...]:
        """Take back the jobs that have not begun and return their actors.

        Callable from any thread, before the end is asked for.
        """
        dropped: list[int] = []
        while True:
            try:
                job = self.mailbox.get_nowait()
            except Empty:
                return tuple(dropped)
            if job is not None:
                dropped.append(job[0])

    def in_flight(self) -> RunningLaunch | None:
        """Return what the thread is running, or None while it waits. Callable from any thread."""
        return self._activity.look(self.thread, Worker._serve.__code__)

    def _run(self) -> None:
        try:
            self._prepare()
        except BaseException as error:
            self._callbacks.fail_start(error)
        else:
            self._serve()

    def _serve(self) -> None:
        get, is_idle, post = self.mailbox.get, self.mailbox.empty, self._callbacks.post
        firings, note, times = self.firings, self._activity, self._activity.times
        clock, busy_ns, timeline = times.clock, times.busy_ns, times.timeline
        done = [message(Message.DONE, actor) for actor in range(len(firings))]
        launch: Launch | None = None
        # A fork after this line is seen by the count; the thread then is the only one of a child.
        forks, born = _forks, _forks[0]
        while True:
            # For statistics only: another thread may put a job between this look and `get`.
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
                # A forked child, which left the user's function by an error.
                if forks[0] != born:
                    _end_child(error)
                code = self._fail(error, actor, note.launch())
            if forks[0] != born:
                _end_child(None)
            after = clock()
            busy_ns[actor] += after - since
            if timeline is not None:
                timeline.record(actor, firings[actor], since, after)
            firings[actor] += 1
            # Arrays must not live on while the thread waits, nor in the traceback of an error.
            note.job = note.launches = None
            del job, chain, launches
            # The loop's variable outlives the loop, and a launch holds views on the arena.
            launch = None
            post(code)  # last: the firing counts as over as soon as the dispatcher reads it

    def _fail(self, error: BaseException, actor: int, launch: int | None) -> int:
        if self._table.admission[actor] is not None and isinstance(error, SourceExhausted):
            return message(Message.EXHAUSTED, actor)
        self._callbacks.report(Failure(actor, self.firings[actor], launch, error))
        return message(Message.FAILED, actor)


class WorkerPool:
    """The workers of one run, one for each stream with a thread, and what was handed to them.

    `put[actor]` takes a job of an actor to its thread. `running` are the actors whose firing was
    handed over and whose end has not come through the inbox. Both belong to the dispatcher, whose
    loop has them in locals.

    Args:
        plan: names the streams.
        table: tells which actors have a thread.
        new_activity: makes what one thread notes in.
        callbacks: of every worker.
        prepare: called once on every thread that runs kernels, before its first job.
    """

    __slots__ = ("_workers", "put", "running")

    def __init__(
        self,
        plan: Plan,
        table: MachineTable,
        new_activity: Callable[[], ThreadActivity],
        callbacks: WorkerCallbacks,
        prepare: Callable[[], object],
    ) -> None:
        by_stream: dict[int, list[int]] = {}
        # One thread per stream, not per actor: firings of a stream must not overlap.
        for actor in [a for a, is_detached in enumerate(table.is_detached) if is_detached]:
            by_stream.setdefault(table.streams[actor], []).append(actor)
        self._workers = tuple(
            [
                Worker(
                    plan.streams[stream].name,
                    tuple(actors),
                    table,
                    activity=new_activity(),
                    callbacks=callbacks,
                    prepare=prepare if _has_kernels(plan, actors) else _nothing,
                )
                for stream, actors in by_stream.items()
            ]
        )
        self.running: set[int] = set()
        self.put: dict[int, Callable[[Job], object]] = {
            actor: worker.put for worker in self._workers for actor in worker.actors
        }

    def __iter__(self) -> Iterator[Worker]:
        """Iterate over the workers, from any thread."""
        return iter(self._workers)

    def drop(self) -> None:
        """Take back every job that no thread has begun."""
        for worker in self._workers:
            self.running.difference_update(worker.drop())

    def end(self) -> None:
        """Let every thread end after the jobs that it has."""
        for worker in self._workers:
            worker.put(None)

    def ended_firings(self) -> dict[int, int]:
        """Return how many firings each of their actors has ended. Callable from any thread."""
        return {a: worker.firings[a] for worker in self._workers for a in worker.actors}


def _has_kernels(plan: Plan, actors: Sequence[int]) -> bool:
    """Whether a thread runs more than sources and sinks."""
    return any([plan.actors[actor].kind not in PORTED for actor in actors])


def _nothing() -> None:
    """Prepare nothing: sources and sinks run user code, on a thread with the user's settings."""
