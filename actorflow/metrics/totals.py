"""Values of several batches: how each follows from what its batches computed.

A value has parts, one array of each batch for each part (`compiler.contract.statistic`). Its rule
either sums a part over the batches, in int64 or float64, or keeps the arrays of all batches, and
finishes the value from these. So a metric of a whole set is no mean of those of its batches: it is
what it would be of one batch with all rows. Outputs that are no metrics are means by weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actorflow.data import DataError
from actorflow.tensor.tensor import Tensor
from compiler.contract.errors import PlanFormatError
from compiler.contract.statistic import MEAN, Statistic, statistic_of
from compiler.graph.graph import SourceLocation


class NothingCounts(Exception):
    """Nothing counts in any batch; `value` is what a step gives then."""

    def __init__(self, value: Any = math.nan) -> None:
        super().__init__("nothing counts")
        self.value = value


@dataclass(frozen=True, slots=True)
class Rule:
    """How a value follows from its parts.

    `finish` takes, for each part, the sum over all batches: an array of int64 or float64. Or, where
    the rule `keeps_batches`, a list of the arrays of the batches. It returns a number, or, where it
    `is_array`, an array (one of a user's own may, too), and raises NothingCounts, or DataError for
    what the data should not have.
    """

    finish: Callable[..., Any]
    keeps_batches: bool = False
    is_array: bool = False


RULES: dict[str, Rule] = {}
"""All rules by name; plans name them."""
OWN = "own "
"""How the name of a rule begins that a user has made."""


@dataclass(frozen=True, slots=True)
class Column:
    """A value among outputs: its rule, the names of its parts in order, and the user's line."""

    rule: str
    parts: tuple[str, ...]
    line: str = ""


OutputColumns = Mapping[str, Column]


def columns_of(names: Iterable[str], lines: Mapping[str, str] | None = None) -> OutputColumns:
    """Return the values that outputs of these names are, by name and in the order of the outputs.

    `lines` are those of outputs, for messages. Raises PlanFormatError for a rule that is not known.
    """
    parts: dict[str, list[tuple[int, str, str]]] = {}
    for name in names:
        statistic = statistic_of(name)
        if statistic.rule not in RULES:
            mend = "use the version that compiled the plan"
            if statistic.rule.startswith(OWN):
                mend = "import the module that makes it by af.metrics.rule"
            raise PlanFormatError(
                f"output {statistic.output!a:.60} follows a rule {statistic.rule!a:.60}, which this"
                f" actorflow does not have; {mend}"
            )
        parts.setdefault(statistic.output, []).append((statistic.part, name, statistic.rule))
    columns = {}
    for output, found in parts.items():
        names = tuple([name for _, name, _ in sorted(found)])
        columns[output] = Column(found[0][2], names, (lines or {}).get(names[0], ""))
    return columns


class Outputs(dict[str, Any]):
    """The values of a step of one batch by name; `batch` is all that it computed."""

    __slots__ = ("batch", "columns")

    def __init__(self, batch: Mapping[str, Any], columns: OutputColumns) -> None:
        # Only metrics are computed: of one batch another output keeps its bits.
        metrics = {name: column for name, column in columns.items() if column.rule != MEAN}
        values = Totals(metrics).add(batch).values() if metrics else {}
        super().__init__({n: values[n] if n in values else batch[n] for n in columns})
        self.batch, self.columns = batch, columns


@dataclass(frozen=True, slots=True)
class Metric:
    """What a function of `af.metrics` returns, to be returned by the job.

    Whoever hears of the job gets its value: of a step that of the rows of this step, of an
    evaluation that of all rows.
    """

    rule: str
    parts: tuple[Tensor, ...]
    source: SourceLocation

    def outputs(self, name: str) -> dict[str, Tensor]:
        """Return the outputs of a job that the value of this name follows from."""
        return {Statistic(self.rule, i, name).name: part for i, part in enumerate(self.parts)}

    def compute(self) -> Any:
        """Return its value in eager code, of these rows: a number, or an array.

        Raises CompileError in a job, where there are no data yet, and DataError for bad data.
        """
        arrays = {name: np.array(part) for name, part in self.outputs("compute").items()}
        return Outputs(arrays, columns_of(arrays))["compute"]


class Totals:
    """What some batches have computed so far.

    Arrays of a rule that keeps batches are kept as they come, so they may not change until then.

    Args:
        columns: the values.
        is_evaluation: whether arrays that are no metrics are left out.
    """

    def __init__(self, columns: OutputColumns, *, is_evaluation: bool = False) -> None:
        self._columns, self._is_evaluation = columns, is_evaluation
        self._parts: dict[str, list[Any]] = {}

    def add(self, *batches: Mapping[str, Any]) -> Totals:
        """Take what batches have computed, by names of outputs; return the totals."""
        for output, column in self._columns.items():
            first = batches[0][column.parts[0]]
            is_array = getattr(first, "ndim", 0) != 0
            if self._is_evaluation and column.rule == MEAN and is_array:
                continue
            if not RULES[column.rule].keeps_batches:
                self._sum(output, column, batches)
                continue
            if output not in self._parts:
                self._parts[output] = [[] for _ in column.parts]
            for arrays, name in zip(self._parts[output], column.parts, strict=True):
                for batch in batches:
                    arrays.append(batch[name])
        return self

    def _sum(self, output: str, column: Column, batches: Sequence[Mapping[str, Any]]) -> None:
        known = self._parts.get(output)
        for batch in batches:
            parts = [batch[name] for name in column.parts]
            wide = [np.add(part, np.zeros((), _wide(part))) for part in parts]
            pairs = zip(known or wide, wide, strict=True)
            self._parts[output] = known = wide if known is None else [x + y for x, y in pairs]

    def values(self, *, wants_rows: str = "") -> dict[str, Any]:
        """Return the values: floats and integers of Python, and arrays.

        Where nothing counts in any batch it is NaN, of a mean the mean of what was computed; or an
        error that begins with `wants_rows`. Raises DataError.
        """
        return {name: self._value(name, wants_rows) for name in self._parts}

    def _value(self, name: str, wants_rows: str) -> Any:
        column = self._columns[name]
        try:
            value = RULES[column.rule].finish(*self._parts[name])
        except NothingCounts as nothing:
            if not wants_rows:
                return nothing.value
            raise DataError(
                f"{wants_rows}: nothing counts in {name!r}, in none of its batches: all weights are"
                " 0, or all labels are ignored"
            ) from None
        except DataError as error:
            raise DataError(
                f"{column.line}{column.line and ': '}metric {name!r}: {error}"
            ) from None
        return value.item() if getattr(value, "shape", None) == () else value


def _wide(part: Any) -> type[Any]:
    """Return a dtype that sums are exact in, as far as there is one."""
    return np.float64 if np.asarray(part).dtype.kind == "f" else np.int64


def _mean(values: Sequence[Any], weights: Sequence[Any] | None = None) -> Any:
    """Return the mean of outputs by weight: a float for scalars, else an array of floats."""
    if weights is None and getattr(values[0], "ndim", 0) == 0:
        return _sum(list(map(float, values))) / len(values)  # as most outputs of a step
    factors = [1.0] * len(values) if weights is None else [float(weight) for weight in weights]
    if not any(factors):  # a mean by weight is 0 there, and what is computed from it has its value
        raise NothingCounts(_mean(values))
    pairs = [pair for pair in zip(values, factors, strict=True) if pair[1]]
    if getattr(values[0], "ndim", 0) == 0:
        return _sum([float(value) * factor for value, factor in pairs]) / _sum(factors)
    # Summed in float64, so that the mean of many float32 or float16 batches keeps its digits.
    total = np.zeros(values[0].shape, np.float64)
    for value, factor in pairs:
        total += np.multiply(value, factor, dtype=np.float64)
    total /= _sum(factors)
    return total.astype(values[0].dtype) if values[0].dtype.kind == "f" else total


def _sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs, or more than a float holds
        return sum(values)


RULES[MEAN] = Rule(_mean, keeps_batches=True)
