"""Signals to this process, noted by their handlers for the loop that acts on them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

NOTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalNotes:
    """Signals that came, in order, each with its time.

    Attributes:
        bell: a descriptor that is readable when one came, while `woken` is open.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # The handler only appends (atomic under the GIL); the loop reads by index and never
        # removes.
        self._noted: list[tuple[int, float]] = []
        self._num_taken = 0
        self.bell = -1

    @property
    def first(self) -> int | None:
        """The signal that came first, taken or not; None where none came."""
        return self._noted[0][0] if self._noted else None

    def note(self, number: int, came_s: float) -> None:
        """Note a signal; callable from a signal handler."""
        self._noted.append((number, came_s))

    def take(self) -> list[tuple[int, float]]:
        """Return the signals that have come since the last call, with their times."""
        new = self._noted[self._num_taken :]
        self._num_taken += len(new)
        return new

    @contextmanager
    def woken(self) -> Iterator[int]:
        """Note signals while this is open, and yield `bell`.

        From the main thread alone. `empty` makes the descriptor wait for the next one.
        """
        # O_NONBLOCK: the wakeup write happens in signal context and may not wait for a full pipe.
        read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before: dict[int, Any] = {}
        woken = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        try:
            number: int
            for number in NOTED:
                if signal.getsignal(number) != signal.SIG_IGN:  # of nohup, which ranks inherit
                    before[number] = signal.signal(number, self._handle)
            # A child that is stopped is told by this one alone; without a handler none is woken.
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
            self.bell = read_end
            yield read_end
        finally:
            self.bell = -1
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(woken)
            os.close(read_end)
            os.close(write_end)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.note(number, self._clock())


def empty(bell: int) -> None:
    """Read all that lies in the descriptor of `SignalNotes.woken`. Never blocks."""
    with suppress(BlockingIOError):
        # Drained whole: several signals may have left a byte each, and one poll answers all.
        while os.read(bell, 4096):
            pass
