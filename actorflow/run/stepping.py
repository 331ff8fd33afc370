"""A run that is fed step by step, for `step` of a job and of a runner."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from actorflow.initialise import steps_done
from actorflow.run.plan_facts import batch_fields
from actorflow.run.ports import Metrics
from actorflow.run.pushed import Mailbox
from actorflow.run.stopping import next_of
from actorflow.run.training_run import Run, RunOptions
from actorflow.settings import Settings
from compiler.errors import CompileError, InternalError
from compiler.plan import Plan

Array = np.ndarray[Any, Any]


class Stepping:
    """A run that is fed batch by batch."""

    def __init__(self, plan: Plan, values: Mapping[str, Array], settings: Settings) -> None:
        self._mailbox = Mailbox(batch_fields(plan)[0])
        self._outputs: queue.SimpleQueue[Metrics | None] = queue.SimpleQueue()
        self.run = Run(
            plan,
            self._mailbox,
            RunOptions(
                values=values,
                first_step=steps_done(values),
                on_step=lambda step, metrics: self._outputs.put(metrics),
                on_finished=lambda: self._outputs.put(None),
                settings=settings,
            ),
        )
        try:
            self.run.start()
        except BaseException:
            self.run.close()
            raise

    def step(self, batches: Sequence[Mapping[str, Array]]) -> Metrics:
        """Run one step on its batches and return its outputs."""
        for batch in batches:
            self._mailbox.put(batch)
        self.run.admit(1)
        metrics = next_of(self._outputs)
        if metrics is None:
            self.run.wait()
            raise InternalError("a plan that is stepped ended by itself")
        return metrics


def batches_of_step(
    batch: Mapping[str, Array] | Sequence[Mapping[str, Array]], count: int, where: str
) -> Sequence[Mapping[str, Array]]:
    """Return the batches of one step. Raises CompileError when there are not `count` of them."""
    if count == 1:
        return batch if isinstance(batch, (list, tuple)) and len(batch) == 1 else [batch]  # type: ignore[list-item]  # what it is, spec_of checks
    if not isinstance(batch, (list, tuple)) or len(batch) != count:
        came = f"{len(batch)}" if isinstance(batch, (list, tuple)) else type(batch).__name__
        raise CompileError(
            f"{where}: a step accumulates {count} batches, so give a list of {count}; got {came}"
        )
    return batch
