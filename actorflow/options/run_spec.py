"""What a run is asked: options of `fit`, the evaluation between steps, and how a listener stops it.

`RunSpec` is checked where the user made it, before anything is traced or opened, and is passed
down whole to the run. Each error has the user's line, what was expected, what came, and how to
mend it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from math import ceil, gcd
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from actorflow.callbacks.protocol import (
    METHODS,
    Callback,
    Metrics,
    Results,
    asked_outputs,
    is_waited_for,
)
from actorflow.checkpoint.errors import CheckpointError, Every
from actorflow.data import Batch, DataError, DataSource
from actorflow.data.source import EndlessSource, as_source, checked_spec, specs_of
from actorflow.environment.default_seed import SEEDS
from actorflow.environment.option_values import IntRange, OneOfValues, check_fields
from actorflow.nn.module import Module
from actorflow.options.job_options import JobOptions
from actorflow.options.keep import Keep
from actorflow.tensor.tracer import current_trace, find_source, source_of
from compiler.contract.errors import CompileError
from compiler.contract.files import user_path
from compiler.contract.placement import Mesh
from compiler.contract.types import TensorType
from compiler.graph.graph import Graph

if TYPE_CHECKING:
    from actorflow.data.epochs import SourcePasses

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


def check_call(job: str, model: object) -> None:
    """Raise CompileError for what is no model, and where a job cannot be called (see below)."""
    check_model(model)
    check_outside(job)


def check_outside(job: str) -> None:
    """Raise CompileError where a job is called in an eager block or in a function of another job.

    There it would run once, while the function is traced, and what it returned would be a constant.
    """
    outer = current_trace()
    if outer is None:
        return
    where, there = "a function that is traced", "there"
    if outer.is_eager:
        where, there = "an eager block", "in the block"
    raise CompileError(
        f"{find_source()}: job {job!r} was called in {where}; call it outside, or its function"
        f" {there}"
    )


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
        source = as_source(data)
        _check_methods(source, ("spec",))
        data = _typed(source.spec(), f"spec() of the {type(source).__name__}")
    try:
        return checked_spec(data)
    except DataError as error:
        raise DataError(f"{find_source()}: {error}") from None


def specs_of_source(data: DataSource) -> tuple[dict[str, TensorType], ...]:
    """Return the types of all batches that a source declares, that of `spec()` first.

    Raises DataError.
    """
    main = spec_of_source(data)
    try:
        return (main, *[spec for spec in specs_of(as_source(data)) if spec != main])
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
    why = _refusal_of(listener, 2)
    if why:
        raise CompileError(f"{find_source()}: {name} is called with (step, results): {why}")


def checked_callbacks(given: object) -> tuple[Callback, ...]:
    """Return the callbacks of a list. Raises CompileError for anything else."""
    if not isinstance(given, (list, tuple)):
        raise CompileError(
            f"{find_source()}: callbacks must be a list of callbacks, came {describe_value(given)}"
        )
    for one in given:
        name, known = type(one).__name__, ", ".join(METHODS)
        hears = [method for method in METHODS if callable(getattr(one, method, None))]
        if isinstance(one, type) or not ({*hears} - {"close"} or asked_outputs(one)):
            mend = f"it has none of the methods {known}"
            if isinstance(one, type):
                mend = f"make one of it: {one.__name__}(...)"
            raise CompileError(
                f"{find_source()}: expected a callback, came {describe_value(one)}; {mend}"
            )
        for method in [m for m in dir(one) if m.startswith("on_") and m not in METHODS]:
            if callable(getattr(one, method)):
                raise CompileError(
                    f"{find_source()}: callback {name} has a method {method}, which nothing calls:"
                    f" a callback has {known}"
                )
        for method in hears:
            if why := _refusal_of(getattr(one, method), METHODS[method]):
                raise CompileError(
                    f"{find_source()}: {name}.{method} is called with {METHODS[method]}"
                    f" arguments: {why}"
                )
    return tuple(given)


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
    why = _refusal_of(function, 2)
    if why:
        raise CompileError(
            f"{source_of(function)}: a job's function takes (model, batch), and"
            f" {name_of(function)!r} does not: {why}"
        )


def _refusal_of(function: Callable[..., Any], count: int) -> str:
    """Return why a function cannot be called with so many arguments, or nothing."""
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        return "it is a generator or async, and a call runs nothing of such a one"
    try:
        inspect.signature(function).bind(*[None] * count)
    except (TypeError, ValueError) as error:  # ValueError: of a function in C nothing is known
        return str(error) if isinstance(error, TypeError) else ""
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

    def stepped(self, model: Module, data: DataSource, /) -> AbstractContextManager[None]:
        """Have it ready to be stepped on a source's batches, until the end of the context."""

    def step(self, model: Module, batch: Batch, /) -> Metrics:
        """Return its outputs for a model and a batch."""
        ...

    def close(self, model: Module, /) -> None:
        """End what `step` has opened."""


