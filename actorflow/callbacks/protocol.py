"""What a run calls while it goes on: the protocol of callbacks, and what each of them is told.

A callback is any object with one or more of these methods:

    on_start(run)                 before the first step                 thread of `fit`
    on_step(step, metrics)        the outputs of a step                 thread of the outputs
    on_evaluation(step, means)    the means of an evaluation            thread of the evaluation
    on_end(result)                the run ended in order: a FitResult   thread of `fit`
    close()                       last of all, however the run ended    thread of `fit`

No two calls overlap. No further step begins before `on_evaluation` returns, nor before `on_step`
does, unless the callback has `is_waited_for = False`: then later steps go on meanwhile, and the
callback costs a step nothing. Of several ranks the first one calls, and all do where the callback
has `is_on_every_rank = True`. `asked_outputs`, a tuple, names outputs of the engine that it wants:
"lr" and "grad_norm". With `is_part_of_training = True` a callback says that later steps depend on
what it does: `actorflow replay` calls it, too, and the checkpoint of the step that it hears of has
what it writes to the model. In `on_evaluation` it may do so on several ranks, where each calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError

Metrics = Mapping[str, Any]
"""Outputs of one step: floats for scalars, arrays (copies) otherwise."""

Results = Mapping[str, Any]
"""Of one evaluation: metrics, numbers or arrays, and means of the other scalar outputs."""


EVALUATION = "evaluation/"
"""How the name of a value of an evaluation begins, in `metrics.jsonl` and in loggers."""


class StopTraining(Exception):
    """Raise it in a callback, `on_step`, `on_result` or a data source to end `fit` cleanly.

    The steps under way are finished, the last one is checkpointed, and `fit` returns its result.
    Of several ranks one may raise it in a callback or in `on_step`, for all; in a data source all
    do, at the same batch.
    """


def reason_of(asked: StopTraining, where: str) -> str:
    """Return the words for a StopTraining that was raised somewhere."""
    return f"StopTraining in {where}" + (f" ({asked})" if str(asked) else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRun:
    """A run that is about to make its first step.

    Args:
        job: name of the job's function.
        model: what is trained, which has its values from before the run until the run begins, also
            where a checkpoint has others; None where a plan from a file runs.
        first_step: steps done before it.
        total_steps: the last step; None where the data decides.
        directory: what `fit` got as `checkpoint=`, or None.
        rank: of this process.
        outputs: names of the scalar outputs of a step.
        evaluated: names of the means of an evaluation; none without one.
        evaluations: (step, means) of earlier runs in the directory, up to `first_step`.
        options: what the plan was compiled with, and seed, steps and data, for a logger to note.
    """

    job: str
    model: Any
    first_step: int
    total_steps: int | None
    directory: Path | None
    rank: int
    outputs: tuple[str, ...]
    evaluated: tuple[str, ...]
    evaluations: tuple[tuple[int, Results], ...]
    options: Mapping[str, Any]

    def check_evaluated(self, metric: str, whose: str) -> None:
        """Raise CompileError where no evaluation of the run has a metric."""
        check_metric(metric, whose, self.evaluated)


def check_metric(metric: str, whose: str, evaluated: Sequence[str]) -> None:
    """Raise CompileError where a metric is not among those of an evaluation."""
    if not evaluated:
        raise CompileError(
            f"{find_source()}: {whose} needs {metric!r} of an evaluation, and the run has none;"
            " give fit evaluation=af.Evaluation(job, data, every=..., batches=...)"
        )
    if metric not in evaluated:
        raise CompileError(
            f"{find_source()}: {whose} needs {metric!r} of the evaluation, which has"
            f" {', '.join(map(repr, evaluated))}; name one of them"
        )


Callback = object
"""What has one of the methods of a callback; `fit` checks that."""

METHODS = {"on_start": 1, "on_step": 2, "on_evaluation": 2, "on_end": 1, "close": 0}
"""The methods of a callback, and with how many arguments they are called."""


def is_waited_for(callback: Callback) -> bool:
    """Whether no further step begins before the callback has heard of one."""
    return hasattr(callback, "on_step") and bool(getattr(callback, "is_waited_for", True))


def asked_outputs(callback: Callback) -> tuple[str, ...]:
    """Return the outputs of the engine's own that a callback wants of a step."""
    return tuple(getattr(callback, "asked_outputs", ()))


def is_part_of_training(callback: Callback) -> bool:
    """Whether later steps depend on what the callback does, as on a learning rate that it sets."""
    return bool(getattr(callback, "is_part_of_training", False))


def is_on_every_rank(callback: Callback) -> bool:
    """Whether each of several ranks calls the callback, and not the first alone."""
    return bool(getattr(callback, "is_on_every_rank", False))
