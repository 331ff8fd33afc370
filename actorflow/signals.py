"""SIGINT and SIGTERM while a run is on: once finishes the step, twice leaves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class StopSignals:
    """The first SIGINT or SIGTERM stops the run cleanly; the second leaves the process.

    A signal that comes before there is a run stops it before its first step. Outside of the main
    thread signals are not ours to handle.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._stop: Callable[[], None] | None = None
        self._before: dict[int, object] = {}

    def stop_with(self, stop: Callable[[], None]) -> None:
        """Say how to stop the run from now on."""
        self._stop = stop
        if self.received:
            stop()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            if handler is not None:  # None: installed by C code, and not ours to know
                signal.signal(signum, handler)  # type: ignore[arg-type]  # as it was given to us

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)
        if len(self.received) > 1:
            os._exit(128 + signum)
        if self._stop is not None:
            self._stop()
