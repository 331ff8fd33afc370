"""`fit`: one run of a runner's plan from the newest checkpoint to a number of steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from actorflow.callbacks.protocol import (
    Metrics,
    Results,
    StartedRun,
    check_metric,
    is_on_every_rank,
)
from actorflow.compile.plan_facts import snapshot_rate
from actorflow.data import items_of
from actorflow.distributed.process_group import ProcessGroup, check_same_data, check_same_steps
from actorflow.distributed.run_directory import check_one_directory
from actorflow.environment.settings import REPLAY, logger
from actorflow.optim.optimizers import averages_in
from actorflow.options.run_spec import ENDLESS, spec_of_source
from actorflow.run.broken_steps import skips
from actorflow.run.callback_calls import CallbackCalls, earlier_evaluations, scalars_of, told_names
from actorflow.run.devices import device_notice
from actorflow.run.open_plans import memory_lines
from actorflow.run.replay_request import refuse_training
from actorflow.run.report import METRICS_FILE
from actorflow.run.restoring import RestoredState, start_from
from actorflow.run.saving import RunContext, Saver, job_state
from actorflow.run.status import Listener, data_waits, make_reporter, scalar_values
from actorflow.run.stopping import Stopper, StopSignals
from actorflow.run.switched_run import SpecPlan, SwitchedRun
from actorflow.run.training_run import Run
from actorflow.run.training_writes import TrainingWrites
from actorflow.tensor.initial_values import steps_done
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.html_table import html_table
from compiler.pipeline.printer import overview, summarise

if TYPE_CHECKING:
    from actorflow.checkpoint.manager import CheckpointManager
    from actorflow.data.epochs import SourcePasses
    from actorflow.environment.settings import Settings
    from actorflow.nn.module import Module
    from actorflow.options.job_options import JobOptions
    from actorflow.options.run_spec import RunSpec
    from actorflow.run.status import StatusWriter
    from actorflow.tensor.probes import Predicates
    from compiler.contract.plan import Plan

Array = np.ndarray[Any, Any]

_TOLD_WAIT = 0.05
"""Share of time from which on a run says that its steps waited for data."""


@dataclass(frozen=True, slots=True)
class FitResult:
    """What a run came to.

    `first_step` steps were restored, `last_step` are done; `metrics` are those of the last step.
    `mean_loss` is the mean over the last `num_averaged` steps of this run, at most 100 (None when
    it had none). `evaluations` are pairs (step, means) of this run. `num_skipped` steps of this run
    changed nothing, because loss or gradients were not finite (`on_nan="skip"`). `data_wait` is the
    share of the run's time, 0 to 1, in which this rank's steps waited for the data source; None on
    devices other than the host, and where several streams compute. `epoch` is the one that the last
    step ends in, from 1, where epochs were asked for and it is known.
    """

    first_step: int
    last_step: int
    metrics: Metrics
    mean_loss: float | None
    num_averaged: int
    evaluations: tuple[tuple[int, Results], ...]
    variables: Mapping[str, Array] = field(repr=False)
    num_skipped: int = 0
    data_wait: float | None = None
    epoch: int | None = None

    def _repr_html_(self) -> str:
        rows: dict[str, object] = {"steps": f"{self.first_step:,} to {self.last_step:,}"}
        rows |= {"epoch": self.epoch} if self.epoch is not None else {}
        rows |= {
            f"{name} (last step)": value for name, value in scalar_values(self.metrics).items()
        }
        if self.mean_loss is not None:
            rows[f"loss (mean of {self.num_averaged} steps)"] = self.mean_loss
        for step, means in self.evaluations[-1:]:
            told = scalar_values(means).items()
            rows |= {f"{name} (evaluation after step {step})": value for name, value in told}
        rows |= {"skipped steps": self.num_skipped} if self.num_skipped else {}
        if self.data_wait is not None:
            rows["waited for data"] = f"{self.data_wait:.0%}"
        return html_table("FitResult", rows)

    @property
    def averages(self) -> dict[str, Array]:
        """The averages of the weights by path, where the job has an `ema`.

        `model.load(model.state() | result.averages)` gives them to the model.
        """
        return averages_in(self.variables)


class Stopped(SystemExit):
    """A signal ended `fit` cleanly: the step was finished, and checkpointed where that was asked.

    Also one that came too late to stop anything: it asked the process to end, not just the run.

    The exit code is 128 + signal.
    """

    __module__ = "actorflow"  # the name that users catch it by

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.step = step


class FittedRunner(Protocol):
    """What `fit` asks of the runner that it is called on."""

    plan: Plan
    group: ProcessGroup
    seed: int
    settings: Settings
    given: Mapping[str, Array]
    predicates: Predicates
    spec_plans: Sequence[SpecPlan]
    job_options: JobOptions | None
    model: Module | None
    are_plans_together: bool

    def first(self, restored: Mapping[str, Array] | None = None) -> Mapping[str, Array]:
        """Return what a run begins with."""

    def make_run(
        self, run_spec: RunSpec, context: RunContext, values: Mapping[str, Array]
    ) -> Run | SwitchedRun:
        """Return a run over some data."""
        ...

    def begin(self, run: Run | SwitchedRun) -> None:
        """Note the run that is open."""

    def keep(self, run: Run | SwitchedRun, apart: str = "") -> None:
        """Take over what a run leaves."""


class FitCall:
    """One call of `fit`: opens what the run needs, in the order in which it closes again.

    Whoever makes it closes `stack` after it, whatever happens.
    """

    def __init__(
        self,
        runner: FittedRunner,
        run_spec: RunSpec,
        stack: ExitStack,
        passes: SourcePasses | None = None,
    ) -> None:
        self._passes = passes
        # Where the end of the data decides there is no last step that is known.
        is_endless = run_spec.total_steps == ENDLESS
        self._total = None if is_endless else run_spec.total_steps
        self._runner = runner
        self._plan = runner.plan
        self._run_spec = run_spec
        self._stack = stack
        self._is_writer = runner.group.is_first
        self._stopper = Stopper()
        # First of all: a signal that comes while a checkpoint is read ends the run cleanly, too.
        self._signals = stack.enter_context(StopSignals(self._stopper.ask_by_signal))
        self._reporter = make_reporter(
            run_spec.checkpoint, run_spec.progress, is_writer=self._is_writer
        )
        # Closed last but for the signals: whatever fails before, the progress line is ended.
        stack.callback(self._reporter.finish)
        self._notice: Callable[[str], None] = self._reporter.notice
        self._warn = self._notice if run_spec.progress else logger.warning
        self._manager: CheckpointManager | None = None
        own = [c for c in run_spec.callbacks if self._is_writer or is_on_every_rank(c)]
        self._writes = TrainingWrites.of(own, runner.plan)
        self._calls = stack.enter_context(CallbackCalls(own, self._stopper, self._writes))

    def run(self) -> FitResult:
        """Open, run and close. Raises what `Runner.fit` says."""
        self._introduce()
        self._agree()
        self._open_directory()
        start = self._start()
        first = start.step
        self._record(first)
        saver = self._saver(first)
        listener = self._listener(first)
        run = self._opened(start, saver, listener)
        is_resumed = start.is_resumed
        del start  # the arena holds its values now
        if self._run_spec.callbacks:
            self._calls.start(self._started(first, is_resumed=is_resumed))
        self._drive(run, listener, first)
        if saver is not None and self._is_writer:
            saver.finish()
        result = self._result(run, listener, first)
        self._calls.end(result)
        # Closed before a signal is answered: files are whole when Stopped leaves.
        self._stack.close()
        if self._signals.received:
            raise Stopped(self._signals.received[0], result.last_step)
        return result

    def _introduce(self) -> None:
        """Report warnings of the environment, and what the plan is that is about to run."""
        for warning in self._runner.settings.warnings:
            self._warn(warning)
        each, passes = self._plan.batches_per_step, self._passes
        if (
            passes is not None
            and passes.batches is not None
            and (left := ceil(passes.batches) % each)
        ):
            self._warn(
                f"{passes.count} epochs have {ceil(passes.batches):,} batches, of which the last"
                f" {left} fill no step: a step accumulates {each}"
            )
        if self._run_spec.progress:
            if notice := device_notice(self._plan, self._runner.settings):
                self._notice(notice)
            plans = [spec_plan.plan for spec_plan in self._runner.spec_plans]
            memory = memory_lines(plans, are_together=self._runner.are_plans_together)
            if self._run_spec.verbose:
                lines = [*summarise(self._plan), *memory]
            else:
                lines = [*overview(self._plan), *memory[-1:]]
            for line in lines:
                self._notice(line)

    def _agree(self) -> None:
        """Check that all ranks read the same data, for as many steps."""
        group, seed, evaluation = self._runner.group, self._runner.seed, self._run_spec.evaluation
        check_same_steps(group, self._run_spec.total_steps, self._run_spec.resume)
        check_same_data(group, self._run_spec.data, seed)
        if evaluation is not None:
            check_same_data(group, evaluation.data, seed, "data of the evaluation")

    def _open_directory(self) -> None:
        if self._run_spec.checkpoint is not None:
            if os.environ.get(REPLAY):
                refuse_training(os.environ, self._run_spec.checkpoint)
            from actorflow.checkpoint.fs import WriterTerm
            from actorflow.checkpoint.manager import CheckpointManager  # 15 ms

            directory, keep = os.fspath(self._run_spec.checkpoint), self._run_spec.keep
            keep_last = self._run_spec.keep_last if keep is None else keep.last
            if keep is not None and keep.best:
                check_metric(keep.metric, "keep=", self._evaluated())
            rate, kept_steps = snapshot_rate(self._plan), self._run_spec.plan_options.kept_steps
            if rate and kept_steps % rate:
                raise CompileError(
                    f"{find_source()}: keep= wants checkpoints after multiples of {kept_steps}"
                    f" steps, and plan {self._plan.name!r} takes snapshots after multiples of"
                    f" {rate}; compile it with every={kept_steps}, or use fit of the job"
                )
            settings = self._runner.settings
            term = WriterTerm(settings.launch, settings.epoch)
            manager = CheckpointManager(
                directory, keep_last=keep_last, keep=keep, report=self._warn, term=term
            )
            # One rank has the lock for all: it begins and ends each checkpoint.
            self._manager = self._stack.enter_context(manager) if self._is_writer else manager
            check_one_directory(manager.fs, manager.directory, self._runner.group)

    def _start(self) -> RestoredState:
        start, runner = None, self._runner
        if self._manager is not None:
            start = start_from(
                self._manager, self._plan, self._run_spec, runner.seed, self._warn, runner.group
            )
        if start is None:
            first = runner.first()
            return RestoredState(steps_done(first), first)
        # Of the settings and not of the group: a single rank that is launched has epochs as well.
        epoch = f" in epoch {count}" if (count := runner.settings.epoch) > 1 else ""
        self._notice(f"resumed from the checkpoint of step {start.step}{epoch}")
        return RestoredState(start.step, runner.first(start.values), is_resumed=True)

    def _record(self, first_step: int) -> None:
        """Note in the folder of the run what it is started with."""
        manager = self._manager
        if manager is None or not self._is_writer:
            return
        from actorflow.run.run_record import RecordFolder, write_record  # 10 ms

        folder = RecordFolder(manager.directory, manager.is_writer, self._warn)
        write_record(folder, self._plan, self._run_spec, self._runner.job_options, first_step)

    def _saver(self, first_step: int) -> Saver | None:
        period = self._run_spec.plan_options.period
        if self._manager is None or period is None:
            return None
        # Before the return: it gathers, so every rank has to come to it.
        state = job_state(self._plan, self._runner.group)
        return Saver(
            self._manager,
            self._plan,
            state,
            self._run_spec,
            period,
            seed=self._runner.seed,
            first_step=first_step,
            # What all ranks find is told once.
            report=self._warn if self._is_writer else logger.debug,
        )

    def _listener(self, first_step: int) -> Listener:
        status: StatusWriter | None = None
        if self._manager is not None and self._is_writer:
            from actorflow.run.status import STATUS_FILE, StatusWriter  # 5 ms

            status = StatusWriter(
                self._manager.directory / STATUS_FILE,
                self._plan,
                first_step=first_step,
                total_steps=None if self._total is None else max(self._total, first_step),
                report=self._warn,
                is_ours=self._manager.is_writer,
            )
        listener = Listener(
            self._reporter,
            status,
            self._run_spec.on_step,
            first_step,
            self._stopper,
            self._calls,
            is_skipping=skips(self._plan),
        )
        return self._stack.enter_context(listener)

    def _opened(
        self, start: RestoredState, saver: Saver | None, listener: Listener
    ) -> Run | SwitchedRun:
        evaluation = self._run_spec.evaluation
        if evaluation is not None:
            results = None if saver is None else saver.results
            hear = listener.evaluated(evaluation.on_result, results)
            evaluation = replace(evaluation, on_result=hear)
        run = self._runner.make_run(
            replace(self._run_spec, on_step=listener, evaluation=evaluation),
            RunContext(
                settings=self._runner.settings,
                first_step=start.step,
                is_resumed=start.is_resumed,
                group=self._runner.group,
                saver=saver,
                directory=None if self._manager is None else self._manager.directory,
                warn=self._warn,
                on_finished=self._stopper.over,
                predicates=self._runner.predicates,
                writes=self._writes,
            ),
            start.values,
        )
        self._stack.callback(run.close)
        self._stack.callback(self._runner.keep, run, "it was left")  # where `_drive` raises
        return run

    def _started(self, first: int, *, is_resumed: bool) -> StartedRun:
        """Return what callbacks are told of the run."""
        run_spec, runner, manager = self._run_spec, self._runner, self._manager
        evaluations: tuple[tuple[int, Results], ...] = ()
        if run_spec.callbacks and is_resumed and manager is not None:
            path = manager.directory / METRICS_FILE
            evaluations = earlier_evaluations(path, first, self._warn)
        outputs = scalars_of(self._plan, "metrics")
        for name in run_spec.plan_options.asked_outputs:
            if not any([own.partition("/")[0] == name for own in outputs]):
                raise CompileError(
                    f"{find_source()}: a callback asks for the output {name!r}, and plan"
                    f" {self._plan.name!r} has {', '.join(map(repr, outputs))}; give the callback"
                    " to fit of a job that trains, which compiles a plan with it"
                )
        options = {
            "seed": runner.seed,
            "steps": self._total,
            "data": run_spec.data.fingerprint(),
        }
        return StartedRun(
            job=self._plan.name,
            model=runner.model,
            first_step=first,
            total_steps=self._total,
            directory=None if manager is None else manager.directory,
            rank=runner.group.rank,
            outputs=outputs,
            evaluated=self._evaluated(),
            evaluations=evaluations,
            options=dict(self._plan.options) | options,
        )

    def _evaluated(self) -> tuple[str, ...]:
        """Return the names of the means of an evaluation."""
        evaluation, model = self._run_spec.evaluation, self._runner.model
        if evaluation is None or not self._runner.spec_plans or model is None:
            return scalars_of(self._plan, "eval_metrics")
        graph = evaluation.job.graph(model, spec_of_source(evaluation.data))
        return told_names({o.name: graph.types[o.value] for o in graph.outputs})

    def _drive(self, run: Run | SwitchedRun, listener: Listener, first: int) -> None:
        items, item_name = items_of(self._run_spec.data)
        items *= self._plan.batches_per_step
        more = dict if run.waits is None else run.waits.row
        waits = data_waits(run.loop.statistics)
        self._reporter.start(self._total, first, items, item_name, more, self._epoch_of, waits)
        self._stopper.watch(run)
        self._runner.begin(run)
        listener.start(run.loop.statistics, self._runner.settings.epoch, run.waits)
        run.start()
        # The main thread waits here, where Python runs signal handlers.
        self._stopper.attend(self._notice if self._run_spec.progress else logger.info)
        self._stopper.wait()
        # The others are told of a failure, and keep nothing: no rank has a part of what none has.
        is_kept = self._stopper.failure is None or self._plan.mesh.num_ranks == 1
        if is_kept:
            self._runner.keep(run)
        self._stopper.tell(is_kept=is_kept)

    def _result(self, run: Run | SwitchedRun, listener: Listener, first: int) -> FitResult:
        last = run.num_steps if run.are_steps_untold else listener.step
        steps, reasons = self._run_spec.total_steps, self._stopper.reasons
        listener.ending = "stopped" if reasons and last < steps else "finished"
        if run.num_skipped:
            self._warn(f"{run.num_skipped} of {last - first} steps were skipped")
        is_kept = self._manager is not None
        epoch, epochs = self._epoch_of(last)
        text = _ending(first, last, steps, reasons, is_kept=is_kept)
        if steps == ENDLESS and not reasons:  # the data said when
            text = f"nothing to do: {epochs} epochs are done" * (last == first)
        if text and last == first and not self._run_spec.progress:
            logger.warning("%s", text)
        data_wait = run.loop.statistics().source_wait()
        if data_wait is not None and data_wait >= _TOLD_WAIT and last > first:
            waited = f"steps waited for data {data_wait:.0%} of the time"
            text = f"{text}\n{waited}" if text else waited
        mean_loss, num_averaged = self._reporter.finish(text)
        return FitResult(
            first,
            last,
            listener.metrics,
            mean_loss,
            num_averaged,
            tuple(listener.evaluations),
            dict(self._runner.given),
            run.num_skipped,
            data_wait,
            epoch,
        )

    def _epoch_of(self, step: int) -> tuple[int | None, int]:
        """Return the epoch that a step ends in, and how many there are; 0 for a run in steps."""
        passes = self._passes
        if passes is None:
            return None, 0
        return passes.epoch_of(max(1, step * self._plan.batches_per_step)), passes.count


def _ending(first: int, last: int, steps: int, reasons: list[str], *, is_kept: bool) -> str:
    """Return why a run ended, or nothing where it simply came to its end."""
    if reasons and last < steps:
        hint = (
            "it is checkpointed: run again to continue" if is_kept else "nothing was kept on disk"
        )
        return f"stopped by {reasons[0]} after step {last}; {hint}"
    if first >= steps:
        return f"nothing to do: {first} steps are done, {steps} were asked for"
    return f"the data ended after step {last} of {steps}" if last < steps else ""
