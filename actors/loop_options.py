"""How a bound plan is run, and who hears of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from actors.protocol import Clock
from actors.timeline import Timeline
from actors.watchdog import Watch


def _nothing() -> None:
    """Prepare nothing."""


def _report(text: str) -> None:
    logging.getLogger("actorflow").warning("%s", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """What a `Loop` is told beside its plan.

    Args:
        timeline: Where to record firings, or None.
        clock: Nanoseconds; for statistics and timeline only.
        on_finished: Called once on the dispatcher's thread when the run is over in any way, before
            `wait` returns. What it raises becomes the failure of a run that had none. After a
            failure or `close` a source may still be running.
        prepare_thread: Called once on every thread that runs kernels, before its first launch; what
            it raises fails the run. The threads of sources and sinks are the user's.
        window: Steps that may begin before more are granted (`Loop.grant`), or None for no limit.
        watch: How to report that the run stands still, or None.
        join_timeout_s: How long `close` waits for a port to let go of its thread.
        source_timeout_s: How long `close` waits for sources, instead.
        report: Receives a text for every source's thread that `close` leaves behind, and for every
            stall; by default a warning in the log "actorflow".
    """

    timeline: Timeline | None = None
    clock: Clock = time.perf_counter_ns
    on_finished: Callable[[], object] | None = None
    prepare_thread: Callable[[], object] = _nothing
    window: int | None = None
    watch: Watch | None = None
    join_timeout_s: float = 10.0
    source_timeout_s: float = 2.0
    report: Callable[[str], object] = _report
