"""A learning rate: a number, or a function of the finished steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from actorflow.literals import checked_number
from actorflow.tensor import Tensor, as_tensor
from actorflow.trace.tracer import find_source, source_of
from compiler.errors import CompileError
from compiler.types import DType, TensorType

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
