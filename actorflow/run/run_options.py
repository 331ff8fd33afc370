"""What a run begins with, where it ends, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actorflow.evaluation import Evaluation
from actorflow.run.among import ONE_RANK, Among
from actorflow.run.ports import Metrics
from actorflow.settings import Settings

if TYPE_CHECKING:
    from actorflow.checkpoint.policy import Every
    from actorflow.run.saving import Saver

Array = np.ndarray[Any, Any]


def _ignore(*_: object) -> None:
    """Hear of nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run begins with, where it ends, and who hears of it.

    Args:
        values: first value of every variable.
        settings: where a trace goes, and whether invariants are checked.
        on_step: called with (step, outputs) on the metrics thread.
        first_step: steps done before this run.
        total_steps: step at which the run ends, or None for as many as are admitted.
        every: the period of checkpoints, the same on all ranks; None where the run writes none.
        saver: writes them, on the first rank alone.
        on_nan: what to do when the loss is not finite, one of `broken_steps.POLICIES`.
        evaluation: what the plan's evaluation reads, and who listens to it.
        among: this rank among those that run the job; `values` are its parts.
        is_stepped: whether nothing runs between two steps, of which each is admitted.
        directory: of the run, for what the watchdog writes; None when it has none.
        warn: receives warnings.
        on_finished: called once when the run is over in any way, before `wait` returns.
    """

    values: Mapping[str, Array]
    settings: Settings
    on_step: Callable[[int, Metrics], object]
    first_step: int = 0
    total_steps: int | None = None
    every: Every | None = None
    saver: Saver | None = None
    on_nan: str = "raise"
    evaluation: Evaluation | None = None
    among: Among = ONE_RANK
    is_stepped: bool = False
    directory: Path | None = None
    warn: Callable[[str], object] = _ignore
    on_finished: Callable[[], object] | None = None
