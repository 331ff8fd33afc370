"""A run over batches of several shapes: each step on the plan of its batches, one plan at a time.

A thread of its own makes the steps, as `step` of a runner does, and all that comes between two of
them; another one reads the source, a few steps ahead. A step begins when the one before has ended.
To its caller it is what a `Run` is.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

from actorflow.callbacks.protocol import Metrics, StopTraining, reason_of
from actorflow.data import Batch, DataError, DataSource
from actorflow.data.source import place_of_spec
from actorflow.environment.settings import logger
from actorflow.options.run_spec import RunSpec
from actorflow.run.evaluation import evaluated
from actorflow.run.ports import OpenCall, no_first_batch
from actorflow.run.saving import RunContext
from actorflow.tensor.probes import Predicates
from actorflow.tensor.tracer import find_source
from actors.machine.errors import ForkedRun
from actors.machine.history import Statistics
from compiler.contract.errors import CompileError
from compiler.contract.plan import Plan
from compiler.contract.types import TensorType

_READ_AHEAD = 2
"""Steps whose batches are read before they are asked for."""

_PATIENCE_S = 2.0
"""How long `close` waits for a source that blocks."""


@dataclass(frozen=True, slots=True)
class SpecPlan:
    """A plan for one of the types of batches that a source declares."""

    spec: Mapping[str, TensorType]
    plan: Plan
    predicates: Predicates


class SteppedRunner(Protocol):
    """What makes the steps."""

    def step_of(self, spec_plan: SpecPlan, batches: Sequence[Batch]) -> Metrics:
        """Run one step on a plan."""
        ...

    def variables(self) -> dict[str, Any]:
        """Return all variables."""
        ...

    @property
    def num_skipped(self) -> int:
        """Steps of this run that were skipped."""


@dataclass(frozen=True, slots=True)
class StepData:
    """The batches of a step: the place of their type, and where the source is after them."""

    batches: tuple[Batch, ...]
    place: int
    position: Mapping[str, Any]


class StepReader:
    """Reads a source step by step on a thread of its own, until its end or for so many steps.

    `failure` is what the source raised, `stopped_by` the words of its StopTraining, `num_unused`
    how many batches it gave for a step that it did not complete.

    Args:
        source: used by this thread alone, after `start`.
        specs: the types that its batches may have.
        each: batches of a step, which have one type.
    """

    def __init__(
        self, source: DataSource, specs: Sequence[Mapping[str, TensorType]], each: int
    ) -> None:
        self._source, self._specs, self._each = source, specs, each
        self._call = OpenCall(source)
        # None is the end of the data.
        self._steps: queue.SimpleQueue[StepData | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(_READ_AHEAD)
        self._num_left = 0
        self._thread = threading.Thread(target=self._read, name="actorflow-shapes", daemon=True)
        self.failure: BaseException | None = None
        self.stopped_by = ""
        self.num_unused = 0

    def start(self, steps: int) -> None:
        """Begin to read so many steps, or fewer where the data ends."""
        self._num_left = steps
        self._thread.start()

    def next(self) -> StepData | None:
        """Return the next step's batches, or None at the end of the data; blocks."""
        data = self._steps.get()
        self._room.release()
        return data

    def give_up(self) -> None:
        """End the data now; what a call of the source still brings no longer counts."""
        self._num_left = 0
        self._call.abandon()
        self._steps.put(None)
        self._room.release()

    def close(self) -> None:
        """End the data, ask a source that blocks to stop, and wait for it a short while."""
        self.give_up()
        self._call.close()
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            logger.warning("the data source is still blocked in its __next__; its thread is left")

    def _read(self) -> None:
        while self._num_left > 0:
            self._room.acquire()
            data = self._step()
            if data is None:
                break
            self._steps.put(data)
            self._num_left -= 1
        self._steps.put(None)

    def _step(self) -> StepData | None:
        batches: list[Batch] = []
        position: Mapping[str, Any] = {}
        try:
            while len(batches) < self._each:
                if not self._call.begin():
                    return None
                batches.append(next(self._source))
                position = dict(self._source.state())
                if not self._call.settle():
                    return None  # nobody waits for it
            return StepData(tuple(batches), self._place(batches), position)
        # BaseException: an exit that the source asks for must end the run in order, on this thread.
        except BaseException as error:
            if self._call.is_inside and not self._call.settle():
                return None
            if isinstance(error, StopTraining):
                self.stopped_by = reason_of(error, "the data source")
            elif isinstance(error, StopIteration):
                self.num_unused = len(batches)
            else:
                self.failure = error
            return None

    def _place(self, batches: Sequence[Batch]) -> int:
        first, *others = [place_of_spec(batch, self._specs) for batch in batches]
        if {*others} - {first}:
            shapes = [{name: array.shape for name, array in b.items()} for b in batches]
            raise DataError(
                f"a step accumulates {self._each} batches of one type, came {shapes}; have the"
                f" source give {self._each} batches of a shape one after the other"
            )
        return first


