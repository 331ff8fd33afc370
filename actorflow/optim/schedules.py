"""Learning-rate schedules: pure functions of the number of finished steps.

They compute in float64 and round once, so that a rate of the millionth step has the digits of the
first. Semantics are those of torch.optim.lr_scheduler, with `lr` the rate that torch has in its
optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from numbers import Real

from actorflow import functional
from actorflow.tensor.literals import checked_number
from actorflow.tensor.tensor import Tensor, as_tensor
from actorflow.tensor.tracer import find_source, source_of
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, TensorType

Schedule = Callable[[Tensor], Tensor | float]
"""Learning rate from the number of finished steps, in tensor operations.

The step is a float64 scalar for float64 parameters and float32 for all others: a model with both
traces its schedule once for each. A plain number is a learning rate that stays.
"""


def rate_at(lr: float | Schedule, step: Tensor) -> Tensor:
    """Return the learning rate at `step`, in its dtype.

    Raises CompileError for what is no scalar of that dtype or of float32.
    """
    dtype = step.type.dtype
    rate: object = lr(step) if callable(lr) else lr
    if isinstance(rate, Real):
        return as_tensor(float(rate), dtype)
    allowed = [TensorType(d, ()) for d in (DType.FLOAT32, dtype)]
    if not isinstance(rate, Tensor) or rate.type not in allowed:
        came = rate.type if isinstance(rate, Tensor) else type(rate).__name__
        raise CompileError(
            f"{source_of(lr)}: a schedule must return a {dtype.value} scalar or a number, it"
            f" returned {came}"
        )
    return rate.to(dtype)


def check_rate(lr: float | Schedule) -> None:
    """Raise CompileError for what is neither a number, 0 or more, nor a function."""
    if not callable(lr):
        not_negative(lr, "lr, unless it is a schedule,")


def not_negative(number: object, what: str) -> float:
    """Return a number that is 0 or more; a negative rate would climb, a NaN ends every run."""
    value = checked_number(number, what)
    if not 0.0 <= value < math.inf:
        raise CompileError(f"{find_source()}: {what} must be finite and 0 or more, got {number}")
    return value


def constant(lr: float) -> Schedule:
    """Return a schedule that is `lr` at every step."""
    rate = not_negative(lr, "lr")
    return _exact(lambda step: step * 0.0 + rate)


def linear(lr: float, *, steps: int, final: float = 0.0) -> Schedule:
    """Return a schedule that falls linearly from `lr` to `final` over `steps`, then stays."""
    return polynomial(lr, steps=steps, final=final)


def polynomial(lr: float, *, steps: int, power: float = 1.0, final: float = 0.0) -> Schedule:
    """Return `lr` falling to `final` as (1 - step / steps)^power, then `final`."""
    first, last = not_negative(lr, "lr"), not_negative(final, "final")
    length, exponent = _length(steps, 1), not_negative(power, "power")
    if exponent == 1.0:
        return _exact(lambda step: first + (last - first) * _progress(step, length))
    return _exact(lambda step: last + (first - last) * (1.0 - _progress(step, length)) ** exponent)


def cosine(lr: float, *, steps: int, final: float = 0.0) -> Schedule:
    """Return a half cosine from `lr` to `final` over `steps`, then `final`.

    Source: Loshchilov & Hutter, 2017.
    """
    first, last = not_negative(lr, "lr"), not_negative(final, "final")
    length = _length(steps, 1)
    return _exact(lambda step: _wave(first, last, _progress(step, length)))


def cosine_restarts(lr: float, *, steps: int, mult: int = 1, final: float = 0.0) -> Schedule:
    """Return half cosines from `lr` to `final`, each `mult` times as long as the one before.

    The first takes `steps`. Source: Loshchilov & Hutter, 2017; torch's CosineAnnealingWarmRestarts.
    """
    first, last = not_negative(lr, "lr"), not_negative(final, "final")
    length, factor = _length(steps, 1), _length(mult, 1, "mult")
    if factor == 1.0:
        return _exact(lambda step: _wave(first, last, step / length - _whole(step / length)))

    def schedule(step: Tensor) -> Tensor:
        # The cycle that a step is in, as ends of cycles form a geometric sum. A logarithm of a
        # whole power may come out a little below it.
        past = functional.log(step * (factor - 1.0) / length + 1.0) / math.log(factor)
        scale = factor ** _whole(past + 1e-9)
        begin = (scale - 1.0) / (factor - 1.0) * length
        return _wave(first, last, (step - begin) / (scale * length))

    return _exact(schedule)


def step(lr: float, *, every: int, gamma: float = 0.1) -> Schedule:
    """Return `lr`, multiplied by `gamma` after `every` steps, and again; torch's StepLR."""
    rate, length, factor = not_negative(lr, "lr"), _length(every, 1, "every"), _gamma(gamma)
    return _exact(lambda step: rate * factor ** _whole(step / length))


