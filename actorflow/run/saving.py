"""Between a run and its checkpoints: what is saved, when, and restored; do both belong together?

`CheckpointScheduler` decides which snapshots become checkpoints, `Saver` writes them: alone, or a
rank's pieces of them together with the other ranks (`ShardedSaver`).

Saved: every variable (parameters in one group of shards, optimizer state and counters in another),
the step, the seed, the position of the data source after that step, its fingerprint, the plan's
hash and its kernels.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from actorflow.checkpoint.errors import CheckpointDropped, CheckpointError, Every
from actorflow.checkpoint.manifest import Expected
from actorflow.checkpoint.shard import MODEL_GROUP
from actorflow.compile.plan_facts import saved_variables, written_variables
from actorflow.data import DataError, DataSource
from actorflow.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from actorflow.distributed.unshard import saved_shards
from actorflow.environment.settings import Settings, is_worth_a_line
from actorflow.options.run_spec import WARN
from actorflow.run.broken_steps import NonFiniteLoss
from actorflow.tensor.initial_values import whole_type
from actorflow.tensor.probes import Predicates
from compiler.contract.codec import printable
from compiler.contract.errors import CompileError, InternalError, PeerFailed
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import ActorKind
from compiler.contract.sbp import shard_slices
from compiler.graph.target import GOOD_STEPS, LOSS_SCALE, SKIPPED
from compiler.ops.primitives.sources import OF_MODEL

if TYPE_CHECKING:
    from actorflow.checkpoint.manager import CheckpointManager, SavedFacts
    from actorflow.checkpoint.reader import LoadedCheckpoint
    from actorflow.distributed.distributed_run import DistributedRun
    from actorflow.distributed.messages import OfCheckpoint
    from actorflow.distributed.sharded_save import SavedPieces, SaveVotes, ShardedSaver
    from actorflow.options.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class JobState:
    """What is saved of a job, by name.

    `types` are texts such as "float32[2, 3]", of whole tensors; `roles` say what each is for;
    `written` are those that a step changes.
    """

    types: Mapping[str, str]
    roles: Mapping[str, str]
    written: frozenset[str]


def job_state(plan: Plan, group: ProcessGroup = SINGLE_PROCESS) -> JobState:
    """Return what is saved of a plan's job; ranks in stages have variables of their own each.

    All ranks call it at the same place.
    """
    saved, written = {*saved_variables(plan)}, {*written_variables(plan)}
    entries = [
        (v.name, v.role, str(whole_type(plan, v)), v.name in written)
        for v in plan.state
        if v.name in saved
    ]
    answers = cast(
        "list[Any]", group.all_gather_object("tell its variables for checkpoints", tuple(entries))
    )
    # By rank, so all ranks have one order. A variable that several ranks hold is one entry of a
    # dict.
    rows = [row for rows in answers for row in rows]
    return JobState(
        {name: type_ for name, _, type_, _ in rows},
        {name: role for name, role, _, _ in rows},
        frozenset([name for name, _, _, is_written in rows if is_written]),
    )


Array = np.ndarray[Any, Any]
STEP = "step"
"""The variable that counts the steps."""


@dataclass(frozen=True, slots=True)
class RestoredState:
    """Where a run begins: steps done, and the rank's part of the value of every variable."""

    step: int
    values: Mapping[str, Array]
    is_resumed: bool = False


