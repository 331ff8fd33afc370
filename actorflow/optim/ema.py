"""Exponential moving averages of weights: what a model is often evaluated with, and kept.

    @af.job(optimizer=af.optim.AdamW(1e-3), ema=0.999)

Each trained parameter has an average beside it, the variable `ema/<parameter>`: planned, saved and
moved as the optimizer's state is. After its update the step writes

    average += (1 - decay) * (parameter - average)

as torch's `AveragedModel` with `get_ema_multi_avg_fn(decay)` does; the first step copies. A step
that is skipped leaves averages, and their count, as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from actorflow.functional.elementwise import minimum, where
from actorflow.literals import checked_number
from actorflow.optim.rates import not_negative
from actorflow.tensor import Tensor, as_tensor
from actorflow.trace.tracer import Trace, find_source
from compiler.errors import CompileError
from compiler.graph import Write
from compiler.ops.update import APPROACH
from compiler.types import DType, Phase, TensorType, ValueId

Array = np.ndarray[Any, Any]

AVERAGE = "ema/"
"""Before the name of a parameter: that of its average."""

COUNT = "ema_count"
"""The steps that averages were made of."""

_ZEROS = (("kind", "zeros"),)


@dataclass(frozen=True, slots=True)
class EMA:
    """Averages of the weights that a job trains.

    Args:
        decay: what an average keeps of itself in a step, in [0, 1).
        warmup: a power such as 2/3: after n steps an average keeps at most 1 - (1 + n)^-warmup, so
            that it follows young weights fast (timm's ModelEmaV3); None for `decay` at once.

    Raises CompileError with the user's line.
    """

    decay: float = 0.999
    warmup: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= checked_number(self.decay, "decay of an EMA") < 1.0:
            raise CompileError(
                f"{find_source()}: decay of an EMA must be in [0.0, 1.0), got {self.decay}"
            )
        if self.warmup is not None:
            not_negative(self.warmup, "warmup of an EMA")

    def add_to(self, trace: Trace, parameters: Mapping[str, TensorType]) -> None:
        """Declare averages of parameters and what a step does with them.

        The nodes read the parameters as they are before the step; `compiler.passes.averages` lets
        them read what updates make.
        """
        number = TensorType(DType.FLOAT64, ())
        with trace.scope("optimizer"):
            count = trace.variable(COUNT, number, "optimizer", _ZEROS)
            done = Tensor(trace, count)
            kept = as_tensor(float(self.decay), DType.FLOAT64)
            if self.warmup is not None:
                kept = minimum(1.0 - (done + 1.0) ** -float(self.warmup), kept)
            share = where(done == 0.0, 1.0, 1.0 - kept)
            _approach(trace, count, done + 1.0, as_tensor(1.0, DType.FLOAT64))
            for name, type_ in parameters.items():
                average = trace.variable(AVERAGE + name, type_, "optimizer", _ZEROS)
                now = Tensor(trace, trace.variable(name, type_, "parameter", ()))
                _approach(trace, average, now, share.to(type_.dtype))


def _approach(trace: Trace, average: ValueId, now: Tensor, share: Tensor) -> None:
    b = trace.builder
    declared = b.producer_of(average)
    with b.at("optimizer", declared.source, Phase.UPDATE, declared.device):
        made = b.one(APPROACH, average, now._value_in(trace), share._value_in(trace))
    b.writes.append(Write(average, made))


def averages_in(variables: Mapping[str, Array]) -> dict[str, Array]:
    """Return the averages among the variables of a run, by the paths of their parameters."""
    return {n.removeprefix(AVERAGE): a for n, a in variables.items() if n.startswith(AVERAGE)}
