"""One run: a plan opened on this machine's memory and driven over a data source.

A run owns the arena, the loop and the ports, from `start` to `close`. `fit`, `stream` and `step` of
a job are three ways to listen to one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from actorflow.compile.native import is_native
from actorflow.data import DataError, DataSource
from actorflow.evaluation import Evaluation, EvaluationDataPort, EvaluationPort
from actorflow.run.broken_steps import BrokenSteps, skips
from actorflow.run.live_variables import LiveVariables
from actorflow.run.plan_credits import credits_after
from actorflow.run.ports import CheckpointPort, DataPort, Metrics, MetricsPort
from actorflow.run.stopping import ON_RESULT, ON_STEP
from actorflow.settings import Settings, SettingsError
from actors.errors import ActorFailed
from actors.kernels import catalogue
from actors.kernels.floating_point import quiet_floating_point
from actors.kernels.library import openblas
from actors.kernels.native.chain import join
from actors.launch_trace import LaunchTrace
from actors.load import Rework, load
from actors.loop import Loop
from actors.protocol import Chain, HostPort
from actors.statistics import Statistics
from actors.table import MachineTable
from actors.timeline import Timeline
from actors.watchdog import Watch
from compiler.errors import ActorflowError, CompileError, InternalError
from compiler.ops.sources import SCRATCH
from compiler.options import SKIPPED
from compiler.plan import Field, Plan
from compiler.types import TensorType

Array = np.ndarray[Any, Any]

_USERS = {
    "data": "the data source",
    "eval_data": "the data source of the evaluation",
    "metrics": ON_STEP,
    "eval_metrics": ON_RESULT,
}
"""What of the user runs in a port, by the name of its actor."""

Save = Callable[[int, Mapping[str, Array], Mapping[str, Any]], None]
"""Write a checkpoint: step, variables by name, state of the data source after that step."""


class Run:
    """A plan that is open on this machine.

    Args:
        plan: what to run.
        source: where batches come from; must give the plan's batch fields.
        values: first value of every variable.
        first_step: steps done before this run.
        total_steps: step at which the run ends, or None for as many as are admitted.
        on_step: called with (step, outputs) on the metrics thread.
        save: writes a checkpoint on the checkpoint thread; None when the plan takes no snapshots.
        is_due: whether a snapshot of this step is to be written.
        on_nan: what to do when the loss is not finite, one of `broken_steps.POLICIES`.
        evaluation: what the plan's evaluation reads, and who listens to it.
        directory: of the run, for what the watchdog writes; None when it has none.
        warn: receives warnings.
        on_finished: called once when the run is over in any way, before `wait` returns.
        settings: where a trace goes, and whether invariants are checked.

    Raises:
        DataError: the source does not give what the plan was compiled for.
        OutOfMemory: the arena cannot be allocated.
    """

    def __init__(
        self,
        plan: Plan,
        source: DataSource,
        *,
        values: Mapping[str, Array],
        first_step: int = 0,
        total_steps: int | None = None,
        on_step: Callable[[int, Metrics], None],
        save: Save | None = None,
        is_due: Callable[[int], bool] = lambda step: True,
        on_nan: str = "raise",
        evaluation: Evaluation | None = None,
        directory: Path | None = None,
        warn: Callable[[str], None] = lambda text: None,
        on_finished: Callable[[], object] | None = None,
        settings: Settings,
    ) -> None:
        if is_native(plan):
            # Two pools of threads fight for the cores: numpy multiplies on one thread then.
            openblas.use_one_thread()
        elif not openblas.use_threads(settings.threads) and settings.threads is not None:
            warn(
                "ACTORFLOW_THREADS has no effect: numpy's BLAS is not one whose threads can be set"
            )
        self.plan = plan
        self.ask: Callable[[str], object] = lambda reason: self.stop()
        self._total_steps = total_steps
        self._first_step = first_step
        self._batches_per_step = batches_per_step(plan)
        fields, lines = batch_fields(plan)
        check_source(source, fields, lines)
        self._data = DataPort(
            source,
            fields,
            lines,
            first_step,
            total_steps,
            self._on_source_end,
            snapshot_every=snapshot_rate(plan) if save is not None else 0,
            in_flight=_batch_slots(plan),
            batches_per_step=self._batches_per_step,
        )
        loss_line = _line_of_output(plan, "loss") if plan.option("is_training") else None
        self._broken: BrokenSteps | None = None
        if loss_line is not None:
            skipped = int(values[SKIPPED]) if skips(plan) and SKIPPED in values else None
            self._broken = BrokenSteps(
                on_nan, loss_line, warn, skipped=skipped, directory=directory
            )
        metrics = MetricsPort(
            on_step,
            first_step,
            watch=self._broken.see if self._broken is not None else None,
            batches_per_step=self._batches_per_step,
        )
        ports: dict[str, HostPort] = {"data": self._data, "metrics": metrics}
        self._checkpoint: CheckpointPort | None = None
        if takes_snapshots(plan):
            self._checkpoint = self._checkpoint_port(save, is_due)
            ports["checkpoint"] = self._checkpoint
        elif save is not None:
            raise CompileError(
                f"plan {plan.name!r} takes no snapshots, so it cannot write checkpoints; compile it"
                " with job.compile(model, data, every='5s')"
            )
        self._evaluated: EvaluationDataPort | None = None
        ports |= self._evaluation_ports(evaluation)
        if settings.trace is not None:
            check_trace_path(settings.trace)
        self._warn = warn
        self._timeline = Timeline() if settings.trace is not None else None
        self._trace_path = settings.trace
        # Launch by launch where somebody watches.
        self._launches = LaunchTrace() if settings.trace is not None else None
        rework: Rework | None = None
        if self._launches is not None:
            rework = self._launches.watch
        elif settings.log_level != "DEBUG":
            rework = _joined
        self.bound = load(plan, ports, catalogue.binders(), rework)
        for name, array in values.items():
            np.copyto(self.bound.variables[name], array)
        for variable in plan.variables:
            if variable.role == SCRATCH:
                # A step overwrites it first; where a plan does not, all runs read the same.
                self.bound.variables[variable.name].fill(0)
        if "batches" in self.bound.variables:
            self.bound.variables["batches"][...] = first_step * self._batches_per_step
        self.loop = Loop(
            self.bound,
            initial=credits_after(plan, first_step),
            watch=Watch(settings.stall_seconds, folder=directory or settings.dump),
            timeline=self._timeline,
            on_finished=on_finished,
            prepare_thread=quiet_floating_point,
        )
        self._variables: LiveVariables | None = LiveVariables(plan, self.bound.variables, self.loop)

    def start(self) -> None:
        """Start the threads; with a total, admit all its steps.

        One more is admitted than there are batches: the data port answers it with the end of the
        stream, which is the one way in which a run ends, whether all steps are done, the source has
        no more, or `stop` was called.
        """
        self.loop.start()
        if self._total_steps is not None:
            steps = max(0, self._total_steps - self._first_step)
            self.loop.admit(steps * self._batches_per_step + 1)

    def admit(self, steps: int) -> None:
        """Permit more steps of a run that was started without a total."""
        self.loop.admit(steps * self._batches_per_step)

    def stop(self) -> None:
        """Admit no further step; those that have begun are finished and a last snapshot is written.

        Safe to call from a signal handler.
        """
        self._data.stop()

    def give_up_sources(self) -> None:
        """Let a run that was stopped end without the sources that block in user code."""
        self.loop.give_up_sources()

    def user_code_at(self) -> dict[str, str]:
        """Return where the threads are that run functions of the user, by what they run."""
        places = self.loop.ports_at()
        return {_USERS[name]: at for name, at in places.items() if name in _USERS}

    @property
    def stopped_by(self) -> str:
        """The words of a StopTraining that the data source raised, or nothing."""
        return self._data.stopped_by

    def end(self) -> None:
        """End a run that was started without a total, after the steps that are admitted."""
        self.loop.end()

    def wait(self) -> None:
        """Block until the plan has ended.

        Raises ActorFailed for a failed launch, the typed error itself where a port raised one of
        ours (a checkpoint that cannot be written, a loss that is not finite), and what the data
        source raised.
        """
        try:
            self.loop.wait()
        except ActorFailed as failed:
            cause = failed.__cause__
            error = cause if isinstance(cause, ActorflowError) else failed
            if self._data.failure is not None:
                error.add_note(f"before that the data source raised {self._data.failure!r}")
            raise error from (failed if error is cause else cause)
        if self._broken is not None and SKIPPED in self.bound.variables:
            self._broken.finish(int(self.bound.variables[SKIPPED]))
        if self._data.unused_text:
            self._warn(self._data.unused_text)
        if self._data.failure is not None:
            raise self._data.failure
        if self._evaluated is not None and self._evaluated.failure is not None:
            raise self._evaluated.failure

    @property
    def num_skipped(self) -> int:
        """Steps of this run that were skipped; exact after `wait`."""
        return 0 if self._broken is None else self._broken.num_skipped

    def statistics(self) -> Statistics:
        """Return what the actors have done so far."""
        return self.loop.statistics()

    @property
    def variables(self) -> LiveVariables:
        """The variables, to be read and written while the run is open. Not after `close`."""
        if self._variables is None:
            raise InternalError(f"the memory of plan {self.plan.name!r} was given back")
        return self._variables

    def whole_variables(self) -> dict[str, Array] | None:
        """End the threads and return all variables, or None when an update was cut in two."""
        self.loop.close()
        return self.variables.whole()

    def close(self) -> None:
        """End all threads, write the trace if one was asked for, release the arena. Idempotent.

        A forked child has none of them, and leaves all as it is.
        """
        if self.loop.is_inherited:
            return
        try:
            self.loop.close()
            self._write_trace()
        finally:
            self._variables = None  # whoever else has it keeps the arena
            self.bound.release()

    def _write_trace(self) -> None:
        if self._timeline is not None and self._trace_path is not None:
            names = tuple(stream.name for stream in self.plan.streams)
            timeline, self._timeline = self._timeline, None
            launches, self._launches = self._launches, None
            try:
                timeline.write_chrome_trace(
                    self._trace_path,
                    MachineTable.of(self.plan),
                    stream_names=names,
                    has_arrows=True,
                    more=partial(launches.events, self.plan) if launches is not None else None,
                )
            except OSError as error:
                self._warn(f"ACTORFLOW_TRACE: cannot write {self._trace_path}: {error.strerror}")

    def _evaluation_ports(self, evaluation: Evaluation | None) -> dict[str, HostPort]:
        every = self.plan.int_option("evaluate_every", 0)
        if not every:
            if evaluation is not None:
                raise CompileError(
                    f"plan {self.plan.name!r} does not evaluate; compile it with"
                    " job.compile(model, data, evaluation=...)"
                )
            return {}
        if evaluation is None:
            raise CompileError(
                f"plan {self.plan.name!r} evaluates every {every} steps; give fit the evaluation"
                " that it was compiled with"
            )
        fields, lines = batch_fields(self.plan, "eval_data")
        check_source(evaluation.data, fields, lines)
        batches = self.plan.int_option("evaluate_batches", 0)
        listeners = () if evaluation.on_result is None else (evaluation.on_result,)
        data = EvaluationDataPort(
            evaluation.data,
            fields,
            lines,
            batches,
            lambda: self.ask("the evaluation's data failed"),
        )
        self._evaluated = data
        return {
            "eval_data": data,
            "eval_metrics": EvaluationPort(self._first_step, every, listeners, data),
        }

    def _on_source_end(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.last_step = self._data.num_steps

    def _checkpoint_port(self, save: Save | None, is_due: Callable[[int], bool]) -> CheckpointPort:
        """Return the port of the checkpoint sink; without `save` it lets every snapshot go."""

        def save_with_position(step: int, arrays: Mapping[str, Array]) -> None:
            if save is not None:
                save(step, arrays, self._data.position_after(step))

        def due(step: int) -> bool:
            if save is not None and (step == self._total_steps or is_due(step)):
                return True
            self._data.forget_before(step)
            return False

        return CheckpointPort(save_with_position, due, self._first_step)


def batches_per_step(plan: Plan) -> int:
    """Return how many batches one update consumes."""
    return plan.int_option("accumulate", 1)


def snapshot_rate(plan: Plan) -> int:
    """Return the steps between two snapshots of the variables; 0 where the plan takes none."""
    snapshots = [actor for actor in plan.actors if actor.name == "snapshot"]
    return snapshots[0].inputs[0].rate if snapshots else 0


def _batch_slots(plan: Plan) -> int:
    register = next(a for a in plan.actors if a.name == "data").outputs[0].register
    return plan.registers[register].num_slots


def takes_snapshots(plan: Plan) -> bool:
    """Whether the plan was compiled to write checkpoints."""
    return any(actor.name == "checkpoint" for actor in plan.actors)


def written_variables(plan: Plan) -> tuple[str, ...]:
    """Return the names of the variables that a step changes, in order of the plan."""
    written = {
        plan.views[view].register
        for actor in plan.actors
        for launch in actor.launches
        for view in launch.outputs
    }
    return tuple(v.name for v in plan.state if plan.views[v.view].register in written)


def saved_variables(plan: Plan) -> tuple[str, ...]:
    """Return the names of the variables that a checkpoint holds, in order of plan.

    What only an evaluation reads is no part of the training.
    """
    writer = next((a for a in plan.actors if a.name == "checkpoint"), None)
    if writer is None:
        return tuple(v.name for v in plan.state)
    staging = writer.inputs[0].register
    return tuple(f.name for f in plan.fields if f.register == staging)


def check_trace_path(path: Path) -> None:
    """Raise SettingsError, before anything runs, when a trace could not be written."""
    if not path.parent.is_dir():
        raise SettingsError(
            f"ACTORFLOW_TRACE={path}: there is no folder {path.parent}; make it, or choose another"
        )


def batch_fields(plan: Plan, source: str = "data") -> tuple[dict[str, TensorType], dict[str, str]]:
    """Return type and user's line of every field that the plan reads from a data source."""
    register = next(a for a in plan.actors if a.name == source).outputs[0].register
    fields = [f for f in plan.fields if f.register == register]
    types = {f.name: plan.views[f.view].type for f in fields}
    return types, {f.name: str(plan.sources[f.source]) for f in fields}


def check_source(
    source: DataSource, fields: Mapping[str, TensorType], lines: Mapping[str, str]
) -> None:
    """Check that a source's spec gives every field of the plan. Raises DataError."""
    spec = source.spec()
    for name, expected in fields.items():
        came = spec.get(name)
        if came != expected:
            raise DataError(
                f"batch[{name!r}] ({lines[name]}): the plan was compiled for {expected}, the data"
                f" source gives {came if came is not None else 'no such key'}; compile the job for"
                " this source, or give it the source that it was compiled for"
            )


def _line_of_output(plan: Plan, name: str) -> str | None:
    sink = next(a for a in plan.actors if a.name == "metrics")
    registers = [port.register for port in sink.inputs]
    found: Field | None = next(
        (f for f in plan.fields if f.register in registers and f.name == name), None
    )
    return None if found is None else str(plan.sources[found.source])


def _joined(actor: int, chain: Chain) -> Chain:
    return join(chain)
