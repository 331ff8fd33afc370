"""The options of a run, and what follows from them: its evaluation, its checkpoints, broken steps.

`RunOptions` says what a run begins with, where it ends, and who hears of it. The ports of an
evaluation and `CheckpointScheduler`, which decides what snapshots become checkpoints, are made of
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actorflow.compile.plan_facts import line_of_output, losses_of
from actorflow.data import Batch, DataError, DataSource, check_batch
from actorflow.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from actorflow.distributed.unshard import ShardGatherer
from actorflow.environment.settings import Settings, logger
from actorflow.options.fit_options import Evaluation, Metrics
from actorflow.run.broken_steps import NonFiniteMonitor, is_scaled, skips
from actorflow.run.ports import FetchState, MetricsPort, ReadFields
from actors.machine.errors import SourceExhausted
from actors.machine.protocol import Launch, Token
from compiler.contract.errors import CompileError, PeerFailed
from compiler.contract.plan import Plan
from compiler.graph.target import SKIPPED
from memory.report import format_bytes

if TYPE_CHECKING:
    from actorflow.checkpoint.errors import Every
    from actorflow.run.saving import Saver


Array = np.ndarray[Any, Any]


def _ignore(*_: object) -> None:
    """Hear of nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run begins with, where it ends, and who hears of it.

    Args:
        values: first value of every variable.
        settings: where a trace goes, and whether invariants are checked.
        on_step: called with (step, outputs) on the metrics thread.
        first_step: steps done before this run.
        is_resumed: whether a checkpoint says where the data goes on.
        total_steps: step at which the run ends, or None for as many as are admitted.
        every: the period of checkpoints, the same on all ranks; None where the run writes none.
        saver: writes them, on the first rank alone.
        on_nan: what to do when the loss is not finite, one of `fit_options.POLICIES`.
        evaluation: what the plan's evaluation reads, and who listens to it.
        group: this rank among those that run the job; `values` are its parts.
        is_stepped: whether nothing runs between two steps, of which each is admitted.
        directory: of the run, for what the watchdog writes; None when it has none.
        warn: receives warnings.
        on_finished: called once when the run is over in any way, before `wait` returns.
    """

    values: Mapping[str, Array]
    settings: Settings
    on_step: Callable[[int, Metrics], object]
    first_step: int = 0
    is_resumed: bool = False
    total_steps: int | None = None
    every: Every | None = None
    saver: Saver | None = None
    on_nan: str = "raise"
    evaluation: Evaluation | None = None
    group: ProcessGroup = SINGLE_PROCESS
    is_stepped: bool = False
    directory: Path | None = None
    warn: Callable[[str], object] = _ignore
    on_finished: Callable[[], object] | None = None


class EvaluationDataPort:
    """Fills batch slots with the first batches of a source, again and again.

    After the last batch of an evaluation the source goes back to where it stood. What the source
    raises is kept in `failure` and stops the run; then, and when the source is given up, the rest
    of the evaluation reads zeros. `num_whole` evaluations had all their batches.

    Args:
        source: used only by this port's thread from now on.
        fields: what the evaluation reads of a batch.
        batches: of one evaluation.
        on_failure: called when the source raised.
    """

    def __init__(
        self,
        source: DataSource,
        fields: ReadFields,
        batches: int,
        on_failure: Callable[[], object],
    ) -> None:
        self._source = source
        self._types = dict(fields.types)
        self._lines = fields.lines
        self._batches = batches
        self._parts = fields.parts
        # A copy: the source may change the mapping that it returned.
        self._begin = dict(source.state())
        self._done = 0
        self._on_failure = on_failure
        self._fetching = FetchState(source)
        self.failure: BaseException | None = None
        self.num_whole = 0

    def bind(self, tokens: tuple[Token, ...]) -> Launch:
        """Return the launch that fetches one batch into this slot."""
        (views,) = tokens
        fetching = self._fetching

        def fetch() -> None:
            if self.failure is not None or not fetching.begin():
                _clear(views)
                return
            try:
                batch = self._next()
                if not fetching.settle():
                    raise SourceExhausted  # nobody waits for it
                self._copy(batch, views)
            except SourceExhausted:
                raise
            except BaseException as error:
                if fetching.is_inside and not fetching.settle():
                    raise SourceExhausted from error
                self.failure = error
                _clear(views)
                self._on_failure()

        return fetch

    def abandon(self) -> bool:
        """See `AbandonablePort.abandon`."""
        return self._fetching.abandon()

    def close(self) -> None:
        """Ask a source that blocks in a fetch to stop, if it can be asked."""
        self._fetching.close()

    def _next(self) -> Batch:
        try:
            return next(self._source)
        except StopIteration:
            mend = f"give batches={self._done}, or more data"
            if not self._done:
                mend = "it is empty or used up; give a new source, or restore its position"
            raise DataError(
                f"the evaluation wants {self._batches} batches, its data ended after"
                f" {self._done}; {mend}"
            ) from None

    def _copy(self, batch: Batch, views: Token) -> None:
        for name, view in views.items():
            # Only what the plan reads is checked; other arrays of the batch are no concern of it.
            is_there = isinstance(batch, Mapping) and name in batch
            came: object = {name: batch[name]} if is_there else batch
            check_batch(came, {name: self._types[name]}, self._lines[name])
            view[...] = batch[name][self._parts.get(name, ...)]
        self._done += 1
        if self._done == self._batches:
            self.num_whole += 1
            # Now and not before the next evaluation: the source stands right for the user after
            # each.
            self._source.restore(self._begin)
            self._done = 0


def _clear(views: Token) -> None:
    """Fill a slot with what every op can read: its bytes may have been others' meanwhile."""
    for view in views.values():
        view[...] = 0