class Saver:
    """Writes the checkpoints of one run; of several ranks each has one, for its pieces.

    Args:
        manager: of the run directory, opened on the first rank.
        plan: gives the plan's hash, and its kernels.
        state: what is saved, of all ranks.
        run_spec: what is to be done where a snapshot cannot be saved. The fingerprint of its data
            goes into every manifest.
        period: when a snapshot is due.
        seed: of the run.
        first_step: step that is restored or initial, so need not be saved.
        report: receives notices.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        plan: Plan,
        state: JobState,
        run_spec: RunSpec,
        period: Every,
        *,
        seed: int,
        first_step: int,
        report: Callable[[str], None],
    ) -> None:
        self._manager = manager
        self._roles = state.roles
        self._written = sorted(state.written)
        self._refused: tuple[int, str] | None = None
        self._unsaved: CheckpointError | None = None
        self._num_failures = 0
        self._plan_hash = plan.graph_hash
        self._config = dict(plan.options) | {"job": plan.name, "kernels": _kernels(plan)}
        self._fingerprint = run_spec.data.fingerprint()
        self._seed = seed
        self._period = period
        self._keeps_nan = run_spec.on_nan == WARN
        self._raises = run_spec.on_save_error == "raise"
        self._last_step = first_step
        self._last_ns = time.monotonic_ns()
        if first_step == 0 and period.seconds is not None:
            # A new run keeps its first snapshot, so that an early kill is no fresh start.
            self._last_ns -= int(period.seconds * 1e9)
        self._report = report
        self._sharded: ShardedSaver | None = None

    def save_with(self, pieces: SavedPieces, votes: SaveVotes, rank: int) -> None:
        """Save together with the other ranks from now on."""
        from actorflow.distributed.sharded_save import ShardedSaver  # for several ranks alone

        self._sharded = ShardedSaver(self._manager, pieces, votes, rank)

    def is_due(self, step: int) -> bool:
        """Whether the policy wants a checkpoint of this step now."""
        now_ns, last_ns = time.monotonic_ns(), self._last_ns
        return self._period.is_due(
            step=step, now_ns=now_ns, last_step=self._last_step, last_ns=last_ns
        )

    def save(self, step: int, arrays: Mapping[str, Array], data_state: Mapping[str, Any]) -> None:
        """Write one checkpoint, or this rank's pieces of it; returns when all of it is durable.

        A state in which training made NaN is not written, unless the run keeps such states.
        Infinity may be meant (a mask), and so may NaN in what training does not change. On several
        ranks a NaN of any of them counts. Raises CheckpointError unless the policy is to go on, and
        PeerFailed where another rank is the reason, or ended.
        """
        # Sorted names, so that the variable in the message is the same in every run.
        floats = [n for n in self._written if n in arrays and arrays[n].dtype.kind == "f"]
        broken = next((name for name in floats if np.isnan(arrays[name]).any()), "")
        if self._keeps_nan:
            broken = ""
        try:
            if self._sharded is not None:
                broken = self._sharded.save(
                    step, self._groups(arrays), self._facts(data_state), broken
                )
            elif not broken:
                self._save_alone(step, arrays, data_state)
        except CheckpointError as error:
            # `_refused` and `_unsaved` are looked at by `finish`: only the last state of a run has
            # to be there.
            self._refused = None
            if self._raises and isinstance(error, CheckpointDropped):
                raise PeerFailed(str(error), rank=error.rank) from error
            if self._raises:
                raise
            self._last_ns = time.monotonic_ns()  # the next try comes a period later
            self._fail(error)
            return
        if broken:
            self._refused = (step, broken)
            self._report(f"{broken!r} holds NaN after step {step}: this state is not saved")
            return
        self._refused = None
        self._last_step, self._last_ns = step, time.monotonic_ns()
        if self._unsaved is not None:
            self._report(f"checkpoints can be saved again: that of step {step} is")
        self._unsaved, self._num_failures = None, 0

    def _save_alone(
        self, step: int, arrays: Mapping[str, Array], data_state: Mapping[str, Any]
    ) -> None:
        # A checkpoint that lacks a variable would be refused only when it is needed, by `Expected`.
        if apart := arrays.keys() ^ self._roles.keys():
            raise InternalError(
                f"the snapshot of step {step} and the variables of its job differ in"
                f" {', '.join(sorted(apart))}"
            )
        facts = self._facts(data_state)
        self._manager.save(
            step,
            self._groups(arrays),
            seed=facts.seed,
            plan_hash=facts.plan_hash,
            config=facts.config,
            data_state=facts.data_state,
            data_fingerprint=facts.data_fingerprint,
        )

    def _groups(self, arrays: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
        groups: dict[str, dict[str, Array]] = {MODEL_GROUP: {}, "optim": {}}
        for name, array in arrays.items():
            groups[MODEL_GROUP if self._roles[name] in OF_MODEL else "optim"][name] = array
        return groups

    def _facts(self, data_state: Mapping[str, Any]) -> SavedFacts:
        from actorflow.checkpoint.manager import SavedFacts  # 15 ms

        return SavedFacts(self._seed, self._plan_hash, self._config, data_state, self._fingerprint)

    @property
    def newest(self) -> str:
        """Which checkpoint is the newest, in words."""
        if not self._last_step:
            return "no checkpoint was written yet"
        directory = self._manager.directory
        return f"the newest checkpoint is of step {self._last_step} in {directory}"

    def finish(self) -> None:
        """Raise the error that kept the last state of the run from being saved, if there is one.

        NonFiniteLoss for a state that is not worth it, else CheckpointError.
        """
        if self._refused is not None:
            step, name = self._refused
            raise NonFiniteLoss(f"variable {name!r} holds NaN after step {step}, the last one")
        if self._unsaved is not None:
            raise self._unsaved

    def _fail(self, error: CheckpointError) -> None:
        self._unsaved = error
        self._num_failures += 1
        if is_worth_a_line(self._num_failures):
            self._report(
                f"{error}. The run continues (on_save_error='warn') and tries again at the next"
                " checkpoint"
            )


def _ignore(text: str) -> None:
    """Hear of nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What a run has besides its plan and `RunSpec`: where it begins, its ranks, who saves.

    Args:
        settings: where a trace goes, and whether invariants are checked.
        first_step: steps done before this run.
        is_resumed: whether a checkpoint says where the data goes on.
        is_stepped: whether each step is admitted by itself, and nothing runs between two.
        group: this rank among those that run the job.
        saver: writes the checkpoints, of this rank its pieces.
        directory: of the run, for what the watchdog writes; None when it has none.
        warn: receives warnings.
        on_finished: called once when the run is over in any way, before `wait` returns.
        predicates: what checks of the job are held against, by sink and number of the probe.
    """

    settings: Settings
    first_step: int = 0
    is_resumed: bool = False
    is_stepped: bool = False
    group: ProcessGroup = SINGLE_PROCESS
    saver: Saver | None = None
    directory: Path | None = None
    warn: Callable[[str], object] = _ignore
    on_finished: Callable[[], object] | None = None
    predicates: Predicates = field(default_factory=dict)


# The same snapshots become checkpoints on all ranks. A period in steps is counted, so all ranks
# come to the same. A period of time is that of the first rank's clock: it asks for a checkpoint,
# and the coordinator names a step that no rank has begun, on all of them
# (`actorflow.distributed.agreement`); the first snapshot from there on is the one. Then every rank
# writes its pieces, and the first one commits (`actorflow.distributed.sharded_save`). Meanwhile
# training goes on.


class CheckpointScheduler:
    """What becomes of the snapshots of one run. All ranks make it at the same place.

    `is_due` and `save` belong to the thread of the snapshots.

    Args:
        plan: of the run.
        period: of its checkpoints, the same on all ranks; None where it writes none.
        context: of the run.
        distributed: the run on all ranks; None for a run that no other rank is on.
    """

    def __init__(
        self,
        plan: Plan,
        period: Every | None,
        context: RunContext,
        distributed: DistributedRun | None,
    ) -> None:
        self._saver, self._period, self._distributed = context.saver, period, distributed
        self._last_step = context.first_step
        self._is_first = context.group.is_first
        # Filled by the link's thread, emptied by that of the snapshots; both ends are atomic.
        self._told: deque[int] = deque()
        self._votes: SaveVotes | None = None
        if distributed is not None and context.saver is not None:
            from actorflow.distributed.sharded_save import SaveVotes, saved_pieces

            group = context.group
            pieces = saved_pieces(
                plan.mesh, saved_shards(plan), group.all_gather_object, group.rank
            )
            self._votes = SaveVotes(distributed, context.settings.rank_seconds)
            context.saver.save_with(pieces, self._votes, group.rank)

    @property
    def needs_others(self) -> bool:
        """Whether a checkpoint takes the other ranks."""
        return self._votes is not None

    def hear(self, message: OfCheckpoint) -> None:
        """Take what is said of the checkpoint that is being written. On the link's thread."""
        if self._votes is not None:
            self._votes.hear(message)

    def schedule(self, step: int) -> None:
        """Mark the first snapshot from a step on as due. On any thread, in order of steps."""
        self._told.append(step)

    def is_due(self, step: int) -> bool:
        """Whether the snapshot of a step is to be saved."""
        period, saver = self._period, self._saver
        if period is None:
            return False
        if self._distributed is None:
            return saver is not None and saver.is_due(step)
        if period.seconds is None:
            is_due = period.is_due(step=step, now_ns=0, last_step=self._last_step, last_ns=0)
        else:
            is_due = bool(self._told) and self._told[0] <= step
            # Several may be due by now: one checkpoint answers them all.
            while self._told and self._told[0] <= step:
                self._told.popleft()
            # What was told and is still to come is answer enough; asking twice is one question.
            is_open = is_due or bool(self._told)
            if self._is_first and not is_open and saver is not None and saver.is_due(step):
                self._distributed.ask_checkpoint()
        if is_due:
            self._last_step = step
        return is_due

    def save(
        self,
        step: int,
        arrays: Mapping[str, Array],
        position: Callable[[int], Mapping[str, Any]],
    ) -> None:
        """Save a snapshot; `position` says where the data is after it.

        Returns when the checkpoint is durable. Raises what `Saver.save` does.
        """
        if self._saver is not None:
            self._saver.save(step, arrays, position(step) if self._is_first else {})

    def stop(self, error: BaseException) -> None:
        """Wait for no other rank any more, because of an error; from any thread."""
        if self._votes is not None:
            self._votes.stop(str(error))

    def close(self) -> None:
        """Make a save that waits for another rank raise."""
        self.stop(PeerFailed("the run is over"))


