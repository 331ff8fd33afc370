"""The watchdog: a thread that says when a run stands still, who holds it up, and when it goes on.

It waits on the end of the run and looks at it a few times per limit. It reports a stall once, again
whenever its length has doubled, and says when the run goes on. It never ends a run: a slow disk is
no deadlock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from actors.stall import Situation, Stall, diagnose

MESSAGES_TOLD = 1000
"""How many of the last messages a report holds."""

_LEAST_INTERVAL_S, _MOST_INTERVAL_S = 1.0, 3600.0
_LOOKS_PER_LIMIT = 4


@dataclass(frozen=True, slots=True)
class Watch:
    """How a run is watched.

    Args:
        seconds: without a firing before a stall is reported; 0 does not watch.
        on_stall: called on the watchdog's thread with every report.
        folder: gets every report with its messages at the end of `stall.txt`, or None.
    """

    seconds: float = 60.0
    on_stall: Callable[[Stall], object] | None = None
    folder: Path | None = None


class Watchdog:
    """Looks at a run now and then, and reports when it stands still.

    Args:
        watch: limit, listener and folder.
        progress: returns a value that changes whenever a firing begins or ends.
        examine: returns the situation now.
        wait: waits so many seconds, or until the run is over, and returns whether it is.
        clock: seconds, monotonic.
        report: takes the text of a report.
    """

    def __init__(
        self,
        watch: Watch,
        *,
        progress: Callable[[], object],
        examine: Callable[[], Situation],
        wait: Callable[[float], bool],
        report: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch = watch
        self._progress = progress
        self._examine = examine
        self._wait = wait
        self._clock = clock
        self._report = report
        self.thread = threading.Thread(target=self.run, name="actorflow-watchdog", daemon=True)

    def run(self) -> None:
        """Watch until the run is over. A stall is seen at most a quarter of the limit late."""
        limit_s = self._watch.seconds
        interval_s = max(_LEAST_INTERVAL_S, min(limit_s / _LOOKS_PER_LIMIT, _MOST_INTERVAL_S))
        seen, since, due_s = self._progress(), self._clock(), limit_s
        while not self._wait(interval_s):
            came, stood_s = self._progress(), self._clock() - since
            if came != seen:
                if due_s > limit_s:
                    self._report(f"the run goes on, after about {stood_s:.0f} s")
                seen, since, due_s = came, since + stood_s, limit_s
            elif stood_s >= due_s:
                stall = diagnose(self._examine(), stood_s)
                if stall is not None:
                    self._tell(stall, is_first=due_s == limit_s)
                    due_s = 2 * stood_s

    def _tell(self, stall: Stall, *, is_first: bool) -> None:
        """Report a stall; the messages are told once, and in the file rather than in the log."""
        lines, messages = list(stall.lines()), []
        if is_first:
            messages = [f"the last {len(stall.messages)} messages:", *stall.messages]
        folder = self._watch.folder
        if folder is not None:
            path = folder / "stall.txt"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write("\n".join([*lines, *messages, "", ""]))
                messages = [f"the last messages are in {path}"] if is_first else []
            except OSError as error:
                lines.append(f"{path} cannot be written: {error.strerror}")
        self._report("\n".join([*lines, *messages]))
        if self._watch.on_stall is not None:
            try:
                self._watch.on_stall(stall)
            except Exception as error:
                self._report(f"on_stall raised {error!r}; the run is not touched by it")
