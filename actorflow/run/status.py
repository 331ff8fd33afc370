"""The status of a run as a small file, for people who watch it from another terminal; its listener.

A run with a directory keeps `status.json` there: where it is, how fast, who is busy and what the
actors wait for. It is written about once a second and replaced as a whole, so a reader never sees
half of it. `actorflow top` shows it. `Listener` hears of every step, and hands it on to the status,
to the reporter and to the user.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from actorflow.callbacks.protocol import Metrics, Results
from actorflow.environment.settings import logger, once
from actorflow.options.run_spec import OnResult, OnStep
from actorflow.run.callback_calls import CallbackCalls
from actorflow.run.evaluation import EvaluationResults
from actorflow.run.progress import ConsoleView, view_of
from actorflow.run.report import METRICS_FILE, Console, Reporter
from actorflow.run.stopping import ON_RESULT, ON_STEP, Stopper
from actors.machine.history import Statistics
from compiler.contract.codec import (
    Bounds,
    DecodeError,
    from_json,
    from_object,
    printable,
    shown,
    text_where,
    to_json,
    to_object,
)
from compiler.contract.errors import ActorflowError
from compiler.contract.files import read_regular, replace_regular, user_path
from compiler.contract.plan import Plan
from compiler.graph.target import SKIPPED

if TYPE_CHECKING:
    from actorflow.distributed.rank_waits import RankWaits

STATUS_FILE = "status.json"
STATES = ("running", "finished", "stopped", "failed")

_FORMAT = 4
_MOST_BYTES = 64 << 20
"""Of the file. An actor takes some 200 bytes."""
_INTERVAL_S = 1.0
_NOT_FINITE = ("nan", "inf", "-inf")

# A status may come from anywhere, as a plan may: a text can do nothing on a terminal.

Label = Annotated[str, printable]
Quantity = Annotated[int, Bounds(0, (1 << 63) - 1)]
Measure = Annotated[float, Bounds(-1e18, 1e18)]
State = Annotated[str, text_where(STATES.__contains__, f"one of {', '.join(STATES)}")]


class StatusError(ActorflowError):
    """There is no status to show, or it cannot be read; the message says how to mend it."""


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """One actor: `busy_share` is over the last interval, the rest since the start of the run.

    `waits` counts firings by what they waited for last: "input batch", "register loss", "self".
    """

    name: Label
    stream: Label
    firings: Quantity
    busy_share: Measure
    ms_per_firing: Measure
    waits: Mapping[Label, Quantity] = field(default_factory=dict)

    @property
    def waited_for(self) -> str:
        """The causes of `waits` by their share of the firings, the largest first."""
        total = sum(self.waits.values())
        ordered = sorted(self.waits.items(), key=lambda item: -item[1])
        return ", ".join([f"{cause} {count / total:.0%}" for cause, count in ordered if count])


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank: the name of its host, and which share of the last window it waited for others."""

    host: Label
    waiting_share: Measure


@dataclass(frozen=True, slots=True)
class Status:
    """A run at one moment.

    `written_at_s` is the time of day (seconds since 1970), `elapsed_s` since the run began;
    `steps_per_s` and the busy share of each stream are over the last interval, None before there
    was one; so is `data_wait`, the share of time in which steps waited for the data source, None
    where that is not known. `total_steps` is None when the run has no end. `epoch` is how often the
    job's `ranks` were started, this time counted. `by_rank` is of each rank, none where nothing is
    known yet; `rank_behind` is the one that all others wait for, if one is clearly behind.
    """

    job: Label
    pid: Quantity
    host: Label
    state: State
    written_at_s: Measure
    elapsed_s: Measure
    step: Quantity
    total_steps: Quantity | None
    steps_per_s: Measure | None
    loss: float | None
    arena_bytes: Quantity
    ranks: Quantity = 1
    epoch: Quantity = 1
    by_rank: tuple[RankStatus, ...] = ()
    rank_behind: Quantity | None = None
    data_wait: Measure | None = None
    streams: Mapping[Label, Measure] = field(default_factory=dict)
    actors: tuple[ActorStatus, ...] = ()
    format: int = _FORMAT

    def to_json(self) -> bytes:
        """Return the file's text. JSON has no NaN, so a loss of NaN becomes the text "nan"."""
        values = to_object(self)
        if self.loss is not None and not math.isfinite(self.loss):
            values["loss"] = str(self.loss)
        return to_json(values)

    @staticmethod
    def from_json(text: bytes, where: str = STATUS_FILE) -> Status:
        """Read a file's text back. Raises StatusError when it is damaged or of another version."""
        try:
            values = from_json(text)
            fields = values if isinstance(values, dict) else {}
            if (version := fields.get("format", _FORMAT)) != _FORMAT:
                raise StatusError(
                    f"{where} has status format {shown(version)}, this actorflow reads"
                    f" format {_FORMAT}; use the version that runs the job"
                )
            if (loss := fields.get("loss")) in _NOT_FINITE:
                return replace(from_object(Status, fields | {"loss": None}), loss=float(loss))
            return from_object(Status, values)
        except DecodeError as error:
            raise StatusError(
                f"{where} is damaged ({error}); a running job writes it again within a second"
            ) from None