def start_from(
    manager: CheckpointManager,
    plan: Plan,
    source: DataSource,
    seed: int,
    report: Callable[[str], None],
    group: ProcessGroup = SINGLE_PROCESS,
) -> RestoredState | None:
    """Restore the source's position and return step and variables of the newest checkpoint.

    None where there is no checkpoint yet. Of several ranks each reads what it needs of the newest
    one that is valid for all of them. Raises CheckpointUnfit when the variables of all of them are
    other than the plan's, CompileError for another seed, DataError when the data is another.
    """
    boxes = own_boxes(plan, group.rank)
    checkpoint = newest_of_all(manager, expected_of(plan, group), boxes, group, report)
    if checkpoint is None:
        return None
    manifest = checkpoint.manifest
    # Data and seed are checked before `restore`, which changes the source.
    came = source.fingerprint()
    if manifest.data_fingerprint != came:
        raise DataError(
            f"the checkpoint of step {manifest.step} was trained on other data: it has fingerprint"
            f" {printable(manifest.data_fingerprint)!r}, this source {came!r}. Give the same data"
            " (same files, same seq, batch and seed), or another checkpoint directory"
        )
    if manifest.seed != seed:
        raise CompileError(
            f"the checkpoint of step {manifest.step} was made with seed {manifest.seed}, this job"
            f" has seed {seed}; use the same seed, or another checkpoint directory"
        )
    if manifest.has_nan:
        report(_of_nan(manifest.step, manager.newest_sound(manifest.step)))
    if manifest.plan_hash != plan.graph_hash:
        report(
            f"the checkpoint of step {manifest.step} was made by another version of this job: its"
            " state fits and is restored, but the run will not equal an uninterrupted one"
        )
    else:
        _compare_kernels(manifest.step, manifest.config.get("kernels"), plan, report)
    source.restore(manifest.data_state or {})
    return RestoredState(manifest.step, checkpoint.tensors)


