"""What a run is asked: options of `fit`, the evaluation between steps, and how a listener stops it.

`RunSpec` is checked where the user made it, before anything is traced or opened, and is passed
down whole to the run. Each error has the user's line, what was expected, what came, and how to
mend it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

import numpy as np

from actorflow.checkpoint.errors import CheckpointError, Every
from actorflow.data import DataError, DataSource
from actorflow.data.source import checked_spec
from actorflow.environment.default_seed import SEEDS
from actorflow.environment.option_values import IntRange, OneOfValues, check_fields
from actorflow.nn.module import Module
from actorflow.options.job_options import JobOptions
from actorflow.tensor.tracer import find_source, source_of
from compiler.contract.errors import CompileError
from compiler.contract.files import user_path
from compiler.contract.placement import Mesh
from compiler.contract.types import TensorType
from compiler.graph.graph import Graph

ENDLESS = (1 << 40) - 1
"""Steps of a stream without an end: at a microsecond each, two weeks."""

_READ = ("spec", "__next__", "state", "restore")
_SOURCE = (*_READ, "fingerprint")


def check_model(model: object) -> None:
    """Raise CompileError for what is no model."""
    if isinstance(model, Module):
        return
    if isinstance(model, type) and issubclass(model, Module):
        mend = f"make one of it: {model.__name__}(...)"
    elif all([callable(getattr(model, name, None)) for name in _SOURCE]):
        mend = "the model comes first, the data after it"
    elif isinstance(model, (list, tuple, dict)):
        mend = "keep the parts as attributes of one class derived from af.nn.Module"
    else:
        mend = "derive its class from af.nn.Module"
    raise CompileError(f"{find_source()}: expected a model, came {describe_value(model)}; {mend}")


def check_source(data: object, *, is_kept: bool = True) -> None:
    """Raise DataError for what is no data source; one of an evaluation is never kept on disk."""
    _check_methods(data, _SOURCE if is_kept else _READ)


def _check_methods(data: object, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not callable(getattr(data, name, None))]
    if missing or isinstance(data, type):
        raise DataError(
            f"{find_source()}: expected a data source, came {describe_value(data)}"
            f"{_lacking(data, missing)}; {_source_for(data)}"
        )


def spec_of_source(data: DataSource | Mapping[str, TensorType]) -> dict[str, TensorType]:
    """Return the types of a source's batches, or those that were given. Raises DataError."""
    if not isinstance(data, Mapping):
        _check_methods(data, ("spec",))
        data = _typed(data.spec(), f"spec() of the {type(data).__name__}")
    try:
        return checked_spec(data)
    except DataError as error:
        raise DataError(f"{find_source()}: {error}") from None


def check_steps(steps: object) -> None:
    """Raise CompileError for what is no number of steps."""
    if not isinstance(steps, (int, np.integer)) or isinstance(steps, bool):
        raise CompileError(
            f"{find_source()}: steps must be an integer, got {steps!r} of type"
            f" {type(steps).__name__}"
        )
    if not 0 <= steps <= ENDLESS:
        raise CompileError(
            f"{find_source()}: steps must be >= 0 and below {ENDLESS + 1:,}, got {steps}"
        )


def check_directory(checkpoint: object) -> None:
    """Raise CompileError for what is no directory of a run."""
    is_path = isinstance(checkpoint, (str, os.PathLike)) and os.fspath(checkpoint)
    if checkpoint is not None and not is_path:
        raise CompileError(
            f"{find_source()}: checkpoint must be a directory for the run, or None, got"
            f" {checkpoint!r}"
        )


def check_listener(name: str, listener: object) -> None:
    """Raise CompileError for what can neither be called with (step, results) nor left out."""
    if listener is None:
        return
    if not callable(listener):
        raise CompileError(
            f"{find_source()}: {name} must be a function, or None, got {describe_value(listener)}"
        )
    why = _refusal_of_two(listener)
    if why:
        raise CompileError(f"{find_source()}: {name} is called with (step, results): {why}")


def check_count(name: str, count: object) -> None:
    """Raise CompileError for what is no number of things."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise CompileError(
            f"{find_source()}: {name} must be an integer of 1 or more, got {count!r}"
        )


def check_rank(rank: object, mesh: Mesh) -> None:
    """Raise CompileError for what is no rank of a mesh."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < mesh.num_ranks:
        raise CompileError(
            f"{find_source()}: rank must be an integer from 0 to {mesh.num_ranks - 1}, as the job's"
            f" mesh has {mesh.num_ranks}; got {rank!r}"
        )


def check_function(function: object) -> None:
    """Raise CompileError for what cannot be a job's function of (model, batch)."""
    if not callable(function):
        raise CompileError(
            f"{find_source()}: expected a function of (model, batch), came"
            f" {describe_value(function)}; write @af.job(...) above the function"
        )
    why = _refusal_of_two(function)
    if why:
        raise CompileError(
            f"{source_of(function)}: a job's function takes (model, batch), and"
            f" {name_of(function)!r} does not: {why}"
        )


