"""A run that is fed step by step, for `step` of a job and of a runner."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from actorflow.callbacks.protocol import Metrics
from actorflow.compile.plan_facts import batch_fields
from actorflow.options.run_spec import ENDLESS, RAISE, RunSpec
from actorflow.run.saving import RunContext
from actorflow.run.stopping import next_of
from actorflow.run.training_run import Run
from compiler.contract.errors import CompileError, InternalError
from compiler.contract.plan import Plan
from compiler.contract.types import TensorType

Array = np.ndarray[Any, Any]


class Mailbox:
    """A `DataSource` over a mailbox.

    `put` may be called from any thread; `__next__` blocks until there is a batch.
    """

    def __init__(self, spec: Mapping[str, TensorType]) -> None:
        self._spec = dict(spec)
        # None ends the stream.
        self._batches: queue.SimpleQueue[Mapping[str, Array] | None] = queue.SimpleQueue()

    def put(self, batch: Mapping[str, Array]) -> None:
        """Give the next batch."""
        self._batches.put(batch)

    def close(self) -> None:
        """End the stream; a blocked `__next__` raises StopIteration."""
        self._batches.put(None)

    def spec(self) -> dict[str, TensorType]:
        """Return the types of a batch."""
        return dict(self._spec)

    def __next__(self) -> Mapping[str, Array]:
        """Return the next batch; blocks."""
        batch = self._batches.get()
        if batch is None:
            raise StopIteration
        return batch

    def state(self) -> dict[str, Any]:
        """Return nothing: what was pushed cannot be sought."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Accept any state; the caller pushes what follows."""

    def fingerprint(self) -> str:
        """Return a fixed text: the caller knows what it pushes."""
        return "mailbox"


class Stepping:
    """A run that is fed batch by batch.

    Args:
        plan: what is run. Its outputs are those of single steps.
        context: of the run; that it is stepped is said here.
        values: that it begins with.
        on_nan: what is done about a loss that is not finite; see `RunSpec`.
        beside: the run of another plan on the same memory, at rest; see `Run`.

    Raises CompileError for a plan that returns the outputs of several steps together.
    """

    def __init__(
        self,
        plan: Plan,
        context: RunContext,
        values: Mapping[str, Array],
        on_nan: str = RAISE,
        beside: Run | None = None,
    ) -> None:
        every = plan.int_option("metrics_every", 1)
        if every != 1:
            raise CompileError(
                f"plan {plan.name!r} returns the outputs of {every} steps together, so a"
                " single step has none; compile the job with metrics_every=1"
            )
        self.context, self.on_nan = context, on_nan
        self._mailbox = Mailbox(batch_fields(plan)[0])
        self._outputs: queue.SimpleQueue[Metrics | None] = queue.SimpleQueue()
        self.run = Run(
            plan,
            RunSpec(
                self._mailbox,
                steps=ENDLESS,
                on_nan=on_nan,
                on_step=lambda step, metrics: self._outputs.put(metrics),
            ),
            replace(context, is_stepped=True, on_finished=lambda: self._outputs.put(None)),
            values,
            beside,
        )
        try:
            self.run.start()
        except BaseException:
            self.run.close()
            raise

    def step(self, batches: Sequence[Mapping[str, Array]]) -> Metrics:
        """Run one step on its batches and return its outputs."""
        # Before the batch is there: what was written until now belongs to this step.
        self.run.flush()
        for batch in batches:
            self._mailbox.put(batch)
        # Batches first: a step that is admitted finds them in the mailbox.
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
