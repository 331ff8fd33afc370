"""Epochs of a job: after a failure all ranks are started again, as long as that may help.

An epoch is one start of all ranks, with a coordinator, keys and processes of its own. When one rank
fails, all end, and all start again. What the script saved carries over, and nothing else: `fit`
goes on from its newest checkpoint. Steps since then are repeated, bit for bit.

`RestartPolicy` decides from failures and their times alone; it reads no clock and starts nothing.
These rules are tried in this order:

1.  A mistake of the script, and ranks that differ, are met by every start: no restart.
2.  The same fault twice in a row, at the same step, would come a third time: no restart. A rank
    that was killed has no fault in this sense: whoever killed it may have killed the same before.
3.  There are at most `restarts` of them within `window_s`.

The first restart is made at once. Later ones wait for 1, 2, 4 s and so on, at most `MOST_DELAY_S`,
so that a host that cannot hold the job is not kept busy with starts.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from actorflow.distributed.agreement import WINDOW_STEPS
from actorflow.distributed.rank_failure import FailureKind, RankFailure

WINDOW_S = 600.0
MOST_DELAY_S = 30.0
GRACE_S = 2.5
"""Most that ranks of a job with restarts may take to end, before SIGTERM and again before SIGKILL:
the next epoch begins 5 s after a failure at the latest."""
BY_SIGNAL = 128
"""What a shell adds to the number of the signal that ended a process."""

_CRASHES = tuple(
    [-s for s in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)]
)
_MOST_HEAD = 300
"""Characters of an error that are compared: values that follow may differ from start to start."""


def kind_of_exit(code: int) -> FailureKind:
    """Return the kind of failure of a process's exit: a status, or a negative signal."""
    if code >= 0:
        return FailureKind.EXIT
    return FailureKind.CRASH if code in _CRASHES else FailureKind.KILL


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """How an epoch ended.

    `status` is the exit status of the job if nothing follows. `failure` is the first one, None
    where all scripts ended well. `is_stopped` says that the user asked for the end by a signal.
    """

    status: int
    failure: RankFailure | None = None
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows a failure: a restart after `delay_s`, or none where that is None.

    `text` says which restart it is, or why there is none.
    """

    delay_s: float | None
    text: str


class RestartPolicy:
    """Decides after each failure of a job whether its ranks are started again.

    Args:
        restarts: how many restarts there may be within `window_s`; 0 for none at all.
        window_s: seconds.
    """

    def __init__(self, restarts: int = 0, window_s: float = WINDOW_S) -> None:
        self.restarts = restarts
        self._window_s = window_s
        # Times at which restarts were due.
        self._restarted_s: list[float] = []
        self._last: RankFailure | None = None

    def decide(self, failure: RankFailure, now_s: float) -> Decision:
        """Return what follows the failure of an epoch that ended at `now_s`.

        Times never fall from call to call.
        """
        last, self._last = self._last, failure
        if failure.kind is FailureKind.MISTAKE:
            return Decision(None, "every start would meet this error")
        if last is not None and is_same_fault(last, failure):
            at = "" if failure.step is None else f" near step {failure.step}"
            return Decision(
                None,
                f"the same fault ended two starts in a row{at}, so it is one of the script or its"
                " data",
            )
        # Those that are older than the window have no part in any later decision.
        self._restarted_s = [at_s for at_s in self._restarted_s if at_s > now_s - self._window_s]
        num_recent = len(self._restarted_s)
        if num_recent >= self.restarts:
            plural = "restart" if self.restarts == 1 else "restarts"
            limit = f"{self.restarts} {plural} within {self._window_s:g} s"
            text = f"the limit of {limit} is reached (--restarts, --restart-window)"
            return Decision(None, text)
        delay_s = min(2.0 ** (num_recent - 1), MOST_DELAY_S) if num_recent else 0.0
        self._restarted_s.append(now_s + delay_s)
        wait = f", in {delay_s:g} s" if delay_s else ""
        return Decision(delay_s, f"restart {num_recent + 1} of {self.restarts}{wait}")


def is_same_fault(one: RankFailure, other: RankFailure) -> bool:
    """Whether two failures in a row are one fault, which would come a third time.

    The ranks may differ: all run the same script, and which of them reports first is chance. Steps
    are those that data was read for, some beyond the fault: a rank reads ahead.
    """
    if one.kind is not other.kind or one.kind is FailureKind.KILL:
        return False
    if (one.op, one.line, _head(one.text)) != (other.op, other.line, _head(other.text)):
        return False
    # A step that is unknown may be the same one.
    is_known = one.step is not None and other.step is not None
    return not is_known or abs((one.step or 0) - (other.step or 0)) <= WINDOW_STEPS


def _head(text: str) -> str:
    return text.partition("\n")[0][:_MOST_HEAD]


def supervise(
    run_epoch: Callable[[int], EpochEnd],
    policy: RestartPolicy,
    *,
    clock: Callable[[], float],
    wait: Callable[[float], int | None],
    report: Callable[[str], object],
) -> int:
    """Run epochs until one ends well or the policy ends the job; return its exit status.

    Args:
        run_epoch: runs the epoch of a number, from 1, and has reported its failure when it returns.
        policy: decides after each failure.
        clock: seconds, monotonic.
        wait: waits for seconds, or until a signal asks for the end: returns it, or else None.
        report: takes a line for the user.
    """
    epoch = 0
    while True:
        epoch += 1
        end = run_epoch(epoch)
        starts = f"started {epoch} times" if epoch > 1 else "started once"
        if end.failure is None or end.is_stopped or not policy.restarts:
            if epoch > 1:
                report(f"the job has ended; its ranks were {starts}")
            return end.status
        decision = policy.decide(end.failure, clock())
        if decision.delay_s is None:
            report(f"no restart: {decision.text}; the ranks were {starts}")
            return end.status
        hint = "; fit continues from its newest checkpoint, a script without any from its beginning"
        report(decision.text + (hint if epoch == 1 else ""))
        if (number := wait(decision.delay_s)) is not None:
            report(f"no restart: {signal.Signals(number).name} came; the ranks were {starts}")
            return BY_SIGNAL + number
