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

from actorflow.compile.plan_facts import (
    batch_slots,
    batches_per_step,
    credits_after,
    snapshot_rate,
    takes_snapshots,
)
from actorflow.data import DataError, DataSource
from actorflow.distributed.process_group import DistributedRun, ProcessGroup
from actorflow.distributed.shared_run import BatchDigestReporter
from actorflow.environment.host import is_cuda
from actorflow.environment.settings import SettingsError, logger
from actorflow.run.devices import (
    device_notice,
    devices_of,
    open_devices,
    set_blas_threads,
    with_poison,
)
from actorflow.run.live_variables import LiveVariables
from actorflow.run.ports import (
    CheckpointPort,
    DataPort,
    FedSteps,
    MetricsPort,
    Positions,
    ReadFields,
)
from actorflow.run.run_options import (
    CheckpointScheduler,
    EvaluationDataPort,
    RunOptions,
    broken_steps_of,
    evaluation_ports,
)
from actors.kernels.common.host_memory import quiet_floating_point
from actors.loop.admission import QuiescentCallback
from actors.loop.dispatch import LoopOptions
from actors.loop.load import load
from actors.loop.loop import Loop
from actors.loop.timeline import LaunchTrace, Timeline, write_chrome_trace
from actors.loop.watchdog import WatchdogOptions
from actors.machine.errors import ActorFailed
from actors.machine.protocol import DeviceFault, HostPort
from actors.machine.table import MachineTable
from compiler.contract.errors import ActorflowError, CompileError, InternalError, PeerFailed
from compiler.contract.plan import Plan
from compiler.contract.types import numpy_dtype
from compiler.graph.target import SKIPPED
from compiler.ops.primitives.sources import EVALUATED, SCRATCH


