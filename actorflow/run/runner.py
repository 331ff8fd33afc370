"""The runner: opens a plan and trains with it.

`fit` does a whole run, `stream` is for a loop, `step` does one.

    Runner(Plan.load("p.plan")).fit(data, steps=1000, checkpoint="runs/a")

needs no model code: the plan knows its variables, their initialisers and its batch. A job's own
`fit`, `stream` and `step` go through here as well.
"""

from __future__ import annotations

import atexit
import os
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from actorflow.arguments import ENDLESS, came, check_run, check_source, check_steps
from actorflow.checkpoint.policy import Every
from actorflow.compile.native import NATIVE, build, choosing
from actorflow.data import DataSource, items_of
from actorflow.evaluation import Evaluation, Results, check_evaluation
from actorflow.initialise import steps_done
from actorflow.logs import logger
from actorflow.proof.prove import prove
from actorflow.run.broken_steps import WARN, check_policy, skips
from actorflow.run.listener import Listener, OnStep, make_reporter
from actorflow.run.ports import Metrics
from actorflow.run.runner_variables import RunnerVariables
from actorflow.run.saving import SavePolicy, Saver, Start, start_from
from actorflow.run.signals import StopSignals
from actorflow.run.stepping import Stepping, batches_of_step
from actorflow.run.stopping import Stopper, drain_outputs
from actorflow.run.training_run import Run, batches_per_step
from actorflow.settings import Settings
from actorflow.trace.tracer import find_source
from actors.kernels import catalogue
from actors.statistics import Statistics
from compiler.errors import CompileError, PlanFormatError
from compiler.plan import Plan
from compiler.printer import summarise

if TYPE_CHECKING:
    from actorflow.checkpoint.manager import CheckpointManager
    from actorflow.run.lease import Lease

Array = np.ndarray[Any, Any]
_STREAM_AHEAD = 2
"""Steps that `stream` may be ahead of its consumer, besides the plan's own slots."""


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


class Stopped(SystemExit):
    """A signal ended `fit` cleanly: the step was finished, and checkpointed where that was asked.

    Also one that came too late to stop anything: it asked the process to end, not just the run.

    The exit code is 128 + signal.
    """

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.step = step