class SwitchedRun:
    """A run of several plans; see `Run` for what its methods have in common with that.

    Args:
        runner: makes the steps.
        plans: for each type of batches.
        run_spec: what the run was asked.
        context: where it begins, its ranks, who saves.
        evaluate: computes the outputs of the evaluation's job for a batch.
    """

    waits = None
    are_steps_untold = False

    def __init__(
        self,
        runner: SteppedRunner,
        plans: Sequence[SpecPlan],
        run_spec: RunSpec,
        context: RunContext,
        evaluate: Callable[[Batch], Metrics] | None = None,
    ) -> None:
        self._runner, self._plans, self._context = runner, plans, context
        self._run_spec, self._evaluate = run_spec, evaluate
        self._where = find_source()  # on the caller's thread
        each = plans[0].plan.batches_per_step
        self._reader = StepReader(run_spec.data, [plan.spec for plan in plans], each)
        self._thread = threading.Thread(target=self._run, name="actorflow-steps", daemon=True)
        self._pid, self._started_ns = os.getpid(), time.perf_counter_ns()
        self._waited_ns = 0
        self._reason = ""
        self._position: Mapping[str, Any] = {}
        self._saved = self.num_steps = context.first_step
        self._failure: BaseException | None = None
        self.ask: Callable[[str], object] = self.stop
        self.is_over = self.is_data_over = False

    def start(self) -> None:
        """Start the threads."""
        self._reader.start(self._run_spec.total_steps - self.num_steps)
        self._thread.start()

    def stop(self, reason: str = "") -> None:
        """Begin no further step; of several ranks none does. Safe in a signal handler."""
        self._reason = self._reason or reason or "a stop"

    def give_up_sources(self) -> None:
        """End a stopped run although the source blocks."""
        self._reader.give_up()

    def give_up_users(self, *, are_callbacks_late: bool) -> None:
        """Wait for functions of the user: they run between two steps."""

    @property
    def stopped_by(self) -> str:
        """The words of a StopTraining that the data source raised, or nothing."""
        return self._reader.stopped_by

    @property
    def num_skipped(self) -> int:
        """Steps of this run that were skipped; exact once its plans are closed."""
        return self._runner.num_skipped

    def wait(self) -> None:
        """Block until the run has ended. Raises what ended it."""
        self._thread.join()
        if unused := self._reader.num_unused:
            self._context.warn(
                f"the data ended in the middle of a step: its last {unused} batches were not used,"
                f" for a step accumulates {self._plans[0].plan.batches_per_step}"
            )
        for failure in (self._failure, self._reader.failure):
            if failure is not None:
                raise failure

    def close(self) -> None:
        """End the threads. Idempotent."""
        if not self.is_inherited:
            self.stop()
            self._reader.close()
            if self._thread.ident is not None:
                self._thread.join()

    # -- what a `Run` has in its loop --------------------------------------------------------------

    @property
    def loop(self) -> SwitchedRun:
        """What drives it: itself."""
        return self

    @property
    def is_inherited(self) -> bool:
        """Whether this is a child forked from the process of the run."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise ForkedRun in such a child."""
        if self.is_inherited:
            raise ForkedRun(f"a run of process {self._pid} cannot go on in a child forked from it")

    def ports_at(self) -> dict[str, str]:
        """Return nothing: where the threads of the user are is not known."""
        return {}

    def statistics(self) -> Statistics:
        """Return how long it took; the actors of several plans are not counted together."""
        return Statistics(time.perf_counter_ns() - self._started_ns, (), (), self._waited_ns)

    # -- on its own thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (data := self._next()) is not None:
                self._step(data)
            if self.num_steps > self._saved:
                self._save()
        # BaseException: `wait` raises it on the user's thread.
        except BaseException as error:
            self._failure = error
        self.is_over = True
        if self._context.on_finished is not None:
            self._context.on_finished()

    def _next(self) -> StepData | None:
        """Return the batches of the next step, or None at the end of the run, on all ranks."""
        data, group = None, self._context.group
        if not self._reason and self.num_steps < self._run_spec.total_steps:
            begun_ns = time.perf_counter_ns()
            data = self._reader.next()
            self._waited_ns += time.perf_counter_ns() - begun_ns
            # A source that is given up or stops the run ends it, and not the data.
            self.is_data_over = data is None and not (self._reason or self._reader.stopped_by)
        is_first = self.num_steps == self._context.first_step and not self._context.is_resumed
        is_empty = self.is_data_over and is_first and self._reader.failure is None
        if is_empty and group.is_alone:
            raise no_first_batch(self._run_spec.data, self._where)
        if group.is_alone:
            # A stop that came while the source was read ends the run before this step.
            return None if self._reason else data
        row = (-1 if data is None else data.place, self._reason)
        rows: list[Any] = group.all_gather_object("agree on the next step", row)
        places, asked = [place for place, _ in rows], next((why for _, why in rows if why), "")
        if asked and not self._reason:
            self.ask(asked)
        if is_empty and not asked:  # of the others, too: all read the same data
            raise no_first_batch(self._run_spec.data, self._where)
        if asked or -1 in places:
            return None
        if (other := next((r for r, place in enumerate(places) if place != places[0]), 0)) != 0:
            specs = [dict(self._plans[places[rank]].spec) for rank in (other, 0)]
            raise CompileError(
                f"{self._where}: rank {other} has a batch of other types for step"
                f" {self.num_steps + 1} than rank 0: {specs[0]}, and {specs[1]}; give all ranks the"
                " same batches in one order"
            )
        return data

    def _step(self, data: StepData) -> None:
        metrics = self._runner.step_of(self._plans[data.place], data.batches)
        self.num_steps += 1
        self._position = data.position
        if self._run_spec.on_step is not None:
            self._run_spec.on_step(self.num_steps, metrics)
        evaluation, saver, group = (
            self._run_spec.evaluation,
            self._context.saver,
            self._context.group,
        )
        if evaluation is not None and self.num_steps % evaluation.every == 0:
            self._report_evaluation()
        if saver is not None:
            is_due = saver.is_due(self.num_steps)
            if not group.is_alone:  # the first rank's clock counts
                is_due = bool(group.all_gather_object("agree on a checkpoint", is_due)[0])
            if is_due:
                self._save()

    def _save(self) -> None:
        """Save the state after the last step; of several ranks the first one writes it whole."""
        saver = self._context.saver
        if saver is not None:
            arrays = self._runner.variables()
            if self._context.group.is_first:
                saver.save(self.num_steps, arrays, self._position)
            self._saved = self.num_steps

    def _report_evaluation(self) -> None:
        evaluation = self._run_spec.evaluation
        if evaluation is None or self._evaluate is None:
            return
        source, begin = evaluation.data, dict(evaluation.data.state())
        batches = islice(iter(partial(next, source, None), None), evaluation.batches)
        where = f"{self._where}: the evaluation"
        results = evaluated(map(self._evaluate, batches), where, evaluation.batches)
        source.restore(begin)
        if evaluation.on_result is not None:
            evaluation.on_result(self.num_steps, results)
