"""Optimizers and learning-rate schedules.

An optimizer is a recipe: while a training job is traced it declares its state as variables and says
which update op changes each parameter. A schedule is a pure function of the step, traced into the
graph like anything else, so there is nothing of it to checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

from actorflow import functional
from actorflow.functional.counters import step_of
from actorflow.literals import checked_number
from actorflow.tensor import Tensor, as_tensor
from actorflow.trace.tracer import Trace, find_source, source_of
from compiler.attrs import Attrs
from compiler.errors import CompileError
from compiler.graph import UpdateRule
from compiler.ops import update
from compiler.registry import Op
from compiler.types import DType, TensorType

Schedule = Callable[[Tensor], Tensor | float]
"""Learning rate from the number of finished steps, in tensor operations.

The step is a float64 scalar for float64 parameters and float32 for all others: a model with both
traces its schedule once for each. A plain number is a learning rate that stays.
"""


class Optimizer(Protocol):
    """What a job needs of an optimizer."""

    def rules(self, trace: Trace, parameters: dict[str, TensorType]) -> tuple[UpdateRule, ...]:
        """Declare state and return one update rule per parameter. Called once, inside the trace."""
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum or Nesterov's momentum.

    Sources: Polyak, 1964; for Nesterov's, Sutskever et al., 2013.
    Follows torch.optim.SGD: weight decay is added to the gradient; the buffer starts at zero.
    """

    lr: float | Schedule
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        _positive(self.weight_decay, "weight_decay")
        _check_range("momentum", self.momentum, 0.0, 1.0)
        if self.nesterov and not self.momentum:
            raise CompileError(f"{find_source()}: nesterov=True needs momentum > 0")

    def rules(self, trace: Trace, parameters: dict[str, TensorType]) -> tuple[UpdateRule, ...]:
        """Return one rule per parameter; state `momentum/<name>` where momentum is used."""
        attrs = {"weight_decay": float(self.weight_decay)}
        states: tuple[str, ...] = ()
        op = update.SGD_UPDATE
        if self.momentum:
            attrs |= {"momentum": float(self.momentum), "nesterov": bool(self.nesterov)}
            op, states = update.MOMENTUM_UPDATE, ("momentum",)
        return _rules(trace, parameters, op, states, Attrs(attrs), self.lr, needs_step=False)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Kingma & Ba, 2015; Loshchilov & Hutter, 2019).

    Follows torch.optim.AdamW: epsilon is added after the bias correction.
    """

    lr: float | Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        _positive(self.eps, "eps")
        _positive(self.weight_decay, "weight_decay")
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise CompileError(f"{find_source()}: betas must be two numbers, got {self.betas!r}")
        _check_range("beta1", self.betas[0], 0.0, 1.0)
        _check_range("beta2", self.betas[1], 0.0, 1.0)

    def rules(self, trace: Trace, parameters: dict[str, TensorType]) -> tuple[UpdateRule, ...]:
        """Return one rule per parameter; state `adam_m/<name>` and `adam_v/<name>`."""
        attrs = Attrs(
            {
                "beta1": float(self.betas[0]),
                "beta2": float(self.betas[1]),
                "eps": float(self.eps),
                "weight_decay": float(self.weight_decay),
            }
        )
        states = ("adam_m", "adam_v")
        return _rules(
            trace, parameters, update.ADAMW_UPDATE, states, attrs, self.lr, needs_step=True
        )


def constant(lr: float) -> Schedule:
    """Return a schedule that is `lr` at every step."""
    rate = _positive(lr, "lr")
    return lambda step: step * 0.0 + rate


def linear(lr: float, *, steps: int, final: float = 0.0) -> Schedule:
    """Return a schedule that falls linearly from `lr` to `final` over `steps`, then stays."""
    first, last = _positive(lr, "lr"), _positive(final, "final")
    length = _length(steps, 1)
    return lambda step: first + (last - first) * _progress(step, length)


def cosine(lr: float, *, steps: int, final: float = 0.0) -> Schedule:
    """Return a half cosine from `lr` to `final` over `steps`, then `final`.

    Source: Loshchilov & Hutter, 2017.
    """
    first, last = _positive(lr, "lr"), _positive(final, "final")
    length = _length(steps, 1)

    def schedule(step: Tensor) -> Tensor:
        wave = functional.cos(_progress(step, length) * math.pi)
        return last + (first - last) * 0.5 * (1.0 + wave)

    return schedule


def warmup(schedule: float | Schedule, *, steps: int) -> Schedule:
    """Return `schedule` scaled up linearly over its first `steps` steps; 0 steps change nothing.

    `schedule` sees the step unshifted.
    """
    _check_rate(schedule)
    length = max(_length(steps, 0), 1.0)

    def warmed(step: Tensor) -> Tensor:
        scale = functional.minimum((step + 1.0) / length, 1.0)
        return scale * _rate(schedule, step)

    return warmed


def _length(steps: float, least: int) -> float:
    length = checked_number(steps, "steps of a schedule")
    if not length >= least:
        raise CompileError(f"{find_source()}: a schedule needs steps >= {least}, got {steps}")
    return length


def _progress(step: Tensor, length: float) -> Tensor:
    return functional.minimum(step / length, 1.0)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= checked_number(value, name) < high:
        raise CompileError(f"{find_source()}: {name} must be in [{low}, {high}), got {value}")


def _check_rate(lr: float | Schedule) -> None:
    if not callable(lr):
        _positive(lr, "lr, unless it is a schedule,")


def _positive(number: float, what: str) -> float:
    """Return a number that is 0 or more; a negative rate would climb, a NaN ends every run."""
    value = checked_number(number, what)
    if not 0.0 <= value < math.inf:
        raise CompileError(f"{find_source()}: {what} must be finite and 0 or more, got {number}")
    return value


def _rate(lr: float | Schedule, step: Tensor) -> Tensor:
    """Return the learning rate at `step`, in its dtype.

    Raises CompileError for what is no scalar of that dtype or of float32.
    """
    dtype = step.type.dtype
    given: object = lr(step) if callable(lr) else lr
    if isinstance(given, Real):
        return as_tensor(float(given), dtype)
    allowed = [TensorType(d, ()) for d in (DType.FLOAT32, dtype)]
    if not isinstance(given, Tensor) or given.type not in allowed:
        came = given.type if isinstance(given, Tensor) else type(given).__name__
        raise CompileError(
            f"{source_of(lr)}: a schedule must return a {dtype.value} scalar or a number, it"
            f" returned {came}"
        )
    return given.to(dtype)


def _rules(
    trace: Trace,
    parameters: dict[str, TensorType],
    op: Op,
    states: tuple[str, ...],
    attrs: Attrs,
    lr: float | Schedule,
    *,
    needs_step: bool,
) -> tuple[UpdateRule, ...]:
    step = step_of(trace)
    widths = {name: _rate_dtype(type_.dtype) for name, type_ in parameters.items()}
    with trace.scope("optimizer"):
        rates = {dtype: _rate(lr, step.to(dtype)) for dtype in dict.fromkeys(widths.values())}
    rules = []
    for name, type_ in parameters.items():
        scalars = [rates[widths[name]].to(type_.dtype)._value_in(trace)]
        if needs_step:
            scalars.append(step._value_in(trace))
        zeros = (("kind", "zeros"),)
        rules.append(
            UpdateRule(
                op=op,
                variable=trace.variable(name, type_, "parameter", ()),
                state=tuple(
                    trace.variable(f"{s}/{name}", type_, "optimizer", zeros) for s in states
                ),
                scalars=tuple(scalars),
                attrs=attrs,
            )
        )
    return tuple(rules)


def _rate_dtype(dtype: DType) -> DType:
    """Return the dtype in which the learning rate of a parameter is computed."""
    return DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