def multi_step(lr: float, *, milestones: Sequence[int], gamma: float = 0.1) -> Schedule:
    """Return `lr`, multiplied by `gamma` at each of the `milestones`; torch's MultiStepLR."""
    rate, ends, factor = not_negative(lr, "lr"), _milestones(milestones), _gamma(gamma)

    def schedule(step: Tensor) -> Tensor:
        rates = [rate * factor**count for count in range(len(ends) + 1)]
        return _pieces(step, ends, [step * 0.0 + value for value in rates])

    return _exact(schedule)


def exponential(lr: float, *, gamma: float) -> Schedule:
    """Return `lr` times `gamma` to the power of the step; torch's ExponentialLR."""
    rate, factor = not_negative(lr, "lr"), _gamma(gamma)
    return _exact(lambda step: rate * factor**step)


def one_cycle(
    lr: float,
    *,
    steps: int,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """Return a rate that climbs to `lr` and falls to nearly nothing over `steps`, by cosines.

    It begins at lr / div_factor, is at `lr` after `pct_start` of the steps, and ends at
    lr / div_factor / final_div_factor, where it stays. With `three_phase` it falls to where it
    began as fast as it climbed, and then on. Source: Smith & Topin, 2018; torch's OneCycleLR,
    without the momentum.
    """
    most, length = not_negative(lr, "lr"), _length(steps, 2)
    share = not_negative(pct_start, "pct_start")
    if not 0.0 < share < 1.0:
        raise CompileError(f"{find_source()}: pct_start must be in (0, 1), got {pct_start}")
    begin = most / _divisor(div_factor, "div_factor")
    last = begin / _divisor(final_div_factor, "final_div_factor")
    top = share * length - 1.0
    if three_phase:
        points = [(top, begin, most), (2.0 * top, most, begin), (length - 1.0, begin, last)]
    else:
        points = [(top, begin, most), (length - 1.0, most, last)]

    def schedule(step: Tensor) -> Tensor:
        rates, start = [], 0.0
        for end, low, high in points:
            part = (step - start) / (end - start) if end > start else step * 0.0 + 1.0
            rates.append(_wave(low, high, functional.maximum(functional.minimum(part, 1.0), 0.0)))
            start = end
        # A phase holds its last step, too: torch asks whether a step is beyond it.
        return _pieces(step, [math.floor(end) + 1.0 for end, _, _ in points[:-1]], rates)

    return _exact(schedule)


def wsd(lr: float, *, warmup: int, stable: int, decay: int, final: float = 0.0) -> Schedule:
    """Return a rate that climbs for `warmup` steps, stays for `stable` and falls for `decay`.

    Straight lines: (step + 1) / warmup of `lr` at first, as `af.optim.warmup` has it; then from
    `lr` to `final`, where it stays. Source: Hu et al., MiniCPM, 2024.
    """
    rate, last = not_negative(lr, "lr"), not_negative(final, "final")
    up, flat = _length(warmup, 0, "warmup"), _length(stable, 0, "stable")
    down = _length(decay, 1, "decay")

    def schedule(step: Tensor) -> Tensor:
        climbed = functional.minimum((step + 1.0) / max(up, 1.0), 1.0) * rate
        fallen = _progress(functional.maximum(step - (up + flat), 0.0), down)
        return climbed + (last - rate) * fallen

    return _exact(schedule)


def warmup(schedule: float | Schedule, *, steps: int) -> Schedule:
    """Return `schedule` scaled up linearly over its first `steps` steps; 0 steps change nothing.

    `schedule` sees the step unshifted.
    """
    check_rate(schedule)
    length = max(_length(steps, 0), 1.0)

    def warmed(step: Tensor) -> Tensor:
        scale = functional.minimum((step.to(DType.FLOAT64) + 1.0) / length, 1.0)
        return (scale * rate_at(schedule, step).to(DType.FLOAT64)).to(step.dtype)

    return warmed


def chain(schedules: Sequence[float | Schedule], *, milestones: Sequence[int]) -> Schedule:
    """Return schedules one after another: the next one begins, at its step 0, at each milestone.

    As torch's SequentialLR. A number is a rate that stays.
    """
    parts = list(schedules) if isinstance(schedules, (list, tuple)) else []
    for part in parts:
        check_rate(part)
    ends = _milestones(milestones)
    if not parts or len(ends) != len(parts) - 1:
        raise CompileError(
            f"{find_source()}: chain needs a list of schedules and one milestone between two of"
            f" them, got {len(parts)} schedules and {len(ends)} milestones"
        )

    def schedule(step: Tensor) -> Tensor:
        begins = [0.0, *ends]
        rates = [rate_at(p, step - start) for p, start in zip(parts, begins, strict=True)]
        return _pieces(step, ends, rates)

    return schedule


def _exact(formula: Callable[[Tensor], Tensor]) -> Schedule:
    """Return a formula as a schedule that computes in float64."""
    return lambda step: formula(step.to(DType.FLOAT64)).to(step.dtype)


def _pieces(step: Tensor, ends: Sequence[float], rates: Sequence[Tensor]) -> Tensor:
    """Return the first rate before the first end, the last after the last."""
    pairs = list(zip(ends, rates, strict=False))
    return reduce(
        lambda later, pair: functional.where(step < pair[0], pair[1], later),
        pairs[::-1],
        rates[-1],
    )


def _wave(first: float, last: float, progress: Tensor) -> Tensor:
    return last + (first - last) * 0.5 * (1.0 + functional.cos(progress * math.pi))


def _whole(quotient: Tensor) -> Tensor:
    """Return the whole part of a number that is not negative."""
    return quotient.to(DType.INT64).to(quotient.dtype)


def _progress(step: Tensor, length: float) -> Tensor:
    return functional.minimum(step / length, 1.0)


def _length(steps: object, least: int, what: str = "steps") -> float:
    length = checked_number(steps, f"{what} of a schedule")
    if not least <= length < math.inf:
        raise CompileError(f"{find_source()}: a schedule needs {what} >= {least}, got {steps}")
    return length


def _gamma(gamma: object) -> float:
    return not_negative(gamma, "gamma")


def _divisor(number: object, what: str) -> float:
    value = not_negative(number, what)
    if value == 0.0:
        raise CompileError(f"{find_source()}: {what} divides, it must be above 0")
    return value


def _milestones(given: object) -> list[float]:
    """Return steps in ascending order. Raises CompileError for anything else."""
    if not isinstance(given, (list, tuple)):
        raise CompileError(
            f"{find_source()}: milestones must be a list of steps, got {type(given).__name__}"
        )
    ends = [_length(end, 1, "milestones") for end in given]
    if ends != sorted(set(ends)):
        raise CompileError(f"{find_source()}: milestones must ascend, got {given}")
    return ends