@dataclass(frozen=True)
class Evaluation:
    """Run `job` on `batches` batches of `data` after every `every` steps of a training.

        valid = af.Evaluation(evaluate, valid_data, every=500, batches=20)
        train.fit(model, data, steps=5000, evaluation=valid)

    It is part of the training plan: its actors read the variables in place, between two updates; no
    copy of the model is made. Every evaluation sees the same batches, the first ones of its source,
    which is another object than that of the training.

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
        object.__setattr__(self, "data", as_source(self.data))
        check_source(self.data, is_kept=False)
        check_listener("on_result of an Evaluation", self.on_result)
        if not isinstance(getattr(self.job, "options", None), JobOptions):
            raise CompileError(
                f"{find_source()}: expected the job of an Evaluation, came"
                f" {describe_value(self.job)}; decorate a function of (model, batch)"
                " with @af.job(train=False)"
            )
        check_evaluates(self.job.name, self.job.options)


def check_evaluates(job: str, options: JobOptions, call: str = "evaluate") -> None:
    """Raise CompileError for a job that trains."""
    if options.train:
        raise CompileError(
            f"{find_source()}: job {job!r} trains, so it cannot {call}; decorate the function"
            " with @af.job(train=False)"
        )


def check_evaluation(evaluation: object) -> None:
    """Raise CompileError for what is neither an Evaluation nor left out."""
    if evaluation is not None and not isinstance(evaluation, Evaluation):
        raise CompileError(
            f"{find_source()}: expected evaluation=af.Evaluation(job, data, every=..., batches=...)"
            f" or None, came {describe_value(evaluation)}"
        )


_KEPT = 3
"""Checkpoints that stay where nothing is said."""

SAME, CHANGED = "same", "changed"
RAISE, WARN, SKIP = POLICIES = ("raise", "warn", "skip")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a call asks of a plan besides its job.

    `period`: between checkpoints, None for a plan that takes no snapshots. `evaluation`: between
    steps. `on_nan`: as `RunSpec` has it. `has_listener`: whether each step is waited for by one.
    `asked_outputs`: those of the engine that are wanted besides the job's own. `kept_steps`: after
    multiples of so many steps there has to be a snapshot, 0 for none. `shown`: patterns of the ops
    whose values a replay shows whole, beside the ranges of all; None for a plan without ranges.

    Raises CompileError, with the user's line.
    """

    period: Every | None = None
    evaluation: Evaluation | None = None
    on_nan: str = field(default=RAISE, metadata={"rule": OneOfValues(POLICIES)})
    has_listener: bool = False
    asked_outputs: tuple[str, ...] = ()
    kept_steps: int = 0
    shown: tuple[str, ...] | None = None

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
        epochs: passes of the source instead, counted in the same way. Where the source has a length
            the number of steps follows from it; one that ends without is started again. The last
            batches that fill no step of `accumulate` are left out.
        checkpoint: directory of the run, which also gets `metrics.jsonl`; None keeps nothing.
        every: time ("5s", "10min") or steps (500) between checkpoints; by time, the first
            snapshot that is due is written, and there is one at least every 16 steps. On several
            ranks the first one's clock counts.
        keep_last: checkpoints to keep.
        keep: which checkpoints to keep, in place of `keep_last`; see `af.Keep`.
        on_nan: what to do when the loss is not finite. "raise" ends the run; "warn" trains on,
            and the newest checkpoint without NaN is kept; "skip" drops the updates of a step
            whose loss or gradients are not finite, for plans compiled so, and ends the run
            when 100 in a row were. Steps count on, and with them schedules and AdamW's
            correction of the bias.
        on_save_error: what to do when a checkpoint cannot be written: a full or read-only disk,
            a directory that was moved away. "raise" ends the run; "warn" trains on and tries
            again with the next one that is due, and raises when the last one fails.
        progress: print what runs, its memory and live progress to stdout.
        verbose: print the whole plan before: actors, registers with their slots, each part of the
            memory with its proof. `actorflow plan SCRIPT` shows the same without a run.
        seed: of initialisers and random ops, in place of the job's; no other plan is compiled. A
            model that has values keeps them, and a resumed run needs the seed that it began with.
        on_step: called with (step, outputs) on the metrics thread, in order. No further step begins
            before it returns: the model has the values after this step meanwhile, and what is
            written to it counts from the next one on. With `metrics_every=k` the run waits once in
            k steps, for all k calls, with the values after the last of them. Of several ranks, and
            where a plan was compiled without `on_step`, none waits: values may be of later steps.
        evaluation: what the plan was compiled to evaluate between steps.
        callbacks: what hears of the run, in this order, after `on_step` and `on_result`; see
            `af.callbacks`. A run waits at each step for those that read the model.
        resume: "changed" continues a checkpoint of another seed, or of other data, such as more of
            it or another batch: a line says what differs and where the data goes on. "same" refuses
            that.
    """

    data: DataSource
    _: KW_ONLY
    steps: int | None = None
    epochs: int | None = None
    checkpoint: str | os.PathLike[str] | None = None
    every: str | int = "5s"
    keep_last: int = field(default=_KEPT, metadata={"rule": IntRange(1, 1 << 30)})
    on_nan: str = RAISE
    on_save_error: str = field(default="raise", metadata={"rule": OneOfValues(("raise", "warn"))})
    progress: bool = True
    verbose: bool = False
    seed: int | None = field(default=None, metadata={"rule": SEEDS})
    on_step: OnStep | None = None
    evaluation: Evaluation | None = None
    callbacks: Sequence[Callback] = ()
    keep: Keep | None = None
    resume: str = field(default=SAME, metadata={"rule": OneOfValues((SAME, CHANGED))})
    plan_options: PlanOptions = field(init=False, repr=False)
    total_steps: int = field(init=False, repr=False, default=-1)
    """`steps`: ENDLESS where the end of the data decides, and -1 until epochs are counted."""
    passes: SourcePasses | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.steps is not None:
            object.__setattr__(self, "total_steps", self.steps)
        object.__setattr__(self, "data", as_source(self.data))
        check_source(self.data)
        if isinstance(self.evaluation, Evaluation) and self.evaluation.data is self.data:
            kind = type(self.data).__name__
            raise DataError(
                f"{find_source()}: fit and its evaluation read one {kind}, which has one position:"
                " each would take batches from the other; make a second one for the evaluation, of"
                " the same data or of other"
            )
        self._count_passes()
        check_directory(self.checkpoint)
        check_listener("on_step", self.on_step)
        callbacks = checked_callbacks(self.callbacks)
        object.__setattr__(self, "callbacks", callbacks)
        every = parse_every(self.every)
        options = PlanOptions(
            None if self.checkpoint is None else every,
            self.evaluation,
            self.on_nan,
            self.on_step is not None or any([is_waited_for(one) for one in callbacks]),
            asked_outputs=tuple(sorted({name for one in callbacks for name in asked_outputs(one)})),
            kept_steps=self._kept_steps(),
        )
        object.__setattr__(self, "plan_options", options)
        check_fields(self, find_source())
        if self.checkpoint is not None:
            object.__setattr__(self, "checkpoint", user_path(self.checkpoint))

    def _count_passes(self) -> None:
        """Take the data for so many epochs, where they are asked for."""
        if (self.steps is None) == (self.epochs is None):
            came = "both" if self.steps is not None else "neither"
            raise CompileError(f"{find_source()}: give steps= or epochs=, one of both; came {came}")
        if self.epochs is None:
            check_steps(self.steps)
            return
        from actorflow.data.epochs import epochs_of  # and pipelines

        check_count("epochs", self.epochs)
        try:
            passes = epochs_of(self.data, self.epochs)
        except DataError as error:
            raise DataError(f"{find_source()}: {error}") from None
        object.__setattr__(self, "passes", passes)
        object.__setattr__(self, "data", passes.source)

    def in_steps(self, batches: int) -> RunSpec:
        """Return what is asked in steps of so many batches. Raises DataError for no step at all."""
        passes = self.passes
        if passes is None:
            return self
        steps = ENDLESS if passes.batches is None else ceil(passes.batches) // batches
        if not steps:
            raise DataError(
                f"{find_source()}: epochs={self.epochs} has {ceil(passes.batches or 0)} batches,"
                f" and a step accumulates {batches}; give more epochs, or accumulate= less"
            )
        return replace(self, steps=steps, epochs=None)

    def _kept_steps(self) -> int:
        """Return the steps of whose multiples those are that `keep` wants, 0 for none."""
        keep: Any = self.keep
        evaluation = self.evaluation
        if keep is None:
            return 0
        wrong = ""
        if not isinstance(keep, Keep):
            wrong = f"keep must be af.Keep(...) or None, came {describe_value(keep)}"
        elif self.checkpoint is None:
            wrong = "keep= says which checkpoints stay, and there is no checkpoint=; give one"
        elif self.keep_last != _KEPT:
            wrong = "give keep=af.Keep(last=...) or keep_last=, one of both"
        elif keep.best and evaluation is None:
            wrong = (
                f"keep= asks for the best {keep.metric!r} of an evaluation, and there is none; give"
                " evaluation=af.Evaluation(job, data, every=..., batches=...)"
            )
        if wrong:
            raise CompileError(f"{find_source()}: {wrong}")
        return gcd(keep.every or 0, evaluation.every if evaluation and keep.best else 0)

    @classmethod
    def of_stream(cls, data: DataSource, steps: int | None, on_nan: str) -> RunSpec:
        """Return what a `stream` is asked: `steps` of this call, or None until the data ends."""
        return cls(data, steps=ENDLESS if steps is None else steps, on_nan=on_nan)

    @classmethod
    def of_whole(cls, data: DataSource, batches: int | None, call: str) -> RunSpec:
        """Return what `evaluate` or `predict` is asked: as a stream, of data with an end."""
        if batches is not None:
            check_count(f"batches of {call}", batches)
        spec = cls.of_stream(data, batches, RAISE)
        try:
            len(spec.data) if batches is None and isinstance(spec.data, Sized) else 0
        except EndlessSource as error:
            raise DataError(
                f"{find_source()}: {call} takes all batches of its data: {error}; give the source"
                f" epochs=1, or {call} batches="
            ) from None
        except TypeError:  # it ends, and does not know when
            pass
        return spec


def parse_every(every: object) -> Every:
    """Return a period. Raises CheckpointError, with the user's line, for what is none."""
    try:
        return Every.parse(every)
    except CheckpointError as error:
        raise CheckpointError(f"{find_source()}: every: {error}") from None


OnStep = Callable[[int, Metrics], None]
