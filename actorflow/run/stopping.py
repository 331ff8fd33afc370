"""How a run ends before its last step: one way, whoever asks.

A signal, a callback that raises and `StopTraining` all ask the same: no further step begins, those
under way are finished, the last one is saved. A source that blocks in user code meanwhile is waited
for `PATIENCE_S` and then given up, so that the end does not hang on it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, Queue, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from actorflow.callbacks.protocol import StopTraining, reason_of

if TYPE_CHECKING:
    from actorflow.run.switched_run import SwitchedRun
    from actorflow.run.training_run import Run


Item = TypeVar("Item")

PATIENCE_S = 1.5
"""How long a run that is to stop waits for a source."""

LATE_S = 1.0
"""How much longer ranks wait for a function of the user on one of them, source or callback."""

AGAIN_S = 1.0
"""How long after the first a signal counts as a second wish.

One wish often comes twice within milliseconds: `timeout` signals its child and then the group, a
service manager or a scheduler every process of a job, to which the launcher of ranks adds its copy.
"""

_GLANCE_S = 0.25
"""How long a wait lasts before the main thread looks whether a signal came."""

_OVER = ""

ON_STEP, ON_RESULT = CALLBACKS = ("on_step", "on_result")
"""The user's functions that hear of a run."""

_USERS = {
    "data": "the data source",
    "eval_data": "the data source of the evaluation",
    "metrics": ON_STEP,
    "eval_metrics": ON_RESULT,
}
"""What of the user runs in a port, by the name of its actor."""

UserFunction = Callable[[int, Mapping[str, Any]], object]
"""Takes a step and its results; the user's `on_step` or `on_result`."""


class Stopper:
    """Stops one run when it is asked to, and attends it until it is over.

    `reasons` says who asked, in order. `failure` is what a callback raised.

    Args:
        patience_s: how long it waits for a source.
        late_s: how much longer it waits for a function of the user, on one of several ranks.
    """

    def __init__(self, *, patience_s: float = PATIENCE_S, late_s: float = LATE_S) -> None:
        self._patience_s, self._late_s = patience_s, late_s
        self.reasons: list[str] = []
        self.failure: BaseException | None = None
        self._calls: dict[str, float] = {}
        """The user's functions that are called, and since when on the clock of time.monotonic."""
        self._events: SimpleQueue[str] = SimpleQueue()
        self._run: Run | SwitchedRun | None = None

    def ask(self, reason: str) -> None:
        """Ask for the end. For any thread, and for signal handlers: it takes no lock."""
        # No lock: the thread that a signal interrupts might hold it. Appending and SimpleQueue.put
        # are atomic, and `watch` looks at the reasons after it has the run, so none is lost.
        self.reasons.append(reason)
        if self._run is not None:
            self._run.stop(reason)
        self._events.put(reason)

    def ask_by_signal(self, signum: int) -> None:
        """Ask for the end because of a signal."""
        self.ask(signal.Signals(signum).name)

    def call(
        self, name: str, function: UserFunction | None, step: int, results: Any, *, by: str = ""
    ) -> None:
        """Call the user's function, unless one failed before; what it raises asks for the end.

        `by` is whose it is, where that is another name.
        """
        if function is None or self.failure is not None:
            return
        by = by or name
        self._calls[name] = time.monotonic()
        try:
            function(step, results)
        except StopTraining as stop:
            self.ask(reason_of(stop, by))
        except BaseException as error:
            if self._run is not None and self._run.loop.is_inherited:
                raise  # a child that was forked in the function has no run to stop
            # No callback is called after this one: `call` looks at `failure`.
            self.failure = error
            error.add_note(f"raised by {by} after step {step}")
            self.ask(f"{by} raised {type(error).__name__}")
        finally:
            del self._calls[name]

    def watch(self, run: Run | SwitchedRun) -> None:
        """Take the run that is to be stopped; it stops before its first step if that was asked."""
        # The run is stored before the reasons are read: `ask` does it the other way round.
        self._run, run.ask = run, self.ask
        if self.reasons:
            run.stop(self.reasons[0])

    def over(self) -> None:
        """Say that the run is over."""
        self._events.put(_OVER)

    def attend(self, notice: Callable[[str], object]) -> None:
        """Block until the run is over; say at once what happens when it is asked to stop."""
        is_told, is_held, look_s = False, False, None
        # First the patience for sources, then looks at functions that still do not return.
        while (event := self._next(look_s)) != _OVER:
            if self._run is None:
                return
            if event is None:
                now_s = time.monotonic()
                if is_held:
                    waited_s = [now_s - since_s for since_s in [*self._calls.values()]]
                    is_late = any([seconds > self._late_s for seconds in waited_s])
                    self._run.give_up_users(are_callbacks_late=is_late)
                else:
                    self._run.give_up_sources()
                is_held, look_s = True, now_s + self._late_s
            elif not is_told:
                is_told, look_s = True, time.monotonic() + self._patience_s
                notice(_stopping_text(event, self._waited_for(self._run), self._patience_s))

    def wait(self) -> None:
        """Return when the run has ended well; else raise why not, a callback's error first."""
        if self._run is None:
            return
        try:
            self._run.wait()
        except BaseException as error:
            if self.failure is None:
                raise
            self.failure.add_note(f"after that the run failed: {error!r}")
            raise self.failure from None
        if self._run.stopped_by:
            self.reasons.append(self._run.stopped_by)

    def tell(self, *, is_kept: bool) -> None:
        """Raise what a callback raised, where one did; with a word if what was trained is kept."""
        if self.failure is not None:
            if is_kept:
                self.failure.add_note("what was trained is kept")
            raise self.failure

    def _waited_for(self, run: Run | SwitchedRun) -> str:
        """Return which functions of the user are running, and where."""
        places = [(_USERS[name], at) for name, at in run.loop.ports_at().items() if name in _USERS]
        # The thread of a callback does other things too.
        waits = [
            f"{name} ({at})" for name, at in places if name in self._calls or name not in CALLBACKS
        ]
        return ", ".join(waits)

    def _next(self, until_s: float | None) -> str | None:
        """Return the next event, or None when it is `until_s` and there was none."""
        try:
            return next_of(self._events, until_s)
        except Empty:
            return None


