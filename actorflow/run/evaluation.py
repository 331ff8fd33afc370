"""The evaluation of a run: its ports for batches and for results; results over a whole source."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from actorflow.callbacks.protocol import Metrics, Results
from actorflow.compile.plan_facts import output_lines
from actorflow.data import Batch, DataError, DataSource, check_batch
from actorflow.metrics.totals import Outputs, Totals
from actorflow.options.run_spec import Evaluation
from actorflow.run.ports import MetricsPort, OpenCall, ReadFields
from actorflow.run.probes import ProbeOptions, ProbeReader
from actors.machine.errors import SourceExhausted
from actors.machine.protocol import Launch, Token
from compiler.contract.errors import CompileError
from compiler.contract.plan import Plan

_MOST_AWAITED = 16
"""Results that are kept for checkpoints which have not asked for them yet."""


class EvaluationResults:
    """The means of evaluations, for the checkpoints of the same steps.

    A checkpoint of the values that an evaluation is of waits for its means, on the thread that
    writes it. The evaluation itself waits for no checkpoint.

    Args:
        every: steps between two evaluations.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._means: dict[int, Results] = {}
        self._last: Callable[[], int] | None = None
        self._changed = threading.Condition()

    def note(self, step: int, means: Results) -> None:
        """Take the means of an evaluation, before the user hears of them."""
        with self._changed:
            # A checkpoint is at most a snapshot behind; of several ranks some may write none.
            self._means = {**dict(list(self._means.items())[-_MOST_AWAITED:]), step: means}
            self._changed.notify_all()

    def end(self, last: Callable[[], int]) -> None:
        """Expect no means after a step, which may still grow; from any thread."""
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def of(self, step: int) -> Results | None:
        """Return the means of an evaluation after a step, when they are there; None without one."""
        if step % self._every:
            return None
        with self._changed:
            while step not in self._means and (self._last is None or step <= self._last()):
                self._changed.wait()
            self._means = {known: means for known, means in self._means.items() if known >= step}
            return self._means.get(step)


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
        on_end: called when no further evaluation gets its batches, and with True when those that
            have them may come to nothing, too.
    """

    def __init__(
        self,
        source: DataSource,
        fields: ReadFields,
        batches: int,
        on_failure: Callable[[], object],
        on_end: Callable[[bool], object] = lambda is_cut: None,
    ) -> None:
        self._source = source
        self._types = dict(fields.types)
        self._lines = fields.lines
        self._batches = batches
        self._parts = fields.parts
        # A copy: the source may change the mapping that it returned.
        self._begin = dict(source.state())
        self._done = 0
        self._on_failure, self._on_end = on_failure, on_end
        self._fetching = OpenCall(source)
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
                self._on_end(False)
                self._on_failure()

        return fetch

    def abandon(self) -> bool:
        """See `AbandonablePort.abandon`."""
        is_inside = self._fetching.abandon()
        self._on_end(False)
        return is_inside

    def close(self) -> None:
        """Ask a source that blocks in a fetch to stop, if it can be asked."""
        self._fetching.close()
        self._on_end(True)  # a run that failed closes its sources first

    def _next(self) -> Batch:
        try:
            return next(self._source)
        except StopIteration:
            raise too_few_batches("the evaluation", self._batches, self._done) from None

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


def too_few_batches(where: str, wanted: int | None, num_batches: int) -> DataError:
    """Return what is wrong with data that ended before the batches that were asked for."""
    mend = f"give batches={num_batches}, or more data"
    if not num_batches:
        mend = "it is empty or exhausted; give a new source, or restore its position"
    return DataError(f"{where} wants {wanted} batches, its data ended after {num_batches}; {mend}")


def _clear(views: Token) -> None:
    """Fill a slot with what every op can read: its bytes may have been others' meanwhile."""
    for view in views.values():
        view[...] = 0


def evaluated(steps: Iterable[Metrics], where: str, wanted: int | None) -> dict[str, Any]:
    """Return metrics, and means of the other scalars, over steps of one batch as a run tells them.

    Args:
        steps: their outputs.
        where: who evaluates, for errors.
        wanted: how many there are to be; None for all that there are.

    Raises:
        CompileError: there is nothing to report.
        DataError: there are fewer batches than wanted, or nothing counts in any.
    """
    totals, num_batches = None, 0
    for outputs in cast("Iterable[Outputs]", steps):
        num_batches += 1
        totals = totals or Totals(outputs.columns, is_evaluation=True)
        totals.add(outputs.batch)
    if num_batches < (wanted or 0):
        raise too_few_batches(where, wanted, num_batches)
    results = totals.values(wants_rows=where) if totals else {}
    if not results:
        raise CompileError(f"{where} has no scalar to report; return at least one, such as a loss")
    return results


def evaluation_ports(
    plan: Plan,
    evaluation: Evaluation | None,
    rank: int,
    first_step: int,
    ask: Callable[[str], object],
    probes: ProbeOptions,
    awaited: EvaluationResults | None = None,
) -> tuple[EvaluationDataPort, MetricsPort] | None:
    """Return the ports for data and for results; None for a plan that does not evaluate.

    `first_step` is the step before the run's first. `ask` ends the run, with the reason. `awaited`
    are the results that checkpoints wait for. Raises CompileError where the plan evaluates and the
    run does not, or the other way round.
    """
    every = plan.int_option("evaluate_every", 0)
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
    fields = ReadFields.of(plan, rank, evaluation.data, "eval_data")
    batches = plan.int_option("evaluate_batches", 0)
    on_result, before = evaluation.on_result, first_step - first_step % every

    def end(is_cut: bool) -> None:
        if awaited is not None:
            awaited.end(lambda: -1 if is_cut else before + data.num_whole * every)

    data = EvaluationDataPort(
        evaluation.data, fields, batches, lambda: ask("the evaluation's data failed"), end
    )

    def tell(number: int, means: Metrics) -> None:
        # One whose source was given up lacks some of its batches.
        if on_result is not None and number <= data.num_whole:
            on_result(before + number * every, means)

    sink = "eval_metrics"
    return data, MetricsPort(
        tell,
        0,
        ProbeReader(plan, sink, probes),
        batches_per_step=batches,
        is_evaluation=True,
        lines=output_lines(plan, sink),
    )
