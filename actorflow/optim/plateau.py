"""A learning rate that falls where a metric no longer improves: torch's ReduceLROnPlateau."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from actorflow.optim.schedules import not_negative
from actorflow.tensor.literals import checked_number, checked_size
from actorflow.tensor.tensor import Tensor
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, TensorType

_STATE = TensorType(DType.FLOAT64, (4,))


class PlateauState(Protocol):
    """What a plateau asks of its buffer, an `nn.Buffer((4,), dtype="float64")` of the model."""

    data: Any

    @property
    def type(self) -> TensorType:
        """Dtype and shape."""

    def __getitem__(self, index: Any) -> Tensor:
        """Return elements, in a job."""


class ReduceLROnPlateau:
    """A schedule whose rate `step(metric)` multiplies by `factor` after `patience` bad steps.

        model.plateau = nn.Buffer((4,), dtype="float64")
        plateau = af.optim.ReduceLROnPlateau(model.plateau, 0.1, factor=0.5, patience=3)
        train = af.job(loss, optimizer=af.optim.SGD(plateau))
        train.fit(..., evaluation=watched, callbacks=[plateau])

    As a callback of `fit` it takes a mean of each evaluation, which is no part of a training step;
    elsewhere call `step`. The buffer has the rate, the best metric, the bad steps in a row, and the
    steps of cooldown that are left: so checkpoints have them, and a run that resumes goes on with
    them. A run has a new rate in its next step. Arguments and semantics are torch's, with `lr` the
    rate that it begins with.

    Args:
        buffer: of four float64; an attribute of the model or of one of its modules.
        lr: the first rate.
        mode: "min" where less is better, or "max".
        factor: what the rate is multiplied by, in (0, 1).
        patience: bad steps that are borne; the rate falls at the next one.
        threshold: by how much a metric must be better than the best.
        threshold_mode: "rel", a share of the best, or "abs".
        cooldown: steps after a reduction that are not counted.
        min_lr: the least rate.
        eps: a smaller change of the rate is not made.
        metric: the mean of the evaluation that it takes as a callback.

    Raises CompileError with the user's line.
    """

    is_part_of_training = True

    def __init__(
        self,
        buffer: PlateauState,
        lr: float,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        eps: float = 1e-8,
        metric: str = "loss",
    ) -> None:
        where = find_source()
        if getattr(buffer, "type", None) != _STATE:
            came = getattr(buffer, "type", type(buffer).__name__)
            raise CompileError(
                f"{where}: ReduceLROnPlateau keeps its state in an nn.Buffer((4,),"
                f" dtype='float64') of the model, got {came}"
            )
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs"):
            raise CompileError(
                f"{where}: mode must be 'min' or 'max', and threshold_mode 'rel' or 'abs', got"
                f" {mode!r} and {threshold_mode!r}"
            )
        if not 0.0 < checked_number(factor, "factor") < 1.0:
            raise CompileError(f"{where}: factor must be in (0.0, 1.0), got {factor}")
        self._buffer, self._metric = buffer, metric
        self._sign = 1.0 if mode == "min" else -1.0
        self._is_relative = threshold_mode == "rel"
        self._factor = float(factor)
        self._patience = checked_size(patience, "patience")
        self._cooldown = checked_size(cooldown, "cooldown")
        self._threshold = not_negative(threshold, "threshold")
        self._least, self._eps = not_negative(min_lr, "min_lr"), not_negative(eps, "eps")
        buffer.data = np.array([not_negative(lr, "lr"), self._sign * math.inf, 0.0, 0.0])

    is_on_every_rank = True

    def __call__(self, step: Tensor) -> Tensor:
        """Return the rate, for an optimizer, which calls this while its job is traced."""
        return self._buffer[0].to(step.dtype)

    @property
    def rate(self) -> float:
        """The rate of the next step."""
        return float(self._buffer.data[0])

    def on_start(self, run: Any) -> None:
        """Check that the run evaluates the metric; called by `fit`."""
        run.check_evaluated(self._metric, "ReduceLROnPlateau")

    def on_evaluation(self, step: int, means: Mapping[str, float]) -> None:
        """Take the metric of an evaluation; called by `fit`."""
        self.step(means[self._metric])

    def step(self, metric: Any) -> float:
        """Take the metric of an evaluation, and return the rate from now on.

        To be called between steps; of several ranks by each with the same metric.
        """
        value = float(metric)
        rate, best, bad, cooldown = [float(x) for x in self._buffer.data]
        bad += 1.0
        if self._is_better(value, best):
            best, bad = value, 0.0
        if cooldown > 0.0:
            cooldown, bad = cooldown - 1.0, 0.0
        if bad > self._patience:
            lower = max(rate * self._factor, self._least)
            rate = lower if rate - lower > self._eps else rate
            cooldown, bad = float(self._cooldown), 0.0
        self._buffer.data = np.array([rate, best, bad, cooldown])
        return rate

    def _is_better(self, value: float, best: float) -> bool:
        share = best if self._is_relative and math.isfinite(best) else float(not self._is_relative)
        return self._sign * (best - value) > share * self._threshold
