"""The runner: opens a plan and trains with it.

`fit` does a whole run, `stream` is for a loop, `step` does one.

    Runner(Plan.load("p.plan")).fit(data, steps=1000, checkpoint="runs/a")

needs no model code: the plan knows its variables, their initialisers and its batch. A job's own
`fit`, `stream` and `step` go through here as well.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from actorflow.callbacks.protocol import Metrics
from actorflow.compile.plan_facts import read_only_variables
from actorflow.data import Batch, DataSource
from actorflow.distributed.process_group import (
    SINGLE_PROCESS,
    ProcessGroup,
    check_same_data,
    check_same_plan,
    check_same_steps,
    check_same_values,
)
from actorflow.distributed.unshard import all_gather_variables
from actorflow.environment.native import told_while_slow
from actorflow.environment.option_values import accepts_options
from actorflow.environment.settings import Settings, logger
from actorflow.nn.lease import frozen, lend_packed
from actorflow.options.run_spec import ENDLESS, RAISE, WARN, RunSpec, describe_value
from actorflow.run.broken_steps import check_policy
from actorflow.run.devices import verify_and_build
from actorflow.run.fitting import FitCall, FitResult
from actorflow.run.live_variables import LiveVariables
from actorflow.run.open_plans import OpenPlans, are_at_one_place
from actorflow.run.packed_values import PackedValues
from actorflow.run.saving import RunContext
from actorflow.run.stepping import Stepping, batches_of_step
from actorflow.run.stopping import drain_outputs, next_of
from actorflow.run.switched_run import SpecPlan, SwitchedRun
from actorflow.run.training_run import Run
from actorflow.tensor.initial_values import check_values, initial_values, steps_done
from actorflow.tensor.probes import Predicates
from actorflow.tensor.tracer import find_source
from actors.machine.history import Statistics
from compiler.contract.errors import CompileError, PeerFailed
from compiler.contract.host_arrays import is_frozen
from compiler.contract.plan import Plan
from compiler.contract.types import numpy_dtype

if TYPE_CHECKING:
    from actorflow.nn.lease import Lease, ParameterStorage
    from actorflow.nn.module import Module
    from actorflow.options.job_options import JobOptions
    from actorflow.run.probes import RangeListener

Array = np.ndarray[Any, Any]
_DROPPED = "the model was dropped, or the script had ended"
_STREAM_AHEAD = 2
"""Steps that `stream` may be ahead of its consumer, besides the plan's own slots."""


AnyRun = Run | SwitchedRun


_OPENING = "allocating memory and binding launches"


@dataclass(slots=True)
class _StepsOfFit:
    """What single steps are, that a run of several plans makes.

    `values` are those that it begins with, until it has begun.
    """

    context: RunContext
    values: Mapping[str, Array] | None
    on_nan: str


