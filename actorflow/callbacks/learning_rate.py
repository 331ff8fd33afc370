"""A learning rate found by a short run in which it grows: Smith, 2017, section 3.3."""

from __future__ import annotations

import math

import numpy as np

from actorflow.callbacks.protocol import Metrics, StartedRun, StopTraining
from actorflow.functional import exp
from actorflow.tensor.literals import checked_number, checked_size
from actorflow.tensor.tensor import Tensor
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType

_SMOOTHING = 0.98
_DIVERGED = 4.0
"""How many times the least loss is too much."""
_SKIPPED = 10
"""First losses that say nothing, as the mean over the losses before them is still short."""


class LearningRateFinder:
    """A schedule that grows from `low` to `high`, and a callback that notes the loss at each rate.

        finder = af.callbacks.LearningRateFinder(1e-6, 1.0, steps=100)
        trial = af.job(train.function, optimizer=af.optim.AdamW(finder))
        trial.fit(Net(), data, steps=100, callbacks=[finder], progress=False)
        print(finder.rate)

    The run ends early where the smoothed loss is four times the least one. "Cyclical Learning Rates
    for Training Neural Networks" (Smith, WACV 2017); smoothing and suggestion are Lightning's.

    Args:
        low: the rate of the first step.
        high: the rate of the last step.
        steps: how many there are.
        loss: name of the output that is noted.

    `rates` and `losses` are those of the steps so far; losses are smoothed. Raises CompileError
    with the user's line.
    """

    is_waited_for = False

    def __init__(
        self, low: float = 1e-8, high: float = 1.0, *, steps: int = 100, loss: str = "loss"
    ) -> None:
        self._low, self._high = checked_number(low, "low"), checked_number(high, "high")
        self._steps, self._loss = checked_size(steps, "steps"), loss
        if not 0.0 < self._low < self._high < math.inf or self._steps <= _SKIPPED + 2:
            raise CompileError(
                f"{find_source()}: LearningRateFinder needs 0 < low < high and more than"
                f" {_SKIPPED + 2} steps, got {low}, {high} and {steps}"
            )
        self._growth = math.log(self._high / self._low) / (self._steps - 1)
        self.rates: list[float] = []
        self.losses: list[float] = []
        self._mean = 0.0

    def __call__(self, step: Tensor) -> Tensor:
        """Return the rate, for an optimizer, which calls this while its job is traced."""
        rate = exp(step.to(DType.FLOAT64) * self._growth) * self._low
        return rate.to(step.dtype)

    def on_start(self, run: StartedRun) -> None:
        """Begin anew. Raises CompileError where the job has no such output."""
        if self._loss not in run.outputs:
            raise CompileError(
                f"{find_source()}: LearningRateFinder needs the output {self._loss!r}, and the job"
                f" has {', '.join(map(repr, run.outputs))}; name one of them by loss="
            )
        self.rates, self.losses, self._mean = [], [], 0.0

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Note a loss. Raises StopTraining where it has diverged."""
        count = len(self.losses) + 1
        self._mean = _SMOOTHING * self._mean + (1.0 - _SMOOTHING) * float(metrics[self._loss])
        smooth = self._mean / (1.0 - _SMOOTHING**count)
        self.rates.append(self._low * math.exp(self._growth * (step - 1)))
        self.losses.append(smooth)
        if count > 1 and not smooth <= _DIVERGED * min(self.losses):
            raise StopTraining(f"the loss has diverged at a rate of {self.rates[-1]:g}")

    @property
    def rate(self) -> float:
        """The rate at which the loss fell fastest. Raises CompileError after too few steps."""
        losses = np.array(self.losses[_SKIPPED:-1])
        losses = losses[np.isfinite(losses)]
        if len(losses) < 2:
            raise CompileError(
                f"{find_source()}: LearningRateFinder has seen {len(self.losses)} losses, too few"
                " for a rate; begin with a lower rate, or give more steps"
            )
        return self.rates[_SKIPPED + int(np.gradient(losses).argmin())]
