"""One run: a plan opened on this machine's memory and driven over a data source.

A run owns the arena, the loop and the ports, from `start` to `close`. `fit`, `stream` and `step` of
a job are three ways to listen to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from actorflow.compile.plan_facts import credits_after
from actorflow.data import DataError
from actorflow.distributed.distributed_run import DistributedRun
from actorflow.distributed.messages import (
    CheckpointAt,
    CutAt,
    EndAt,
    GiveUpData,
    HoldRequested,
    Instruction,
    OfCheckpoint,
    StepsGranted,
)
from actorflow.environment.settings import logger
from actorflow.options.run_spec import RunSpec
from actorflow.run.broken_steps import NonFiniteMonitor
from actorflow.run.callers_thread import CallersThread
from actorflow.run.devices import (
    device_notice,
    open_devices,
    set_blas_threads,
    with_poison,
)
from actorflow.run.live_variables import LiveVariables, numbers_of_rows
from actorflow.run.run_ports import RunPorts
from actorflow.run.saving import RunContext
from actorflow.run.trace_file import TraceFile
from actors.kernels.common.host_memory import quiet_floating_point
from actors.kernels.library import onednn, resident
from actors.loop.admission import QuiescentCallback
from actors.loop.bound import PlanMemory
from actors.loop.dispatch import LoopOptions
from actors.loop.load import load
from actors.loop.loop import Loop
from actors.loop.watchdog import WatchdogOptions
from actors.machine.errors import ActorFailed
from actors.machine.protocol import Communicator, DeviceFault, OpenDevice
from actors.machine.table import MachineTable, fits_one_thread
from compiler.contract.errors import ActorflowError, InternalError, PeerFailed
from compiler.contract.plan import Plan
from compiler.contract.probe import have_breakpoint
from compiler.contract.types import numpy_dtype
from compiler.graph.target import SKIPPED
from compiler.ops.primitives.sources import EVALUATED, SCRATCH

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class RunRanks:
    """The other ranks of a run, by both ways to them; each is None where it is not needed.

    `distributed` has what the ranks agree on, `communicator` the memory of their collectives.
    """

    distributed: DistributedRun | None
    communicator: Communicator | None = None

    def count_waits(self) -> None:
        """Have this rank say with each step how long collectives have waited, from now on these."""
        communicator, distributed = self.communicator, self.distributed
        if distributed is not None and communicator is not None:
            before_ns = distributed.waited_ns() - communicator.waited_ns
            distributed.waited_ns = lambda: before_ns + communicator.waited_ns

    def begin(self) -> None:
        """Meet the others. Raises PeerFailed without them."""
        if self.distributed is not None and not self.distributed.number:
            self.distributed.begin()
        if self.communicator is not None:
            self.communicator.ready()

    def abort(self, reason: str, at_fault: int | None = None) -> None:
        """Make collectives that wait, on any rank, raise; from any thread."""
        if self.communicator is not None:
            self.communicator.abort(reason, at_fault)

    def ended(self, step: int) -> None:
        """Report that this rank has ended its run after a step."""
        if self.distributed is not None:
            self.distributed.ended(step)

    def close(self) -> None:
        """Release the memory of the others, when no launch runs. Idempotent."""
        if self.communicator is not None:
            self.communicator.close()


@dataclass(slots=True)
class RunEnd:
    """How a run comes to its end.

    `is_over` says that it has. `cut` is the last step of a run that ends without the data of later
    ones, else None. `is_deaf` says that callbacks are no longer called.
    """

    is_over: bool = False
    cut: int | None = None
    is_deaf: bool = False


class Run:
    """A plan that is open on this machine, over a source that gives the plan's batch fields.

    Args:
        plan: what is run.
        run_spec: what the run was asked.
        context: where it begins, its ranks, who saves.
        values: that the run begins with, by variable.
        beside: an open run, at rest, on whose memory and devices this one is to take turns; the
            values are there then, and `take_turn` comes before the first step.

    Raises:
        DataError: the source does not give what the plan was compiled for.
        OutOfMemory: the arena cannot be allocated.
    """

    def __init__(
        self,
        plan: Plan,
        run_spec: RunSpec,
        context: RunContext,
        values: Mapping[str, Array],
        beside: Run | None = None,
    ) -> None:
        settings, group = context.settings, context.group
        set_blas_threads(plan, settings, context.warn)
        if notice := device_notice(plan, settings):
            logger.info(notice)
        self.plan, self._context = plan, context
        self.ask: Callable[[str], object] = lambda reason: self.stop()
        self._end = RunEnd()
        # The step before the first one that this plan counts: others may have made steps between.
        first = self._first_step = context.first_step
        distributed = self._distributed_run() if beside is None else beside._ranks.distributed
        self.waits = None if distributed is None else distributed.waits
        self._ranks: RunRanks = RunRanks(distributed)
        self._ports = RunPorts(plan, run_spec, context, values, distributed, self._ask_now)
        self._trace = TraceFile.of(settings.trace, group.rank, plan, is_beside=beside is not None)
        numbers = numbers_of_rows(plan, group.rank)
        is_driven = context.is_stepped and distributed is None and fits_one_thread(plan)
        memory = PlanMemory(context.arena_bytes, borrowed=context.borrowed)
        self.memory: PlanMemory = memory if beside is None else beside.memory
        try:
            self._devices: tuple[OpenDevice, ...] = (
                open_devices(plan, settings, group.rank, group.local_rank)
                if beside is None
                else beside._devices
            )
            self._ranks.communicator = group.communicator(
                plan, settings, self._devices, self.memory.communicator_beside
            )
            if beside is None:
                self._ranks.count_waits()
            self.bound = load(
                with_poison(plan, settings),
                self._ports.by_name,
                self._devices,
                table=MachineTable.of(plan, credits_after(plan, first), is_one_thread=is_driven),
                watch=None if self._trace is None else self._trace.launches.watch,
                communicator=self._ranks.communicator,
                memory=self.memory,
            )
        # BaseException: a ^C in `load` leaves the mapped shared memory open as an error does.
        except BaseException:
            self._ranks.close()
            raise
        if beside is None:
            self._fill(values)
        for name, array in numbers.items():
            self.bound.variables.keep(name, array)
        self.loop = Loop(self.bound, self._loop_options(is_driven=is_driven))
        self._variables: LiveVariables | None = LiveVariables(
            plan,
            self.bound.variables,
            self.loop,
            group,
            is_stepped=context.is_stepped,
            holder=None if beside is None else beside.variables,
            writes=context.writes,
        )

    def _loop_options(self, *, is_driven: bool) -> LoopOptions:
        plan, context, settings = self.plan, self._context, self._context.settings
        # Whoever is in a debugger may take his time, and a driven run stands where its caller does.
        is_patient = is_driven or have_breakpoint([field.name for field in plan.fields])
        stall_seconds = 0.0 if is_patient else settings.stall_seconds
        options = LoopOptions(
            # None is no limit. Of several ranks none begins a step before the coordinator
            # granted it.
            window=None if self._ranks.distributed is None else 0,
            watch=WatchdogOptions(stall_seconds, folder=context.directory or settings.dump),
            timeline=None if self._trace is None else self._trace.timeline,
            on_finished=self._finish,
            on_failure=self._release,
            prepare_thread=quiet_floating_point,
        )
        if not is_driven:
            return options
        caller = CallersThread()
        return replace(options, drive=caller, settle=caller.settle)

    def _distributed_run(self) -> DistributedRun | None:
        """Return a new run on all ranks; None where no other is on it."""
        context, member = self._context, self._context.group.member
        if member is None:
            return None
        return DistributedRun(
            member,
            context.first_step,
            obey=self._obey,
            abort=self._abort,
            is_stepped=context.is_stepped,
            hosts=member.hosts,
        )

    def start(self) -> None:
        """Start the threads; with a total, admit all its steps.

        One more is admitted than there are batches: the data port answers it with the end of the
        stream, which is the one way in which a run ends, whether all steps are done, the source has
        no more, or `stop` was called. Waits for the other ranks; raises PeerFailed without them.
        """
        # Steps run what was bound, and none of what found and built it.
        onednn.release_code()
        resident.release_freed()
        if self._ranks.distributed is not None:
            self._ranks.distributed.join(self._abort)
        self._ranks.begin()
        self.loop.start()
        if self._ports.total_steps is not None:
            # The loop counts firings of the plan's source from this run on; an update of
            # accumulated gradients takes several batches.
            steps = max(0, self._ports.total_steps - self._context.first_step)
            self.loop.admit(steps * self.plan.batches_per_step + 1)

    def flush(self) -> None:
        """Apply what was written to variables before the step that is fed next."""
        written = self.variables.flush()
        if self._ports.data.reporter is not None:
            self._ports.data.reporter.written = written

    def announce(self, batch: Mapping[str, Any]) -> None:
        """Tell other ranks that the next step is of this batch, for which a plan is opened now."""
        if self._ranks.distributed is not None:
            self._ranks.distributed.announce(self.num_steps + 1, batch)

    def take_turn(self, before: Run) -> None:
        """Take the turn on the memory from the run that has it, and count the steps on.

        Raises what ended that run, as where another rank has failed.
        """
        with before.raises_its_end():
            self.variables.take_turn()
        self._ports.metrics.step = before._ports.metrics.step
        count_on = partial(self._count_on, before.num_steps)
        if self._ranks.distributed is None:
            count_on()
        else:
            self._ranks.distributed.take_turn(self._obey, count_on)
            self._ranks.count_waits()

    @contextmanager
    def raises_its_end(self) -> Iterator[None]:
        """Raise what ended this run instead of what follows from that."""
        try:
            yield
        except InternalError:
            if self.loop.failure is not None:
                self.wait()
            raise

    def _count_on(self, step: int) -> None:
        """Have the next step of this plan be the one after another plan's."""
        self._first_step += step - self.num_steps
        self._ports.data.go_on_after(step)
        if self._ranks.distributed is not None:
            self.loop.withhold()  # what it was granted was counted from another step

    @property
    def monitor(self) -> NonFiniteMonitor | None:
        """What looks at the losses; None for a plan without one."""
        return self._ports.monitor

    def admit(self, steps: int) -> None:
        """Permit more steps of a run that was started without a total."""
        self.loop.admit(steps * self.plan.batches_per_step)

    def stop(self, reason: str = "") -> None:
        """Admit no further step; those that have begun are finished and a last snapshot is written.

        Of several ranks all end with the same step. Safe to call from a signal handler.
        """
        if self._ranks.distributed is not None:
            self._ranks.distributed.ask_stop(reason)
        else:
            self._ports.data.stop()

    def give_up_sources(self) -> None:
        """End a stopped run without the data sources that block in user code.

        Of several ranks: after the last step that one of them has begun, for which all need data.
        """
        if self._ranks.distributed is None:
            self.loop.give_up_sources()
        else:
            self._ranks.distributed.report_last_started(self._ports.data.hold())

    def give_up_users(self, *, are_callbacks_late: bool) -> None:
        """End a stop on several ranks although a function of the user does not return.

        Callbacks are no longer called. If the last step lacks a batch, all ranks end after the
        last step whose data every rank has.
        """
        if self._ranks.distributed is None:
            return
        if are_callbacks_late:
            self._end.is_deaf = True
            self.loop.give_up_sinks()
            self._ports.expect_no_calls()
        if self._ports.data.is_awaited:
            self._give_up_data()

    def _give_up_data(self) -> None:
        if self._ranks.distributed is not None:
            self._ranks.distributed.data_given_up(self._ports.data.give_up_data())

    def _cut_at(self, step: int) -> None:
        """Make `wait` end the run once this rank is idle and the updates of a step are done."""
        communicator = self._ranks.communicator
        if communicator is not None and not communicator.has_clean_abort:
            text = (
                f"the data source of a rank gave no batch for step {step + 1} when the run was to"
                " stop, and others had begun that step. Work that is enqueued on a GPU cannot be"
                f" undone: the state after step {step} is lost, and not saved; the newest"
                " checkpoint is of an earlier step"
            )
            self._abort(DataError(text) if self._ports.data.is_awaited else PeerFailed(text))
            return
        self._end.cut = step
        # At rest means: every update of that step is made. Later steps may have begun, and may wait
        # for data that never comes.
        rest = self.variables.when_updated(step - self._context.first_step)
        self.loop.run_when_quiescent(
            QuiescentCallback(rest, self._context.on_finished or (lambda: None))
        )

    @property
    def num_steps(self) -> int:
        """Steps that are done when the run has ended, those before it included."""
        return self._ports.data.num_steps if self._end.cut is None else self._end.cut

    @property
    def are_steps_untold(self) -> bool:
        """Whether a stop left out steps' outputs: no callback received them."""
        return self._end.is_deaf or self._end.cut is not None

    @property
    def stopped_by(self) -> str:
        """The words of a StopTraining that the data source raised, or nothing."""
        return self._ports.data.stopped_by

    @property
    def is_over(self) -> bool:
        """Whether it has come to its end, in any way."""
        return self._end.is_over

    @property
    def is_data_over(self) -> bool:
        """Whether the data source has no more, or failed."""
        return self._ports.data.is_over

    def wait(self) -> None:
        """Block until the plan has ended. Raises what `_wait` does, or what ended another rank."""
        try:
            if self._end.cut is not None and self.loop.failure is None:
                self._end_after(self._end.cut)
            self._wait()
        except Exception as error:
            distributed = self._ranks.distributed
            first = error if distributed is None else distributed.report_failure(error)
            if first is error:
                raise
            raise first from error
        self._ranks.ended(self.num_steps)

    def _end_after(self, step: int) -> None:
        """Drop what was begun of later steps, and save the state after this one.

        Raises DataError on the rank whose data was awaited, and PeerFailed on the others, where
        that state is not whole on all: then nothing is saved.
        """
        group = self._context.group
        # Before any rank aborts: from here on a collective that fails is no failure of the run.
        self.loop.expect_cut()
        # Whoever is woken out of a collective has finished the step, for its part and for others.
        group.all_gather_object("come to rest after the last step that all can finish", None)
        self._ranks.abort(f"the run ends after step {step}")
        self.loop.cut()
        self.loop.wait()
        changed = self.variables.changed_after(step - self._context.first_step)
        newest = "" if self._context.saver is None else self._context.saver.newest
        # All ranks come to this gather before one of them may raise, so that none waits for it in
        # vain.
        rows: list[Any] = group.all_gather_object(
            "end after one step", (changed, self._ports.data.num_steps, newest)
        )
        if changed := next((row[0] for row in rows if row[0]), ""):
            # The rank with the fewest steps of data is the one that the others waited for.
            late = min(range(len(rows)), key=lambda rank: rows[rank][1])
            text = (
                f"the data source of rank {late} gave no batch for step {step + 1} while the run"
                f" was stopping, and other ranks had started that step, which updates {changed!r}"
                f" in place: the state after step {step} is lost and not saved;"
                f" {rows[0][2] or 'the run writes no checkpoints'}"
            )
            raise DataError(text) if late == group.rank else PeerFailed(text, rank=late)
        saved = self.variables.saved_after(step - self._context.first_step)
        self._ports.save_cut(step, saved)

    def _obey(self, message: Instruction | OfCheckpoint) -> None:
        """Do what the coordinator has all ranks of the run do; on the link's thread."""
        match message:
            case StepsGranted(steps=steps, is_last=is_last, reason=reason):
                distributed = self._ranks.distributed
                if is_last and distributed is not None and not distributed.asked:
                    self.ask(reason)  # another rank asked
                self._grant(steps, is_last)
            case CheckpointAt(step=step):
                self._ports.scheduler.schedule(step)
            case HoldRequested():
                self.give_up_sources()
            case EndAt(step=step):
                self._grant(step, is_last=True)
                if not self._ports.data.go_on(step):
                    self.loop.give_up_sources()
            case GiveUpData():
                self._give_up_data()
            case CutAt(step=step):
                self._cut_at(step)
            case _:
                self._ports.scheduler.hear(message)

    def _grant(self, steps: int, is_last: bool) -> None:
        # The port learns of its last step before the loop may run it.
        if is_last:
            self._ports.end_at(steps)
        batches = max(0, steps - self._first_step) * self.plan.batches_per_step
        self.loop.grant(batches, is_last=is_last)

    def _abort(self, error: BaseException) -> None:
        self.loop.abort(error)
        self._ports.scheduler.stop(error)
        self._release(error)

    def _release(self, error: BaseException) -> None:
        """Make what waits for this run, on other ranks too, go on without it: it has failed."""
        # At once: a checkpoint may wait for the vote of a rank that waits in a collective for us.
        self._ports.release(error)
        self._ranks.abort(str(error), getattr(error, "rank", None))

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
            if self._ports.data.failure is not None:
                error.add_note(f"before that the data source raised {self._ports.data.failure!r}")
            raise error from (failed if error is cause else cause)
        if self._ports.monitor is not None and SKIPPED in self.bound.variables:
            self._ports.monitor.finish(int(self.bound.variables.read(SKIPPED)))
        if self._ports.data.unused_text:
            self._context.warn(self._ports.data.unused_text)
        self._ports.raise_failure()

    def _note_loss(self, error: ActorflowError) -> None:
        """Add a note to an error that says what is left if a device took the variables along."""
        if self.bound.variables.lost_with:
            saved = (
                "no checkpoint was to be written"
                if self._context.saver is None
                else self._context.saver.newest
            )
            is_read = self.variables.last_read is not None
            rest = "the values that were read last" if is_read else "its values from before the run"
            error.add_note(
                "the variables lay in the memory of the device and are lost;"
                f" {saved}. The model has {rest}"
            )

    @property
    def num_skipped(self) -> int:
        """Steps of this run that were skipped; exact after `wait`."""
        return 0 if self._ports.monitor is None else self._ports.monitor.num_skipped

    @property
    def variables(self) -> LiveVariables:
        """The variables, to be read and written while the run is open. Not after `close`."""
        if self._variables is None:
            raise InternalError(f"the memory of plan {self.plan.name!r} was released")
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
                trace.write(self.plan, self._context.warn)
        finally:
            self._variables = None  # whoever else has it keeps the arena
            if self._ranks.distributed is not None:
                self._ranks.distributed.part(self._abort)
            self.memory, self._devices = PlanMemory(), ()
            self.bound.release()
            self._ranks.close()

    def _leave(self) -> None:
        """Release ranks that wait for this one: its run has ended, or is aborted here."""
        if self._variables is None or not self._variables.has_turn:
            return  # nobody waits in a plan at rest, though others may not be so far yet
        if not self._end.is_over:
            self._ranks.abort(f"it closed its run of plan {self.plan.name!r} before the end")
        elif self.loop.failure is None and self._ports.data.failure is None:
            self._ranks.ended(self.num_steps)

    def _finish(self) -> None:
        """Handle the end of the run."""
        self._end.is_over = True
        if self._context.on_finished is not None:
            self._context.on_finished()

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
            count = self._context.first_step * self.plan.batches_per_step
            variables.write("batches", np.asarray(count, np.int64))

    def _evaluated_batches(self) -> int:
        """Return how many batches the runs before this one have evaluated."""
        every = self.plan.int_option("evaluate_every", 1)
        return self._context.first_step // every * self.plan.int_option("evaluate_batches", 0)

    def _ask_now(self, reason: str) -> None:
        """Ask for the end through the current `ask`, which is set after the ports are made."""
        self.ask(reason)