def read_status(run: str | os.PathLike[str]) -> Status:
    """Return the newest status of a run's directory. Raises StatusError."""
    directory = Path(user_path(run))
    path = directory / STATUS_FILE
    if not directory.is_dir():
        raise StatusError(
            f"there is no run {str(run)!r}: the directory does not exist; give the one that fit"
            " got as checkpoint="
        )
    try:
        text = read_regular(path, _MOST_BYTES)
    except FileNotFoundError:
        raise StatusError(
            f"{path} is not there: no run has been started with checkpoint={str(run)!r} yet"
        ) from None
    except OSError as error:
        raise StatusError(f"{path} cannot be read: {error.strerror}") from None
    return Status.from_json(text, str(path))


class StatusWriter:
    """Keeps the status file of one run.

    `start`, `step` and `finish` belong to one thread at a time. A file that cannot be written is
    reported once and tried again at the next time: a full disk must not end a training.

    Args:
        path: the file; its folder is there.
        plan: what runs.
        first_step: steps done before this run.
        total_steps: the last step, or None.
        clock: seconds, monotonic.
        time_of_day: seconds since 1970.
        report: takes the text of a warning.
        is_ours: whether the folder is still that of the run; asked before every write.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        plan: Plan,
        *,
        first_step: int,
        total_steps: int | None,
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], float] = time.time,
        report: Callable[[str], object] = logger.warning,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        self._path = Path(path)
        self._plan = plan
        self._first_step = self._step = first_step
        self._total_steps = total_steps
        self._clock = clock
        self._time_of_day = time_of_day
        self._tell_trouble = once(report)
        self._is_ours = is_ours
        self._statistics: Callable[[], Statistics] | None = None
        self._epoch = 1
        self._waits: RankWaits | None = None
        self._loss: float | None = None
        self._start_s = self._due_s = 0.0
        self._before: tuple[float, int, Statistics] | None = None

    def start(
        self, statistics: Callable[[], Statistics], epoch: int = 1, waits: RankWaits | None = None
    ) -> None:
        """Begin, with a first status. `statistics` is asked at every write, `waits` is read."""
        self._statistics, self._epoch, self._waits = statistics, epoch, waits
        self._start_s = self._clock()
        self._write("running", self._start_s)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the outputs of a step, and write if it is time; else it costs a clock reading."""
        self._step = step
        loss = metrics.get("loss")
        self._loss = float(loss) if isinstance(loss, (int, float)) else None
        now = self._clock()
        if now >= self._due_s:
            self._write("running", now)

    def finish(self, state: str) -> None:
        """Write the last status, with rates and shares of the whole run; no effect before `start`.

        `state` is "finished", "stopped" or "failed".
        """
        # Without a reading before, `_status` takes the start of the run.
        self._before = None
        self._write(state, self._clock())

    def _write(self, state: str, now: float) -> None:
        if self._statistics is None:
            return
        statistics = self._statistics()
        status = self._status(state, now, statistics)
        self._before = (now, self._step, statistics)
        self._due_s = now + _INTERVAL_S
        if not self._is_ours():
            self._tell("its folder is no longer that of the run")
            return
        try:
            replace_regular(self._path, status.to_json())
        except OSError as error:
            self._tell(str(error.strerror))

    def _tell(self, why: str) -> None:
        self._tell_trouble(
            f"{self._path} cannot be written ({why}); the run continues, and 'actorflow top'"
            " cannot show it meanwhile"
        )

    def _status(self, state: str, now: float, statistics: Statistics) -> Status:
        since_s, since_step, before = self._before or (self._start_s, self._first_step, None)
        seconds = now - since_s
        streams = {
            stream.name: statistics.busy_share(index, before)
            for index, stream in enumerate(statistics.streams)
        }
        return Status(
            job=self._plan.name,
            pid=os.getpid(),
            host=socket.gethostname(),
            state=state,
            written_at_s=self._time_of_day(),
            elapsed_s=now - self._start_s,
            step=self._step,
            total_steps=self._total_steps,
            steps_per_s=(self._step - since_step) / seconds if seconds > 0 else None,
            loss=self._loss,
            arena_bytes=sum([arena.size_bytes for arena in self._plan.arenas]),
            ranks=self._plan.mesh.num_ranks,
            epoch=self._epoch,
            by_rank=() if self._waits is None else _by_rank(self._waits),
            rank_behind=None if self._waits is None else self._waits.behind,
            data_wait=statistics.source_wait(before),
            streams=streams,
            actors=tuple(
                [_actor_status(statistics, before, a) for a in range(len(statistics.actors))]
            ),
        )


