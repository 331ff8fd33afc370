"""A job: a Python function that is traced, compiled and run.

    @af.job(optimizer=af.optim.AdamW(1e-3))
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    train.fit(model, data, steps=1300, checkpoint="runs/demo")

The function is traced once, and again when what a trace reads has changed: types of the batch, the
modules and parameters of the model, settings, code, globals. A plan already compiled, in this
process or on disk, is used again; a graph that changed says in one line why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from actorflow.data import DataError, DataSource, spec_of
from actorflow.environment.option_values import accepts_options
from actorflow.environment.settings import REPLAY, Settings, configure, logger
from actorflow.jobs.job_ranks import devices_of, group_of, mesh_of, ranks_of
from actorflow.jobs.job_spec import (
    CAPTURING,
    asked_rows,
    assigned_buffers,
    captured,
    check_results,
    check_same_state,
    compile_options,
    evaluation_graph,
    variables_of,
    warn_of_fresh_start,
    with_rates,
)
from actorflow.nn.lease import Claim, OpenLoop, are_leased, make_claim, newest
from actorflow.nn.module import ByIdentity, Memo, Module, initialise
from actorflow.optim.optimizers import averages_in
from actorflow.options.job_options import JobOptions
from actorflow.options.run_spec import (
    Evaluation,
    PlanOptions,
    RunSpec,
    check_call,
    check_evaluates,
    check_model,
    name_of,
    parse_every,
    spec_of_source,
    specs_of_source,
)
from actorflow.tensor.tracer import find_source, source_of
from actorflow.trace.job_graph import Batch, trace_job
from actorflow.trace.traces import TraceCache, TraceResult, carried_over
from actors.machine.errors import forkable_lock
from compiler.contract.errors import CompileError
from compiler.contract.html_table import html_table
from compiler.contract.placement import Device, Mesh, RankContext
from compiler.contract.probe import have_breakpoint, is_probe
from compiler.contract.types import TensorType
from compiler.graph.graph import Graph
from compiler.graph.target import LEARNING_RATE
from compiler.ops.families.weights import with_weights

if TYPE_CHECKING:  # kernels, machine and runner are loaded by the first job that compiles or runs
    from actorflow.callbacks.protocol import Metrics
    from actorflow.compile.compiling import JobSpec
    from actorflow.distributed.process_group import ProcessGroup
    from actorflow.eager_mode.training import EagerModel
    from actorflow.run.fitting import FitResult
    from actorflow.run.open_model import OpenModel
    from actorflow.run.prediction import RowSink
    from actorflow.run.predictor import Predictor
    from actorflow.run.runner import Runner
    from actorflow.run.switched_run import SpecPlan
    from compiler.contract.plan import Plan

if TYPE_CHECKING:
    import typing_extensions as typing_  # has defaults: `Job` alone is a job of any model

    M = typing_.TypeVar("M", bound=Module, default=Any)
    R = typing_.TypeVar("R", default=Any)
else:
    M, R = TypeVar("M"), TypeVar("R")
Array = np.ndarray[Any, Any]

_MOST_PLANS = 256
"""Plans that a job keeps by their keys; one that is gone comes from the disk, or is made again."""


class Job(Generic[M, R]):
    """A function of (model, batch) that can be compiled and run; M is the model's type.

    A training job returns its loss, a float scalar, or a dict of tensors with the key "loss", or
    with the keys that several optimizers name. Other jobs return a tensor ("output") or a dict of
    tensors. Whoever hears of a step gets numbers for scalars and arrays for all else, of which
    progress lines and files have the numbers.
    """

    def __init__(self, function: Callable[[M, Batch], R], options: JobOptions) -> None:
        self.name = name_of(function)
        self.options = options
        self._function = function
        # By cache key. The tables below hold a model weakly: an entry goes when its model does.
        self._plans: dict[str, Plan] = {}
        self._open: ByIdentity[OpenModel | EagerModel] = ByIdentity()
        self._fitted: ByIdentity[int] = ByIdentity()
        self._turns: ByIdentity[AbstractContextManager[object]] = ByIdentity()
        self._masked: dict[str, Job[M, Any]] = {}
        self._lock = forkable_lock()
        self.__doc__ = function.__doc__

    def __repr__(self) -> str:
        changed = [f", {name}={value}" for name, value in self.options.changed().items()]
        return f"Job({self.name!r} at {source_of(self._function)}{''.join(changed)})"

    def _repr_html_(self) -> str:
        rows = {"defined at": str(source_of(self._function))}
        return html_table(f"Job {self.name}", rows | self.options.changed())

    @property
    def function(self) -> Callable[[M, Batch], R]:
        """The function that was decorated."""
        return self._function

    def compile(
        self,
        model: M,
        data: DataSource | Mapping[str, TensorType],
        *,
        every: str | int | None = None,
        evaluation: Evaluation | None = None,
        rank: int | None = None,
        on_nan: str = "raise",
        on_step: bool = False,
    ) -> Plan:
        """Return the plan for a model and the batches of a source (or their types).

        With `every` the plan takes snapshots of the variables for checkpoints at that cadence, with
        `evaluation` it evaluates between steps. Of a job with a mesh it is the plan of one rank:
        of `rank`, by default this process's own where `actorflow launch` has started it, else 0. It
        is compiled here, whatever the other ranks do.
        With `on_nan="skip"` a step whose loss or gradients are not finite changes nothing but the
        counters; all gradients of a step are alive at once then. A job in float16 always does so.
        With `on_step` a run of the plan waits at each step for its `on_step`, as `fit` does.
        Raises CompileError with the user's line.
        """
        ranks = self.ranks(rank)
        check_call(self.name, model)
        period = None if every is None else parse_every(every)
        call = PlanOptions(period, evaluation, on_nan, on_step)
        return self._plan(self._spec(model, data, call, ranks), None, model)

    def _plan(self, job_spec: JobSpec, group: ProcessGroup | None, model: M) -> Plan:
        """Return the plan; a line says why there is another one now, and how long that took."""
        from actorflow.distributed.agreed_plan import plan_for

        began_s, known = time.perf_counter(), {id(plan) for plan in self._plans.values()}
        plan = plan_for(job_spec, self._plans, group)
        if len(self._plans) > _MOST_PLANS:  # shapes that never come again
            del self._plans[next(iter(self._plans))]
        reason = self._traces(model).take_reason(job_spec.traced)
        if reason and id(plan) not in known:
            seconds = time.perf_counter() - began_s
            text = "job %r recompiled because %s; that took %.2f s"
            logger.warning(text, self.name, reason, seconds)
        return plan

    @accepts_options(RunSpec, Module)
    def fit(self, model: M, run_spec: RunSpec) -> FitResult:
        """Train until `steps` steps are done in total; `Runner.fit` says what may be raised.

        `evaluation` runs another job on the same model between steps.

        A run starts from the newest valid checkpoint, or else from the model's own parameters with
        fresh optimizer state at step 0. Whatever ends it, the model has the parameters; while it
        runs, whoever reads them gets those after the last finished step, and what is written to
        them counts from the next one on. Raises CompileError where another run trains the model.
        """
        check_call(self.name, model)
        job_spec, *others = self._specs_of_data(model, run_spec)
        # Refused before anything is compiled. `close` then brings home what `step` has trained.
        claim = self._claim(model, "fit", job_spec.graph)
        self._close(model)
        group = self._group()
        plan = self._plan(job_spec, group, model)
        # A tool (memory map, inspect) runs the user's script up to here, and takes the plan out.
        if CAPTURING.get():

            def plan_of(options: JobOptions, spec: Mapping[str, TensorType]) -> Plan:
                other = Job(self._function, options)
                return other._plan(other._spec(model, spec, run_spec.plan_options), None, model)

            raise captured(plan, job_spec, spec_of_source(run_spec.data), self.options, plan_of)
        seed = self.options.effective_seed if run_spec.seed is None else run_spec.seed
        self._initialise(model, seed, job_spec.graph)
        num_steps = self._fitted.get(model)
        if num_steps and run_spec.checkpoint is None and self.options.train:
            self._fitted.set(model, 0)  # it is told once
            count = f"epochs={run_spec.epochs}" if run_spec.epochs else f"steps={run_spec.steps}"
            warn_of_fresh_start(self.name, num_steps, count)
        from actorflow.run.open_model import runner_on

        spec_plans = self._spec_plans(model, run_spec, [job_spec, *others], group)
        with ExitStack() as stack:
            evaluation = run_spec.evaluation if spec_plans else None
            if evaluation is not None:
                stack.enter_context(evaluation.job.stepped(model, evaluation.data))
            runner = stack.enter_context(runner_on(model, plan, claim, seed, job_spec, group))
            runner.model = model
            runner.take_turns(spec_plans)
            if evaluation is not None:
                runner.evaluate = partial(evaluation.job.step, model)
            passed = None
            if os.environ.get(REPLAY):
                from actorflow.run.replay import replay_if_asked

                evaluating = Job(self._function, self.options.without_training())
                passed = replay_if_asked(runner, run_spec, self, evaluating, model)
            result = passed or runner.run(run_spec)
        if self._fitted.get(model) is None:
            self._fitted.set(model, result.last_step)
        return result

    def runner_like(
        self, runner: Runner, model: M, spec: Mapping[str, TensorType], call: PlanOptions
    ) -> Runner:
        """Return a runner of this job's plan for some batches, on the ranks of another runner."""
        job_spec = self._spec(model, spec, call, metrics_every=1)
        return runner.beside(self._plan(job_spec, runner.group, model), job_spec.predicates)

    def _specs_of_data(self, model: M, run_spec: RunSpec) -> list[JobSpec]:
        """Return what a compilation is asked for each type of batches, that of `spec()` first.

        Of several types each step is made by itself, and all that comes between two of them is
        done outside of their plans.
        """
        specs, call = specs_of_source(run_spec.data), run_spec.plan_options
        if len(specs) == 1:
            return [self._spec(model, run_spec.data, call)]
        evaluation = call.evaluation
        if evaluation is not None and evaluation.ema:
            raise CompileError(
                f"{find_source()}: an evaluation beside batches of several types"
                f" ({len(specs)} of {type(run_spec.data).__name__}) is made by step of its job, on"
                " the model: leave out ema=True, or evaluate after the run"
            )
        call = PlanOptions(on_nan=call.on_nan, asked_outputs=call.asked_outputs)
        return [self._spec(model, spec, call, metrics_every=1) for spec in specs]

    def _spec_plans(
        self,
        model: M,
        run_spec: RunSpec,
        job_specs: Sequence[JobSpec],
        group: ProcessGroup,
    ) -> tuple[SpecPlan, ...]:
        """Return the plans of a source of several types; nothing for one type."""
        from actorflow.run.switched_run import SpecPlan

        if len(job_specs) == 1:
            return ()
        plans = [self._plan(job_spec, group, model) for job_spec in job_specs]
        check_same_state(self.name, plans)
        rows = zip(specs_of_source(run_spec.data), plans, job_specs, strict=True)
        return tuple([SpecPlan(spec, plan, job_spec.predicates) for spec, plan, job_spec in rows])

    def stream(
        self, model: M, data: DataSource, *, steps: int | None = None, on_nan: str = "raise"
    ) -> Iterator[Metrics]:
        """Yield the outputs of each step, of a run that is at most a few steps ahead of them.

        Starts from the model's own parameters with fresh optimizer state. In the loop, as anywhere
        else, the model's parameters are those after the last finished step, and writing to them
        counts from the next step on. `on_nan` as in `fit`. Raises CompileError at the first step
        where another run trains the model. A job that does not train reads the parameters once, at
        the beginning.
        """
        check_call(self.name, model)
        # Arguments are checked at the call; the generator's own body runs at the first `next` only.
        run_spec, loop = RunSpec.of_stream(data, steps, on_nan), OpenLoop()
        return loop.of(self._streamed(model, run_spec, loop))

    def evaluate(self, model: M, data: DataSource, *, batches: int | None = None) -> dict[str, Any]:
        """Return metrics, and means of the other scalar outputs, over batches of a source.

        A metric (`af.metrics`) is that of all rows. An output that is computed from one
        `af.weighted_mean`, as losses of `reduction="tokens"` are, is the mean over all that counts
        in all batches; of another one all batches count the same. `batches` from where the source
        stands, by default all until it ends; then the source goes back there. Parameters stay.

        Raises CompileError for a job that trains or has nothing to report, and DataError where the
        source has no batch, fewer than `batches`, nothing that counts, or what a metric refuses.
        """
        from actorflow.run.evaluation import evaluated

        where = f"{find_source()}: evaluate of job {self.name!r}"
        return evaluated(self._whole(model, data, batches, "evaluate"), where, batches)

    def predict(
        self, model: M, data: DataSource, to: RowSink | None = None, *, batches: int | None = None
    ) -> Any:
        """Return the outputs of all rows of a source, in its order: arrays by name.

        Rows that only fill up a batch are left out, where the source names its mask (`row_mask`).
        With `to` nothing is kept, and the number of rows is returned: a function is called with the
        arrays of each batch; of a new Parquet file (extra [data]) it is the path. `batches` as in
        `evaluate`; the source goes back. Raises CompileError for a job that trains or an output
        without an axis of rows, DataError for a path that is taken and data without an end.
        """
        from actorflow.run.prediction import gathered_rows, rows_sink, with_mask

        where, mask, job = find_source(), getattr(data, "row_mask", ""), self
        if mask:
            masked = Job(with_mask(self._function, mask), self.options)
            job = self._masked.setdefault(mask, masked)  # which keeps its plans
        steps = job._whole(model, data, batches, "predict")
        with closing(steps), rows_sink(to, where, is_first=self._group().is_first) as sink:
            return gathered_rows(steps, sink, where, batches)

    def _whole(
        self, model: M, data: DataSource, batches: int | None, call: str
    ) -> Generator[Metrics, None, None]:
        """Yield the outputs of batches of a source, which then goes back to where it stood."""
        check_call(self.name, model)
        check_evaluates(self.name, self.options, call)
        run_spec, loop = RunSpec.of_whole(data, batches, call), OpenLoop()
        start = dict(run_spec.data.state())
        try:
            yield from loop.of(self._streamed(model, run_spec, loop))
        finally:
            run_spec.data.restore(start)

    def _streamed(
        self, model: M, run_spec: RunSpec, loop: OpenLoop
    ) -> Generator[Metrics, None, None]:
        job_spec, *others = self._specs_of_data(model, run_spec)
        claim = self._claim(model, "stream", job_spec.graph)
        self._close(model)
        from actorflow.run.open_model import runner_on

        group, seed = self._group(), self.options.effective_seed
        plan = self._plan(job_spec, group, model)
        self._initialise(model, seed, job_spec.graph)
        spec_plans = self._spec_plans(model, run_spec, [job_spec, *others], group)
        with runner_on(model, plan, claim, seed, job_spec, group, loop) as runner:
            runner.take_turns(spec_plans)
            yield from runner.streamed(run_spec)

    @contextmanager
    def stepped(self, model: M, data: DataSource) -> Iterator[None]:
        """Have `step` compile nothing for a source's batches, and close it after all.

        It stays open where it was open before. Raises CompileError, and DataError, for what it
        could not step, and where the job has no scalar output.
        """
        was_open = self._open.get(model) is not None
        for spec in specs_of_source(data):
            graph = self._graph(model, asked_rows(spec))
            types = {o.name: graph.types[o.value] for o in graph.outputs if not is_probe(o.name)}
            check_results(types, self.name)
            job_spec = self._spec(model, spec, PlanOptions(), metrics_every=1, graph=graph)
            self._plan(job_spec, self._group(), model)
        try:
            yield
        finally:
            if not was_open:
                self.close(model)

    def step(self, model: M, batch: Mapping[str, Array] | Sequence[Mapping[str, Array]]) -> Metrics:
        """Run one step on one batch with the model's newest parameters and return its outputs.

        A job with accumulate=k takes a list of k batches of one type. The plan stays open until
        `close`. A batch of another type opens another plan beside it, on the same variables and the
        same memory; to go back and forth between types costs little more than the steps. Of more
        than `max_plans` plans the one that was used least recently is closed. Threads that step one
        job on one model take turns, whatever their batches. Several jobs may be stepped on one
        model in turn. Raises CompileError where a `fit` or `stream` trains the model, or in another
        thread a `step` of another job.
        """
        from actorflow.run.stepping import batches_of_step

        check_call(self.name, model)
        where = f"step of job {self.name!r}"
        try:
            batches = batches_of_step(batch, self.options.accumulate, where)
            spec = spec_of(batches[0], where)
        except (CompileError, DataError) as error:
            raise type(error)(f"{find_source()}: {error}") from None
        with self._turn(model):
            opened = self._open.get(model)
            traced = self._traces(model).newest(spec)
            # By identity: a stamp is made anew by each reading, so the same one means nothing
            # has changed since.
            if opened is None or traced is None or not opened.select(traced.guard.stamp):
                if opened is not None:
                    opened.announce(batches[0])
                opened = self._opened_for(model, spec, opened)
            return opened.step(batches)

    def eager_step(self, model: M, batch: Mapping[str, Array]) -> Metrics:
        """Run one step op by op, as `af.eager` does, and return its outputs.

        The function computes with values: print and a debugger show them, and they may decide what
        it does. Results are, bit by bit, those of a plan without fusion. The state of the optimizer
        is that of `step`: one goes on where the other has stopped. A step on one batch of a job on
        the host, in float32. Raises CompileError as `step` does.
        """
        from actorflow.eager_mode.training import EagerJob

        check_model(model)
        job = EagerJob(self.name, self._function, self.options)
        arrays = job.checked(self.devices, batch)
        with self._turn(model):
            return job.opened(model, self._open).step([arrays])

    def predictor(
        self,
        model: M,
        example: Mapping[str, Array],
        *,
        max_wait_ms: float | None = None,
        threads: int | None = None,
    ) -> Predictor:
        """Return the job, open for batches like an example, as a function that any thread calls.

        With `max_wait_ms` callers give one row or more, which are computed together in one batch.
        A kernel uses at most `threads` threads, by default those of the process. Raises
        CompileError for a job that trains or no such number, DataError for no batch.
        """
        from actorflow.environment.native import check_threads, limited_threads
        from actorflow.run.predictor import Predictor, check_rows

        check_call(self.name, model)
        check_evaluates(self.name, self.options, "be a predictor")
        where = f"{find_source()}: predictor of job {self.name!r}"
        own, spec = Job(self._function, self.options), spec_of(example, where)
        check_threads(threads, where)
        traced = own._traces(model).current(model, spec)
        check_rows(spec, traced.graph, max_wait_ms, where)
        with limited_threads(threads):
            return Predictor(own._reopen(model, traced, None), spec, where, max_wait_ms, threads)

    def averages(self, model: M) -> dict[str, Array]:
        """Return the averages of the weights that `step` trains, by path; none without an `ema`.

        `model.load(model.state() | job.averages(model))` gives them to the model.
        """
        opened = self._open.get(model)
        return {} if opened is None else averages_in(opened.variables())

    def close(self, model: M) -> None:
        """End a plan that `step` opened for this model; its optimizer state goes with it."""
        check_model(model)
        self._close(model)

    def _close(self, model: M) -> None:
        with self._turn(model):
            opened = self._open.pop(model)
            if opened is not None:
                opened.close()

    def _turn(self, model: M) -> AbstractContextManager[object]:
        """Return the lock under which the job is traced on a model, and a plan opened or stepped.

        One for each model: ranks may be threads, which step models of their own and wait for each
        other.
        """
        with self._lock:
            lock = self._turns.get(model)
            return self._turns.set(model, forkable_lock()) if lock is None else lock

    def _opened_for(
        self, model: M, spec: dict[str, TensorType], opened: OpenModel | EagerModel | None
    ) -> OpenModel | EagerModel:
        """Return a plan that is open for the model as it is now: the one there is, or another."""
        traced = self._traces(model).current(model, spec)
        now = traced.signature(model)
        if opened is not None and opened.signature.has_parameters_of(now):
            if opened.take_up(now):
                return opened
        elif opened is not None and opened.signature.has_graph_of(now):
            moves = opened.signature.moves(now)
            logger.warning("job %r opened its plan again: parameter %s", self.name, moves)
        return self._reopen(model, traced, opened)

    def _reopen(
        self, model: M, traced: TraceResult, opened: OpenModel | EagerModel | None
    ) -> OpenModel:
        from actorflow.run.open_model import OpenModel
        from actorflow.run.runner import Runner

        claim = self._claim(model, "step", traced.graph)
        group, signature = self._group(), traced.signature(model)
        job_spec = self._spec(
            model, traced.spec, PlanOptions(), metrics_every=1, graph=traced.graph
        )
        plan = self._plan(job_spec, group, model)
        if (
            isinstance(opened, OpenModel)
            and opened.signature.has_parameters_of(signature)
            and opened.add(plan, job_spec.predicates, signature, claim)
        ):
            return opened
        self._initialise(model, seed := self.options.effective_seed, traced.graph)
        carried: dict[str, Array] = {}
        if opened is not None:
            self._open.pop(model)
            carried = carried_over(plan, opened.close(), opened.signature, signature)
        # The model's own values win over those that the closed plan left.
        values = {**carried, **newest(model.cells())}
        runner = Runner(
            plan,
            values=values,
            seed=seed,
            settings=job_spec.settings,
            group=group,
            predicates=job_spec.predicates,
            max_plans=self.options.max_plans,
        )
        runner.borrows = claim is None and not are_leased(model.cells())
        now_open = OpenModel(model, runner, signature, claim)
        self._open.set(model, now_open)
        return now_open

    def _initialise(self, model: M, seed: int, graph: Graph) -> None:
        """Give the model the first values that it lacks, but those that a training makes itself.

        A training makes them where it computes, one at a time, and the model gets them from there.
        """
        initialise(model, seed, variables_of(graph) if self.options.train else ())

    def _claim(self, model: M, call: str, graph: Graph) -> Claim | None:
        """Return what a call says of itself that trains the model, or assigns buffers of it.

        Raises CompileError where another call changes the same values.
        """
        names = None if self.options.train else assigned_buffers(graph)
        if names is not None and not names:
            return None
        return make_claim(model.cells(), f"{call} of job {self.name!r}", names)

    def _spec(
        self,
        model: M,
        data: DataSource | Mapping[str, TensorType],
        call: PlanOptions,
        ranks: RankContext | None = None,
        *,
        graph: Graph | None = None,
        metrics_every: int | None = None,
    ) -> JobSpec:
        """Return what a compilation is asked; the arguments of the call are checked by now."""
        from actorflow.compile.compiling import JobSpec
        from actorflow.compile.extensions import load_plugins
        from actorflow.compile.hardware import hardware_for
        from actorflow.environment.host import cudnn_for, gpu_for

        ranks, devices = ranks or self.ranks(), self.options.placed_on
        spec = asked_rows(spec_of_source(data))
        settings = Settings.from_env(os.environ)
        configure(settings.log_level)
        devices = devices or settings.devices
        try:
            gpu = gpu_for(devices, self.options.gpu, settings)
        except CompileError as error:
            raise CompileError(f"{source_of(self._function)}: job {self.name!r}: {error}") from None
        load_plugins()  # before the trace: what they add may change what it sees
        graph = traced = graph or self._graph(model, spec)
        if LEARNING_RATE in call.asked_outputs:
            graph = with_rates(graph, self.name)
        if not self.options.train or self.options.accumulate > 1:  # where batches meet
            graph = with_weights(graph)
        hardware = hardware_for(devices, gpu, cudnn_for(settings) if gpu else None, ranks)
        if have_breakpoint([output.name for output in graph.outputs]):
            call = replace(call, has_listener=True)  # a step waits for the debugger
        evaluated = evaluation_graph(call.evaluation, model, devices, graph)
        options = compile_options(
            self.name,
            self.options,
            call,
            hardware,
            gpu=gpu,
            metrics_every=metrics_every or self.options.metrics_every,
            verify=settings.verify,
            debug=settings.debug,
        )
        predicates = {"metrics": graph.predicates}
        if evaluated is not None:
            predicates["eval_metrics"] = evaluated.predicates
        job = self.options
        return JobSpec(graph, hardware, options, settings, job, traced, evaluated, predicates)

    @property
    def mesh(self) -> Mesh:
        """The ranks that share the work of a step."""
        return mesh_of(self.options)

    def _group(self) -> ProcessGroup:
        return group_of(self.name, self.options)

    def ranks(self, rank: int | None = None) -> RankContext:
        """Return who shares the work of a step; `rank` is whose plan it is, by default our own."""
        return ranks_of(self.name, self.options, rank)

    @property
    def devices(self) -> tuple[Device, ...]:
        """What the job runs on, in order; ACTORFLOW_DEVICE says so for one that names none."""
        return devices_of(self.options)

    def graph(self, model: M, spec: dict[str, TensorType]) -> Graph:
        """Return the logical graph of this job for a model and the types of a batch.

        It is traced again when anything that the trace may read has changed; a changed graph says
        why in one line. Raises CompileError with the user's line.
        """
        check_call(self.name, model)
        graph = self._graph(model, spec_of_source(spec))
        if reason := self._traces(model).take_reason(graph):
            logger.warning("job %r recompiled because %s", self.name, reason)
        return graph

    def _graph(self, model: M, spec: dict[str, TensorType]) -> Graph:
        with self._turn(model):
            return self._traces(model).current(model, spec).graph

    def _traces(self, model: M) -> TraceCache:
        memo: Memo[TraceCache] = model.memo()
        if traces := memo.get(self):
            return traces
        name, function, options = self.name, self._function, self.options

        # Without the job, which what a model has of it would keep alive, with all that it opened.
        def trace(model: Module, spec: Mapping[str, TensorType]) -> Graph:
            return trace_job(name, function, options, model, spec, devices_of(options))

        # Kept by the model, so the graphs go with it.
        traces = TraceCache(name, function, options.optimizer, trace, options.max_plans)
        return memo.set(self, traces)
