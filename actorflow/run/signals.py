"""SIGINT, SIGTERM and SIGHUP while a run is on: once ends it cleanly, again leaves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_ENDING = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
"""In the order in which they are given back: a ^C may raise as soon as SIGINT is."""

_handling: list[StopSignals] = []
"""Whose handlers the process has, outermost first: a forked child must not keep them."""


class StopSignals:
    """Reports the first ending signal; the same one again leaves the process at once.

    A closing terminal often sends SIGHUP twice, so that one never leaves at once. What was ignored
    before stays ignored (`nohup`, and SIGINT of jobs in the background). A forked child gets the
    handlers from before the run. Outside of the main thread signals are not ours to handle.

    Args:
        on_signal: called in the handler, so it may take no lock that the main thread may hold.
    """

    def __init__(self, on_signal: Callable[[int], object]) -> None:
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
            self.give_back()
            os.kill(os.getpid(), signum)
            return
        is_again = signum in self.received
        self.received.append(signum)
        # A terminal that closes may send SIGHUP more than once; nobody presses that key.
        if is_again and signum != signal.SIGHUP:
            os._exit(128 + signum)  # not sys.exit: a thread in user code would hold that up
        self._on_signal(signum)


def _give_back_in_child() -> None:
    for signals in reversed(_handling):
        signals.give_back()
    _handling.clear()


os.register_at_fork(after_in_child=_give_back_in_child)
