"""Who hears of every step of a run: the progress line, the files of the run, the user."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from actorflow.evaluation import OnResult, Results
from actorflow.logs import logger
from actorflow.run.console import Console
from actorflow.run.ports import Metrics
from actorflow.run.report import Reporter
from actorflow.run.stopping import ON_RESULT, ON_STEP, Stopper
from actors.statistics import Statistics
from compiler.options import SKIPPED

if TYPE_CHECKING:
    from actorflow.run.status import StatusWriter

OnStep = Callable[[int, Metrics], None]


class Listener:
    """Passes scalar outputs to the reporter, all to the user, and keeps the status of the run.

    What a function of the user raises stops the run. As a context it ends the status when the run
    ends: in whatever `ending` says, "failed" until then. Where steps that are not finite change
    nothing (`is_skipping`), such outputs are handed on, and are no part of what is reported.
    """

    def __init__(
        self,
        reporter: Reporter,
        status: StatusWriter | None,
        on_step: OnStep | None,
        first_step: int,
        stopper: Stopper,
        *,
        is_skipping: bool = False,
    ) -> None:
        self._reporter = reporter
        self._is_skipping = is_skipping
        self._stopper = stopper
        self._status = status
        self._on_step = on_step
        self.ending = "failed"
        self.step = first_step
        self.metrics: Metrics = {}
        self.evaluations: list[tuple[int, Results]] = []

    def start(self, statistics: Callable[[], Statistics]) -> None:
        """Begin the status of the run; before its threads start."""
        if self._status is not None:
            self._status.start(statistics)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.finish(self.ending)

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Take the outputs of a step, on the metrics thread."""
        self.step, self.metrics = step, metrics
        scalars = {n: float(v) for n, v in metrics.items() if isinstance(v, (int, float))}
        if self._is_skipping:  # what a skipped step gave is no part of a mean
            scalars = {n: v for n, v in scalars.items() if n != SKIPPED and math.isfinite(v)}
        self._reporter.step(step, scalars)
        if self._status is not None:
            self._status.step(step, metrics)
        self._stopper.call(ON_STEP, self._on_step, step, metrics)

    def evaluated(self, on_result: OnResult | None) -> OnResult:
        """Return a listener to evaluations that reports them and passes them to the user."""

        def listen(step: int, means: Results) -> None:
            self.evaluations.append((step, means))
            self._reporter.evaluation(step, means)
            self._stopper.call(ON_RESULT, on_result, step, means)

        return listen


def make_reporter(
    checkpoint: str | os.PathLike[str] | None, progress: bool, *, is_writer: bool = True
) -> Reporter:
    """Return the reporter of a run: to stdout if `progress`, and to the file of its directory.

    Of several ranks one alone is the writer of that.
    """
    path = Path(checkpoint) / "metrics.jsonl" if checkpoint is not None and is_writer else None
    if progress:
        # Asked at every write: a program may put another stream there while it runs.
        return Reporter(Console(lambda: sys.stdout), time.monotonic, metrics_path=path)
    silence = Console(lambda: None)
    return Reporter(silence, time.monotonic, metrics_path=path, warn=logger.warning)
