"""The calls of a run's callbacks: one at a time, each with its name where it raises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from actorflow.callbacks.protocol import (
    EVALUATION,
    METHODS,
    Callback,
    Metrics,
    Results,
    StartedRun,
    StopTraining,
    is_part_of_training,
    reason_of,
)
from actorflow.compile.plan_facts import sink_fields
from actorflow.metrics.totals import RULES, columns_of
from actorflow.run.report import read_metrics
from actorflow.run.stopping import ON_RESULT, ON_STEP, Stopper
from actorflow.run.training_writes import TrainingWrites
from compiler.contract.plan import Plan
from compiler.contract.probe import is_probe
from compiler.contract.statistic import MEAN
from compiler.contract.types import TensorType


class CallbackCalls:
    """Calls the callbacks of one run; as a context it closes them, however the run ended.

    Args:
        callbacks: those that this rank calls.
        stopper: of the run, asked for the end by what they raise.
        writes: hears of the calls of those that are part of the training.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        stopper: Stopper,
        writes: TrainingWrites | None = None,
    ) -> None:
        self._stopper, self._writes = stopper, writes
        # By method, with names; looked up once, for most runs have none and every step asks.
        self._methods: dict[str, list[tuple[str, Callable[..., object]]]] = {}
        self._trained: dict[str, list[Callback]] = {}
        """By method those that are called for the training's sake, None in place of others."""
        for method in METHODS:
            called = [callback for callback in callbacks if hasattr(callback, method)]
            self._methods[method] = [
                (f"{type(callback).__name__}.{method}", getattr(callback, method))
                for callback in called
            ]
            self._trained[method] = [one if is_part_of_training(one) else None for one in called]
        # Steps and evaluations come on two threads.
        self._lock = threading.Lock()

    def start(self, run: StartedRun) -> None:
        """Tell of the start. Raises what a callback raises; StopTraining ends the run at once."""
        for name, on_start in self._methods["on_start"]:
            try:
                on_start(run)
            except StopTraining as stop:
                self._stopper.ask(reason_of(stop, name))
            except BaseException as error:
                error.add_note(f"raised by {name}")
                raise

    def step(self, step: int, metrics: Metrics) -> None:
        """Tell of a step, on the thread of its outputs."""
        if self._methods["on_step"]:
            self._tell("on_step", ON_STEP, step, metrics)

    def evaluation(self, step: int, means: Results) -> None:
        """Tell of an evaluation, on its thread."""
        self._tell("on_evaluation", ON_RESULT, step, means)

    def end(self, result: object) -> None:
        """Tell of a run that ended in order. Raises what a callback raises."""
        for name, on_end in self._methods["on_end"]:
            try:
                on_end(result)
            except StopTraining:  # it has ended
                continue
            except BaseException as error:
                error.add_note(f"raised by {name}")
                raise

    def __enter__(self) -> CallbackCalls:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        raised: BaseException | None = None
        for name, close in self._methods["close"]:
            try:
                close()
            except Exception as other:  # the others are closed all the same
                other.add_note(f"raised by {name}")
                raised = raised or other
        if error is not None and raised is not None:
            error.add_note(f"after that {raised!r} was {raised.__notes__[-1]}")
        elif raised is not None:
            raise raised

    def _tell(self, method: str, role: str, step: int, results: Mapping[str, Any]) -> None:
        trained, writes = self._trained[method], self._writes
        num_waited_for = sum(one is not None for one in trained) if writes is not None else 0
        for (name, function), callback in zip(self._methods[method], trained, strict=True):
            with self._lock:
                if writes is None or callback is None:
                    self._stopper.call(role, function, step, results, by=name)
                    continue
                with writes.hearing(callback, method, step):
                    self._stopper.call(role, function, step, results, by=name)
            num_waited_for -= 1
            if not num_waited_for:  # those behind it may wait for the checkpoint of this step
                writes.heard(method, step)


def scalars_of(plan: Plan, sink: str) -> tuple[str, ...]:
    """Return the names of the numbers that come to a sink of a plan, none without it."""
    if all([actor.name != sink for actor in plan.actors]):
        return ()
    return told_names({f.name: plan.views[f.view].type for f in sink_fields(plan, sink)})


def told_names(outputs: Mapping[str, TensorType]) -> tuple[str, ...]:
    """Return the names of metrics and of other outputs that are numbers, as a plan has them.

    Raises PlanFormatError for a rule that is not known.
    """
    shapes = {name: type_.shape for name, type_ in outputs.items() if not is_probe(name)}
    columns = columns_of(shapes)
    arrays = [n for n, c in columns.items() if RULES[c.rule].is_array]
    arrays += [n for n, c in columns.items() if c.rule == MEAN and shapes[c.parts[0]]]
    return tuple([name for name in columns if name not in arrays])


def earlier_evaluations(
    path: Path, last: int, report: Callable[[str], object]
) -> tuple[tuple[int, Results], ...]:
    """Return (step, values) of the evaluations up to a step that a metrics file tells of.

    Lines that are none of a run are left out. A file that cannot be read is reported: callbacks
    then begin anew.
    """
    rows: dict[int, Results] = {}
    try:
        lines = read_metrics(path)
    except FileNotFoundError:  # none was written
        return ()
    except OSError as error:
        report(
            f"{path} cannot be read ({error.strerror}): callbacks are told of no evaluation before"
            f" step {last}"
        )
        return ()
    for line in lines:
        step = line.get("step")
        if isinstance(step, int) and step <= last and (values := _evaluated(line)):
            rows[step] = values  # of lines with one step the last counts
    return tuple(sorted(rows.items()))


def _evaluated(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation in a line of metrics, where it has some."""
    values: dict[str, float] = {}
    for name, value in line.items():
        if name.startswith(EVALUATION):
            with suppress(TypeError, ValueError):  # NaN is written as a text
                values[name.removeprefix(EVALUATION)] = float(value)
    return values