class Runner:
    """Runs one plan.

    Args:
        plan: what to run; from `job.compile` or `Plan.load`.
        values: first values by name, of variables that do not start from their initialiser.
        seed: of initialisers and random ops.
        settings: environment; read from `os.environ` by default.
        lease: on the parameters that are trained; it has the values while a run is open.
        group: this process among the ranks of the plan's mesh; all of them do the same calls.
        predicates: what checks of the job call; a plan from a file leaves out those that have none.
        max_plans: plans of one training that stay open, of those that `use` steps in turn.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        values: Mapping[str, Array] | None = None,
        seed: int = 0,
        settings: Settings | None = None,
        lease: Lease | None = None,
        group: ProcessGroup = SINGLE_PROCESS,
        predicates: Predicates | None = None,
        max_plans: int = 8,
    ) -> None:
        if not isinstance(plan, Plan):
            raise CompileError(
                f"{find_source()}: expected a plan, came {describe_value(plan)}; use"
                " job.compile(model, data) or af.Plan.load(path)"
            )
        self.plan = plan
        self.given: Mapping[str, Array] = dict(values or {})
        """What the next run begins with, of variables that do not start from their initialiser."""
        self.group = group
        self.predicates: Predicates = predicates or {}
        self._lease = lease
        self._newest: Run | None = None
        self._open: Run | None = None
        self._live: LiveVariables | None = None
        self.seed = seed
        self.settings = settings or Settings.from_env(os.environ)
        self.max_plans = max_plans
        self.borrows = False
        """Whether values that no step changes are read where the given arrays lie. Once others are
        written, the plan is opened again with a copy of all."""
        self._plans = OpenPlans(max_plans)
        self._fit: _StepsOfFit | None = None
        self.spec_plans: Sequence[SpecPlan] = ()
        """The plans of a source whose batches have several types, that of its `spec()` first."""
        self.job_options: JobOptions | None = None
        """What the job was given, for the record of a run; None for a plan from a file."""
        self.are_plans_together = False
        """Whether these are open on one memory in a run, on all ranks."""
        self.evaluate: Callable[[Batch], Metrics] | None = None
        """Computes what an evaluation between their steps wants of a batch."""
        self.model: Module | None = None
        """What callbacks are told is trained; the runner itself needs none."""
        self._check(plan)

    def _check(self, plan: Plan) -> None:
        # Before kernels are built: ranks with other plans end here, in a message that names them.
        check_same_plan(self.group, plan, self.seed)
        verify_and_build(plan, self.settings, self.group)

    def beside(self, plan: Plan, predicates: Predicates) -> Runner:
        """Return a runner of another plan with the seed and on the ranks of this one."""
        seed, settings, group = self.seed, self.settings, self.group
        return Runner(plan, seed=seed, settings=settings, group=group, predicates=predicates)

    def take_turns(self, spec_plans: Sequence[SpecPlan]) -> None:
        """Have the next run step one of some plans for each batch, by its types.

        All ranks call it together; without plans there is nothing to do. Raises as `Runner`.
        """
        if not spec_plans:
            return
        for spec_plan in spec_plans:
            if spec_plan.plan is not self.plan:
                self._check(spec_plan.plan)
        are_alike = are_at_one_place([spec_plan.plan for spec_plan in spec_plans])
        self.spec_plans = spec_plans
        self.are_plans_together = self._do_all(are_alike, "open several plans on one memory")

    def _do_all(self, is_so: bool, what: str) -> bool:
        """Return whether something is so on all ranks, whose plans may be of other sizes."""
        return all(self.group.all_gather_object(what, is_so))

    def use(self, plan: Plan, predicates: Predicates, *, is_leased: bool = False) -> None:
        """Step another plan of the same training from now on; between steps.

        Plans that have their variables at the same addresses stay open on one memory, as large as
        the largest needs it, and take turns. For other variables the open one is closed. All ranks
        do the same. `is_leased` says that the lease goes on whatever is closed. Raises as `Runner`.
        """
        if plan is self.plan:
            return
        plans = self._plans
        if plan not in plans:
            self._check(plan)
        stays_open = plans.current is None or plan in plans
        if not stays_open and self.can_share(plan):
            stays_open = self._do_all(plans.has_room(plan), "open a plan beside others")
            if not stays_open:
                plans.reserve([(plan, predicates)])
        if not stays_open:
            lease, before = self._lease, self.given
            if is_leased:
                self._lease = None
            try:
                self.close()  # by the plan that was open: the other one comes after it
            finally:
                # What only other plans have stays as it was left.
                self._lease, self.given = lease, {**before, **self.given}
        self.plan, self.predicates = plan, predicates

    def announce(self, batch: Batch) -> None:
        """Tell other ranks for which batch a plan is opened, before the next step."""
        if self._plans.current is not None:
            self._plans.current.run.announce(batch)

    def can_share(self, plan: Plan) -> bool:
        """Whether a plan can be open beside those that are."""
        return self._do_all(self._plans.shares_memory(plan), "take turns on one memory")

    @property
    def num_skipped(self) -> int:
        """Steps of the newest run that were skipped."""
        return 0 if self._newest is None else self._newest.num_skipped

    def make_run(
        self, run_spec: RunSpec, context: RunContext, values: Mapping[str, Array]
    ) -> AnyRun:
        """Return a run over some data, to be given to `begin`: with the plan for each batch."""
        if not self.spec_plans:
            with told_while_slow(self.plan.name, lambda: _OPENING):
                return Run(self.plan, run_spec, context, values)
        plans = [(spec_plan.plan, spec_plan.predicates) for spec_plan in self.spec_plans]
        if self.are_plans_together:
            self._plans.reserve(plans)
        self._plans.most = max(self.max_plans, len(plans))
        self._newest = None
        self._fit = _StepsOfFit(replace(context, saver=None), values, run_spec.on_nan)
        return SwitchedRun(self, self.spec_plans, run_spec, context, self.evaluate)

    def step_of(self, spec_plan: SpecPlan, batches: Sequence[Batch]) -> Metrics:
        """Run one step on one of `spec_plans`, as part of a run."""
        self.use(spec_plan.plan, spec_plan.predicates, is_leased=True)
        return self.step(batches)

    @accepts_options(RunSpec)
    def fit(self, run_spec: RunSpec) -> FitResult:
        """Train until `steps` steps are done in total, continuing from the newest valid checkpoint.

        Raises:
            ActorFailed: a launch or a sink failed; `__cause__` is the original error.
            CheckpointError: a checkpoint cannot be read, locked or written.
            DataError: the data is not what the plan, or the checkpoint, was made for.
            Stopped: SIGINT, SIGTERM or SIGHUP; the last finished step is checkpointed. ^C again
                leaves the process at once.

        What `on_step`, `on_result` or the data source raises comes out as it is, after the last
        finished step was checkpointed; StopTraining ends the run cleanly, and `fit` returns.
        """
        return self.run(run_spec)

    def run(self, run_spec: RunSpec) -> FitResult:
        """Do what `fit` does, with the options in one."""
        check_policy(self.plan, run_spec.on_nan)
        passes, run_spec = run_spec.passes, run_spec.in_steps(self.plan.batches_per_step)
        self.close()
        if run_spec.seed is not None and run_spec.seed != self.seed:
            self.seed = run_spec.seed
            # The seed is a variable of the plan as well; a former run's must not win over the new
            # one.
            self.given = {name: a for name, a in self.given.items() if name != "seed"}
        with ExitStack() as stack:
            return FitCall(self, run_spec, stack, passes).run()

    def stream(
        self, data: DataSource, *, steps: int | None = None, on_nan: str = "raise"
    ) -> Iterator[Metrics]:
        """Yield the outputs of each step, `steps` of them or until the data ends.

        The plan runs at most a few steps ahead of the consumer; leaving the loop ends the run.
        Variables continue from where this runner's last call left them. All ranks take as many
        outputs: one whose loop was ended by another's raises CompileError at its end.
        """
        return self.streamed(RunSpec.of_stream(data, steps, on_nan))

    def streamed(self, run_spec: RunSpec) -> Generator[Metrics, None, None]:
        """Do what `stream` does, with the options in one."""
        check_policy(self.plan, run_spec.on_nan)
        steps = None if run_spec.total_steps == ENDLESS else run_spec.total_steps
        # A generator: all of this runs at the first `next`, in the same order on all ranks.
        check_same_steps(self.group, steps)
        check_same_data(self.group, run_spec.data, self.seed)
        self.close()
        # A full queue blocks the metrics port, whose slots then hold the steps back.
        outputs: queue.Queue[Metrics | None] = queue.Queue(maxsize=_STREAM_AHEAD)
        values = self.first()
        first = steps_done(values)
        run = self.make_run(
            replace(
                run_spec,
                steps=min(first + run_spec.total_steps, ENDLESS),
                on_step=lambda step, metrics: outputs.put(metrics),
            ),
            RunContext(
                # Whoever iterates may take his time: that is no stall.
                settings=replace(self.settings, stall_seconds=0.0),
                first_step=first,
                group=self.group,
                warn=logger.warning,
                on_finished=lambda: outputs.put(None),
                predicates=self.predicates,
                borrowed=self._borrowed(),
            ),
            values,
        )
        # An iterator that is still alive at exit would wait for threads that are gone by then.
        reason = f"rank {self.group.rank} left its loop over stream"
        drain = partial(drain_outputs, run, outputs, reason)
        stopped_by: list[str] = []
        # Before `start`: a stop of another rank may come with the first step.
        run.ask = stopped_by.append
        count = 0
        with closing(run):
            self.begin(run)
            run.start()
            atexit.register(drain)
            try:
                while (metrics := next_of(outputs)) is not None:
                    count += 1
                    yield metrics
                    # The loop may go on in a forked child, where no thread of the run is.
                    run.loop.check_process()
                outputs.put(None)  # `drain` looks for it
            finally:
                drain()
                atexit.unregister(drain)
                # After `drain`: the run has ended, so its variables stand still.
                self.keep(run)
            run.wait()
            if stopped_by and count != steps and not run.is_data_over:
                raise CompileError(
                    f"{find_source()}: {stopped_by[0]}, which ended that of rank"
                    f" {self.group.rank} after {count} of {'all' if steps is None else steps}"
                    " outputs: every step takes all ranks. Leave the loop after the same output"
                    " on all ranks, by a condition that is equal on all, such as the step or the"
                    " loss"
                )

    def step(self, batch: Mapping[str, Array] | Sequence[Mapping[str, Array]]) -> Metrics:
        """Run one step on one batch and return its outputs. The plan stays open until `close`.

        A plan whose step accumulates k batches takes a list of k.

        A step that fails changes nothing: a refused batch never reaches the plan, and a launch that
        raises comes before the first update. Only where updates had begun, or where a device other
        than the host failed and its memory is lost with it, do the variables go back to those
        before the plan was opened, on such a device to those that were read last between steps (of
        a model, by any look at a parameter). A line of the log says so.
        """
        batches = batches_of_step(batch, self.plan.batches_per_step, f"plan {self.plan.name!r}")
        stepping = self._stepping()
        try:
            return stepping.step(batches)
        except BaseException as error:
            # Taken out first: whatever fails below, the next step opens a new run.
            self._plans.current = None
            with closing(stepping.run), closing(self._plans):
                if not isinstance(error, Exception):  # an interrupt: the step itself is all right
                    stepping.run.loop.end()
                    stepping.run.wait()
                self.keep(stepping.run, "a step of this rank did not end")
            raise

    def load(self) -> None:
        """Load the plan, unless it is: what the first `step` would do."""
        self._stepping()

    def observe(self, batches: Sequence[Mapping[str, Array]], on_ranges: RangeListener) -> Metrics:
        """Run one step as `step` does, of a plan that shows ranges, which a listener is given.

        A loss that is not finite is no error.
        """
        context = RunContext(settings=self.settings, group=self.group, on_ranges=on_ranges)
        self._fit = _StepsOfFit(context, None, WARN)
        return self.step(batches)

    def _stepping(self) -> Stepping:
        """Return what steps the plan, opened if it is not."""
        plans, current = self._plans, self._plans.current
        if current is not None:
            current.run.loop.check_caller()
            if current.run.plan is self.plan and current.run.variables.has_turn:
                return current
            opened = plans.turn_to(self.plan, self.predicates)
            self._attach(opened.run)
            return opened
        fit, on_nan = self._fit, RAISE
        values = self.first() if fit is None or fit.values is None else fit.values
        context = RunContext(settings=self.settings, group=self.group)
        if fit is not None:
            context, on_nan = fit.context, fit.on_nan
        monitor = None if fit is None or self._newest is None else self._newest.monitor
        context = replace(
            context,
            first_step=steps_done(values),
            predicates=self.predicates,
            monitor=monitor,
            borrowed=self._borrowed(),
        )
        with told_while_slow(self.plan.name, lambda: _OPENING):
            opened = plans.open(self.plan, context, values, on_nan)
        try:
            self.begin(opened.run)
        except BaseException:
            with closing(opened.run):
                plans.close()
            raise
        plans.current = opened
        if fit is not None:
            fit.values = None
        return opened

    def write(self, values: Mapping[str, Array]) -> None:
        """Give variables new values by name; a plan that is open has them in its next step.

        Names that the plan does not have are left out, as those of a model that it reads in part.
        Callable from any thread. Raises CompileError when shape or dtype differ.
        """
        names = {variable.name for variable in self.plan.state}
        # Copies, where the caller could still write into its array.
        all_values = {n: frozen(a) for n, a in values.items()}
        check_values(self.plan, {n: a for n, a in all_values.items() if n in names})
        borrowed = self._plans.borrowed
        is_released = not self._plans.released.isdisjoint(all_values)
        if is_released or any([a is not borrowed.get(n, a) for n, a in all_values.items()]):
            # Launches have the addresses of the arrays. Who writes once may do so at every step.
            self.borrows = False
            self.close()
        if self._live is not None:
            self._live.write(all_values)
        # Those of other stages too: all ranks compare what they begin with.
        kept = names | self.given.keys()
        self.given = {**self.given, **{n: a for n, a in all_values.items() if n in kept}}

    def variables(self) -> dict[str, Array]:
        """Return all variables, read-only and whole, as they are after the last finished step.

        Callable from any thread, also while the plan is open; but where ranks have parts of them,
        between steps or runs, and on all ranks.
        """
        live = self._live
        values = None if live is None else live.read(live.names)
        return self._whole_first() if values is None else values

    def statistics(self) -> Statistics | None:
        """Return what the actors of this runner's newest run have done; None before the first.

        Callable from any thread, also while the run goes on.
        """
        return None if self._newest is None else self._newest.loop.statistics()

    def close(self) -> None:
        """End a plan that `step` opened; its variables stay with the runner.

        Does nothing in a child forked from the process of that plan, where it cannot be ended.
        """
        self._end_stepping()

    def drop(self) -> None:
        """Do what `close` does for a model that nobody has any more, or where the script is over.

        Other ranks come to that at another time: the collector's, so nothing is asked of them. If
        one has failed, that is told elsewhere.
        """
        with suppress(PeerFailed):
            self._end_stepping(_DROPPED)

    def _end_stepping(self, apart: str = "") -> None:
        stepping = self._plans.current
        if stepping is not None and not stepping.run.loop.is_inherited:
            stepping.run.loop.check_caller()
            self._plans.current = None
            with closing(stepping.run), closing(self._plans):
                stepping.run.loop.end()
                stepping.run.wait()
                self.keep(stepping.run, apart)

    def begin(self, run: AnyRun) -> None:
        """Direct all reads and writes of variables to a run, before its first step.

        One of several plans has its steps do so. Raises CompileError where another run of this
        runner goes on.
        """
        if isinstance(run, SwitchedRun):
            return
        if self._live is not None and not self._live.is_over:
            raise CompileError(
                f"{find_source()}: a runner of plan {self.plan.name!r} was called during another"
                " call of it: two runs cannot change the same variables. Let the other call end"
                " first, or make a second Runner"
            )
        self._attach(run)

    def _attach(self, run: Run) -> None:
        self._newest = self._open = run
        self._live = run.variables
        if self._lease is not None:
            self._lease.attach(run.variables)

    def first(self, restored: Mapping[str, Array] | None = None) -> Mapping[str, Array]:
        """Return what a run begins with: this rank's parts of restored, given or first values.

        `restored` has parts already. Raises CompileError where ranks were given other values; all
        of them read the same checkpoint.
        """
        if restored is None:
            check_same_values(self.group, self.plan, self.given)
        with told_while_slow(self.plan.name, lambda: "setting first values of variables"):
            return initial_values(self.plan, self.given, self.seed, self.group.rank, restored)

    def lend_packed(self, cells: Mapping[str, ParameterStorage]) -> PackedValues | None:
        """Have the open plan alone keep what it reads packed, of the values of some cells.

        None where that is nothing. The lease ends with the plan, or when somebody asks for them.
        """
        packed, current = self._plans.packed, self._plans.current
        if self._lease is not None or current is None or not packed:
            return None
        memory = current.run.bound.variables
        packed_cells = {name: cells[name] for name in packed if name in cells}
        values = PackedValues(memory, packed_cells)
        lease = lend_packed(packed_cells, self._plans.borrowed, values)
        if lease is not None:
            self._lease = lease
            memory.release(lease.names)
            self.given = {n: a for n, a in self.given.items() if n not in lease.names}
            values.lease = lease
        return None if lease is None else values

    def _borrowed(self) -> dict[str, Array]:
        """Return the given values that the plan can read where they lie, by variable."""
        if not (self.borrows and self.group.is_alone):
            return {}
        types = {v.name: self.plan.views[v.view].type for v in self.plan.state}
        given = {n: self.given[n] for n in read_only_variables(self.plan) if n in self.given}
        return {
            name: array
            for name, array in given.items()
            if is_frozen(array)
            and array.flags.c_contiguous
            and array.dtype == numpy_dtype(types[name].dtype)
        }

    def _whole_first(self) -> dict[str, Array]:
        values = initial_values(self.plan, self.given, self.seed, rank=None)
        return {variable.name: values[variable.name] for variable in self.plan.state}

    def keep(self, run: AnyRun, apart: str = "") -> None:
        """Take over what a run that began leaves, if it is whole; its threads end. Idempotent.

        The other ranks do so as well, unless `apart` says why not, as where this one raises. Raises
        PeerFailed where one of them does not after all.
        """
        if isinstance(run, SwitchedRun):
            run.close()
            left = None if self._fit is None else self._fit.values
            if left is not None and not self.group.is_alone:
                self._stepping()  # ranks come together by what they opened
                left = None
            self._fit = None
            self._end_stepping(apart)
            if left is not None:  # it made no step, and leaves what it began with
                before, self.given = self.given, {**self.given, **left}
                self._end_lease(before)
            return
        if run is not self._open or run.loop.is_inherited:
            return
        variables, failure = run.whole_variables(), None
        # `given` stays by identity if nothing is taken over; that is asked below.
        before = self.given
        if variables is None:
            why = f"a step of plan {self.plan.name!r} failed inside its updates"
            values = run.variables.last_read
            if lost_with := run.variables.lost_with:
                why = f"the variables of plan {self.plan.name!r} went with a device: {lost_with}"
                self.given = before = {**self.given, **(values or {})}
            then = "values read last" if lost_with and values else "values before the run"
            logger.warning("%s; the variables return to their %s", why, then)
        elif self.plan.mesh.num_ranks == 1:
            self.given = variables
        else:
            failure = self._join(run, variables, apart)
        self._open = self._live = None
        self._end_lease(before)
        if failure is not None:
            raise failure

    def _end_lease(self, before: Mapping[str, Array]) -> None:
        """Give the model what `given` holds now, which was `before` while the run went on."""
        if self._lease is not None and self._lease.is_of_packed:
            self._lease.give_back()
            # One array for the model and for the next run.
            self.given, self._lease = {**self.given, **self._lease.left_by_name()}, None
        elif self._lease is not None:
            # What other stages trained came with the rest; what was given before may be old by now.
            values = {} if self.given is before else self.given
            arrays = {**values, **self._whole_first()}
            self._lease.end({n: frozen(a) for n, a in arrays.items()})

    def _join(
        self, run: Run, parts: Mapping[str, Array], apart: str
    ) -> CompileError | PeerFailed | None:
        """Begin the next run with what this one leaves on all ranks; return why that cannot be.

        A rank that failed, or has a reason to do so apart, asks nobody: the others wait for it
        elsewhere, and learn of it first by its error.
        """
        failed: CompileError | PeerFailed | None = None
        why = "it failed" if run.loop.failure is not None else apart
        # This rank ended on its own, but every rank has whole variables: no other is asked.
        if why == apart != "" and not run.variables.are_shared_out:
            self.given = parts  # of all that is whole here the others have the same
            return None
        try:
            if not why:
                group = self.group
                run.variables.agree_on_writes()
                self.given = all_gather_variables(
                    self.plan, parts, group.all_gather_object, group.rank
                )
        except (CompileError, PeerFailed) as error:
            why, failed = str(error), error
        if why:
            logger.log(
                logging.INFO if why is _DROPPED else logging.WARNING,
                "plan %r has its variables on several ranks, and not all ranks finished the run"
                " (%s): the variables return to their values before the run",
                self.plan.name,
                why,
            )
        return failed

    def hold_again(self) -> None:
        """Train under a new lease on the same values, where a run has ended the one before."""
        if self._lease is not None and self._lease.left is not None:
            self.hold(self._lease.renewed())

    def hold(self, lease: Lease) -> None:
        """Train under another lease from the next step on."""
        self._lease = lease
        if self._live is not None:
            lease.attach(self._live)
