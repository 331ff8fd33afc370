"""The decorator: a Python function becomes a job, which is traced, compiled and run.

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
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from inspect import Parameter
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, cast, overload

import numpy as np

from actorflow.data import DataError, DataSource, spec_of
from actorflow.environment.option_values import (
    accepts_options,
    arguments_of,
    describe,
    signature_with,
)
from actorflow.environment.settings import Settings, configure, logger
from actorflow.jobs.job_spec import (
    CAPTURING,
    PlanCaptured,
    asked_rows,
    compile_options,
    evaluation_graph,
)
from actorflow.nn.lease import Claim, OpenLoop, make_claim, newest
from actorflow.nn.module import ByIdentity, Memo, Module, initialise
from actorflow.optim.optimizers import averages_in
from actorflow.options.job_options import JobOptions
from actorflow.options.run_spec import (
    Evaluation,
    PlanOptions,
    RunSpec,
    check_function,
    check_model,
    check_rank,
    name_of,
    parse_every,
    spec_of_source,
)
from actorflow.tensor.tracer import find_source, source_of
from actorflow.trace.job_graph import Function, trace_job
from actorflow.trace.traces import ModelSignature, TraceCache, TraceResult, carried_over
from actors.machine.errors import forkable_lock
from compiler.contract.errors import CompileError
from compiler.contract.placement import (
    BETWEEN_GPUS,
    INSIDE_A_HOST,
    SINGLE_RANK,
    SINGLE_RANK_MESH,
    Device,
    DeviceKind,
    Hosts,
    Mesh,
    RankContext,
    joined,
    on_hosts,
)
from compiler.contract.plan import Plan
from compiler.contract.probe import have_breakpoint
from compiler.contract.types import TensorType
from compiler.graph.graph import Graph
from compiler.ops.primitives.sources import OF_MODEL, VARIABLE

if TYPE_CHECKING:  # kernels, machine and runner are loaded by the first job that compiles or runs
    from actorflow.compile.compiling import JobSpec
    from actorflow.distributed.process_group import ProcessGroup
    from actorflow.eager_mode.training import EagerModel
    from actorflow.options.run_spec import Metrics
    from actorflow.run.fitting import FitResult
    from actorflow.run.open_model import OpenModel

P = ParamSpec("P")
Array = np.ndarray[Any, Any]


class Job:
    """A function of (model, batch) that can be compiled and run.

    A training job returns its loss, a float scalar, or a dict of tensors with the key "loss", or
    with the keys that several optimizers name. Other jobs return a tensor ("output") or a dict of
    tensors. Whoever hears of a step gets numbers for scalars and arrays for all else, of which
    progress lines and files have the numbers.
    """

    def __init__(self, function: Function, options: JobOptions) -> None:
        self.name = name_of(function)
        self.options = options
        self._function = function
        # By cache key. The tables below hold a model weakly: an entry goes when its model does.
        self._plans: dict[str, Plan] = {}
        self._open: ByIdentity[OpenModel | EagerModel] = ByIdentity()
        self._fitted: ByIdentity[int] = ByIdentity()
        self._turns: ByIdentity[AbstractContextManager[object]] = ByIdentity()
        self._lock = forkable_lock()
        self.__doc__ = function.__doc__

    @property
    def function(self) -> Function:
        """The function that was decorated."""
        return self._function

    def compile(
        self,
        model: Module,
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
        check_model(model)
        period = None if every is None else parse_every(every)
        call = PlanOptions(period, evaluation, on_nan, on_step)
        return self._plan(self._spec(model, data, call, ranks))

    def _plan(self, job_spec: JobSpec, group: ProcessGroup | None = None) -> Plan:
        from actorflow.distributed.agreed_plan import plan_for

        return plan_for(job_spec, self._plans, group)

    @accepts_options(RunSpec, Module)
    def fit(self, model: Module, run_spec: RunSpec) -> FitResult:
        """Train until `steps` steps are done in total; `Runner.fit` says what may be raised.

        `evaluation` runs another job on the same model between steps.

        A run starts from the newest valid checkpoint, or else from the model's own parameters with
        fresh optimizer state at step 0. Whatever ends it, the model has the parameters; while it
        runs, whoever reads them gets those after the last finished step, and what is written to
        them counts from the next one on. Raises CompileError where another run trains the model.
        """
        check_model(model)
        job_spec = self._spec(model, run_spec.data, run_spec.plan_options)
        # Refused before anything is compiled. `close` then brings home what `step` has trained.
        claim = self._claim(model, "fit", job_spec.graph)
        self._close(model)
        group = self._group()
        plan = self._plan(job_spec, group)
        # A tool (memory map, inspect) runs the user's script only up to here, and takes the plan
        # out.
        if CAPTURING.get():
            store_all = None
            if self.options.memory_budget or self.options.recompute == "blocks":
                stores_all = replace(self.options, memory_budget=None, recompute="none")
                other = Job(self._function, stores_all)
                store_all = other._plan(other._spec(model, run_spec.data, run_spec.plan_options))
            raise PlanCaptured(plan, store_all, job_spec)
        seed = self.options.effective_seed if run_spec.seed is None else run_spec.seed
        self._initialise(model, seed, job_spec.graph)
        self._say_anew(model, run_spec)
        from actorflow.run.open_model import runner_on

        with runner_on(model, plan, claim, seed, job_spec, group) as runner:
            result = runner.run(run_spec)
        if self._fitted.get(model) is None:
            self._fitted.set(model, result.last_step)
        return result

    def _say_anew(self, model: Module, run_spec: RunSpec) -> None:
        """Warn once that a second `fit` starts afresh and does not continue the first."""
        num_steps = self._fitted.get(model)
        if num_steps and run_spec.checkpoint is None and self.options.train:
            self._fitted.set(model, 0)
            logger.warning(
                "%s: fit of job %r starts at step 0 with new optimizer state, although it has"
                " trained this model for %d steps before: without checkpoint=, steps=%d counts"
                " the steps of this call. Give both calls the same checkpoint= to continue",
                find_source(),
                self.name,
                num_steps,
                run_spec.steps,
            )

    def stream(
        self, model: Module, data: DataSource, *, steps: int | None = None, on_nan: str = "raise"
    ) -> Iterator[Metrics]:
        """Yield the outputs of each step, of a run that is at most a few steps ahead of them.

        Starts from the model's own parameters with fresh optimizer state. In the loop, as anywhere
        else, the model's parameters are those after the last finished step, and writing to them
        counts from the next step on. `on_nan` as in `fit`. Raises CompileError at the first step
        where another run trains the model. A job that does not train reads the parameters once, at
        the beginning.
        """
        check_model(model)
        # Arguments are checked at the call; the generator's own body runs at the first `next` only.
        run_spec = RunSpec.of_stream(data, steps, on_nan)
        loop = OpenLoop()
        return loop.of(self._streamed(model, run_spec, loop))

    def _streamed(
        self, model: Module, run_spec: RunSpec, loop: OpenLoop
    ) -> Generator[Metrics, None, None]:
        job_spec = self._spec(model, run_spec.data, run_spec.plan_options)
        claim = self._claim(model, "stream", job_spec.graph)
        self._close(model)
        from actorflow.run.open_model import runner_on

        group, seed = self._group(), self.options.effective_seed
        plan = self._plan(job_spec, group)
        self._initialise(model, seed, job_spec.graph)
        with runner_on(model, plan, claim, seed, job_spec, group, loop) as runner:
            yield from runner.streamed(run_spec)

    def step(
        self, model: Module, batch: Mapping[str, Array] | Sequence[Mapping[str, Array]]
    ) -> Metrics:
        """Run one step on one batch with the model's newest parameters and return its outputs.

        A job with accumulate=k takes a list of k batches of one type. The plan stays open until
        `close`. Another batch type opens another plan, which goes on with the optimizer state of
        this one. Threads that step one job on one model take turns, whatever their batches. Several
        jobs may be stepped on one model in turn. Raises CompileError where a `fit` or `stream`
        trains the model, or in another thread a `step` of another job.
        """
        from actorflow.run.stepping import batches_of_step

        check_model(model)
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
            if opened is None or traced is None or opened.signature.stamp is not traced.guard.stamp:
                opened = self._opened_for(model, spec, opened)
            return opened.step(batches)

    def eager_step(self, model: Module, batch: Mapping[str, Array]) -> Metrics:
        """Run one step op by op, as `af.eager` does, and return its outputs.

        The function computes with values: print and a debugger show them, and they may decide what
        it does. Results are, bit by bit, those of a plan without fusion. The state of the optimizer
        is that of `step`: one goes on where the other has stopped. A step on one batch of a job on
        the host, in float32. Raises CompileError as `step` does.
        """
        from actorflow.eager_mode.region import arrays_of
        from actorflow.eager_mode.training import EagerJob, EagerModel

        check_model(model)
        job = EagerJob(self.name, self._function, self.options)
        job.check(self.devices)
        arrays = arrays_of(batch)
        spec_of(arrays, f"{find_source()}: eager_step of job {self.name!r}")
        with self._turn(model):
            opened = self._open.get(model)
            if not isinstance(opened, EagerModel):
                left = {} if opened is None else opened.close()
                self._open.pop(model)
                opened = self._open.set(model, EagerModel(job, model, left))
            return opened.step([arrays])

    def averages(self, model: Module) -> dict[str, Array]:
        """Return the averages of the weights that `step` trains, by path; none without an `ema`.

        `model.load(model.state() | job.averages(model))` gives them to the model.
        """
        opened = self._open.get(model)
        return {} if opened is None else averages_in(opened.variables())

    def close(self, model: Module) -> None:
        """End a plan that `step` opened for this model; its optimizer state goes with it."""
        check_model(model)
        self._close(model)

    def _close(self, model: Module) -> None:
        with self._turn(model):
            opened = self._open.pop(model)
            if opened is not None:
                opened.close()

    def _turn(self, model: Module) -> AbstractContextManager[object]:
        """Return the lock under which the job is traced on a model, and a plan opened or stepped.

        One for each model: ranks may be threads, which step models of their own and wait for each
        other.
        """
        with self._lock:
            lock = self._turns.get(model)
            return self._turns.set(model, forkable_lock()) if lock is None else lock

    def _opened_for(
        self, model: Module, spec: dict[str, TensorType], opened: OpenModel | EagerModel | None
    ) -> OpenModel | EagerModel:
        """Return a plan that is open for the model as it is now: the one there is, or another."""
        traced = self._traces(model).current(model, spec)
        now = traced.signature(model)
        if opened is None or not opened.signature.has_graph_of(now):
            return self._reopen(model, traced, now, opened)
        if not opened.signature.has_parameters_of(now):
            moves = opened.signature.moves(now)
            logger.warning("job %r opened its plan again: parameter %s", self.name, moves)
            return self._reopen(model, traced, now, opened)
        opened.signature = now
        return opened

    def _reopen(
        self,
        model: Module,
        traced: TraceResult,
        signature: ModelSignature,
        opened: OpenModel | EagerModel | None,
    ) -> OpenModel:
        from actorflow.run.open_model import OpenModel
        from actorflow.run.runner import Runner

        claim = self._claim(model, "step", traced.graph)
        group = self._group()
        job_spec = self._spec(
            model, traced.spec, PlanOptions(), metrics_every=1, graph=traced.graph
        )
        plan = self._plan(job_spec, group)
        seed = self.options.effective_seed
        self._initialise(model, seed, traced.graph)
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
        )
        now_open = OpenModel(model, runner, signature, claim)
        self._open.set(model, now_open)
        return now_open

    def _initialise(self, model: Module, seed: int, graph: Graph) -> None:
        """Give the model the first values that it lacks, but those that a training makes itself.

        A training makes them where it computes, one at a time, and the model gets them from there.
        """
        initialise(model, seed, _variables_of(graph) if self.options.train else ())

    def _claim(self, model: Module, call: str, graph: Graph) -> Claim | None:
        """Return what a call says of itself that trains the model, or assigns buffers of it.

        Raises CompileError where another call changes the same values.
        """
        names = None if self.options.train else _assigned_buffers(graph)
        if names is not None and not names:
            return None
        return make_claim(model.cells(), f"{call} of job {self.name!r}", names)

    def _spec(
        self,
        model: Module,
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
        graph = graph or self._graph(model, spec)
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
        return JobSpec(graph, hardware, options, settings, self.options, evaluated, predicates)

    @property
    def mesh(self) -> Mesh:
        """The ranks that share the work of a step."""
        return self.options.mesh or SINGLE_RANK_MESH

    def _group(self) -> ProcessGroup:
        """Return this process among the job's ranks: alone, where it trains and shares nothing."""
        from actorflow.distributed.process_group import SINGLE_PROCESS, process_group_from_env

        is_alone = CAPTURING.get() or (self.mesh.num_ranks == 1 and not self.options.train)
        return (
            SINGLE_PROCESS if is_alone else process_group_from_env(os.environ, self.name, self.mesh)
        )

    def ranks(self, rank: int | None = None) -> RankContext:
        """Return who shares the work of a step; `rank` is whose plan it is, by default our own."""
        context = CAPTURING.get()
        if context is not None and context.count > 1:
            return context
        is_launched = context is None and "RANK" in os.environ and self.mesh.num_ranks > 1
        group = self._group() if is_launched else None
        if rank is None:
            rank = group.rank if group else (context or SINGLE_RANK).rank
        check_rank(rank, self.mesh)
        if context is not None and context.hosts is not None:
            return on_hosts(self.mesh, context.hosts, rank)
        kinds = {device.kind for device in self.devices} if self.mesh.num_ranks > 1 else ()
        link = BETWEEN_GPUS if kinds == {DeviceKind.CUDA} else INSIDE_A_HOST
        sizes = group.host_sizes if group else ()
        if not sizes:
            return joined(self.mesh, link, rank)
        between = Settings.from_env(os.environ).link
        return on_hosts(self.mesh, Hosts(sizes, link, between), rank)

    @property
    def devices(self) -> tuple[Device, ...]:
        """What the job runs on, in order; ACTORFLOW_DEVICE says so for one that names none."""
        return self.options.placed_on or Settings.from_env(os.environ).devices

    def graph(self, model: Module, spec: dict[str, TensorType]) -> Graph:
        """Return the logical graph of this job for a model and the types of a batch.

        It is traced again when anything that the trace may read has changed; a changed graph says
        why in one line. Raises CompileError with the user's line.
        """
        check_model(model)
        return self._graph(model, spec_of_source(spec))

    def _graph(self, model: Module, spec: dict[str, TensorType]) -> Graph:
        with self._turn(model):
            return self._traces(model).current(model, spec).graph

    def _traces(self, model: Module) -> TraceCache:
        memo: Memo[TraceCache] = model.memo()
        # Kept by the model, so the graphs go with it.
        return memo.get(self) or memo.set(self, self._new_traces())

    def _new_traces(self) -> TraceCache:
        def trace(model: Module, spec: Mapping[str, TensorType]) -> Graph:
            return trace_job(self.name, self._function, self.options, model, spec, self.devices)

        options = self.options
        return TraceCache(self.name, self._function, options.optimizer, trace, options.max_plans)