def own_boxes(plan: Plan, rank: int) -> dict[str, tuple[slice, ...]]:
    """Return what a rank needs of a checkpoint: its box of each variable of its plan, by name."""
    saved, boxes = {*saved_variables(plan)}, {}
    for variable in plan.state:
        if variable.name in saved:
            part, whole = variable.sharding, whole_type(plan, variable)
            boxes[variable.name] = (
                tuple([slice(0, extent) for extent in whole.shape])
                if part is None
                else shard_slices(part, plan.mesh, rank)
            )
    return boxes


# Each rank reads and verifies what it needs, so one may find damage where the others find none. All
# go on from the newest step that is valid for every one: each names the newest that is valid for
# it, and those that are above the lowest of them look again below it, until all name the same.


def newest_of_all(
    manager: CheckpointManager,
    expected: Expected,
    boxes: Mapping[str, tuple[slice, ...]],
    group: ProcessGroup,
    report: Callable[[str], None],
) -> LoadedCheckpoint | None:
    """Return this rank's part of the newest checkpoint that is valid for all; None without one.

    All ranks call it at the same place. The first one reports what any of them has skipped, and
    why. Raises as `CheckpointReader.latest`, and CheckpointError where only some find one.
    """
    problems: list[str] = []
    loaded = manager.latest(expected, boxes, report=problems.append)
    while True:
        step = -1 if loaded is None else loaded.manifest.step
        row = (step, tuple(problems))
        rows = cast("list[Any]", group.all_gather_object("find the checkpoint to go on from", row))
        problems.clear()
        if group.is_first:
            _report_skipped([told for _, told in rows], report)
        steps = [step for step, _ in rows]
        lowest = min(steps)
        if lowest == max(steps):
            break
        if lowest < 0:
            raise CheckpointError(
                f"rank {steps.index(lowest)} finds no checkpoint in {manager.directory}, and rank"
                f" {steps.index(max(steps))} finds one of step {max(steps)}: give all ranks one"
                " directory, on a disk that all hosts share"
            )
        if step > lowest:
            loaded = None  # before the next one takes memory
            loaded = manager.latest(expected, boxes, report=problems.append, at_most=lowest)
    # Until all have read it nobody trains, and writes others that would have it removed.
    group.all_gather_object("read the checkpoint", None)
    return loaded


