"""Metrics by a rule of the user's own: sums over all rows, and a function of these.

    @af.metrics.rule
    def percentage_error(count, errors):
        return 100 * errors / count

    return {"loss": loss, "error": percentage_error(abs(z - y) / y, mask=batch.rows)}

What a sum over rows is exact in does not depend on how they are cut into batches, or on which rank
they are. So a metric that is a function of such sums is one of the whole set.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from actorflow.data import DataError
from actorflow.functional.elementwise import where
from actorflow.metrics.totals import OWN, RULES, Metric, NothingCounts, Rule
from actorflow.tensor.tensor import Operand, Tensor, as_tensor
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType

Array = np.ndarray[Any, Any]


class OwnRule:
    """What `af.metrics.rule` makes of a function; called in a job it returns a metric."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function) or isinstance(function, type):
            raise CompileError(
                f"{find_source()}: af.metrics.rule takes a function of the number of rows and of"
                f" sums over them, got {type(function).__name__}"
            )
        self._function = function
        functools.update_wrapper(self, function)
        name = f"{OWN}{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
        self._name = _free_name(name.replace("/", "."))
        RULES[self._name] = Rule(self._value)

    def __call__(self, *rows: Operand, mask: Operand | None = None) -> Metric:
        """Return the metric of rows, [N, ...] each, of which those count where `mask` is not 0.

        Raises CompileError with the user's line.
        """
        parts = [as_tensor(one) for one in rows]
        lengths = {part.shape[:1] for part in parts}
        shape = next(iter(lengths), ())
        counts = as_tensor(np.ones(shape, bool) if mask is None else mask)
        if len(lengths) != 1 or () in lengths or lengths != {counts.shape}:
            came = ", ".join([str(part.type) for part in parts]) or "none"
            raise CompileError(
                f"{find_source()}: rule {self._function.__name__!r} takes tensors [N, ...] with a"
                f" row for each of a batch, and mask= [N], got {came}"
                + ("" if mask is None else f" and a mask {counts.type}")
            )
        is_row = counts != 0
        sums = [_sum_of(part, is_row) for part in parts]
        return Metric(self._name, (is_row.sum(), *sums), find_source())

    def _value(self, count: Array, *sums: Array) -> Any:
        if not count:
            raise NothingCounts(math.nan)
        try:
            value = self._function(count[()], *[total[()] for total in sums])
        except Exception as error:
            raise DataError(f"its rule raised {type(error).__name__}: {error}") from error
        if not isinstance(value, (int, float, np.generic, np.ndarray)):
            raise DataError(
                f"its rule is to return a number or an array, came {type(value).__name__}"
            )
        return value


def _free_name(name: str) -> str:
    """Return a name that no rule has yet: a cell may be run again, a function made in a loop."""
    names = itertools.chain([name], (f"{name} {number}" for number in itertools.count(2)))
    return next(one for one in names if one not in RULES)


def _sum_of(part: Tensor, is_row: Tensor) -> Tensor:
    wide = part.to(DType.FLOAT64 if part.dtype.is_float else DType.INT64)
    return where(is_row.reshape(-1, *[1] * (part.ndim - 1)), wide, 0).sum(0)


def rule(function: Callable[..., Any]) -> OwnRule:
    """Make a metric of a function of sums; for a decorator.

        @af.metrics.rule
        def percentage_error(count, errors):
            return 100 * errors / count

    In a job `percentage_error(tensor, mask=batch.rows)` is a metric as `af.metrics.accuracy` is:
    exact over the rows of all batches and ranks. The function gets the number of rows that count,
    and for each tensor [N, ...] its sum over them, a number or an array [...] of numpy: float64 of
    floats, int64 of integers and bools. It returns a number, or an array. What is made of several
    numbers of a row, such as a square, is computed in the job.

    A plan in a file names the rule: whoever runs it has to import the module of the function.

    Raises CompileError with the user's line.
    """
    return OwnRule(function)
