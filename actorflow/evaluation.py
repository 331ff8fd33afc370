"""Evaluation between steps: another job on the same model, after every so many steps.

    valid = af.Evaluation(evaluate, valid_data, every=500, batches=20)
    train.fit(model, data, steps=5000, evaluation=valid)

It is part of the training plan: its actors read the variables in place, between two updates, at
rates that the plan knows; no copy of the model is made. Every evaluation sees the same batches,
the first ones of its source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from actorflow.arguments import (
    came,
    check_count,
    check_listener,
    check_source,
    spec_of_source,
)
from actorflow.compile.capture import asked_rows
from actorflow.data import Batch, DataError, DataSource, check_batch
from actorflow.data.source import Part
from actorflow.optim.ema import AVERAGE, COUNT
from actorflow.run.fetching import Fetching
from actorflow.trace.tracer import find_source
from actors.errors import SourceExhausted
from actors.protocol import Launch, Token
from compiler.errors import CompileError
from compiler.graph import UNPLACED, Graph
from compiler.ops.sources import VARIABLE
from compiler.types import TensorType

if TYPE_CHECKING:
    from actorflow.jobs import Job
    from actorflow.nn.module import Module
    from compiler.placement import Device

Results = Mapping[str, float]
"""Mean of every scalar output over the batches of one evaluation."""

OnResult = Callable[[int, Results], object]


@dataclass(frozen=True)
class Evaluation:
    """Run `job` on `batches` batches of `data` after every `every` steps of a training.

    `job` is one with train=False that returns at least one scalar. `on_result` is called as (step,
    means) on the evaluation's own thread. Steps count over resumes. With `ema` it reads the
    averages of the weights, where the training keeps some (`@af.job(ema=...)`).

    Raises:
        CompileError: a number is no integer of 1 or more, or the job trains or is none.
        DataError: `data` is no data source.
    """

    job: Job
    data: DataSource
    every: int
    batches: int
    on_result: OnResult | None = None
    ema: bool = False

    def __post_init__(self) -> None:
        check_count("every of an Evaluation", self.every)
        check_count("batches of an Evaluation", self.batches)
        check_source(self.data, is_kept=False)
        check_listener("on_result of an Evaluation", self.on_result)
        from actorflow.jobs import Job  # which imports this

        if not isinstance(self.job, Job):
            raise CompileError(
                f"{find_source()}: expected the job of an Evaluation, came {came(self.job)};"
                " decorate a function of (model, batch) with @af.job(train=False)"
            )
        if self.job.options.train:
            raise CompileError(
                f"{find_source()}: job {self.job.name!r} trains, so it cannot evaluate; decorate"
                " the function with @af.job(train=False)"
            )


def evaluation_graph(
    evaluation: Evaluation | None, model: Module, devices: tuple[Device, ...], training: Graph
) -> Graph | None:
    """Return the graph of an evaluation that is part of a training on some devices, if there is.

    Raises CompileError for what its job asks of an arena or of devices that are the training's,
    where it has no scalar to report, and where it wants averages that the training has not.
    """
    if evaluation is None:
        return None
    job = evaluation.job
    if job.options.memory_budget is not None:
        raise CompileError(
            f"{find_source()}: job {job.name!r} has a memory_budget, but evaluates in the arena of"
            " the training: give the budget to the training job, which counts the evaluation too"
        )
    if job.options.placed_on not in ((), devices):
        named, own = (", ".join(map(str, found)) for found in (job.options.placed_on, devices))
        raise CompileError(
            f"{find_source()}: job {job.name!r} is for {named}, but evaluates in a training on"
            f" {own}; give both the same devices, or the evaluation none"
        )
    graph = job.graph(model, asked_rows(spec_of_source(evaluation.data)))
    check_results({o.name: graph.types[o.value] for o in graph.outputs}, job.name)
    if evaluation.ema:
        graph = _of_averages(graph, training, job.name)
    if job.options.placed_on:
        return graph
    # The trace knows what the environment says; the evaluation runs where its training does.
    place = 0 if len(devices) == 1 else UNPLACED
    nodes = [replace(node, device=place) for node in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


def _of_averages(graph: Graph, training: Graph, job: str) -> Graph:
    """Return a graph that reads the averages of the training in place of parameters."""
    named = {n.attrs["name"]: n.attrs for n in training.nodes if n.op is VARIABLE}
    nodes = []
    for node in graph.nodes:
        name = AVERAGE + node.attrs.str_("name") if node.op is VARIABLE else ""
        nodes.append(replace(node, attrs=named[name]) if name in named else node)
    if COUNT not in named:
        raise CompileError(
            f"{find_source()}: job {job!r} is to evaluate averages of the weights, and the"
            " training keeps none; give it @af.job(ema=0.999), or leave out ema=True"
        )
    return replace(graph, nodes=tuple(nodes))


class EvaluationDataPort:
    """Fills batch slots with the first batches of a source, again and again.

    After the last batch of an evaluation the source goes back to where it stood. What the source
    raises is kept in `failure` and stops the run; then, and when the source is given up, the rest
    of the evaluation reads zeros. `num_whole` evaluations had all their batches.

    Args:
        source: used only by this port's thread from now on.
        types: type of each field of a whole batch of the evaluation.
        lines: the user's line that reads each field, for messages.
        batches: of one evaluation.
        on_failure: called when the source raised.
        parts: where in the whole a rank's part lies, of the fields of which it has one.
    """

    def __init__(
        self,
        source: DataSource,
        types: Mapping[str, TensorType],
        lines: Mapping[str, str],
        batches: int,
        on_failure: Callable[[], object],
        parts: Mapping[str, Part],
    ) -> None:
        self._source = source
        self._types = dict(types)
        self._lines = lines
        self._batches = batches
        self._parts = parts
        self._begin = dict(source.state())
        self._done = 0
        self._on_failure = on_failure
        self._fetching = Fetching(source)
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

    def give_up(self) -> bool:
        """See `GivesUp.give_up`."""
        return self._fetching.give_up()

    def close(self) -> None:
        """Ask a source that blocks in a fetch to stop, if it can be asked."""
        self._fetching.close()

    def _next(self) -> Batch:
        try:
            return next(self._source)
        except StopIteration:
            raise DataError(
                f"the evaluation wants {self._batches} batches, its data ended after"
                f" {self._done}; give batches={max(self._done, 1)}, or more data"
            ) from None

    def _copy(self, batch: Batch, views: Token) -> None:
        for name, view in views.items():
            is_there = isinstance(batch, Mapping) and name in batch
            came: object = {name: batch[name]} if is_there else batch
            check_batch(came, {name: self._types[name]}, self._lines[name])
            view[...] = batch[name][self._parts.get(name, ...)]
        self._done += 1
        if self._done == self._batches:
            self.num_whole += 1
            self._source.restore(self._begin)
            self._done = 0


def _clear(views: Token) -> None:
    """Fill a slot with what every op can read: its bytes may have been others' meanwhile."""
    for view in views.values():
        view[...] = 0


def check_evaluation(evaluation: object) -> None:
    """Raise CompileError for what is neither an Evaluation nor left out."""
    if evaluation is not None and not isinstance(evaluation, Evaluation):
        raise CompileError(
            f"{find_source()}: expected evaluation=af.Evaluation(job, data, every=..., batches=...)"
            f" or None, came {came(evaluation)}"
        )


def check_results(outputs: Mapping[str, Any], job: str) -> None:
    """Raise CompileError when an evaluation has no scalar to report."""
    if not any([type_.shape == () for type_ in outputs.values()]):
        came = ", ".join(f"{name!r}: {type_}" for name, type_ in outputs.items())
        raise CompileError(
            f"job {job!r} evaluates to {came}; an evaluation reports means of scalars, so return"
            " at least one, such as a loss"
        )