def _report_skipped(told: list[tuple[str, ...]], report: Callable[[str], None]) -> None:
    """Report each problem once; one that the first rank does not have with the rank that does."""
    first: dict[str, int] = {}
    for rank, problems in enumerate(told):
        for problem in problems:
            first.setdefault(problem, rank)
    for problem, rank in first.items():
        report(f"rank {rank}: {problem}" if rank else problem)


def _of_nan(step: int, sound: int | None) -> str:
    text = f"the checkpoint of step {step} holds NaN: the run began to fail before it; "
    if sound is None:
        return text + "there is no earlier one without NaN"
    return text + (
        f"the newest one without NaN is of step {sound}: to continue from there, move the newer"
        " ones out of the directory"
    )


def _kernels(plan: Plan) -> dict[str, str]:
    """Return the kernels of a plan's launches, by op and types of the operands."""
    kernels: dict[str, list[str]] = {}
    for actor in plan.actors:
        if actor.kind is ActorKind.COMPUTE:
            for launch in actor.launches:
                types = ", ".join([str(plan.views[view].type) for view in launch.inputs])
                kernels.setdefault(f"{launch.op}({types})", []).append(launch.kernel)
    return {work: ", ".join(sorted(dict.fromkeys(names))) for work, names in kernels.items()}


def _compare_kernels(step: int, wrote: Any, plan: Plan, report: Callable[[str], None]) -> None:
    """Report work that both plans do, each with another kernel; older checkpoints do not say."""
    if not isinstance(wrote, Mapping):
        return
    ours = _kernels(plan)
    others = [work for work in ours if wrote.get(work, ours[work]) != ours[work]]
    if others:
        first = others[0]
        report(
            f"the checkpoint of step {step} continues with other kernels ({first}: {ours[first]} in"
            f" place of {printable(str(wrote[first]))}; {len(others)} in all): not bit for bit;"
            " deterministic=True fixes the choice"
        )


def expected_of(plan: Plan, group: ProcessGroup = SINGLE_PROCESS) -> Expected:
    """Return what a checkpoint must hold for a plan: the variables of all ranks, whole.

    Whether steps may be skipped, and losses scaled, is a choice of each run: what there is of it is
    not asked for.
    """
    tensors = job_state(plan, group).types
    counter = STEP if STEP in tensors else ""
    return Expected(tensors, frozenset((SKIPPED, LOSS_SCALE, GOOD_STEPS)), counter)
