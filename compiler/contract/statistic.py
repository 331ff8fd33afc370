"""Statistics: outputs of a plan that a value of several batches follows from; nobody gets them.

As of a probe (`compiler.contract.probe`) the name of the output says it (`Field.name`), so they go
wherever outputs go, and into a file without user code:

    statistic/mean/1/loss
    statistic/f1 macro/0/quality

is the weight of the output `loss`, which of several batches is the mean by that weight; and the
first of the arrays of which the rule "f1 macro" makes the value `quality` (`actorflow.metrics`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from compiler.contract.errors import PlanFormatError

MEAN = "mean"
"""The rule of outputs that are no metrics: part 0 is the output itself, part 1 its weight."""

_NAME = re.compile(r"statistic/([^/]+)/(\d{1,9})/(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Statistic:
    """The part of a number of what a rule makes the value of the name `output` of."""

    rule: str
    part: int
    output: str

    @property
    def name(self) -> str:
        """The name of the output that is this part."""
        return f"statistic/{self.rule}/{self.part}/{self.output}"


def is_statistic(name: str) -> bool:
    """Whether an output of this name is a statistic, and no value of the job's own."""
    return name.startswith("statistic/")


def statistic_of(name: str) -> Statistic:
    """Return what an output is a part of; one that is no statistic is the mean of its batches.

    Raises PlanFormatError for a name that begins as one of a statistic and is none.
    """
    if not is_statistic(name):
        return Statistic(MEAN, 0, name)
    match = _NAME.fullmatch(name)
    if match is None:
        raise PlanFormatError(f"the plan has an output {name!a:.60}, which is no statistic")
    return Statistic(match[1], int(match[2]), match[3])