def data_waits(statistics: Callable[[], Statistics]) -> Callable[[], float | None]:
    """Return what tells the share of time, since it was asked last, that waited for sources."""
    before: Statistics | None = None

    def share() -> float | None:
        nonlocal before
        now = statistics()
        waited, before = now.source_wait(before), now
        return waited

    return share


def _by_rank(waits: RankWaits) -> tuple[RankStatus, ...]:
    shares = waits.shares
    hosts = waits.hosts or (socket.gethostname(),) * len(shares)
    return tuple([RankStatus(host, share) for host, share in zip(hosts, shares, strict=False)])


def _actor_status(statistics: Statistics, before: Statistics | None, index: int) -> ActorStatus:
    actor = statistics.actors[index]
    elapsed_ns, busy_ns = statistics.elapsed_ns, actor.busy_ns
    if before is not None:
        elapsed_ns -= before.elapsed_ns
        busy_ns -= before.actors[index].busy_ns
    return ActorStatus(
        name=actor.name,
        stream=actor.stream,
        firings=actor.firings,
        busy_share=busy_ns / elapsed_ns if elapsed_ns > 0 else 0.0,
        ms_per_firing=actor.ns_per_firing / 1e6,
        waits={str(wait): wait.count for wait in actor.waits},
    )


class Listener:
    """Passes scalar outputs to the reporter, all to the user, and keeps the status of the run.

    The user has `on_step`, `on_result` and callbacks, which are called in this order.

    What a function of the user raises stops the run. As a context it ends the status when the run
    ends: in whatever `ending` says, "failed" until then. Where steps that are not finite change
    nothing (`is_skipping`), such outputs are handed on, and are no part of what is reported.
    """

    def __init__(
        self,
        reporter: Reporter,
        status: StatusWriter | None,
        on_step: OnStep | None,
        first_step: int,
        stopper: Stopper,
        calls: CallbackCalls,
        *,
        is_skipping: bool = False,
    ) -> None:
        self._reporter, self._calls = reporter, calls
        self._is_skipping = is_skipping
        self._stopper = stopper
        self._status = status
        self._on_step = on_step
        self._waits: RankWaits | None = None
        self._named: set[int | None] = {None}
        self.ending = "failed"
        self.step = first_step
        self.metrics: Metrics = {}
        self.evaluations: list[tuple[int, Results]] = []

    def start(
        self, statistics: Callable[[], Statistics], epoch: int = 1, waits: RankWaits | None = None
    ) -> None:
        """Begin the status of the run; before its threads start."""
        self._waits = waits
        if self._status is not None:
            self._status.start(statistics, epoch, self._waits)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.finish(self.ending)

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Take the outputs of a step, on the metrics thread."""
        self.step, self.metrics = step, metrics
        scalars = scalar_values(metrics)
        if self._is_skipping:  # what a skipped step gave is no part of a mean
            scalars = {n: v for n, v in scalars.items() if n != SKIPPED and math.isfinite(v)}
        self._reporter.step(step, scalars)
        waits = self._waits
        if waits is not None and (rank := waits.behind) not in self._named:  # once for each
            self._named.add(rank)
            self._reporter.notice(str(waits))
        if self._status is not None:
            self._status.step(step, metrics)
        self._stopper.call(ON_STEP, self._on_step, step, metrics)
        self._calls.step(step, metrics)

    def evaluated(
        self, on_result: OnResult | None, awaited: EvaluationResults | None = None
    ) -> OnResult:
        """Return a listener to evaluations that reports them and passes them to the user.

        `awaited` has those that checkpoints wait for.
        """

        def listen(step: int, results: Results) -> None:
            self.evaluations.append((step, results))
            self._reporter.evaluation(step, scalar_values(results))
            if awaited is not None:  # behind the line that a resumed run finds them in
                awaited.note(step, results)
            self._stopper.call(ON_RESULT, on_result, step, results)
            self._calls.evaluation(step, results)

        return listen


def scalar_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the outputs that are numbers."""
    return {name: float(v) for name, v in values.items() if isinstance(v, (int, float))}


def make_reporter(
    checkpoint: str | os.PathLike[str] | None, progress: bool, *, is_writer: bool = True
) -> Reporter:
    """Return the reporter of a run: to stdout if `progress`, and to the file of its directory.

    Of several ranks one alone is the writer of that.
    """
    path = Path(checkpoint) / METRICS_FILE if checkpoint is not None and is_writer else None
    if progress:
        # Asked at every write: a program may put another stream there while it runs.
        view = view_of(Console(lambda: sys.stdout))
        return Reporter(view, time.monotonic, metrics_path=path)
    silence = ConsoleView(Console(lambda: None))
    return Reporter(silence, time.monotonic, metrics_path=path, warn=logger.warning)