def _refusal_of_two(function: Callable[..., Any]) -> str:
    """Return why a function cannot be called with two arguments, or nothing."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        return str(error)
    except ValueError:  # of a function in C nothing is known
        return ""
    return ""


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of what a partial or an object stands for."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def describe_value(value: object) -> str:
    """Return what a value is, in words."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if inspect.isfunction(value):
        return f"the function {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _lacking(data: object, missing: list[str]) -> str:
    """Return what an object lacks that is nearly a source, or nothing."""
    is_near = 0 < len(missing) < len(_SOURCE) - 1 and not isinstance(data, type)
    return f", which has no {', '.join([f'{name}()' for name in missing])}" if is_near else ""


def _source_for(data: object) -> str:
    if isinstance(data, type):
        return f"make one of it: {data.__name__}(...)"
    if isinstance(data, (np.ndarray, Mapping)):
        return 'wrap arrays: af.data.ArraySource({"x": x, "y": y}, batch=32)'
    if isinstance(data, Module):
        return "the model comes first, the data after it"
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes)):
        return "wrap what yields batches: af.data.from_iterable(make_iterator, spec)"
    return "use af.data.Tokens, af.data.ArraySource or af.data.from_iterable, or a class of yours"


def _typed(spec: object, what: str) -> Mapping[str, TensorType]:
    """Return a spec as sources give it. Raises DataError for another."""
    if not isinstance(spec, Mapping) or not spec:
        raise DataError(
            f"{find_source()}: {what}: expected {{name: af.TensorType}} of one entry or more, came"
            f" {describe_value(spec) if spec else repr(spec)}"
        )
    for name, type_ in spec.items():
        if not isinstance(name, str) or not isinstance(type_, TensorType):
            raise DataError(
                f"{find_source()}: {what}: expected {{name: af.TensorType(dtype, shape)}}, came"
                f" {name!r}: {describe_value(type_)}"
            )
    return spec


Results = Mapping[str, float]
"""Mean of every scalar output over the batches of one evaluation."""

OnResult = Callable[[int, Results], object]


class EvaluatingJob(Protocol):
    """What an evaluation asks of its job."""

    @property
    def name(self) -> str:
        """The name of its function."""

    @property
    def options(self) -> JobOptions:
        """What it was decorated with."""

    def graph(self, model: Module, spec: dict[str, TensorType], /) -> Graph:
        """Return its logical graph for a model and the types of a batch."""


@dataclass(frozen=True)
class Evaluation:
    """Run `job` on `batches` batches of `data` after every `every` steps of a training.

        valid = af.Evaluation(evaluate, valid_data, every=500, batches=20)
        train.fit(model, data, steps=5000, evaluation=valid)

    It is part of the training plan: its actors read the variables in place, between two updates; no
    copy of the model is made. Every evaluation sees the same batches, the first ones of its source.

    `job` is one with train=False that returns at least one scalar. `on_result` is called as (step,
    means) on the evaluation's own thread. No further step begins before it returns: the model has
    the values that were evaluated, and what is written to it counts from the next step on. So
    `model.state()` is what to keep of the best result. Steps count over resumes. With `ema` it
    reads the averages of the weights, where the training keeps some (`@af.job(ema=...)`).

    Raises:
        CompileError: a number is no integer of 1 or more, or the job trains or is none.
        DataError: `data` is no data source.
    """

    job: EvaluatingJob
    data: DataSource
    every: int
    batches: int
    on_result: OnResult | None = None
    ema: bool = False

    def __post_init__(self) -> None:
        check_count("every of an Evaluation", self.every)
        check_count("batches of an Evaluation", self.batches)
        check_source(self.data, is_kept=False)
        check_listener("on_result of an Evaluation", self.on_result)
        if not isinstance(getattr(self.job, "options", None), JobOptions):
            raise CompileError(
                f"{find_source()}: expected the job of an Evaluation, came"
                f" {describe_value(self.job)}; decorate a function of (model, batch)"
                " with @af.job(train=False)"
            )
        if self.job.options.train:
            raise CompileError(
                f"{find_source()}: job {self.job.name!r} trains, so it cannot evaluate; decorate"
                " the function with @af.job(train=False)"
            )


def check_evaluation(evaluation: object) -> None:
    """Raise CompileError for what is neither an Evaluation nor left out."""
    if evaluation is not None and not isinstance(evaluation, Evaluation):
        raise CompileError(
            f"{find_source()}: expected evaluation=af.Evaluation(job, data, every=..., batches=...)"
            f" or None, came {describe_value(evaluation)}"
        )


