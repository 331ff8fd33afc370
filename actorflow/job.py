"""The decorator: a Python function becomes a job, which is traced, compiled and run.

    @af.job(optimizer=af.optim.AdamW(1e-3))
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    train.fit(model, data, steps=1300, checkpoint="runs/demo")

The function is traced once per input signature: types of the batch, parameters of the model, and
the plain settings of its modules. A plan already compiled, in this process or on disk, is used
again; a new signature says in one line what changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from actorflow import functional
from actorflow.batch import Batch
from actorflow.checkpoint.policy import Every
from actorflow.data import DataSource, spec_of
from actorflow.dump import dumper
from actorflow.identity import ByIdentity
from actorflow.log import configure, logger
from actorflow.nn.module import Module
from actorflow.open_model import OpenModel, give_back, values_of
from actorflow.optim import Optimizer
from actorflow.plan_cache import PlanCache, cache_key
from actorflow.ports import Metrics
from actorflow.runner import FitResult, OnStep, Runner
from actorflow.settings import Settings
from actorflow.signature import Signature, difference, signature_of
from actorflow.targets import HostTarget
from actorflow.tensor import Tensor
from actorflow.trace import Trace, current_trace, find_source, recording
from compiler.attrs import NO_ATTRS
from compiler.errors import CompileError
from compiler.graph import Graph, Output, Write
from compiler.ops.update import INCREMENT
from compiler.options import CompileOptions
from compiler.pipeline import compile_graph
from compiler.plan import Plan
from compiler.types import TensorType

Array = np.ndarray[Any, Any]
Function = Callable[[Any, Any], Any]

RESERVED = ("step", "seed")
"""Variables of the engine's own: the steps done, and the seed of the run."""


class PlanCaptured(BaseException):
    """Ends a script at its first `fit` while a plan is only asked for; see `capturing_plan`."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("plan captured")
        self.plan = plan


_CAPTURING: ContextVar[bool] = ContextVar("actorflow_capturing", default=False)


@contextmanager
def capturing_plan() -> Iterator[None]:
    """Make the next `fit` raise PlanCaptured instead of running."""
    token = _CAPTURING.set(True)
    try:
        yield
    finally:
        _CAPTURING.reset(token)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What `@af.job` was given.

    `optimizer` changes the parameters of a training job; `train=False` makes a job that only
    computes its outputs. `seed` keys initialisers and random ops; `max_plans` bounds the input
    signatures per model.
    """

    optimizer: Optimizer | None
    train: bool
    seed: int
    max_plans: int


