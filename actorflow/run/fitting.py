"""`fit`: one run of a runner's plan from the newest checkpoint to a number of steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from actorflow.data import items_of
from actorflow.distributed.process_group import ProcessGroup, check_same_data, check_same_steps
from actorflow.distributed.run_directory import check_one_directory
from actorflow.environment.settings import logger
from actorflow.optim.optimizers import averages_in
from actorflow.options.run_spec import Metrics, Results
from actorflow.run.broken_steps import skips
from actorflow.run.devices import device_notice
from actorflow.run.saving import RestoredState, RunContext, Saver, job_state, start_from
from actorflow.run.status import Listener, make_reporter
from actorflow.run.stopping import Stopper, StopSignals
from actorflow.run.training_run import Run
from actorflow.tensor.initial_values import steps_done
from compiler.pipeline.printer import summarise

if TYPE_CHECKING:
    from actorflow.checkpoint.manager import CheckpointManager
    from actorflow.environment.settings import Settings
    from actorflow.options.run_spec import RunSpec
    from actorflow.run.status import StatusWriter
    from actorflow.tensor.probes import Predicates
    from compiler.contract.plan import Plan

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class FitResult:
    """What a run came to.

    `first_step` steps were restored, `last_step` are done; `metrics` are those of the last step.
    `mean_loss` is the mean over the last `num_averaged` steps of this run, at most 100 (None when
    it had none). `evaluations` are pairs (step, means) of this run. `num_skipped` steps of this run
    changed nothing, because loss or gradients were not finite (`on_nan="skip"`).
    """

    first_step: int
    last_step: int
    metrics: Metrics
    mean_loss: float | None
    num_averaged: int
    evaluations: tuple[tuple[int, Results], ...]
    variables: Mapping[str, Array] = field(repr=False)
    num_skipped: int = 0

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

    def first(self, restored: Mapping[str, Array] | None = None) -> Mapping[str, Array]:
        """Return what a run begins with."""

    def begin(self, run: Run) -> None:
        """Note the run that is open."""

    def keep(self, run: Run, apart: str = "") -> None:
        """Take over what a run leaves."""


class FitCall:
    """One call of `fit`: opens what the run needs, in the order in which it closes again.

    Whoever makes it closes `stack` after it, whatever happens.
    """

    def __init__(self, runner: FittedRunner, run_spec: RunSpec, stack: ExitStack) -> None:
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

    def run(self) -> FitResult:
        """Open, run and close. Raises what `Runner.fit` says."""
        self._introduce()
        self._agree()
        self._open_directory()
        start = self._start()
        first = start.step
        saver = self._saver(first)
        listener = self._listener(first)
        run = self._opened(start, saver, listener)
        del start  # the arena holds its values now
        self._drive(run, listener, first)
        if saver is not None and self._is_writer:
            saver.finish()
        result = self._result(run, listener, first)
        # Closed before a signal is answered: files are whole when Stopped leaves.
        self._stack.close()
        if self._signals.received:
            raise Stopped(self._signals.received[0], result.last_step)
        return result

    def _introduce(self) -> None:
        """Report warnings of the environment, and a summary of the plan that is about to run."""
        for warning in self._runner.settings.warnings:
            self._warn(warning)
        if self._run_spec.progress:
            if notice := device_notice(self._plan, self._runner.settings):
                self._notice(notice)
            for line in summarise(self._plan):
                self._notice(line)

    def _agree(self) -> None:
        """Check that all ranks read the same data, for as many steps."""
        group, seed, evaluation = self._runner.group, self._runner.seed, self._run_spec.evaluation
        check_same_steps(group, self._run_spec.steps)
        check_same_data(group, self._run_spec.data, seed)
        if evaluation is not None:
            check_same_data(group, evaluation.data, seed, "data of the evaluation")

    def _open_directory(self) -> None:
        if self._run_spec.checkpoint is not None:
            from actorflow.checkpoint.fs import WriterTerm
            from actorflow.checkpoint.manager import CheckpointManager  # 15 ms

            directory, keep_last = os.fspath(self._run_spec.checkpoint), self._run_spec.keep_last
            settings = self._runner.settings
            term = WriterTerm(settings.launch, settings.epoch)
            manager = CheckpointManager(
                directory, keep_last=keep_last, report=self._warn, term=term
            )
            # One rank has the lock for all: it begins and ends each checkpoint.
            self._manager = self._stack.enter_context(manager) if self._is_writer else manager
            check_one_directory(manager.fs, manager.directory, self._runner.group)

    def _start(self) -> RestoredState:
        start, runner = None, self._runner
        if self._manager is not None:
            data = self._run_spec.data
            start = start_from(
                self._manager, self._plan, data, runner.seed, self._warn, runner.group
            )
        if start is None:
            first = runner.first()
            return RestoredState(steps_done(first), first)
        epoch = f" in epoch {group.epoch}" if (group := runner.group).epoch > 1 else ""
        self._notice(f"resumed from the checkpoint of step {start.step}{epoch}")
        return RestoredState(start.step, runner.first(start.values), is_resumed=True)

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
                total_steps=max(self._run_spec.steps, first_step),
                report=self._warn,
                is_ours=self._manager.is_writer,
            )
        listener = Listener(
            self._reporter,
            status,
            self._run_spec.on_step,
            first_step,
            self._stopper,
            is_skipping=skips(self._plan),
        )
        return self._stack.enter_context(listener)

    def _opened(self, start: RestoredState, saver: Saver | None, listener: Listener) -> Run:
        evaluation = self._run_spec.evaluation
        if evaluation is not None:
            evaluation = replace(evaluation, on_result=listener.evaluated(evaluation.on_result))
        run = Run(
            self._plan,
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
            ),
            start.values,
        )
        self._stack.callback(run.close)
        self._stack.callback(self._runner.keep, run, "it was left")  # where `_drive` raises
        return run

    def _drive(self, run: Run, listener: Listener, first: int) -> None:
        items, item_name = items_of(self._run_spec.data)
        items *= self._plan.batches_per_step
        more = dict if run.waits is None else run.waits.row
        self._reporter.start(self._run_spec.steps, first, items, item_name, more)
        self._stopper.watch(run)
        self._runner.begin(run)
        listener.start(run.loop.statistics, self._runner.group.epoch, run.waits)
        run.start()
        # The main thread waits here, where Python runs signal handlers.
        self._stopper.attend(self._notice if self._run_spec.progress else logger.info)
        self._stopper.wait()
        # The others are told of a failure, and keep nothing: no rank has a part of what none has.
        is_kept = self._stopper.failure is None or self._plan.mesh.num_ranks == 1
        if is_kept:
            self._runner.keep(run)
        self._stopper.tell(is_kept=is_kept)

    def _result(self, run: Run, listener: Listener, first: int) -> FitResult:
        last = run.num_steps if run.are_steps_untold else listener.step
        steps, reasons = self._run_spec.steps, self._stopper.reasons
        listener.ending = "stopped" if reasons and last < steps else "finished"
        if run.num_skipped:
            self._warn(f"{run.num_skipped} of {last - first} steps were skipped")
        is_kept = self._manager is not None
        text = _ending(first, last, steps, reasons, is_kept=is_kept)
        if text and last == first and not self._run_spec.progress:
            logger.warning("%s", text)
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
        )


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
