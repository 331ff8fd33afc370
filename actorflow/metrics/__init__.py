"""Metrics of whole sets: what a job returns beside its loss, exact over batches and ranks.

A function inside a job computes counts and sums of its rows; these are outputs of the plan. The
host sums them over the batches of a step or of an evaluation, and a rule makes the value of that.

functions.py  `accuracy`, `f1`, `auroc`, ...: what users call
own.py        `rule`: a metric by a function of the user's own
rules.py      the formulas, over sums or over the arrays of all batches
totals.py     `Metric`, what these return; `Totals`: values of several batches, other outputs too

May import actorflow.{data, functional, tensor}, compiler.contract, compiler.graph and
compiler.ops.primitives. Begin reading at totals.py: a new metric is a function and a rule.
"""

from actorflow.metrics.functions import (
    LabelOptions,
    accuracy,
    auroc,
    average_precision,
    confusion_matrix,
    f1,
    mean_absolute_error,
    mean_squared_error,
    perplexity,
    precision,
    r2_score,
    recall,
)
from actorflow.metrics.own import OwnRule, rule
from actorflow.metrics.totals import Metric
from actorflow.tensor.arguments import validate_arguments
from actorflow.tensor.habits import accept_habits

__all__ = [
    "LabelOptions",
    "Metric",
    "OwnRule",
    "accuracy",
    "auroc",
    "average_precision",
    "confusion_matrix",
    "f1",
    "mean_absolute_error",
    "mean_squared_error",
    "perplexity",
    "precision",
    "r2_score",
    "recall",
    "rule",
]

for _name in __all__[3:-1]:
    globals()[_name] = accept_habits(validate_arguments(globals()[_name]))
