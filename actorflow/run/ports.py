"""The host's ends of a plan: the data source and the metrics sink.

Each port is bound once per slot at load and then called on a thread of its own, firing by firing.
Nothing here decides when: that is the plan's and the machine's part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actorflow.callbacks.protocol import Metrics, StopTraining, reason_of
from actorflow.compile.plan_facts import batch_fields, batch_parts, batch_slots, snapshot_rate
from actorflow.data import DataError, DataSource, check_batch
from actorflow.data.source import Part, filler_of, plain_array
from actorflow.distributed.distributed_run import DistributedRun
from actorflow.environment.settings import logger
from actorflow.metrics.totals import OutputColumns, Outputs, Totals, columns_of
from actorflow.run.probes import ProbeReader
from actorflow.tensor.tracer import find_source
from actors.machine.errors import SourceExhausted
from actors.machine.protocol import Launch, Token
from compiler.contract.errors import InternalError
from compiler.contract.plan import Plan
from compiler.contract.types import TensorType


class OpenCall:
    """The calls of a function of the user, one at a time, each of which ends once.

    It ends when the function returns (`settle`), or when it is given up because the run is to stop
    and the function does not return (`abandon`): then what it brings no longer counts. `is_inside`
    says that the thread is in the user's code, also in a call that was given up.

    Taking an item of a list is one atomic step, so the two need no lock. `begin` and `settle` call
    nothing of ours: they are part of every step, while other threads wait for the interpreter.

    Args:
        source: what is called, where `close` may ask it to stop.
    """

    __slots__ = ("_is_given_up", "_open", "_source", "is_inside")

    def __init__(self, source: object = None) -> None:
        self._source = source
        # Holds one None while a call is open; whoever pops it decides whether it counts.
        self._open: list[None] = []
        self._is_given_up = self.is_inside = False

    def begin(self) -> bool:
        """Begin a call; return False when the function was given up."""
        # Appended before the flag is read, and `abandon` does the reverse: one of the two always
        # sees the other, so no call begins unnoticed after a stop.
        self._open.append(None)
        if self._is_given_up:
            self.settle()
            return False
        self.is_inside = True
        return True

    def settle(self) -> bool:
        """End a call that has returned; return whether that still counts."""
        self.is_inside = False
        try:
            self._open.pop()
        except IndexError:
            return False
        return True

    def abandon(self) -> bool:
        """Allow no more calls; return whether one was under way. What it brings does not count."""
        self._is_given_up = True
        try:
            self._open.pop()
        except IndexError:
            return False
        return True

    def close(self) -> None:
        """Ask a source that blocks in a call to stop, if it can be asked.

        A source that is not called is left alone: it belongs to the user, who may use it again.
        """
        close = getattr(self._source, "close", None)
        if self.is_inside and callable(close):
            close()


# A checkpoint of step n saves the position after n's last batch, long after the source has moved
# on. Saved are the steps at which the plan takes a snapshot, and the last step of the run; so what
# is kept is bounded by the slots of the plan, and by the snapshots between two that are written.

State = Mapping[str, Any]


class Positions:
    """Positions by number of batches done. `note` belongs to one thread, the rest to another.

    Args:
        batch: batches done before the first.
        state: the position then.
        stride: batches between two snapshots, counted from batch 0.
        in_flight: batches that may be fetched and not done.
    """

    def __init__(self, batch: int, state: State, *, stride: int, in_flight: int) -> None:
        self._states: dict[int, State] = {batch: state}
        self._oldest = batch
        self._stride = stride
        self._in_flight = in_flight

    def __len__(self) -> int:
        """Return how many positions are kept."""
        return len(self._states)

    def note(self, batch: int, state: State) -> None:
        """Keep the position after `batch` batches."""
        self._states[batch] = state
        # Batch `past` is over: its position is wanted only where the plan takes a snapshot after
        # it.
        past = batch - self._in_flight - 1
        if past % self._stride and past > self._oldest:
            self._states.pop(past, None)

    def after(self, batch: int) -> State:
        """Return the position after `batch` batches and forget those before it."""
        self.forget_before(batch)
        return self._states[batch]

    def forget_before(self, batch: int) -> None:
        """Forget positions before `batch`. Linear in what is kept."""
        # `list` copies the keys at once, while the fetching thread may insert; pop takes a default
        # for the same reason.
        for number in [number for number in list(self._states) if number < batch]:
            self._states.pop(number, None)
        self._oldest = batch


def positions_of(plan: Plan, source: DataSource, first_step: int) -> Positions | None:
    """Return what keeps the positions that checkpoints of a plan need; None if it takes none."""
    each = plan.batches_per_step
    stride = snapshot_rate(plan) * each
    if not stride:
        return None
    in_flight = batch_slots(plan) + each
    return Positions(first_step * each, source.state(), stride=stride, in_flight=in_flight)


@dataclass(frozen=True, slots=True)
class FedSteps:
    """The steps of a run, of `batches` batches each.

    `first` is the number of the step before the first batch, `total` that of the step with the last
    one, or None for no such end. A stop lets a step that has begun have all its batches. A run that
    goes on from a checkpoint `is_resumed`: its data may have ended there.
    """

    first: int
    total: int | None
    batches: int = 1
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class ReadFields:
    """What a plan reads of each batch of a source, by name.

    Args:
        types: of each field of a whole batch.
        lines: the user's line that reads each field, for messages.
        parts: where in the whole a rank's part lies, of the fields of which it has one.
    """

    types: Mapping[str, TensorType]
    lines: Mapping[str, str]
    parts: Mapping[str, Part] = field(default_factory=dict)

    @staticmethod
    def of(plan: Plan, rank: int, source: DataSource, name: str = "data") -> ReadFields:
        """Return what a rank reads of a source. Raises DataError where its spec gives other."""
        fields = ReadFields(*batch_fields(plan, name), batch_parts(plan, rank, name))
        spec = source.spec()
        for name, expected in fields.types.items():
            came = spec.get(name)
            if came != expected:
                raise DataError(
                    f"batch[{name!r}] ({fields.lines[name]}): the plan was compiled for {expected},"
                    f" the data source gives {came if came is not None else 'no such key'}; compile"
                    " the job for this source, or give it the source that it was compiled for"
                )
        return fields


def no_first_batch(source: DataSource, where: object = None) -> DataError:
    """Return what is wrong with a source that has nothing for a run that wants some."""
    return DataError(
        f"{where or find_source()}: the data source ({type(source).__name__}) has no batch for the"
        " first step: it is empty, or another run has used it up. Make a new one for each run, or"
        " take start = source.state() before the first run, and source.restore(start) before the"
        " others"
    )


class DataPort:
    """Fills batch slots from a data source and remembers the source's position after each batch.

    An exception of the source ends the stream cleanly, so that all batches before it are trained on
    and checkpointed; it is kept in `failure` and raised by the runner afterwards. StopTraining is
    no failure: `stopped_by` has its words. `is_over` says that the source ended, and `unused_text`
    what it gave for a step that did not get all its batches. What a source raises after a stop was
    asked for is only logged: the same ^C may have ended its workers.

    Args:
        source: where batches come from; used only by this port's thread from now on.
        fields: what the plan reads of a batch.
        steps: which steps are fed.
        on_end: called before the end of the stream is announced to the plan.
        positions: keeps those for `position_after`; None for none.
        distributed: is told of each batch that is whole here, and of each step that has all of its
            own, before it begins; None for a run that no other rank is on.
    """

    def __init__(
        self,
        source: DataSource,
        fields: ReadFields,
        steps: FedSteps,
        on_end: Callable[[], None],
        *,
        positions: Positions | None = None,
        distributed: DistributedRun | None = None,
    ) -> None:
        self._source = source
        self._distributed = distributed
        self.reporter = None if distributed is None else distributed.batches(fields.lines)
        self._parts = fields.parts
        batches_per_step = self._batches_per_step = steps.batches
        # In batches, like `_batch`: both count from the beginning of training.
        self._total = None if steps.total is None else steps.total * batches_per_step
        self._on_end = on_end
        self._is_stopping = False
        self._types = dict(fields.types)
        self._dtypes = {name: np.dtype(t.dtype.value) for name, t in fields.types.items()}
        self._lines = fields.lines
        self._batch = steps.first * batches_per_step
        # A source that has nothing at this batch is an error; a resumed run may have nothing left
        # to do.
        self._first_wanted = None if steps.total is None or steps.is_resumed else self._batch
        # Taken now: on the port's thread there is no line of the user on the stack.
        self._where = find_source()
        self._positions = positions
        self._fetching = OpenCall(source)
        self._turn = threading.Condition()
        self._is_held = self._has_gone_on = self._is_given_up = self._is_closed = False
        self.is_over = False
        self.failure: BaseException | None = None
        self.stopped_by = ""
        self.unused_text = ""

    def bind(self, tokens: tuple[Token, ...]) -> Launch:
        """Return the launch that fetches one batch into this slot."""
        (views,) = tokens
        source, fetching = self._source, self._fetching
        fills, filled = filler_of(source, self._parts), views
        others = {} if fills is None else {n: t for n, t in source.spec().items() if n not in views}
        if others:  # which the plan does not read: no row of them is wanted
            whole = {n: [slice(0, length) for length in t.shape] for n, t in others.items()}
            none = {n: (slice(0, 0), *axes[1:]) for n, axes in whole.items() if axes}
            fills = filler_of(source, {**self._parts, **none}) if len(none) == len(others) else None
            spare = {n: np.empty((0, *t.shape[1:]), t.dtype.value) for n, t in others.items()}
            filled = {**views, **spare}
        # Who reads its own rows or arrays alone has said by its fingerprint what the whole is.
        is_part = fills is not None and bool(self._parts or others)
        reporter = None if is_part else self.reporter

        def fetch() -> None:
            if self._is_at_end() or not fetching.begin():
                self._stay()
                self._on_end()
                raise SourceExhausted
            try:
                batch = views
                if fills is not None:
                    fills(filled)
                else:
                    batch = next(source)
                position = None if self._positions is None else source.state()
                if not fetching.settle():
                    raise SourceExhausted  # whoever gave it up has said so
                if fills is None:
                    self._copy(batch, views)
                if reporter is not None:
                    step, place = divmod(self._batch, self._batches_per_step)
                    is_last = place == self._batches_per_step - 1
                    reporter.see(step + 1, batch, is_last=is_last)
                if self._positions is not None and position is not None:
                    self._positions.note(self._batch + 1, position)
            except SourceExhausted:
                raise
            # BaseException: also a KeyboardInterrupt or SystemExit that user code raises has to end
            # the stream in order, for this is not the main thread.
            except BaseException as error:
                self._stay()
                # Outside of a fetch the error is of `_copy` and counts; inside only if nobody gave
                # it up.
                if not fetching.is_inside or fetching.settle():
                    self._end_with(error)
                raise SourceExhausted from error
            self._feed()

        return fetch

    def _feed(self) -> None:
        """Let the step have the batch that was fetched, as soon as it may begin."""
        with self._turn:
            # Only at the edge of a step: one that has begun gets all its batches.
            while self._is_held and self._batch % self._batches_per_step == 0:
                self._turn.wait()
            if self._is_given_up:
                self._stay()
            if self._total is not None and self._batch >= self._total:  # as it is said by now
                self._on_end()
                raise SourceExhausted
            self._batch += 1
            if self._distributed is not None and self._batch % self._batches_per_step == 0:
                self._distributed.report_data_ready(self.num_steps)

    @property
    def num_steps(self) -> int:
        """Steps whose batches were all fetched, those before this run included."""
        return self._batch // self._batches_per_step

    def go_on_after(self, step: int) -> None:
        """Have the next batch be of the step after this one; while none is fetched or fed."""
        self._batch = step * self._batches_per_step

    def position_after(self, step: int) -> Mapping[str, Any]:
        """Return the source's state after the last batch of `step`; earlier ones are forgotten.

        Called from one other thread than the one that fetches, with growing steps.
        """
        if self._positions is None:
            raise InternalError(f"no positions are kept, that after step {step} was asked for")
        return self._positions.after(step * self._batches_per_step)

    def forget_before(self, step: int) -> None:
        """Forget where the source stood before `step`; on the thread of `position_after`."""
        if self._positions is not None:
            self._positions.forget_before(step * self._batches_per_step)

    def stop(self) -> None:
        """Let the step that is being fed be the last. Safe to call from a signal handler."""
        self._is_stopping = True

    def hold(self) -> int:
        """Begin no step until `go_on`; return the last step that has begun. Waits for no source.

        No effect after that: this rank's own patience may end just when the others have answered.
        """
        with self._turn:
            self._is_held = not self._has_gone_on
            # Rounded up: a step that has one of its batches has begun.
            return -(-self._batch // self._batches_per_step)

    def go_on(self, last: int) -> bool:
        """Feed a port that is held up to a last step; return whether it lacks batches for that.

        No effect on one that is not held, of which it is said that it does.
        """
        with self._turn:
            if not self._is_held:
                return True
            self._is_held, self._has_gone_on = False, True
            self._total = last * self._batches_per_step
            self._turn.notify_all()
            return self._batch < self._total

    @property
    def is_awaited(self) -> bool:
        """Whether a port that went on lacks a batch, for which the source blocks."""
        total = self._total
        is_lacking = not self._is_held and total is not None and self._batch < total
        return is_lacking and self._fetching.is_inside

    def abandon(self) -> bool:
        """See `AbandonablePort.abandon`."""
        # False: no fetch is open, so the thread itself comes to the end and says so.
        if not self._fetching.abandon():
            return False
        self._on_end()
        return True

    def give_up_data(self) -> int:
        """Feed no more batches and return the last step that has all of its own; announce no end.

        The thread that fetches waits until the port is closed. Waits for no source.
        """
        with self._turn:
            self._is_held, self._has_gone_on, self._is_given_up = False, True, True
            self._turn.notify_all()
            return self.num_steps

    def _stay(self) -> None:
        """Return if the data is not given up; else block until the port is closed, and raise."""
        with self._turn:
            while self._is_given_up and not self._is_closed:
                self._turn.wait()
            if self._is_given_up:
                raise SourceExhausted

    def close(self) -> None:
        """Ask a source that blocks in a fetch to stop, if it can be asked."""
        # Wakes a thread that is held in `_feed`, which then finds itself at the end.
        self.go_on(self.num_steps)
        with self._turn:
            self._is_closed = True
            self._turn.notify_all()
        self._fetching.close()

    def _end_with(self, error: BaseException) -> None:
        """Note why the stream ends."""
        self.is_over = True
        if isinstance(error, StopTraining):
            self.stopped_by = reason_of(error, "the data source")
        elif self._is_stopping and not isinstance(error, StopIteration):
            logger.warning("the run was stopping when the data source raised %r", error)
        elif not isinstance(error, StopIteration):
            self.failure = error
        elif self._batch == self._first_wanted and not self._is_stopping:
            self.failure = no_first_batch(self._source, self._where)
        # Batches of a step that the end of the data cut short; no update is made of them.
        unused = self._batch % self._batches_per_step
        if unused:
            was = f"its last {unused} batches were" if unused > 1 else "its last batch was"
            self.unused_text = (
                f"the data ended in the middle of a step: {was} not used, for a step accumulates"
                f" {self._batches_per_step}; give a multiple of {self._batches_per_step} batches"
            )
        self._on_end()

    def _is_at_end(self) -> bool:
        if self._total is not None and self._batch >= self._total:
            return True
        return self._is_stopping and self._batch % self._batches_per_step == 0

    def _copy(self, batch: Any, views: Token) -> None:
        # A dict is told at once; what else is a mapping asks Python's own code.
        fields: Mapping[str, Any] = batch if isinstance(batch, (dict, Mapping)) else {}
        for name, view in views.items():
            array: Any = fields.get(name)
            if type(array) is not np.ndarray:
                array = plain_array(array)
            if (
                # Types are compared here first; `check_batch`, which words the error, runs only for
                # a wrong batch.
                array is None
                or array.shape != self._types[name].shape
                or array.dtype != self._dtypes[name]
            ):
                came = {name: fields[name]} if name in fields else batch
                check_batch(came, {name: self._types[name]}, self._lines[name])
            np.copyto(view, array[self._parts[name]] if name in self._parts else array)


class MetricsPort:
    """Hands each step's outputs to a listener.

    The outputs of a step of several batches are metrics of all of their rows and the means of
    others, element by element (`actorflow.metrics.totals`). Those of a step that the end of the
    data cut short are dropped, for it updated nothing. An evaluation is such a step, of which only
    metrics and scalars are told.

    Args:
        on_step: called as (step, outputs) on this port's thread.
        first_step: number of the step before the first one.
        watch: called before `on_step`, to refuse or to complete the outputs; None for nobody.
        probes: gets the outputs that probes name, before the listener hears of the others.
        batches_per_step: tokens that make one step.
        is_evaluation: what is told is of a set, also where one token makes a step.
        lines: of the user, by output, for what is wrong with the data of a metric.
    """

    def __init__(
        self,
        on_step: Callable[[int, Metrics], object],
        first_step: int,
        probes: ProbeReader,
        *,
        watch: Callable[[int, dict[str, Any]], None] | None = None,
        batches_per_step: int = 1,
        is_evaluation: bool = False,
        lines: Mapping[str, str] | None = None,
    ) -> None:
        self._probes = probes
        self._lines = lines
        self._columns: OutputColumns = {}
        self._on_step = on_step
        self._batches_per_step = batches_per_step
        self._is_evaluation = is_evaluation
        self.step = first_step
        """The number of the last step that was read."""
        self._watch = watch
        self._call = OpenCall()

    def bind(self, tokens: tuple[Token, ...]) -> Launch:
        """Return the launch that reads the outputs of these steps."""
        each = self._batches_per_step
        tokens, see_probes = self._probes.bind(tokens, each)
        # Tokens that do not fill a step are left out: they are of a step that the end of data cut
        # short.
        steps = [tokens[i : i + each] for i in range(0, len(tokens) - each + 1, each)]
        # What is made once per step has fewer tokens than what is made once per batch.
        rare = [n for n in (tokens[0] if each > 1 and steps else ()) if n not in tokens[-1]]
        self._columns = columns_of(tokens[-1] if tokens else (), self._lines)

        def read() -> None:
            if not self._call.begin():
                return
            for number, batches in enumerate(steps):
                self.step += 1
                see_probes(number, self.step)
                outputs = self._of_step(batches, {n: tokens[number][n] for n in rare})
                if self._watch is not None:
                    self._watch(self.step, outputs)
                self._on_step(self.step, outputs)
            if not self._call.settle():
                raise SourceExhausted  # nobody waits for it

        return read

    def abandon(self) -> bool:
        """Hand on nothing more; return whether the listener still runs. See `AbandonablePort`."""
        return self._call.abandon()

    def _of_step(self, tokens: tuple[Token, ...], of_step: Token) -> dict[str, Any]:
        if self._batches_per_step == 1 and not self._is_evaluation:
            return Outputs(_taken(tokens[0]), self._columns)
        totals = Totals(self._columns, is_evaluation=self._is_evaluation).add(*tokens)
        return totals.values() | _taken(of_step)

    def close(self) -> None:
        """Nothing blocks here."""


def _taken(token: Token) -> dict[str, Any]:
    # Copies: the slot is written again as soon as this launch returns.
    return {n: v.item() if v.ndim == 0 else v.copy() for n, v in token.items()}
