"""Between a run and its checkpoints: what is saved, and when.

`CheckpointScheduler` decides which snapshots become checkpoints, `Saver` writes them: alone, or a
rank's pieces of them together with the other ranks (`ShardedSaver`).

Saved: every variable (parameters in one group of shards, optimizer state and counters in another),
the step, the seed, the position of the data source after that step, its fingerprint, the plan's
hash and its kernels.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from actorflow.callbacks.protocol import Results
from actorflow.checkpoint.errors import CheckpointDropped, CheckpointError, Every
from actorflow.checkpoint.reader import BEST_BY, EVALUATION
from actorflow.checkpoint.shard import MODEL_GROUP, holds_nan
from actorflow.compile.plan_facts import saved_variables, written_variables
from actorflow.data import items_of
from actorflow.distributed.process_group import (
    SINGLE_PROCESS,
    ProcessGroup,
)
from actorflow.distributed.unshard import saved_shards
from actorflow.environment.settings import Settings, is_worth_a_line
from actorflow.options.run_spec import WARN
from actorflow.run.broken_steps import NonFiniteLoss, NonFiniteMonitor
from actorflow.run.evaluation import EvaluationResults
from actorflow.run.training_writes import TrainingWrites
from actorflow.tensor.initial_values import whole_type
from actorflow.tensor.probes import Predicates
from compiler.contract.errors import InternalError, PeerFailed
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import ActorKind
from compiler.ops.primitives.sources import OF_MODEL

if TYPE_CHECKING:
    from actorflow.checkpoint.manager import CheckpointManager, SavedFacts
    from actorflow.distributed.distributed_run import DistributedRun
    from actorflow.distributed.messages import OfCheckpoint
    from actorflow.distributed.sharded_save import SavedPieces, SaveVotes, ShardedSaver
    from actorflow.options.run_spec import RunSpec
    from actorflow.run.probes import RangeListener


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
STEP, SEED = "step", "seed"
"""The variables that count the steps, and that random numbers follow from."""

ITEMS = "items_per_batch"
"""What a manifest calls the items of a batch of the source."""


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
        # JSON has no infinity, which is a norm that clips nothing.
        self._config = {n: str(v) if v == math.inf else v for n, v in plan.options} | {
            "job": plan.name,
            "kernels": kernels_of(plan),
            ITEMS: items_of(run_spec.data)[0],
        }
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
        keep, evaluation = run_spec.keep, run_spec.evaluation
        self._kept_every = self._evaluated_every = 0
        self._best_by: dict[str, Any] = {}
        if keep is not None:
            self._kept_every = keep.every or 0
        self.results: EvaluationResults | None = None
        """The means that checkpoints at the steps of evaluations wait for.

        One that came before them would be gone on from without: a resumed run does not evaluate
        the step that it begins after.
        """
        if evaluation is not None:
            self.results = EvaluationResults(evaluation.every)
        if keep is not None and keep.best and evaluation is not None:
            self._best_by = {BEST_BY: {"metric": keep.metric, "mode": keep.mode}}
            self._evaluated_every = evaluation.every

    def save_with(self, pieces: SavedPieces, votes: SaveVotes, rank: int) -> None:
        """Save together with the other ranks from now on."""
        from actorflow.distributed.sharded_save import ShardedSaver  # for several ranks alone

        self._sharded = ShardedSaver(self._manager, pieces, votes, rank)

    def keeps(self, step: int) -> bool:
        """Whether there is to be a checkpoint of this step, whatever the period says."""
        periods = (self._kept_every, self._evaluated_every)
        return any([period and step % period == 0 for period in periods])

    def expect_no_results(self) -> None:
        """Wait for no evaluation any more; from any thread."""
        if self.results is not None:
            self.results.end(lambda: -1)

    def is_due(self, step: int) -> bool:
        """Whether the policy wants a checkpoint of this step now."""
        if self.keeps(step):
            return step > self._last_step
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
        # On all ranks, before the first one begins: it may take a while.
        means = None if self.results is None else self.results.of(step)
        # Sorted names, so that the variable in the message is the same in every run.
        trained = [name for name in self._written if name in arrays]
        broken = next((name for name in trained if holds_nan(arrays[name])), "")
        if self._keeps_nan:
            broken = ""
        try:
            if self._sharded is not None:
                broken = self._sharded.save(
                    step, self._groups(arrays), self._facts(data_state, means), broken
                )
            elif not broken:
                self._save_alone(step, arrays, self._facts(data_state, means))
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

    def _save_alone(self, step: int, arrays: Mapping[str, Array], facts: SavedFacts) -> None:
        # A checkpoint that lacks a variable would be refused only when it is needed, by `Expected`.
        if apart := arrays.keys() ^ self._roles.keys():
            raise InternalError(
                f"the snapshot of step {step} and the variables of its job differ in"
                f" {', '.join(sorted(apart))}"
            )
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

    def _facts(self, data_state: Mapping[str, Any], means: Results | None) -> SavedFacts:
        from actorflow.checkpoint.manager import SavedFacts  # 15 ms

        config = self._config | self._best_by
        if means is not None:  # JSON has no NaN, which is the best of nothing
            numbers = {n: v for n, v in means.items() if isinstance(v, (int, float))}
            finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
            config = config | {EVALUATION: finite}
        return SavedFacts(self._seed, self._plan_hash, config, data_state, self._fingerprint)

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
        monitor: looks at losses, also those of other plans of the same training; None for one of
            its own.
        arena_bytes: what the memory of each arena has at least, for the plans that follow.
        borrowed: values that the plan reads where they lie, by variable; see `PlanMemory`.
        on_ranges: takes the ranges of values of each batch, of a plan that shows them.
        writes: what callbacks of the training write, None where there is none of these.
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
    monitor: NonFiniteMonitor | None = None
    arena_bytes: tuple[int, ...] = ()
    borrowed: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    on_ranges: RangeListener | None = None
    writes: TrainingWrites | None = None


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
        is_kept = saver is not None and saver.keeps(step)
        if period.seconds is None:
            is_due = period.is_due(step=step, now_ns=0, last_step=self._last_step, last_ns=0)
        else:
            is_due = bool(self._told) and self._told[0] <= step
            # Several may be due by now: one checkpoint answers them all.
            while self._told and self._told[0] <= step:
                self._told.popleft()
            # What was told and is still to come is answer enough; asking twice is one question.
            is_open = is_due or is_kept or bool(self._told)
            if self._is_first and not is_open and saver is not None and saver.is_due(step):
                self._distributed.ask_checkpoint()
        is_due = is_due or is_kept
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

    def hurry(self, error: BaseException) -> None:
        """Wait for other ranks a little longer, because of an error of this run."""
        if self._votes is not None:
            self._votes.hurry(str(error))

    def close(self) -> None:
        """Make a save that waits for another rank raise."""
        self.stop(PeerFailed("the run is over"))


def kernels_of(plan: Plan) -> dict[str, str]:
    """Return the kernels of a plan's launches, by op and types of the operands."""
    kernels: dict[str, list[str]] = {}
    for actor in plan.actors:
        if actor.kind is ActorKind.COMPUTE:
            for launch in actor.launches:
                types = ", ".join([str(plan.views[view].type) for view in launch.inputs])
                kernels.setdefault(f"{launch.op}({types})", []).append(launch.kernel)
    return {work: ", ".join(sorted(dict.fromkeys(names))) for work, names in kernels.items()}