class TraceFile:
    """The trace of a run, where ACTORFLOW_TRACE asks for one: every firing and every launch.

    Each of several ranks has one, with its number in the name: trace.json, trace.rank1.json.

    Raises SettingsError, before anything runs, when the file could not be written.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        if not path.parent.is_dir():
            raise SettingsError(
                f"ACTORFLOW_TRACE={path}: there is no folder {path.parent}; make it, or choose"
                " another"
            )
        self.timeline = Timeline()
        self.launches = LaunchTrace()
        self._path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path

    def write(self, plan: Plan, warn: Callable[[str], object]) -> None:
        """Write the file, when no launch runs any more; warn where that is not possible."""
        try:
            write_chrome_trace(
                self._path,
                self.timeline.rows(),
                MachineTable.of(plan),
                stream_names=tuple(stream.name for stream in plan.streams),
                has_arrows=True,
                more=partial(self.launches.events, plan),
                title=_title(plan),
            )
        except OSError as error:
            warn(f"ACTORFLOW_TRACE: cannot write {self._path}: {error.strerror}")


def _title(plan: Plan) -> str:
    """Return what the times of a trace are of: on a GPU not those of an ordinary run."""
    devices = devices_of(plan)
    title = f"plan {plan.name!r} on {', '.join(map(str, devices))}"
    if not any([is_cuda(device) for device in devices]):
        return title
    return f"{title}: launches of a GPU one by one, each waited for, without graphs"


Array = np.ndarray[Any, Any]


class Run:
    """A plan that is open on this machine, over a source that gives the plan's batch fields.

    Raises:
        DataError: the source does not give what the plan was compiled for.
        OutOfMemory: the arena cannot be allocated.
    """

    def __init__(self, plan: Plan, source: DataSource, options: RunOptions) -> None:
        settings = options.settings
        set_blas_threads(plan, settings, options.warn)
        if notice := device_notice(plan, settings):
            logger.info(notice)
        self.plan = plan
        self._on_finished = options.on_finished
        self.ask: Callable[[str], object] = lambda reason: self.stop()
        self._total_steps = options.total_steps
        self._first_step = options.first_step
        self._rank = options.group.rank
        self._batches_per_step = batches_per_step(plan)
        self._warn = options.warn
        self._saver = options.saver
        self._keeping = CheckpointScheduler(plan, options, self._ask_checkpoint)
        self._together = self._with_others(options.group, is_stepped=options.is_stepped)
        self._given: BatchDigestReporter | None = None
        self._data = self._data_port(source, is_resumed=options.is_resumed)
        self._broken = broken_steps_of(plan, options)
        self._checkpoint: CheckpointPort | None = None
        self._evaluated: EvaluationDataPort | None = None
        ports = self._ports(options)
        self._trace = None if settings.trace is None else TraceFile(settings.trace, self._rank)
        self._is_over = False
        self._group = options.group
        # The last step of a run that ends without the data of later ones; None until `_cut_at`.
        self._cut: int | None = None
        self._is_deaf = False
        self._communicator = options.group.communicator(plan, settings)
        try:
            self.bound = load(
                with_poison(plan, settings),
                ports,
                open_devices(plan, settings),
                initial=credits_after(plan, self._first_step),
                watch=None if self._trace is None else self._trace.launches.watch,
                communicator=self._communicator,
            )
        # BaseException: a ^C in `load` leaves the mapped shared memory open as an error does.
        except BaseException:
            if self._communicator is not None:
                self._communicator.close()
            raise
        self._fill(options.values)
        self.loop = Loop(
            self.bound,
            LoopOptions(
                # None is no limit. Of several ranks none begins a step before the coordinator
                # granted it.
                window=None if self._together is None else 0,
                watch=WatchdogOptions(
                    settings.stall_seconds, folder=options.directory or settings.dump
                ),
                timeline=None if self._trace is None else self._trace.timeline,
                on_finished=self._finish,
                prepare_thread=quiet_floating_point,
            ),
        )
        self._variables: LiveVariables | None = LiveVariables(
            plan,
            self.bound.variables,
            self.loop,
            options.group,
            is_stepped=options.is_stepped,
        )

    def start(self) -> None:
        """Start the threads; with a total, admit all its steps.

        One more is admitted than there are batches: the data port answers it with the end of the
        stream, which is the one way in which a run ends, whether all steps are done, the source has
        no more, or `stop` was called. Waits for the other ranks; raises PeerFailed without them.
        """
        if self._together is not None:
            self._together.begin()
        if self._communicator is not None:
            self._communicator.ready()
        self.loop.start()
        if self._total_steps is not None:
            # The loop counts firings of the plan's source from this run on; an update of
            # accumulated gradients takes several batches.
            steps = max(0, self._total_steps - self._first_step)
            self.loop.admit(steps * self._batches_per_step + 1)

    def flush(self) -> None:
        """Apply what was written to variables before the step that is fed next."""
        written = self.variables.flush()
        if self._given is not None:
            self._given.written = written

    def admit(self, steps: int) -> None:
        """Permit more steps of a run that was started without a total."""
        self.loop.admit(steps * self._batches_per_step)

    def stop(self, reason: str = "") -> None:
        """Admit no further step; those that have begun are finished and a last snapshot is written.

        Of several ranks all end with the same step. Safe to call from a signal handler.
        """
        if self._together is not None:
            self._together.ask_stop(reason)
        else:
            self._data.stop()

    def give_up_sources(self) -> None:
        """End a stopped run without the data sources that block in user code.

        Of several ranks: after the last step that one of them has begun, for which all need data.
        """
        if self._together is None:
            self.loop.give_up_sources()
        else:
            self._together.report_last_started(self._data.hold())

    def give_up_users(self, *, are_callbacks_late: bool) -> None:
        """End a stop on several ranks although a function of the user does not return.

        Callbacks are no longer called. If the last step lacks a batch, all ranks end after the
        last step whose data every rank has.
        """
        if self._together is None:
            return
        if are_callbacks_late:
            self._is_deaf = True
            self.loop.give_up_sinks()
        if self._data.is_awaited:
            self._give_up_data()

    def _give_up_data(self) -> None:
        if self._together is not None:
            self._together.data_given_up(self._data.give_up_data())

    def _cut_at(self, step: int) -> None:
        """Make `wait` end the run once this rank is idle and the updates of a step are done."""
        self._cut = step
        # At rest means: every update of that step is made. Later steps may have begun, and may wait
        # for data that never comes.
        rest = self.variables.when_updated(step - self._first_step)
        self.loop.run_when_quiescent(QuiescentCallback(rest, self._on_finished or (lambda: None)))

    @property
    def num_steps(self) -> int:
        """Steps that are done when the run has ended, those before it included."""
        return self._data.num_steps if self._cut is None else self._cut

    @property
    def are_steps_untold(self) -> bool:
        """Whether a stop left out steps' outputs: no callback received them."""
        return self._is_deaf or self._cut is not None

    @property
    def stopped_by(self) -> str:
        """The words of a StopTraining that the data source raised, or nothing."""
        return self._data.stopped_by

    @property
    def is_over(self) -> bool:
        """Whether it has come to its end, in any way."""
        return self._is_over

    @property
    def is_data_over(self) -> bool:
        """Whether the data source has no more, or failed."""
        return self._data.is_over

    def wait(self) -> None:
        """Block until the plan has ended. Raises what `_wait` does, or what ended another rank."""
        try:
            if self._cut is not None and self.loop.failure is None:
                self._end_after(self._cut)
            self._wait()
        except Exception as error:
            first = error if self._together is None else self._together.report_failure(error)
            if first is error:
                raise
            raise first from error
        if self._together is not None:
            self._together.ended(self.num_steps)

    def _end_after(self, step: int) -> None:
        """Drop what was begun of later steps, and save the state after this one.

        Raises DataError on the rank whose data was awaited, and PeerFailed on the others, where
        that state is not whole on all: then nothing is saved.
        """
        group = self._group
        # Before any rank aborts: from here on a collective that fails is no failure of the run.
        self.loop.expect_cut()
        # Whoever is woken out of a collective has finished the step, for its part and for others.
        group.all_gather_object("come to rest after the last step that all can finish", None)
        if self._communicator is not None:
            self._communicator.abort(f"the run ends after step {step}")
        self.loop.cut()
        self.loop.wait()
        changed = self.variables.changed_after(step - self._first_step)
        newest = "" if self._saver is None else self._saver.newest
        # All ranks come to this gather before one of them may raise, so that none waits for it in
        # vain.
        rows: list[Any] = group.all_gather_object(
            "end after one step", (changed, self._data.num_steps, newest)
        )
        if changed := next((row[0] for row in rows if row[0]), ""):
            # The rank with the fewest steps of data is the one that the others waited for.
            late = min(range(len(rows)), key=lambda rank: rows[rank][1])
            text = (
                f"the data source of rank {late} gave no batch for step {step + 1} when the run was"
                f" to stop, and others had begun that step, in which {changed!r} is changed at"
                f" once: the state after step {step} is lost, and not saved;"
                f" {rows[0][2] or 'the run writes no checkpoints'}"
            )
            raise DataError(text) if late == group.rank else PeerFailed(text, rank=late)
        if self._checkpoint is not None:
            self._checkpoint.finish(step, self.variables.saved_after(step - self._first_step))

    def _with_others(self, group: ProcessGroup, *, is_stepped: bool) -> DistributedRun | None:
        """Return what the run ends by together with those of other ranks."""
        if group.member is None:
            return None
        from actorflow.distributed.shared_run import RunCallbacks

        calls = RunCallbacks(
            grant=self._grant,
            abort=self._abort,
            checkpoint=self._keeping.schedule,
            stopping=self._hear_of_stop,
            hold=self.give_up_sources,
            end_at=self._end_at,
            give_up_data=self._give_up_data,
            cut_at=self._cut_at,
            is_stepped=is_stepped,
        )
        return DistributedRun(group.member, self._first_step, calls)

    def _grant(self, steps: int, is_last: bool) -> None:
        # The port learns of its last step before the loop may run it.
        if is_last and self._checkpoint is not None:
            self._checkpoint.last_step = steps
        batches = max(0, steps - self._first_step) * self._batches_per_step
        self.loop.grant(batches, is_last=is_last)

    def _end_at(self, step: int) -> None:
        self._grant(step, is_last=True)
        if not self._data.go_on(step):
            self.loop.give_up_sources()

    def _ask_checkpoint(self) -> None:
        if self._together is not None:
            self._together.ask_checkpoint()

    def _abort(self, error: BaseException) -> None:
        self.loop.abort(error)
        self._keeping.stop(error)
        if self._communicator is not None:
            self._communicator.abort(str(error), getattr(error, "rank", None))

    def _hear_of_stop(self, reason: str) -> None:
        if self._together is not None and not self._together.asked:
            self.ask(reason)

    def _wait(self) -> None:
        """Block until this rank's plan has ended.

        Raises ActorFailed for a failed launch, DeviceFault for one that the device could not name,
        the typed error itself where a port raised one of ours (a checkpoint that cannot be written,
        a loss that is not finite), and what the data source raised.
        """
        try:
            self.loop.wait()
        except DeviceFault as fault:  # of which no device could tell the launch
            self._note_loss(fault)
            raise
        except ActorFailed as failed:
            cause = failed.__cause__
            error = cause if isinstance(cause, ActorflowError) else failed
            self._note_loss(error)
            if self._data.failure is not None:
                error.add_note(f"before that the data source raised {self._data.failure!r}")
            raise error from (failed if error is cause else cause)
        if self._broken is not None and SKIPPED in self.bound.variables:
            self._broken.finish(int(self.bound.variables.read(SKIPPED)))
        if self._data.unused_text:
            self._warn(self._data.unused_text)
        if self._data.failure is not None:
            raise self._data.failure
        if self._evaluated is not None and self._evaluated.failure is not None:
            raise self._evaluated.failure

    def _note_loss(self, error: ActorflowError) -> None:
        """Add a note to an error that says what is left if a device took the variables along."""
        if self.bound.variables.lost_with:
            saved = "no checkpoint was to be written" if self._saver is None else self._saver.newest
            is_read = self.variables.last_read is not None
            rest = "the values that were read last" if is_read else "its values from before the run"
            error.add_note(
                "the variables lay in the memory of the device and are lost;"
                f" {saved}. The model has {rest}"
            )

    @property
    def num_skipped(self) -> int:
        """Steps of this run that were skipped; exact after `wait`."""
        return 0 if self._broken is None else self._broken.num_skipped

    @property
    def variables(self) -> LiveVariables:
        """The variables, to be read and written while the run is open. Not after `close`."""
        if self._variables is None:
            raise InternalError(f"the memory of plan {self.plan.name!r} was given back")
        return self._variables

    def whole_variables(self) -> dict[str, Array] | None:
        """End the threads and return all this rank's variables; None when an update was cut."""
        self._leave()
        self.loop.close()
        return self.variables.whole()

    def close(self) -> None:
        """End all threads, write the trace if one was asked for, release the arena. Idempotent.

        A forked child has none of them, and leaves all as it is.
        """
        if self.loop.is_inherited:
            return
        self._leave()
        try:
            self.loop.close()
            trace, self._trace = self._trace, None
            if trace is not None:
                trace.write(self.plan, self._warn)
        finally:
            self._variables = None  # whoever else has it keeps the arena
            self.bound.release()
            self._keeping.release()
            if self._communicator is not None:
                self._communicator.close()

    def _leave(self) -> None:
        """Release ranks that wait for this one: its run has ended, or is aborted here."""
        is_well = self._is_over and self.loop.failure is None and self._data.failure is None
        if is_well and self._together is not None:
            self._together.ended(self.num_steps)
        if not self._is_over and self._communicator is not None:
            self._communicator.abort(f"it closed its run of plan {self.plan.name!r} before the end")

    def _finish(self) -> None:
        """Handle the end of the run: a failed rank releases the ranks that wait for it."""
        self._is_over = True
        try:
            if self._communicator is not None and self.loop.failure is not None:
                self._communicator.abort(str(self.loop.failure))
        finally:  # or whoever waits for the run would wait for ever
            if self._on_finished is not None:
                self._on_finished()

    def _fill(self, values: Mapping[str, Array]) -> None:
        variables = self.bound.variables
        for name, array in values.items():
            variables.write(name, array)
        for variable in self.plan.variables:
            if variable.role == SCRATCH:
                # A step overwrites it first; where a plan does not, all runs read the same.
                dtype = numpy_dtype(self.plan.views[variable.view].type.dtype)
                variables.write(variable.name, np.zeros((), dtype))
            elif variable.role == EVALUATED:
                variables.write(variable.name, np.asarray(self._evaluated_batches(), np.int64))
        if "batches" in variables:
            count = self._first_step * self._batches_per_step
            variables.write("batches", np.asarray(count, np.int64))

    def _evaluated_batches(self) -> int:
        """Return how many batches the runs before this one have evaluated."""
        every = self.plan.int_option("evaluate_every", 1)
        return self._first_step // every * self.plan.int_option("evaluate_batches", 0)

    def _ports(self, options: RunOptions) -> dict[str, HostPort]:
        metrics = MetricsPort(
            options.on_step,
            self._first_step,
            watch=None if self._broken is None else self._broken.see,
            batches_per_step=self._batches_per_step,
        )
        ports: dict[str, HostPort] = {"data": self._data, "metrics": metrics}
        if takes_snapshots(self.plan):
            # Without a saver it lets every snapshot go.
            self._checkpoint = CheckpointPort(
                self._save, self._is_due, self._first_step, self._keeping.close
            )
            ports["checkpoint"] = self._checkpoint
        elif self._saver is not None:
            raise CompileError(
                f"plan {self.plan.name!r} takes no snapshots, so it cannot write checkpoints;"
                " compile it with job.compile(model, data, every='5s')"
            )
        evaluating = evaluation_ports(self.plan, options, self._ask_now)
        if evaluating is None:
            return ports
        self._evaluated, eval_metrics = evaluating
        return ports | {"eval_data": self._evaluated, "eval_metrics": eval_metrics}

    def _data_port(self, source: DataSource, *, is_resumed: bool) -> DataPort:
        fields = ReadFields.of(self.plan, self._rank, source)
        if self._together is not None:
            self._given = self._together.batches(fields.lines)
        total, each = self._total_steps, self._batches_per_step
        stride = 0 if self._saver is None else snapshot_rate(self.plan) * each
        positions = None
        if stride:
            first, in_flight = self._first_step * each, batch_slots(self.plan) + each
            positions = Positions(first, source.state(), stride=stride, in_flight=in_flight)
        return DataPort(
            source,
            fields,
            FedSteps(self._first_step, total, each, is_resumed=is_resumed),
            self._on_source_end,
            positions=positions,
            on_fed=None if self._together is None else self._together.report_data_ready,
            given=self._given,
        )

    def _ask_now(self, reason: str) -> None:
        """Ask for the end through the current `ask`, which is set after the ports are made."""
        self.ask(reason)

    def _on_source_end(self) -> None:
        if self._together is not None:
            if self._data.failure is None:
                self._together.data_ended(self._data.num_steps, self._data.stopped_by)
            elif self._keeping.needs_others:
                return  # they are at other steps, and end without a last checkpoint
        if self._checkpoint is not None:
            self._checkpoint.last_step = self._data.num_steps

    def _save(self, step: int, arrays: Mapping[str, Array]) -> None:
        self._keeping.save(step, arrays, self._data.position_after)

    def _is_due(self, step: int) -> bool:
        if step == self._total_steps or self._keeping.is_due(step):
            return True
        self._data.forget_before(step)
        return False