def next_of(items: Queue[Item] | SimpleQueue[Item], until_s: float | None = None) -> Item:
    """Return the next item; a signal that comes meanwhile is handled, whenever it comes.

    Raises queue.Empty when it is `until_s`, in seconds of time.monotonic, and there was none.
    """
    # A signal wakes a wait only if the kernel gives it to this very thread while that waits. One
    # that comes a moment before, or is given to another thread, is only noted, and its handler
    # would run after the wait. So no wait is long.
    while True:
        left_s = _GLANCE_S if until_s is None else min(_GLANCE_S, until_s - time.monotonic())
        try:
            return items.get(timeout=max(0.0, left_s))
        except Empty:
            if until_s is not None and time.monotonic() >= until_s:
                raise


def drain_outputs(
    run: Run | SwitchedRun, outputs: Queue[Any], reason: str, *, patience_s: float = PATIENCE_S
) -> None:
    """Stop a run whose outputs are no longer read; return at the None that ends them.

    Returns at once in a forked child, where no thread would ever put that None.
    """
    if run.loop.is_inherited:
        return
    if not run.is_over:  # the others of several ranks would hear of a stop
        run.stop(reason)
    give_up_s: float | None = time.monotonic() + patience_s
    is_over = False
    while not is_over:
        try:
            is_over = next_of(outputs, give_up_s) is None
        except Empty:
            run.give_up_sources()
            give_up_s = None
    outputs.put(None)  # whoever drains it once more finds the end


def _stopping_text(reason: str, waited_for: str, patience_s: float) -> str:
    text = f"{reason}: stopping after the step that is under way"
    if waited_for:
        text += f"; waiting for {waited_for}, for a data source at most {patience_s} s"
    if reason not in ("SIGINT", "SIGTERM"):
        return text
    return f"{text}; {reason} again quits at once, {AGAIN_S:g} s later or more"


_ENDING = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
"""In the order in which they are given back: a ^C may raise as soon as SIGINT is."""

_handling: list[StopSignals] = []
"""Objects whose handlers are installed, outermost first: a forked child must not keep them."""


class StopSignals:
    """Reports ending signals; the same one again, `AGAIN_S` later, leaves the process at once.

    A copy that comes earlier is the same wish, and is not reported. A closing terminal often sends
    SIGHUP twice, so that one never leaves at once. What was ignored before stays ignored (`nohup`,
    and SIGINT of jobs in the background). A forked child gets the handlers from before the run.
    Outside of the main thread signals are not ours to handle.

    Args:
        on_signal: called in the handler, so it may take no lock that the main thread may hold.
        clock: seconds, of no meaning but their difference.
    """

    def __init__(
        self, on_signal: Callable[[int], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._first_s: dict[int, float] = {}
        self.received: list[int] = []
        self._on_signal = on_signal
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            _handling.append(self)
            for signum in _ENDING:
                before = signal.getsignal(signum)
                # None was installed by C code: it could not be given back.
                if before is not None and before != signal.SIG_IGN:
                    self._before[signum] = before
                    signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self in _handling:
            self.give_back()
            _handling.remove(self)

    def give_back(self) -> None:
        """Install the handlers from before again."""
        for signum in _ENDING:
            if signum in self._before:
                signal.signal(signum, self._before[signum])

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # it came before a forked child had its handlers
            # Send it anew rather than return: the handler of before decides, and the signal is not
            # lost.
            self.give_back()
            os.kill(os.getpid(), signum)
            return
        now_s = self._clock()
        if signum not in self._first_s:
            self._first_s[signum] = now_s
            self.received.append(signum)
            self._on_signal(signum)
        # A terminal that closes may send SIGHUP more than once; nobody presses that key.
        elif signum != signal.SIGHUP and now_s >= self._first_s[signum] + AGAIN_S:
            os._exit(128 + signum)  # not sys.exit: a thread in user code would hold that up


def _give_back_in_child() -> None:
    # Innermost first, as contexts end: the outermost holds the handlers of the program itself.
    for signals in reversed(_handling):
        signals.give_back()
    _handling.clear()


# A forked worker (of a data loader, say) has no run: it must die of SIGTERM as any process does.
os.register_at_fork(after_in_child=_give_back_in_child)
