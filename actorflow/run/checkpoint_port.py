"""The checkpoint sink of a plan: it writes the snapshots that are due, beside the steps."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from actors.machine.protocol import Launch, Token

WRITER_NICENESS = 5
"""By how much a thread that writes checkpoints is nicer: a third of the share of one that computes.

Measured on two ranks of one core and 101 MB each (benchmarks/results/cluster.md): a step of 19 ms
took 46 to 50 beside a writer of the same priority, and 32 to 34 at 5, where saves took no longer.
At 10 and more the writer may be kept from the processor while it holds the interpreter.
"""


def yield_to_steps() -> None:
    """Lower the priority of the calling thread, where the system has priorities of threads."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + WRITER_NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, niceness)  # the system ends it at 19


class CheckpointPort:
    """Writes snapshots that are due.

    A snapshot that is not due is let go at once. The last one of a run is always due: `last_step`
    is set before the flushed firing, perhaps while earlier ones are still to come. An unfinished
    state (NaN under policy "raise") is never written.

    Args:
        save: called as (step, arrays by variable name) on this port's thread; returns when durable.
        is_due: called with the step; says whether to write.
        last_saved: a step that needs no saving.
        stop: called from another thread: a save that waits for other ranks is to raise.
    """

    def __init__(
        self,
        save: Callable[[int, Mapping[str, np.ndarray[Any, Any]]], None],
        is_due: Callable[[int], bool],
        last_saved: int,
        stop: Callable[[], object],
    ) -> None:
        self._stop = stop
        self._save = save
        self._is_due = is_due
        self._last_saved = last_saved
        self.last_step: int | None = None

    def bind(self, tokens: tuple[Token, ...]) -> Launch:
        """Return the launch that writes the staged variables, whose memory is touched here."""
        (views,) = tokens
        # Else the first snapshot pays the page faults, between two steps: 80 to 240 ms of 101 MB.
        for view in views.values():
            view.fill(0)
        is_background = False

        def write() -> None:
            nonlocal is_background
            if not is_background:
                yield_to_steps()
                is_background = True
            # The number comes out of the snapshot itself, so it belongs to the staged values for
            # certain.
            step = int(views["step"][()])
            if step != self._last_saved and (step == self.last_step or self._is_due(step)):
                self.finish(step, views)

        return write

    def finish(self, step: int, views: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Write a state that is due, unless it was the last one written."""
        if step != self._last_saved:
            self._save(step, views)
            self._last_saved = step

    def close(self) -> None:
        """Wait for no other rank; what is being written is written."""
        self._stop()