class Job:
    """A function of (model, batch) that can be compiled and run.

    A training job returns its loss, a float scalar, or a dict of scalars with the key "loss". Other
    jobs return a tensor ("output") or a dict of tensors.
    """

    def __init__(self, function: Function, options: JobOptions) -> None:
        self.name = function.__name__
        self.options = options
        self._function = function
        self._graphs: ByIdentity[dict[Signature, Graph]] = ByIdentity()
        self._plans: dict[str, Plan] = {}
        self._open: ByIdentity[OpenModel] = ByIdentity()
        self.__doc__ = function.__doc__

    def compile(
        self,
        model: Module,
        data: DataSource | Mapping[str, TensorType],
        *,
        every: str | int | None = None,
    ) -> Plan:
        """Return the plan for a model and the batches of a source (or their types).

        With `every` the plan takes snapshots of the variables for checkpoints at that cadence.
        Raises CompileError with the user's line.
        """
        spec = dict(data) if isinstance(data, Mapping) else data.spec()
        settings = Settings.from_env(os.environ)
        cadence = Every.parse(every) if every is not None else None
        options = CompileOptions(
            name=self.name,
            is_training=self.options.train,
            snapshot_every=(cadence.steps or 0) if cadence else 0,
            snapshot_seconds=(cadence.seconds or 0.0) if cadence else 0.0,
            verify=settings.verify,
        )
        graph = self._graph(model, spec)
        target = HostTarget()
        key = cache_key(graph, options, target.fingerprint)
        if key not in self._plans:
            configure(settings.log_level)
            self._plans[key] = _compiled(key, graph, target, options, settings)
        return self._plans[key]

    def fit(
        self,
        model: Module,
        data: DataSource,
        *,
        steps: int,
        checkpoint: str | os.PathLike[str] | None = None,
        every: str | int = "5s",
        keep_last: int = 3,
        on_nan: str = "raise",
        progress: bool = True,
        on_step: OnStep | None = None,
    ) -> FitResult:
        """Train until `steps` steps are done in total; see `Runner.fit` for arguments and errors.

        A run starts from the newest valid checkpoint, or else from the model's own parameters with
        fresh optimizer state at step 0. Whatever ends it, the model gets the parameters.
        """
        self.close(model)
        plan = self.compile(model, data, every=None if checkpoint is None else every)
        if _CAPTURING.get():
            raise PlanCaptured(plan)
        runner = Runner(plan, values=values_of(model), seed=self.options.seed)
        try:
            return runner.fit(
                data,
                steps=steps,
                checkpoint=checkpoint,
                every=every,
                keep_last=keep_last,
                on_nan=on_nan,
                progress=progress,
                on_step=on_step,
            )
        finally:
            self._give_back(model, runner)

    def stream(
        self, model: Module, data: DataSource, *, steps: int | None = None
    ) -> Iterator[Metrics]:
        """Yield the outputs of each step; the model gets the parameters when the loop ends.

        Starts from the model's own parameters with fresh optimizer state.
        """
        self.close(model)
        plan = self.compile(model, data)
        runner = Runner(plan, values=values_of(model), seed=self.options.seed)
        try:
            yield from runner.stream(data, steps=steps)
        finally:
            self._give_back(model, runner)

    def step(self, model: Module, batch: Mapping[str, Array]) -> Metrics:
        """Run one step on one batch with the model's newest parameters and return its outputs.

        The plan stays open until `close`. Another batch type opens another plan, which goes on with
        the optimizer state of this one. The model's parameters are always the newest to whoever
        reads them.
        """
        spec = spec_of(batch, f"step of job {self.name!r}")
        signature = signature_of(model, spec)
        opened = self._open.get(model)
        if opened is None or opened.signature != signature:
            opened = self._reopen(model, spec, signature, opened)
        return opened.step(batch)

    def close(self, model: Module) -> None:
        """End a plan that `step` opened for this model; its optimizer state goes with it."""
        opened = self._open.pop(model)
        if opened is not None:
            opened.close()

    def _reopen(
        self,
        model: Module,
        spec: dict[str, TensorType],
        signature: Signature,
        opened: OpenModel | None,
    ) -> OpenModel:
        plan = self.compile(model, spec)
        carried: dict[str, Array] = {}
        if opened is not None:
            self._open.pop(model)
            left = opened.close()
            for variable in plan.variables:
                type_ = plan.views[variable.view].type
                array = left.get(variable.name)
                if array is not None and array.shape == type_.shape:
                    carried[variable.name] = array
        runner = Runner(plan, values=carried | values_of(model), seed=self.options.seed)
        is_training = self.options.train
        return self._open.set(model, OpenModel(model, runner, signature, is_training=is_training))

    def _give_back(self, model: Module, runner: Runner) -> None:
        if self.options.train:
            give_back(model, runner.variables())

    def _graph(self, model: Module, spec: dict[str, TensorType]) -> Graph:
        signature = signature_of(model, spec)
        graphs = self._graphs.get(model)
        if graphs is None:
            graphs = self._graphs.set(model, {})
        if signature not in graphs:
            if len(graphs) >= self.options.max_plans:
                raise CompileError(
                    f"{find_source()}: job {self.name!r} has met {len(graphs)} input signatures, as"
                    f" many as max_plans={self.options.max_plans} allows, and now"
                    f" {difference(list(graphs)[-1], signature)}. Pad batches to few shapes, or"
                    " raise max_plans"
                )
            if graphs:
                reason = difference(list(graphs)[-1], signature)
                logger.warning("job %r recompiled because %s", self.name, reason)
            graphs[signature] = self._trace(model, spec)
        return graphs[signature]

    def _trace(self, model: Module, spec: dict[str, TensorType]) -> Graph:
        parameters = dict(model.named_parameters())
        names = {id(p): name for name, p in parameters.items()}
        paths = {id(m): path for path, m in model.named_modules()}
        trace = Trace(spec, names, paths, is_training=self.options.train)
        with recording(trace):
            returned = self._function(model, Batch(trace))
            outputs = _outputs(self, returned, is_training=self.options.train)
            b = trace.builder
            b.outputs = [Output(name, t._value_in(trace)) for name, t in outputs.items()]
            if self.options.train:
                self._add_update(trace, model, outputs["loss"])
        return b.freeze()

    def _add_update(self, trace: Trace, model: Module, loss: Tensor) -> None:
        b = trace.builder
        b.objective = loss._value_in(trace)
        trained = {}
        for name, parameter in model.named_parameters():
            if name in RESERVED:
                raise CompileError(
                    f"{parameter.source}: a parameter cannot be called {name!r}: the engine counts"
                    " under that name; give the attribute another"
                )
            if parameter.is_frozen:
                continue
            if not trace.has_variable(name):
                raise CompileError(
                    f"{parameter.source}: parameter {name!r} is not used by job {self.name!r}, so"
                    " it has no path to the loss. Use it, remove it, or freeze it with"
                    " parameter.freeze()"
                )
            trained[name] = parameter.type
        functional.seed_of(trace)
        step = functional.step_of(trace)._value_in(trace)
        if self.options.optimizer is not None:
            b.updates = list(self.options.optimizer.rules(trace, trained))
        with trace.scope("optimizer"):
            counted = trace.emit(INCREMENT, [step], NO_ATTRS)[0]
        b.writes.append(Write(step, counted))


