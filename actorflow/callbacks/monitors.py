"""Callbacks that watch a run: they end it, lower its rate, or ask it for numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from actorflow.callbacks.protocol import Metrics, Results, StartedRun, StopTraining
from actorflow.checkpoint.errors import CheckpointError, Every
from actorflow.tensor.literals import checked_number, checked_size
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.graph.target import GRAD_NORM, LEARNING_RATE

MIN, MAX = "min", "max"


def checked_mode(mode: object) -> float:
    """Return what a metric is multiplied by so that less is better. Raises CompileError."""
    if mode not in (MIN, MAX):
        raise CompileError(f"{find_source()}: mode must be 'min' or 'max', got {mode!r}")
    return 1.0 if mode == MIN else -1.0


class EarlyStopping:
    """Ends a run when a metric of its evaluations has not improved for some of them.

        fit(..., evaluation=watched, callbacks=[af.callbacks.EarlyStopping("loss", patience=5)])

    A run that resumes counts the evaluations that its directory tells of, so it ends where an
    uninterrupted one does. NaN is no improvement. `best` and `best_step` are the best so far.

    Args:
        metric: a mean of the evaluation.
        patience: evaluations in a row without an improvement after which the run ends.
        min_delta: by how much a value must be better than the best.
        mode: "min" where less is better, or "max".

    Raises CompileError with the user's line.
    """

    def __init__(
        self, metric: str = "loss", patience: int = 3, min_delta: float = 0.0, mode: str = MIN
    ) -> None:
        self._metric, self._sign = metric, checked_mode(mode)
        self._patience = checked_size(patience, "patience")
        self._min_delta = checked_number(min_delta, "min_delta")
        if self._patience < 1 or not 0.0 <= self._min_delta < math.inf:
            raise CompileError(
                f"{find_source()}: patience must be 1 or more, and min_delta finite and 0 or more,"
                f" got {patience} and {min_delta}"
            )
        self._begin()

    def _begin(self) -> None:
        self.best, self.best_step, self._num_bad = self._sign * math.inf, 0, 0

    def on_start(self, run: StartedRun) -> None:
        """Take what earlier runs have evaluated."""
        run.check_evaluated(self._metric, "EarlyStopping")
        self._begin()
        for step, means in run.evaluations:
            if self._metric in means:
                self.on_evaluation(step, means)

    def on_evaluation(self, step: int, means: Results) -> None:
        """Count an evaluation. Raises StopTraining."""
        value = means[self._metric]
        if self._sign * (self.best - value) > self._min_delta:
            self.best, self.best_step, self._num_bad = value, step, 0
            return
        self._num_bad += 1
        if self._num_bad >= self._patience:
            raise StopTraining(
                f"{self._metric} has not improved in {self._num_bad} evaluations on {self.best:g},"
                f" that of step {self.best_step}"
            )


class SweepTrial(Protocol):
    """What a sweep hands out for one run, as optuna's Trial."""

    def report(self, value: float, step: int) -> object:
        """Take an intermediate value."""

    def should_prune(self) -> bool:
        """Whether the run is not worth going on with."""
        ...


class Pruning:
    """Reports a metric of the evaluations to a sweep, which may end the run.

        pruning = af.callbacks.Pruning(trial, "loss")
        train.fit(..., callbacks=[pruning])
        if pruning.is_pruned:
            raise optuna.TrialPruned

    Args:
        trial: of optuna, or with its methods `report(value, step)` and `should_prune()`.
        metric: a mean of the evaluation.
    """

    def __init__(self, trial: SweepTrial, metric: str = "loss") -> None:
        self._trial, self._metric = trial, metric
        self.is_pruned = False

    def on_start(self, run: StartedRun) -> None:
        """Check that the metric is there."""
        run.check_evaluated(self._metric, "Pruning")
        self.is_pruned = False

    def on_evaluation(self, step: int, means: Results) -> None:
        """Report an evaluation. Raises StopTraining."""
        self._trial.report(means[self._metric], step)
        if self._trial.should_prune():
            self.is_pruned = True
            raise StopTraining("the sweep prunes this run")


class Timer:
    """Ends a run after a time, such as that of a queue; of this call of `fit`.

    Args:
        limit: seconds, or a text such as "30min" or "12h".
        clock: seconds, monotonic.

    Raises CompileError with the user's line.
    """

    is_waited_for = False

    def __init__(self, limit: float | str, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            every = Every(seconds=limit) if isinstance(limit, (int, float)) else Every.parse(limit)
        except CheckpointError:
            every = None
        if every is None or every.seconds is None:
            raise CompileError(
                f"{find_source()}: limit of a Timer must be seconds, or a time such as '30min' or"
                f" '12h', got {limit!r}"
            )
        self._limit, self._limit_s, self._clock = limit, every.seconds, clock
        self._start_s = clock()

    def on_start(self, run: StartedRun) -> None:
        """Begin to count."""
        self._start_s = self._clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._start_s

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Look at the clock. Raises StopTraining."""
        if self.elapsed_s >= self._limit_s:
            raise StopTraining(f"the limit of {self._limit} is over")


class LearningRate:
    """Adds the learning rate of a step to its outputs, as `lr`.

    Where parameters have several rates each is `lr/<path>`, with the path of the first parameter
    that has it. Progress lines, `metrics.jsonl` and loggers have it like any other output.
    """

    asked_outputs = (LEARNING_RATE,)


class GradientNorms:
    """Adds the norm of all gradients of a step to its outputs, as `grad_norm`.

    It is the norm before clipping, exactly that of `clip_norm`; gradients are not changed. It costs
    one launch for each parameter, which reads its gradient once more.
    """

    asked_outputs = (GRAD_NORM,)