def broken_steps_of(plan: Plan, options: RunOptions) -> NonFiniteMonitor | None:
    """Return what looks at the steps of a run; None for a plan without a loss."""
    lines = {name: line_of_output(plan, name) or "" for name in losses_of(plan)}
    if not lines:
        return None
    values = options.values
    return NonFiniteMonitor(
        options.on_nan,
        lines,
        options.warn,
        skipped=int(values[SKIPPED]) if skips(plan) and SKIPPED in values else None,
        scaled=is_scaled(plan),
        directory=options.directory,
        is_writer=options.group.is_first,
    )


def evaluation_ports(
    plan: Plan, options: RunOptions, ask: Callable[[str], object]
) -> tuple[EvaluationDataPort, MetricsPort] | None:
    """Return the ports for data and for results; None for a plan that does not evaluate.

    `ask` ends the run, with the reason. Raises CompileError where plan and options disagree.
    """
    every, evaluation = plan.int_option("evaluate_every", 0), options.evaluation
    if not every:
        if evaluation is not None:
            raise CompileError(
                f"plan {plan.name!r} does not evaluate; compile it with"
                " job.compile(model, data, evaluation=...)"
            )
        return None
    if evaluation is None:
        raise CompileError(
            f"plan {plan.name!r} evaluates every {every} steps; give fit the evaluation that it was"
            " compiled with"
        )
    fields = ReadFields.of(plan, options.group.rank, evaluation.data, "eval_data")
    batches = plan.int_option("evaluate_batches", 0)
    data = EvaluationDataPort(
        evaluation.data,
        fields,
        batches,
        lambda: ask("the evaluation's data failed"),
    )
    on_result, before = evaluation.on_result, options.first_step - options.first_step % every

    def tell(number: int, means: Metrics) -> None:
        # One whose source was given up lacks some of its batches.
        if on_result is not None and number <= data.num_whole:
            on_result(before + number * every, means)

    return data, MetricsPort(tell, 0, batches_per_step=batches, is_evaluation=True)


# The same snapshots become checkpoints on all ranks. A period in steps is counted, so all ranks
# come to the same. A period of time is that of the first rank's clock: it asks for a checkpoint,
# and the coordinator names a step that no rank has begun, on all of them
# (`actorflow.distributed.agreement`); the first snapshot from there on is the one. Then every rank
# tells what it has, and the first writes the whole: at once where that has all of it, else when the
# parts have come (`ShardGatherer`). Meanwhile training goes on.


class CheckpointScheduler:
    """What becomes of the snapshots of one run. All ranks make it at the same place.

    `is_due` and `save` belong to the thread of the snapshots.

    Args:
        plan: of the run.
        options: of the run; nothing is kept where there is no `every` in them.
        ask: asks for a checkpoint on all ranks, soon.
    """

    def __init__(self, plan: Plan, options: RunOptions, ask: Callable[[], object]) -> None:
        self._saver, self._every, self._ask = options.saver, options.every, ask
        self._last_step = options.first_step
        # Filled by the link's thread, emptied by that of the snapshots; both ends are atomic.
        self._told: deque[int] = deque()
        self._joining: ShardGatherer | None = None
        self._is_shared = options.group is not SINGLE_PROCESS
        if self._is_shared and self._every is not None:
            self._joining = ShardGatherer(plan, options.group, options.settings.rank_seconds)
            if options.saver is not None and self.needs_others:
                size = format_bytes(self._joining.size_bytes)
                logger.info("rank 0 joins the parts of variables for checkpoints in %s", size)

    @property
    def needs_others(self) -> bool:
        """Whether a checkpoint takes what other ranks have."""
        return self._joining is not None and self._joining.size_bytes > 0

    def schedule(self, step: int) -> None:
        """Mark the first snapshot from a step on as due. On any thread, in order of steps."""
        self._told.append(step)

    def is_due(self, step: int) -> bool:
        """Whether the snapshot of a step is to be saved."""
        every, saver = self._every, self._saver
        if every is None:
            return False
        if not self._is_shared:
            return saver is not None and saver.is_due(step)
        if every.seconds is None:
            is_due = every.is_due(step=step, now_ns=0, last_step=self._last_step, last_ns=0)
        else:
            is_due = bool(self._told) and self._told[0] <= step
            # Several may be due by now: one checkpoint answers them all.
            while self._told and self._told[0] <= step:
                self._told.popleft()
            # What was told and is still to come is answer enough; asking twice is one question.
            if not (is_due or self._told) and saver is not None and saver.is_due(step):
                self._ask()
        if is_due:
            self._last_step = step
        return is_due

    def save(
        self,
        step: int,
        arrays: Mapping[str, Array],
        position: Callable[[int], Mapping[str, Any]],
    ) -> None:
        """Save a snapshot, or this rank's share of it; `position` says where the data is after it.

        Returns when the first rank has all, there when it is durable. Raises what `Saver.save`
        does, and PeerFailed where another rank ended.
        """
        joining, saver = self._joining, self._saver
        if joining is not None and saver is None:
            joining.send_shards(step, arrays)
        elif saver is not None:
            whole = arrays if joining is None else joining.gather_shards(step, arrays)
            saver.save(step, whole, position(step))

    def stop(self, error: BaseException) -> None:
        """Wait for no other rank any more, because of an error; from any thread."""
        if self._joining is not None:
            self._joining.stop(str(error))

    def close(self) -> None:
        """Make a save that waits for another rank raise."""
        self.stop(PeerFailed("the run is over"))

    def release(self) -> None:
        """Let go of what was made for it, when no save goes on. Idempotent."""
        if self._joining is not None:
            self._joining.close()