@overload
def job(
    function: Function,
    *,
    optimizer: Optimizer | None = None,
    train: bool = True,
    seed: int = 0,
    max_plans: int = 4,
) -> Job: ...


@overload
def job(
    *,
    optimizer: Optimizer | None = None,
    train: bool = True,
    seed: int = 0,
    max_plans: int = 4,
) -> Callable[[Function], Job]: ...


def job(
    function: Function | None = None,
    *,
    optimizer: Optimizer | None = None,
    train: bool = True,
    seed: int = 0,
    max_plans: int = 4,
) -> Job | Callable[[Function], Job]:
    """Turn a function of (model, batch) into a `Job`; a decorator when called without the function.

    Args:
        function: the function to turn; the decorator's argument otherwise.
        optimizer: changes the model's parameters; a training job needs one.
        train: False for a job that only computes its outputs.
        seed: of initialisers and random ops.
        max_plans: input signatures per model before a CompileError says that shapes keep changing.
    """

    def decorate(given: Function) -> Job:
        is_training = train and optimizer is not None
        if train and optimizer is None:
            raise CompileError(
                f"{find_source()}: job {given.__name__!r} has no optimizer; give"
                " @af.job(optimizer=af.optim.AdamW(1e-3)), or train=False to evaluate only"
            )
        return Job(given, JobOptions(optimizer, is_training, seed, max_plans))

    return decorate if function is None else decorate(function)


def _compiled(
    key: str, graph: Graph, target: HostTarget, options: CompileOptions, settings: Settings
) -> Plan:
    """Return the plan from the cache on disk, or compile it and keep it there."""
    from actors.race import check_races  # needed only where something is compiled

    cache = PlanCache(settings.cache, logger.warning)
    plan = cache.find(key) if settings.dump is None else None
    if plan is not None:
        logger.info("plan %r comes from %s", options.name, settings.cache)
        return plan
    before = time.perf_counter()
    plan = compile_graph(graph, target, options, dumper(settings.dump))
    check_races(plan)
    seconds = time.perf_counter() - before
    logger.info("plan %r compiled in %.3f s: %d nodes", options.name, seconds, len(graph.nodes))
    cache.store(key, plan)
    return plan


def _outputs(owner: Job, returned: Any, *, is_training: bool) -> dict[str, Tensor]:
    name = "loss" if is_training else "output"
    outputs = dict(returned) if isinstance(returned, Mapping) else {name: returned}
    for key, value in outputs.items():
        if not isinstance(value, Tensor):
            raise CompileError(
                f"job {owner.name!r} returned {type(value).__name__} as {key!r}; return a tensor,"
                " or a dict of tensors"
            )
        if is_training and value.shape != ():
            what = "the loss" if key == "loss" else f"metric {key!r}"
            raise CompileError(
                f"{_line(value)}: {what} of job {owner.name!r} must be a scalar, it is"
                f" {value.type}; reduce it with .mean() or .sum()"
            )
    if not outputs:
        raise CompileError(f"job {owner.name!r} returned nothing")
    if is_training:
        if "loss" not in outputs:
            raise CompileError(
                f"job {owner.name!r} returned {sorted(outputs)}; a training job's dict needs the"
                " key 'loss'"
            )
        if not outputs["loss"].dtype.is_float:
            loss = outputs["loss"]
            raise CompileError(
                f"{_line(loss)}: the loss of job {owner.name!r} must be a float scalar, it is"
                f" {loss.type}"
            )
    return outputs


def _line(tensor: Tensor) -> str:
    trace = current_trace()
    if trace is None:
        return "job"
    return str(trace.builder.producer_of(tensor._value_in(trace)).source)
