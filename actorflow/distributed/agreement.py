"""What the ranks of a job agree on: decided in one place, as a function of messages alone.

A message goes in, messages to ranks come out; there is no socket, clock or thread here, so that any
order of messages can be tried. All decisions follow from what ranks said, joined so that the order
of two messages, or a second copy of one, does not matter but for what is decided by the first: who
failed, and where a stop falls. Whatever is decided is told to every rank in the same words.

*Meetings.* A rank that has come to one waits; when all have come to the same, each gets all values.

*Steps.* The coordinator grants a window: `WINDOW_STEPS` beyond what every rank has come to. So no
rank has begun a step that was not granted to all, which is what makes these common:
a stop is at the largest total granted, for every rank can get there and none is beyond it; a
checkpoint is after the first step that is not granted yet, for no rank has decided on it yet, and
each is told before it may begin that step.

*Stops that wait for data.* A stop is to wait for no source that does not answer. So a rank that
has waited long enough holds: it begins no step more. The others are told to hold, too, and the end
is the last step that any of them has begun; who lacks data for that is waited for, nobody else.
Where that source does not answer either, the rank gives up its data, and so do all others; the run
is cut after the last step of which every rank has the data. That one all can finish, and no rank
can have finished a later one that takes all of them. What was begun of those is dropped: whether
the state of the step is whole by then, ranks find out themselves.

*Data.* Each takes its rows of a batch that all were given, so ranks say a digest of what they were
given, and all digests of a step are equal. So are those of what was written to variables between
two steps that the user makes one by one. There a batch of other types takes another plan, for which
all ranks meet when it is opened: who opens one says so before, and is compared with who makes that
step without.

*Ends.* A rank whose data ends says after which step. Others answer if they have data for more, for
they would wait for it in a collective. All that ended must name the same step.

*Checkpoints.* The first rank names an attempt to save a step, all ranks vote on it, and the first
rank, which is told all votes at once, says how it ended. Who decides is the first rank; here it is
only passed on, in whatever order it comes, after the run's end as well: a last save outlives the
data. Steps that are saved only grow, so what is said of an earlier one is old.

*RankFailure.* The first one counts. It is told to every rank, now or as soon as it is heard of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actorflow.distributed.messages import (
    Ack,
    BatchAnnounced,
    BatchDigest,
    CheckpointAt,
    CheckpointBegun,
    CheckpointEnded,
    CheckpointRequested,
    CheckpointTimedOut,
    CheckpointVote,
    CheckpointVotes,
    CutAt,
    DataEnded,
    DataGivenUp,
    DataRemains,
    EndAt,
    FromRank,
    GatherDone,
    GatherEntered,
    GatherTimedOut,
    GiveUpData,
    Hello,
    HoldRequested,
    LastStarted,
    PeerDataEnded,
    RankFailed,
    RunReady,
    ScriptEnded,
    StepReached,
    StepsGranted,
    StopRequested,
    ToRank,
    Welcome,
)
from actorflow.distributed.rank_failure import (
    FailureKind,
    RankFailure,
    aborted,
    failure_of,
    left_early,
    listed,
    other_batch,
    other_end,
    other_types,
    other_values,
)
from actorflow.distributed.rank_waits import pack_waits

WINDOW_STEPS = 4
"""How far a rank may be ahead of the last: more hides the coordinator's answer, less stops sooner.
"""

MOST_DIGESTS = 64
"""Steps whose digests are kept: more than one rank can be ahead of another."""

Sends = list[tuple[int, ToRank]]
"""Messages to send, in order: (rank, message)."""


@dataclass(slots=True)
class _AgreedRun:
    """The state of one run of the job; values that differ between ranks are kept by rank."""

    # By rank: the step before the first; the highest step with data; the step after which it ended;
    # the highest step that it has data for beyond another's end.
    first: dict[int, int] = field(default_factory=dict)
    reached: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    more: dict[int, int] = field(default_factory=dict)
    granted: int | None = None
    checkpoint: int | None = None
    stop: str | None = None
    is_last: bool = False
    is_settled: bool = False
    is_checkpoint_asked: bool = False
    # By rank: the last step begun when it held; the last step whose data it has.
    held: dict[int, int] = field(default_factory=dict)
    given_up: dict[int, int] = field(default_factory=dict)
    # By step: the rank that told first, and what it told. By rank: why its data ended.
    given: dict[int, tuple[int, BatchDigest]] = field(default_factory=dict)
    # By rank: for which batch it has opened a plan last.
    announced: dict[int, BatchAnnounced] = field(default_factory=dict)
    whys: dict[int, str] = field(default_factory=dict)
    # By rank: how long it has waited for others; nothing is decided by it.
    waited_us: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _AgreedSaves:
    """The checkpoints of one run: steps that were begun, voted on and ended last; votes by rank."""

    begun: int = -1
    voted: int = -1
    ended: int = -1
    votes: dict[int, CheckpointVote] = field(default_factory=dict)


class CoordinatorState:
    """The agreement of one job. `failure` is the first one, or None.

    Args:
        num_ranks: how many ranks there are.
        window_steps: how far a rank may be ahead of the last.
        hosts: the name of the host of each rank, "" where there is one; none for one host.
    """

    def __init__(
        self, num_ranks: int, window_steps: int = WINDOW_STEPS, hosts: Sequence[str] = ()
    ) -> None:
        self.num_ranks = num_ranks
        self._hosts = tuple(hosts) or ("",) * num_ranks
        self._window_steps = window_steps
        self.failure: RankFailure | None = None
        self._teller: int | None = None
        self._heard: set[int] = set()
        self._gone: set[int] = set()
        self._num_meetings = 0
        self._came: dict[int, GatherEntered] = {}
        self._runs: dict[int, _AgreedRun] = {}
        self._closed: set[int] = set()
        self._saves: dict[int, _AgreedSaves] = {}

    def on_message(self, rank: int, message: FromRank) -> Sends:
        """Handle a message of a rank; return the messages to send."""
        # Any message greets: a rank is known from whatever it says first.
        sends = self._greet(rank)
        # The Ack goes out even after a failure: the rank waits for it before it exits.
        if isinstance(message, ScriptEnded | RankFailed):
            sends += [(rank, Ack())]
        if self.failure is None and rank not in self._gone:
            sends += _TAKES[type(message)](self, rank, message)
        elif self.failure is not None and isinstance(message, RankFailed):
            self._explain(self.failure, rank, message)
        return sends

    def on_process_exit(
        self,
        rank: int,
        text: str,
        *,
        explains: bool = False,
        kind: FailureKind = FailureKind.KILL,
    ) -> Sends:
        """Handle the failed exit of a rank's process; `text` is a predicate without the rank.

        With `explains` that takes the place of what others, who missed the rank, said of it.
        """
        failure = self.failure
        # Only hearsay of this very rank is replaced; what the rank said itself is better than its
        # status.
        if explains and failure is not None and failure.is_hearsay and failure.rank == rank:
            self.failure = RankFailure(rank, text, kind=kind, step=failure.step, host=failure.host)
        return self._fail(RankFailure(rank, text, kind=kind))

    def _explain(self, failure: RankFailure, rank: int, message: RankFailed) -> None:
        """Add a later report of the first failure; the failed rank's own report wins."""
        if failure.is_hearsay and rank == failure.rank and message.rank < self.num_ranks:
            told = failure_of(rank, message)
            self.failure = replace(told, step=failure.step, host=failure.host)
            self._teller = rank
        elif rank == self._teller:
            self.failure = replace(failure, shown=failure.shown or message.shown)

    def has_heard(self, rank: int) -> bool:
        """Whether a rank has ever said anything."""
        return rank in self._heard

    def has_left(self, rank: int) -> bool:
        """Whether a rank has said that its script ended well."""
        return rank in self._gone

    def meeting(self) -> tuple[str, tuple[int, ...]]:
        """Return what the open meeting is for ("" if none is open), and which ranks are missing."""
        if not self._came:
            return "", ()
        missing = [r for r in range(self.num_ranks) if r not in self._came]
        return str(self._came[min(self._came)]), tuple(missing)

    def _greet(self, rank: int) -> Sends:
        if rank in self._heard:
            return []
        self._heard.add(rank)
        sends: Sends = [(rank, Welcome(self.num_ranks))]
        return sends if self.failure is None else [*sends, (rank, aborted(self.failure))]

    def _hello(self, rank: int, message: Hello) -> Sends:
        return []

    def _fail(self, failure: RankFailure) -> Sends:
        if self.failure is not None:
            return []
        rank = failure.rank
        failure = replace(failure, step=self._last_step(rank), host=self._hosts[rank])
        self.failure = failure
        # Nobody meets after a failure, and `meeting` must not name ranks as missing any more.
        self._came.clear()
        return self._all(aborted(failure))

    def _last_step(self, rank: int) -> int | None:
        """Return the last step whose data a rank has in its newest open run, or None."""
        runs = [run for _, run in sorted(self._runs.items()) if rank in run.first]
        return max(runs[-1].first[rank], runs[-1].reached.get(rank, 0)) if runs else None

    def _all(self, message: ToRank) -> Sends:
        # Sorted, so that messages have one order. A rank that was not heard yet is told by
        # `_greet`.
        return [(rank, message) for rank in sorted(self._heard - self._gone)]

    def _failed(self, rank: int, message: RankFailed) -> Sends:
        if message.rank >= self.num_ranks:  # of nobody
            message = replace(message, rank=rank)
        self._teller = rank
        return self._fail(failure_of(rank, message))

    def _left(self, rank: int, message: ScriptEnded) -> Sends:
        self._gone.add(rank)
        for number in sorted(self._runs):
            run = self._runs[number]
            # Others have begun this run, and this rank neither ended it nor can any more.
            if run.first.keys() - {rank} and rank not in run.ends:
                return self._fail(left_early(rank))
        return self._missed()

    # Meetings

    def _take_came(self, rank: int, message: GatherEntered) -> Sends:
        if message.number <= self._num_meetings:
            return []  # a second copy, of one that is over
        # A rank waits in each meeting for its end, so an honest one cannot be two ahead.
        if message.number > self._num_meetings + 1:
            return self._fail(RankFailure(rank, f"wants to {message} out of turn"))
        # The first copy stands.
        self._came.setdefault(rank, message)
        first = min(self._came)
        for other in sorted(self._came):
            if self._came[other].name != self._came[first].name:
                return self._fail(RankFailure(other, self._apart(first, other)))
        if len(self._came) < self.num_ranks:
            return self._missed()
        values = tuple([self._came[r].value for r in range(self.num_ranks)])
        self._num_meetings += 1
        self._came = {}
        return self._all(GatherDone(self._num_meetings, values))

    def _apart(self, first: int, other: int) -> str:
        return (
            f"is about to {self._came[other]}, where rank {first} is about to"
            f" {self._came[first]}; every rank has to do the same in the same order"
        )

    def _missed(self) -> Sends:
        """Fail where somebody waits for a rank that is gone."""
        name, missing = self.meeting()
        for rank in missing:
            if rank in self._gone:
                there = tuple(sorted(self._came))
                wait = "waits" if len(there) == 1 else "wait"
                text = f"has ended its script, where {listed(there)} {wait} for it to {name}"
                return self._fail(RankFailure(rank, text))
        return []

    def _waited(self, rank: int, message: GatherTimedOut) -> Sends:
        name, missing = self.meeting()
        # The report may cross the end of the meeting on its way.
        if not missing or message.number != self._num_meetings + 1 or rank in missing:
            return []  # they came after all
        if not message.is_final:
            return [(rank, message)]
        return self._fail(
            RankFailure(
                missing[0],
                f"did not arrive within {message.seconds} s where rank {rank} waits for"
                f" {listed(missing)} to {name}: it hangs, is stopped, or runs other code"
                " (ACTORFLOW_RANK_SECONDS sets how long ranks wait for each other)",
                is_hearsay=True,
                kind=FailureKind.SILENCE,
            )
        )

    # Runs

    def _run(self, number: int) -> _AgreedRun | None:
        # A late message of a run that all have ended must not open it again.
        if number in self._closed:
            return None
        return self._runs.setdefault(number, _AgreedRun())

    def _began(self, rank: int, message: RunReady) -> Sends:
        run = self._run(message.run)
        if run is None:
            return []
        run.first.setdefault(rank, message.first_step)
        lowest = min(run.first)
        for other, step in sorted(run.first.items()):
            if step != run.first[lowest]:
                text = (
                    f"would train on after step {step}, rank {lowest} after step"
                    f" {run.first[lowest]}; give all ranks the same checkpoint and model"
                )
                return self._fail(RankFailure(other, text))
        if gone := self._gone - run.ends.keys():
            return self._fail(left_early(min(gone)))
        return self._advance(message.run, run)

    def _reached(self, rank: int, message: StepReached) -> Sends:
        run = self._run(message.run)
        if run is None:
            return []
        run.reached[rank] = max(message.step, run.reached.get(rank, 0))
        run.waited_us[rank] = max(message.waited_us, run.waited_us.get(rank, 0))
        return self._advance(message.run, run)

    def _stop_asked(self, rank: int, message: StopRequested) -> Sends:
        run = self._run(message.run)
        if run is None:
            return []
        if run.stop is None:
            run.stop = message.reason
        return self._advance(message.run, run)

    def _checkpoint_asked(self, rank: int, message: CheckpointRequested) -> Sends:
        run = self._run(message.run)
        if run is None:
            return []
        run.is_checkpoint_asked = True
        return self._advance(message.run, run)

    def _save_begun(self, rank: int, message: CheckpointBegun) -> Sends:
        saves = self._saves.setdefault(message.run, _AgreedSaves())
        if rank:
            return self._fail(RankFailure(rank, "began a checkpoint, which rank 0 alone does"))
        if message.step <= saves.begun:
            return []
        saves.begun = message.step
        return [(r, one) for r, one in self._all(message) if r]

    def _save_voted(self, rank: int, message: CheckpointVote) -> Sends:
        saves = self._saves.setdefault(message.run, _AgreedSaves())
        before = saves.votes.get(rank)
        if message.step <= max(saves.voted, -1 if before is None else before.step):
            return []
        saves.votes[rank] = message
        if [vote.step for vote in saves.votes.values()] != [message.step] * self.num_ranks:
            return []
        saves.voted = message.step
        values = tuple([saves.votes[r].value for r in range(self.num_ranks)])
        saves.votes.clear()
        return [(0, CheckpointVotes(message.run, message.step, values))]

    def _save_ended(self, rank: int, message: CheckpointEnded) -> Sends:
        saves = self._saves.setdefault(message.run, _AgreedSaves())
        if rank:
            return self._fail(RankFailure(rank, "ended a checkpoint, which rank 0 alone does"))
        if message.step <= saves.ended:
            return []
        saves.ended = message.step
        # Also without votes: the first rank may end what it could not begin.
        saves.begun, saves.voted = max(saves.begun, message.step), max(saves.voted, message.step)
        return [(r, one) for r, one in self._all(message) if r]

    def _save_waited(self, rank: int, message: CheckpointTimedOut) -> Sends:
        saves = self._saves.setdefault(message.run, _AgreedSaves())
        if message.step <= saves.ended:
            return []
        # All have voted, or it was not begun: then the first rank is awaited.
        voters = [r for r, vote in saves.votes.items() if vote.step == message.step]
        is_open = saves.voted < message.step <= saves.begun
        missing = [r for r in range(self.num_ranks) if r not in voters] if is_open else [0]
        if rank in missing:
            return []
        if not message.is_final:
            return [(rank, message)]
        return self._fail(
            RankFailure(
                missing[0],
                f"did not do its part of the checkpoint of step {message.step} within"
                f" {message.seconds} s, for which rank {rank} waits: it hangs, is stopped, or its"
                " disk does not answer (ACTORFLOW_RANK_SECONDS sets how long ranks wait for each"
                " other)",
                is_hearsay=True,
                kind=FailureKind.SILENCE,
            )
        )

    def _ends(self, rank: int, message: DataEnded) -> Sends:
        run = self._run(message.run)
        if run is None or run.ends.get(rank) == message.step:
            return []
        # min, as max for what was reached: the earliest end of a rank holds whatever the order of
        # messages.
        step = run.ends[rank] = min(message.step, run.ends.get(rank, message.step))
        run.whys.setdefault(rank, message.why)
        if differ := self._ends_apart(run):
            return differ
        if len(run.ends) == self.num_ranks:
            # A rank may hold although its data has ended: it waits to be told where the run ends.
            sends = self._settle(message.run, run)
            del self._runs[message.run]
            self._closed.add(message.run)
            return sends
        # Ranks that ended are told nothing: their end is compared here, in `_ends_apart`.
        ended = PeerDataEnded(message.run, step)
        sends = [(r, one) for r, one in self._all(ended) if r not in run.ends]
        return sends + self._settle(message.run, run)

    def _would_end(self, rank: int, message: LastStarted) -> Sends:
        run = self._run(message.run)
        if run is None:  # all have ended, this rank too, after one step
            return [(rank, EndAt(message.run, message.step))]
        if rank in run.held:
            return []
        sends = self._all(HoldRequested(message.run)) if not run.held else []
        run.held[rank] = message.step
        others = [(r, one) for r, one in sends if r != rank and r not in run.ends]
        return others + self._settle(message.run, run)

    def _settle(self, number: int, run: _AgreedRun) -> Sends:
        """Send the last step once every rank holds or has ended."""
        last_steps = run.ends | run.held
        if not (run.is_last and run.held) or run.is_settled or len(last_steps) < self.num_ranks:
            return []
        run.is_settled = True
        # The largest: a rank has begun that step, and it takes all ranks to finish it.
        return self._all(EndAt(number, max(last_steps.values())))

    def _data_given_up(self, rank: int, message: DataGivenUp) -> Sends:
        run = self._run(message.run)
        if run is None or not run.is_last or rank in run.given_up:
            return []
        sends = self._all(GiveUpData(message.run)) if not run.given_up else []
        sends = [(r, one) for r, one in sends if r != rank]
        run.given_up[rank] = message.step
        if len(run.given_up) == self.num_ranks:
            # The smallest: the last step whose data all ranks have.
            sends += self._all(CutAt(message.run, min(run.given_up.values())))
        return sends

    def _given(self, rank: int, message: BatchDigest) -> Sends:
        run = self._run(message.run)
        if run is None:
            return []
        other, before = run.given.setdefault(message.step, (rank, message))
        if before.digest != message.digest:
            # By rank and not by arrival, so that the message is the same in every run.
            (first, earlier), (last, later) = sorted(
                [(rank, message), (other, before)], key=lambda row: row[0]
            )
            return self._fail(other_batch(last, first, later, earlier))
        if before.written != message.written:
            # A rank that alone has written is at fault, or else the later one.
            writers = sorted(
                [(bool(m.written), r, m.wrote) for r, m in ((other, before), (rank, message))]
            )
            (is_both, first, _), (_, last, wrote) = writers
            step = message.step
            return self._fail(other_values(last, first, step, wrote, is_alone=not is_both))
        for announcer, announced in sorted(run.announced.items()):
            if apart := self._announced_apart(announcer, announced, rank, message):
                return apart
        if len(run.given) > MOST_DIGESTS:
            # Dropping the oldest keeps memory bounded in a run of any length.
            del run.given[min(run.given)]
        return []

    def _announced(self, rank: int, message: BatchAnnounced) -> Sends:
        run = self._run(message.run)
        if run is None:
            return []
        run.announced[rank] = message
        other, given = run.given.get(message.step, (rank, None))
        return [] if given is None else self._announced_apart(rank, message, other, given)

    def _announced_apart(
        self, rank: int, announced: BatchAnnounced, other: int, given: BatchDigest
    ) -> Sends:
        """Fail where a rank opens a plan for a step that another one makes on another plan.

        That one has opened fewer for this step, so it does not come to where this one waits.
        """
        step, types = given.step, (announced.types, given.types)
        is_behind = announced.step == step and announced.number > given.num_announced
        if rank == other or not is_behind or types[0] == types[1]:
            return []
        if rank < other:
            rank, other, types = other, rank, types[::-1]
        return self._fail(other_types(rank, other, step, types, given.line))

    def _has_data(self, rank: int, message: DataRemains) -> Sends:
        run = self._run(message.run)
        if run is None:
            return []
        run.more[rank] = max(message.step, run.more.get(rank, 0))
        return self._ends_apart(run)

    def _ends_apart(self, run: _AgreedRun) -> Sends:
        """Fail where ranks do not end after the same step; a run that is cut has one for all."""
        if not run.ends or run.given_up:
            return []
        # The earliest end, and of several ranks the first.
        step, rank = min([(step, rank) for rank, step in run.ends.items()])
        # The right operand wins: of a rank that ended its end counts, not what it reached.
        beyond = run.reached | run.more | run.ends
        for other, reached in sorted(beyond.items()):
            if reached > step:
                is_ended = other in run.ends
                what = f"after step {reached}" if is_ended else f"not before step {reached}"
                return self._fail(other_end(rank, step, f"rank {other} {what}", run.whys[rank]))
        return []

    def _advance(self, number: int, run: _AgreedRun) -> Sends:
        """Grant what can be granted, and say where a checkpoint or the end is."""
        # Nothing is granted before all ranks are in the run: a grant holds for each of them.
        if len(run.first) < self.num_ranks:
            return []
        if apart := self._ends_apart(run):
            return apart
        first = run.first[0]
        if run.is_last:
            return self._settle(number, run)
        if run.granted is None:
            run.granted = first
        if run.stop is not None:
            run.is_last = True
            last = StepsGranted(number, run.granted, True, run.stop)
            return self._all(last) + self._settle(number, run)
        reached = min([max(first, run.reached.get(r, first)) for r in range(self.num_ranks)])
        sends: Sends = []
        if run.is_checkpoint_asked and (run.checkpoint is None or run.checkpoint <= reached):
            # A rank learns of it before the grant that lets it begin this step: messages keep their
            # order.
            run.checkpoint = run.granted + 1
            sends += self._all(CheckpointAt(number, run.checkpoint))
        # A request while one is still to come is dropped: that one will hold a later state.
        run.is_checkpoint_asked = False
        # By halves of a window, so that not every step of every rank is answered to all.
        window_steps = self._window_steps
        if reached + window_steps - run.granted >= window_steps // 2:
            run.granted = reached + window_steps
            grant = StepsGranted(number, run.granted, False, "")
            waits = [run.waited_us.get(r, 0) for r in range(self.num_ranks)]
            told = replace(grant, waits=pack_waits(waits)) if any(waits) else grant
            sends += [(r, one if r else told) for r, one in self._all(grant)]
        return sends


_TAKES: dict[type[Any], Callable[[CoordinatorState, int, Any], Sends]] = {
    Hello: CoordinatorState._hello,
    GatherEntered: CoordinatorState._take_came,
    GatherTimedOut: CoordinatorState._waited,
    RunReady: CoordinatorState._began,
    StepReached: CoordinatorState._reached,
    StopRequested: CoordinatorState._stop_asked,
    CheckpointRequested: CoordinatorState._checkpoint_asked,
    CheckpointBegun: CoordinatorState._save_begun,
    CheckpointVote: CoordinatorState._save_voted,
    CheckpointTimedOut: CoordinatorState._save_waited,
    CheckpointEnded: CoordinatorState._save_ended,
    DataEnded: CoordinatorState._ends,
    DataRemains: CoordinatorState._has_data,
    LastStarted: CoordinatorState._would_end,
    DataGivenUp: CoordinatorState._data_given_up,
    BatchDigest: CoordinatorState._given,
    BatchAnnounced: CoordinatorState._announced,
    RankFailed: CoordinatorState._failed,
    ScriptEnded: CoordinatorState._left,
}
"""What takes each kind of message."""