class Runner:
    """Runs one plan.

    Args:
        plan: what to run; from `job.compile` or `Plan.load`.
        values: first values by name, of variables that do not start from their initialiser.
        seed: of initialisers and random ops.
        settings: environment; read from `os.environ` by default.
        lease: on the parameters that are trained; it has the values while a run is open.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        values: Mapping[str, Array] | None = None,
        seed: int = 0,
        settings: Settings | None = None,
        lease: Lease | None = None,
    ) -> None:
        if not isinstance(plan, Plan):
            raise CompileError(
                f"{find_source()}: expected a plan, came {came(plan)}; use job.compile(model, data)"
                " or af.Plan.load(path)"
            )
        self.plan = plan
        _check_ranks(plan)
        self._variables = RunnerVariables(plan, values or {}, seed, lease)
        self._newest: Run | None = None
        self._seed = seed
        self._settings = settings or Settings.from_env(os.environ)
        with choosing(self._settings, deterministic=False) as is_on:
            _check_target(plan, is_native=is_on)
            prove(plan)
            _build(plan)
        self._stepping: Stepping | None = None

    def fit(
        self,
        data: DataSource,
        *,
        steps: int,
        checkpoint: str | os.PathLike[str] | None = None,
        every: str | int = "5s",
        keep_last: int = 3,
        on_nan: str = "raise",
        on_save_error: str = "raise",
        progress: bool = True,
        on_step: OnStep | None = None,
        evaluation: Evaluation | None = None,
    ) -> FitResult:
        """Train until `steps` steps are done in total, continuing from the newest valid checkpoint.

        Args:
            data: the source; on a resume it is sought to where the checkpoint left it.
            steps: total number of steps, those of earlier runs included.
            checkpoint: directory of the run, which also gets `metrics.jsonl`; None keeps nothing.
            every: time ("5s", "10min") or steps (500) between checkpoints; by time, the first
                snapshot that is due is written, and there is one at least every 16 steps.
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
            on_step: called with (step, outputs) on the metrics thread, in order.
            evaluation: what the plan was compiled to evaluate between steps.

        Raises:
            ActorFailed: a launch or a sink failed; `__cause__` is the original error.
            CheckpointError: a checkpoint cannot be read, locked or written.
            DataError: the data is not what the plan, or the checkpoint, was made for.
            Stopped: SIGINT, SIGTERM or SIGHUP; the last finished step is checkpointed. ^C again
                leaves the process at once.

        What `on_step`, `on_result` or the data source raises comes out as it is, after the last
        finished step was checkpointed; StopTraining ends the run cleanly, and `fit` returns.
        """
        check_policy(self.plan, on_nan)
        check_run(data, steps, checkpoint, on_step)
        check_evaluation(evaluation)
        policy = SavePolicy(Every.parse(every), on_nan == WARN, on_save_error)
        self.close()
        with ExitStack() as stack:
            stopper = Stopper()
            signals = stack.enter_context(StopSignals(stopper.ask_by_signal))
            reporter = make_reporter(checkpoint, progress)
            stack.callback(reporter.finish)
            warn = reporter.notice if progress else logger.warning
            self._introduce(reporter.notice if progress else None, warn)
            manager = None
            if checkpoint is not None:
                from actorflow.checkpoint.manager import CheckpointManager  # 15 ms

                directory = os.fspath(checkpoint)
                manager = CheckpointManager(directory, keep_last=keep_last, report=warn)
                stack.enter_context(manager)
            start = self._start(manager, data, warn, reporter.notice)
            saver = None
            if manager is not None:
                saver = self._saver(manager, data, start.step, policy, warn)
            total = max(steps, start.step)
            status = None
            if manager is not None:
                from actorflow.run.status import STATUS_FILE, StatusWriter  # 5 ms

                path = manager.directory / STATUS_FILE
                status = StatusWriter(
                    path, self.plan, first_step=start.step, total_steps=total, report=warn,
                    is_ours=manager.is_writer,
                )  # fmt: skip
            listener = Listener(
                reporter, status, on_step, start.step, stopper, is_skipping=skips(self.plan)
            )
            stack.enter_context(listener)
            if evaluation is not None:
                evaluation = replace(evaluation, on_result=listener.evaluated(evaluation.on_result))
            run = Run(
                self.plan,
                data,
                values=start.values,
                first_step=start.step,
                total_steps=total,
                on_step=listener,
                save=saver.save if saver else None,
                is_due=saver.is_due if saver else lambda step: False,
                on_nan=on_nan,
                evaluation=evaluation,
                directory=None if manager is None else manager.directory,
                warn=warn,
                on_finished=stopper.over,
                settings=self._settings,
            )
            start = replace(start, values={})  # the arena holds them now
            stack.callback(run.close)
            stack.callback(self._variables.keep, run)
            items, item_name = items_of(data)
            reporter.start(steps, start.step, items * batches_per_step(self.plan), item_name)
            stopper.watch(run)
            self._begin(run)
            listener.start(run.statistics)
            run.start()
            stopper.attend(reporter.notice if progress else logger.info)
            stopper.wait()
            self._variables.keep(run)
            last = listener.step
            if saver is not None:
                saver.finish()
            listener.ending = "stopped" if stopper.reasons and last < steps else "finished"
            ending = _ending(start.step, last, steps, stopper.reasons, is_kept=manager is not None)
            if run.num_skipped:
                warn(f"{run.num_skipped} of {last - start.step} steps were skipped")
            summary = reporter.finish(ending)
        if signals.received:
            raise Stopped(signals.received[0], last)
        return FitResult(
            start.step,
            last,
            listener.metrics,
            summary.mean_loss,
            summary.num_averaged,
            tuple(listener.evaluations),
            dict(self._variables.given),
            run.num_skipped,
        )

    def stream(
        self, data: DataSource, *, steps: int | None = None, on_nan: str = "raise"
    ) -> Iterator[Metrics]:
        """Yield the outputs of each step, `steps` of them or until the data ends.

        The plan runs at most a few steps ahead of the consumer; leaving the loop ends the run.
        Variables continue from where this runner's last call left them.
        """
        check_source(data)
        if steps is not None:
            check_steps(steps)
        check_policy(self.plan, on_nan)
        self.close()
        outputs: queue.Queue[Metrics | None] = queue.Queue(maxsize=_STREAM_AHEAD)
        values = self._variables.first()
        first = steps_done(values)
        run = Run(
            self.plan,
            data,
            values=values,
            first_step=first,
            total_steps=first + (ENDLESS if steps is None else steps),
            on_step=lambda step, metrics: outputs.put(metrics),
            on_nan=on_nan,
            on_finished=lambda: outputs.put(None),
            warn=logger.warning,
            # Whoever iterates may take his time: that is no stall.
            settings=replace(self._settings, stall_seconds=0.0),
        )
        # An iterator that is still alive at exit would wait for threads that are gone by then.
        drain = partial(drain_outputs, run, outputs)
        with closing(run):
            self._begin(run)
            run.start()
            atexit.register(drain)
            try:
                while (metrics := outputs.get()) is not None:
                    yield metrics
                    run.loop.check_process()
                outputs.put(None)  # `drain` looks for it
            finally:
                drain()
                atexit.unregister(drain)
                self._variables.keep(run)
            run.wait()

    def step(self, batch: Mapping[str, Array] | Sequence[Mapping[str, Array]]) -> Metrics:
        """Run one step on one batch and return its outputs. The plan stays open until `close`.

        A plan whose step accumulates k batches takes a list of k.

        A step that fails changes nothing: a refused batch never reaches the plan, and a launch that
        raises comes before the first update. Only where updates had begun do the variables go back
        to those before the plan was opened, and a line of the log says so.
        """
        batches = batches_of_step(batch, batches_per_step(self.plan), f"plan {self.plan.name!r}")
        if self._stepping is not None:
            self._stepping.run.loop.check_process()
        else:
            every = self.plan.int_option("metrics_every", 1)
            if every != 1:
                raise CompileError(
                    f"plan {self.plan.name!r} hands the outputs of {every} steps on together, so a"
                    " single step has none; compile the job with metrics_every=1"
                )
            values = self._variables.first()
            self._stepping = Stepping(self.plan, values, self._settings)
            self._begin(self._stepping.run)
        try:
            return self._stepping.step(batches)
        except BaseException as error:
            stepping, self._stepping = self._stepping, None
            with closing(stepping.run):
                if not isinstance(error, Exception):  # an interrupt: the step itself is all right
                    stepping.run.end()
                    stepping.run.wait()
                self._variables.keep(stepping.run)
            raise

    def hold(self, lease: Lease) -> None:
        """Train under another lease from the next step on."""
        self._variables.hold(lease)

    def write(self, values: Mapping[str, Array]) -> None:
        """Give variables new values by name; a plan that is open has them in its next step.

        Names that the plan does not have are left out, as those of a model that it reads in part.
        Callable from any thread. Raises CompileError when shape or dtype differ.
        """
        self._variables.write(values)

    def variables(self) -> dict[str, Array]:
        """Return all variables, read-only, as they are after the last finished step.

        Callable from any thread, also while the plan is open.
        """
        return self._variables.read()

    def statistics(self) -> Statistics | None:
        """Return what the actors of this runner's newest run have done; None before the first.

        Callable from any thread, also while the run goes on.
        """
        return None if self._newest is None else self._newest.statistics()

    def close(self) -> None:
        """End a plan that `step` opened; its variables stay with the runner.

        Does nothing in a child forked from the process of that plan, where it cannot be ended.
        """
        if self._stepping is not None and not self._stepping.run.loop.is_inherited:
            stepping, self._stepping = self._stepping, None
            with closing(stepping.run):
                stepping.run.end()
                stepping.run.wait()
                self._variables.keep(stepping.run)

    def _introduce(self, notice: Callable[[str], None] | None, warn: Callable[[str], None]) -> None:
        """Say what is about to run: what is odd about the environment, and the plan."""
        for warning in self._settings.warnings:
            warn(warning)
        if notice is not None:
            for line in summarise(self.plan):
                notice(line)

    def _saver(
        self,
        manager: CheckpointManager,
        data: DataSource,
        first_step: int,
        policy: SavePolicy,
        warn: Callable[[str], None],
    ) -> Saver:
        return Saver(
            manager,
            self.plan,
            data,
            seed=self._seed,
            first_step=first_step,
            policy=policy,
            clock_ns=time.monotonic_ns,
            report=warn,
        )

    def _begin(self, run: Run) -> None:
        self._variables.begin(run)
        self._newest = run

    def _start(
        self,
        manager: CheckpointManager | None,
        data: DataSource,
        warn: Callable[[str], None],
        notice: Callable[[str], None],
    ) -> Start:
        start = None
        if manager is not None:
            start = start_from(manager, self.plan, data, self._seed, warn)
        if start is None:
            values = self._variables.first()
            return Start(steps_done(values), values)
        notice(f"resumed from the checkpoint of step {start.step}")
        return Start(start.step, self._variables.first(start.values))


def _ending(first: int, last: int, steps: int, reasons: list[str], *, is_kept: bool) -> str:
    """Return why a run ended, or nothing where it simply came to its end."""
    if reasons and last < steps:
        kept = (
            "it is checkpointed: run again to continue" if is_kept else "nothing was kept on disk"
        )
        return f"stopped by {reasons[0]} after step {last}; {kept}"
    if first >= steps:
        return f"nothing to do: {first} steps are done, {steps} were asked for"
    return f"the data ended after step {last} of {steps}" if last < steps else ""


def _check_ranks(plan: Plan) -> None:
    num_ranks = plan.int_option("num_ranks", 1)
    if num_ranks > 1:
        raise CompileError(
            f"plan {plan.name!r} is one of {num_ranks} ranks, and this version has no transport"
            " between ranks: it can be printed and simulated ('actorflow simulate --devices"
            f" {num_ranks}'); compile the job without num_ranks to run it here"
        )


def _check_target(plan: Plan, *, is_native: bool) -> None:
    """Refuse a plan that was made for other kernels than this machine has."""
    names = dict.fromkeys([launch.kernel for actor in plan.actors for launch in actor.launches])
    native = [name for name in names if name.startswith(NATIVE)]
    if native and not is_native:
        raise PlanFormatError(
            f"plan {plan.name!r} was compiled for native kernels ({', '.join(native)}), and here"
            " is no C compiler, or ACTORFLOW_NATIVE=0 forbids them; compile the job again"
        )
    here, there = catalogue.fingerprint(), plan.target
    if here.split()[:1] != there.split()[:1]:
        raise PlanFormatError(
            f"plan {plan.name!r} was compiled for kernels {there!r}, this actorflow has {here!r};"
            " compile the job again"
        )
    if here != there:
        logger.warning(
            "plan %r was compiled with %s and runs with %s: results may differ in their last bits",
            plan.name,
            there,
            here,
        )


def _build(plan: Plan) -> None:
    """Build the native kernels of a plan, once it is proven that there is nothing else in them."""
    if not build(plan):
        raise PlanFormatError(
            f"the C compiler of this machine refuses what plan {plan.name!r} needs (the log has its"
            " words); compile the job again, and numpy's kernels take its place"
        )