RAISE, WARN, SKIP = POLICIES = ("raise", "warn", "skip")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a call asks of a plan besides its job.

    `period`: between checkpoints, None for a plan that takes no snapshots. `evaluation`: between
    steps. `on_nan`: as `RunSpec` has it. `has_listener`: whether each step is waited for by one.

    Raises CompileError, with the user's line.
    """

    period: Every | None = None
    evaluation: Evaluation | None = None
    on_nan: str = field(default=RAISE, metadata={"rule": OneOfValues(POLICIES)})
    has_listener: bool = False

    def __post_init__(self) -> None:
        check_evaluation(self.evaluation)
        check_fields(self, find_source())


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The options of a training run.

    Args:
        data: the source. It is read from where it stands, and stands behind the last batch that
            was fetched afterwards; on a resume it is sought to where the checkpoint left it. One
            that has no batch for the first step is an error.
        steps: total number of steps, those that a checkpoint has done included. Without
            `checkpoint` all are of this call, which begins at step 0 with fresh optimizer state.
        checkpoint: directory of the run, which also gets `metrics.jsonl`; None keeps nothing.
        every: time ("5s", "10min") or steps (500) between checkpoints; by time, the first
            snapshot that is due is written, and there is one at least every 16 steps. On several
            ranks the first one's clock counts.
        keep_last: checkpoints to keep.
        on_nan: what to do when the loss is not finite. "raise" ends the run; "warn" trains on,
            and the newest checkpoint without NaN is kept; "skip" drops the updates of a step
            whose loss or gradients are not finite, for plans compiled so, and ends the run
            when 100 in a row were. Steps count on, and with them schedules and AdamW's
            correction of the bias.
        on_save_error: what to do when a checkpoint cannot be written: a full or read-only disk,
            a directory that was moved away. "raise" ends the run; "warn" trains on and tries
            again with the next one that is due, and raises when the last one fails.
        progress: print the plan and live progress to stdout.
        seed: of initialisers and random ops, in place of the job's; no other plan is compiled. A
            model that has values keeps them, and a resumed run needs the seed that it began with.
        on_step: called with (step, outputs) on the metrics thread, in order. No further step begins
            before it returns: the model has the values after this step meanwhile, and what is
            written to it counts from the next one on. With `metrics_every=k` the run waits once in
            k steps, for all k calls, with the values after the last of them. Of several ranks, and
            where a plan was compiled without `on_step`, none waits: values may be of later steps.
        evaluation: what the plan was compiled to evaluate between steps.
    """

    data: DataSource
    _: KW_ONLY
    steps: int
    checkpoint: str | os.PathLike[str] | None = None
    every: str | int = "5s"
    keep_last: int = field(default=3, metadata={"rule": IntRange(1, 1 << 30)})
    on_nan: str = RAISE
    on_save_error: str = field(default="raise", metadata={"rule": OneOfValues(("raise", "warn"))})
    progress: bool = True
    seed: int | None = field(default=None, metadata={"rule": SEEDS})
    on_step: OnStep | None = None
    evaluation: Evaluation | None = None
    plan_options: PlanOptions = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_source(self.data)
        check_steps(self.steps)
        check_directory(self.checkpoint)
        check_listener("on_step", self.on_step)
        every, listens = parse_every(self.every), self.on_step is not None
        period = None if self.checkpoint is None else every
        options = PlanOptions(period, self.evaluation, self.on_nan, listens)
        object.__setattr__(self, "plan_options", options)
        check_fields(self, find_source())
        if self.checkpoint is not None:
            object.__setattr__(self, "checkpoint", user_path(self.checkpoint))

    @classmethod
    def of_stream(cls, data: DataSource, steps: int | None, on_nan: str) -> RunSpec:
        """Return what a `stream` is asked: `steps` of this call, or None until the data ends."""
        return cls(data, steps=ENDLESS if steps is None else steps, on_nan=on_nan)


def parse_every(every: object) -> Every:
    """Return a period. Raises CheckpointError, with the user's line, for what is none."""
    try:
        return Every.parse(every)
    except CheckpointError as error:
        raise CheckpointError(f"{find_source()}: every: {error}") from None


Metrics = Mapping[str, Any]
"""Outputs of one step: floats for scalars, arrays (copies) otherwise."""


OnStep = Callable[[int, Metrics], None]


class StopTraining(Exception):
    """Raise it in `on_step`, `on_result` or a data source to end `fit` cleanly.

    The steps under way are finished, the last one is checkpointed, and `fit` returns its result.
    Of several ranks one may raise it in `on_step`, for all; in a data source all do, at the same
    batch.
    """


def reason_of(asked: StopTraining, where: str) -> str:
    """Return the words for a StopTraining that was raised somewhere."""
    return f"StopTraining in {where}" + (f" ({asked})" if str(asked) else "")
