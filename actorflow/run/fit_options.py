"""What `fit` takes: stated once, checked where the user calls it."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from actorflow.arguments import check_directory, check_listener, check_source, check_steps
from actorflow.checkpoint.errors import CheckpointError
from actorflow.checkpoint.policy import Every
from actorflow.data import DataSource
from actorflow.evaluation import Evaluation, check_evaluation
from actorflow.keywords import Choice, Count, check_fields
from actorflow.run.broken_steps import POLICIES
from actorflow.trace.tracer import find_source

if TYPE_CHECKING:  # it loads the kernels and the machine
    from actorflow.run.listener import OnStep


@dataclass(frozen=True, slots=True)
class FitOptions:
    """The options of a training run.

    Args:
        data: the source; on a resume it is sought to where the checkpoint left it.
        steps: total number of steps, those of earlier runs included.
        checkpoint: directory of the run, which also gets `metrics.jsonl`; None keeps nothing.
        every: time ("5s", "10min") or steps (500) between checkpoints; by time, the first
            snapshot that is due is written, and there is one at least every 16 steps. On several
            ranks the first one's clock counts.
        keep_last: checkpoints to keep.
        on_nan: what to do when the loss is not finite. "raise" ends the run; "warn" trains on,
            and the newest checkpoint without NaN is kept; "skip" drops the updates of a step
            whose loss or gradients are not finite, for plans compiled so, and ends the run
            when 100 in a row were. Steps count on, and with them schedules and AdamW's
            correction of the bias.
        on_save_error: what to do when a checkpoint cannot be written: a full or read-only disk,
            a directory that was moved away. "raise" ends the run; "warn" trains on and tries
            again with the next one that is due, and raises when the last one fails.
        progress: print the plan and live progress to stdout.
        seed: of initialisers and random ops, in place of the job's; no other plan is compiled. A
            model that has values keeps them, and a resumed run needs the seed that it began with.
        on_step: called with (step, outputs) on the metrics thread, in order.
        evaluation: what the plan was compiled to evaluate between steps.
    """

    data: DataSource
    _: KW_ONLY
    steps: int
    checkpoint: str | os.PathLike[str] | None = None
    every: str | int = "5s"
    keep_last: int = field(default=3, metadata={"rule": Count(1, 1 << 30)})
    on_nan: str = field(default="raise", metadata={"rule": Choice(POLICIES)})
    on_save_error: str = field(default="raise", metadata={"rule": Choice(("raise", "warn"))})
    progress: bool = True
    seed: int | None = field(default=None, metadata={"rule": Count(0, (1 << 63) - 1)})
    on_step: OnStep | None = None
    evaluation: Evaluation | None = None

    def __post_init__(self) -> None:
        check_source(self.data)
        check_steps(self.steps)
        check_directory(self.checkpoint)
        check_listener("on_step", self.on_step)
        check_evaluation(self.evaluation)
        check_fields(self, find_source())
        check_every(self.every)


def check_every(every: object) -> None:
    """Raise CheckpointError, with the user's line, for what is no period."""
    try:
        Every.parse(every)
    except CheckpointError as error:
        raise CheckpointError(f"{find_source()}: every: {error}") from None