def _variables_of(graph: Graph) -> frozenset[str]:
    """Return the names of the variables that a traced job uses."""
    return frozenset([n.attrs.str_("name") for n in graph.nodes if n.op is VARIABLE])


def _assigned_buffers(graph: Graph) -> frozenset[str]:
    """Return the paths of the buffers that a traced job assigns."""
    made_by = graph.producers()
    variables = [graph.nodes[made_by[write.variable]].attrs for write in graph.writes]
    return frozenset([v.str_("name") for v in variables if v.str_("role") in OF_MODEL])


class JobDecorator(Protocol[P]):
    """What `job` is: a decorator, with or without options."""

    @overload
    def __call__(self, *none: P.args, **options: P.kwargs) -> Callable[[Function], Job]: ...

    @overload
    def __call__(self, function: Function, *none: P.args, **options: P.kwargs) -> Job: ...


def _decorator(options_of: Callable[P, JobOptions]) -> JobDecorator[P]:
    """Return `job`, which takes the fields of its options as keywords."""

    def job(*unnamed: Any, **named: Any) -> Any:
        """Turn a function of (model, batch) into a `Job`; a decorator when called without it."""
        arguments = arguments_of("job", signature, unnamed, named)
        is_decorator = "function" not in arguments
        function = arguments.pop("function", None)
        options = JobOptions(**arguments)

        def decorate(function: Function) -> Job:
            check_function(function)
            options.check(name_of(function))
            return Job(function, options)

        return decorate if is_decorator else decorate(function)

    function = Parameter("function", Parameter.POSITIONAL_OR_KEYWORD, default=None)
    signature = signature_with([function], JobOptions)
    describe(job, signature, JobOptions)
    return cast("JobDecorator[P]", job)


job = _decorator(JobOptions)
