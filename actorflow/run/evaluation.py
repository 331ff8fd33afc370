"""The evaluation of a run: its ports for batches and for results."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actorflow.data import Batch, DataError, DataSource, check_batch
from actorflow.options.run_spec import Evaluation, Metrics
from actorflow.run.ports import MetricsPort, OpenCall, ReadFields
from actorflow.run.probes import ProbeOptions, ProbeReader
from actors.machine.errors import SourceExhausted
from actors.machine.protocol import Launch, Token
from compiler.contract.errors import CompileError
from compiler.contract.plan import Plan


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
                mend = "it is empty or exhausted; give a new source, or restore its position"
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


def evaluation_ports(
    plan: Plan,
    evaluation: Evaluation | None,
    rank: int,
    first_step: int,
    ask: Callable[[str], object],
    probes: ProbeOptions,
) -> tuple[EvaluationDataPort, MetricsPort] | None:
    """Return the ports for data and for results; None for a plan that does not evaluate.

    `first_step` is the step before the run's first. `ask` ends the run, with the reason. Raises
    CompileError where the plan evaluates and the run does not, or the other way round.
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
    data = EvaluationDataPort(
        evaluation.data,
        fields,
        batches,
        lambda: ask("the evaluation's data failed"),
    )
    on_result, before = evaluation.on_result, first_step - first_step % every

    def tell(number: int, means: Metrics) -> None:
        # One whose source was given up lacks some of its batches.
        if on_result is not None and number <= data.num_whole:
            on_result(before + number * every, means)

    reader = ProbeReader(plan, "eval_metrics", probes)
    return data, MetricsPort(tell, 0, reader, batches_per_step=batches, is_evaluation=True)
