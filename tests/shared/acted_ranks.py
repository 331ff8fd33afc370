"""Ranks that are acted: each does what its script says, one small move at a time, in any order.

Between each rank and the agreement there is a channel in either direction that keeps the order, and
delays as long as whoever chooses the moves likes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from actorflow.distributed.agreement import WINDOW_STEPS, CoordinatorState
from actorflow.distributed.messages import (
    Aborted,
    Ack,
    CheckpointAt,
    CheckpointRequested,
    CutAt,
    DataEnded,
    DataGivenUp,
    DataRemains,
    EndAt,
    GatherDone,
    GatherEntered,
    GiveUpData,
    Hello,
    HoldRequested,
    LastStarted,
    PeerDataEnded,
    RunReady,
    ScriptEnded,
    StepReached,
    StepsGranted,
    StopRequested,
    Welcome,
)


@dataclass(frozen=True)
class Meet:
    name: str


@dataclass(frozen=True)
class Train:
    """Train on after `first` on data of so many steps; ask for things before some of them.

    One that `holds` does so once at any time after it heard of a stop. One that `blocks` never has
    the data of that step, and gives it up at any time after it heard that the run ends there.
    """

    steps: int
    first: int = 0
    stop_before: int | None = None
    checkpoint_before: int | None = None
    holds: bool = False
    blocks: int | None = None


@dataclass
class ActedRank:
    """One rank; `log` is what it came to."""

    number: int
    script: tuple
    at: int = 0
    waits: bool = False
    run: int = 0
    begun: int = 0
    finished: int = 0
    granted: int = -1
    last: int | None = None
    is_held: bool = False
    is_settled: bool = False
    given_up: bool = False
    other_end: int | None = None
    asked: set = field(default_factory=set)
    meetings: int = 0
    log: list = field(default_factory=list)
    aborted: Aborted | None = None
    is_dead: bool = False
    has_left: bool = False
    up: deque = field(default_factory=deque)
    down: deque = field(default_factory=deque)

    @property
    def doing(self):
        return self.script[self.at] if self.at < len(self.script) else None

    @property
    def trains(self):
        return isinstance(self.doing, Train) and self.waits

    def say(self, message):
        self.up.append(message)


class Play:
    """All ranks of a job with their agreement; `moves` are what can happen next."""

    def __init__(self, scripts, *, copies=1, window_steps=WINDOW_STEPS):
        self.agreement = CoordinatorState(len(scripts), window_steps)
        self.window_steps = window_steps
        self.ranks = [ActedRank(n, tuple(script)) for n, script in enumerate(scripts)]
        self.copies = copies
        for rank in self.ranks:
            rank.say(Hello())

    def moves(self):
        choices = []
        for rank in self.ranks:
            if rank.up:
                choices.append(("up", rank.number))
            if rank.is_dead or rank.has_left or rank.aborted:
                continue
            if rank.down:
                choices.append(("down", rank.number))
            if self._next(rank):
                choices.append(("act", rank.number))
        return choices

    def make(self, move):
        kind, number = move
        rank = self.ranks[number]
        if kind == "up":
            message = rank.up.popleft()
            for _ in range(self.copies):
                self._tell(self.agreement.on_message(number, message))
        elif kind == "down":
            self._hear(rank, rank.down.popleft())
        else:
            self._next(rank)()
        self.check()

    def kill(self, number):
        """A rank dies; what it said may still be under way."""
        rank = self.ranks[number]
        rank.is_dead = True
        for message in rank.up:
            self._tell(self.agreement.on_message(number, message))
        rank.up.clear()
        self._tell(self.agreement.on_process_exit(number, "was ended by SIGKILL"))

    def _tell(self, sends):
        for number, message in sends:
            self.ranks[number].down.append(message)

    def check(self):
        """No rank is farther ahead than a window, and none is told of a checkpoint too late."""
        training = [r for r in self.ranks if r.trains]
        if len(training) == len(self.ranks) and len({r.run for r in training}) == 1:
            least = min(r.finished for r in training)
            assert max(r.begun for r in training) <= least + self.window_steps

    def _next(self, rank):
        """Return what a rank can do now, or None."""
        doing = rank.doing
        if doing is None:
            return lambda: self._leave(rank)
        if not rank.waits:
            return lambda: self._start(rank, doing)
        return self._step(rank, doing) if isinstance(doing, Train) else None

    def _leave(self, rank):
        rank.has_left = True
        rank.say(ScriptEnded())

    def _start(self, rank, doing):
        rank.waits = True
        if isinstance(doing, Meet):
            rank.meetings += 1
            rank.say(GatherEntered(rank.meetings, doing.name, bytes([rank.number])))
            return
        rank.run += 1
        rank.begun = rank.finished = rank.granted = doing.first
        rank.last, rank.other_end, rank.asked, rank.is_held = None, None, set(), False
        rank.is_settled = rank.given_up = False
        rank.say(RunReady(rank.run, doing.first))

    def _step(self, rank, doing):
        end = doing.first + doing.steps
        asks = {doing.stop_before: StopRequested, doing.checkpoint_before: CheckpointRequested}
        ask = asks.get(rank.begun + 1) if rank.begun + 1 not in rank.asked else None
        if ask is not None:
            return lambda: self._ask(rank, ask)
        if doing.holds and rank.last is not None and "hold" not in rank.asked:
            return lambda: self._hold(rank)
        if rank.finished < rank.begun and self._all_begun(rank, rank.finished + 1):
            return lambda: self._finish(rank)
        if rank.last is not None and rank.finished == rank.last:
            return lambda: self._end(rank)
        if rank.begun + 1 == doing.blocks and rank.begun < rank.granted:
            can_give_up = rank.is_settled and not rank.given_up
            return (lambda: self._give_up(rank)) if can_give_up else None
        if rank.begun < rank.granted and not (rank.is_held or rank.given_up):
            return (lambda: self._begin(rank)) if rank.begun < end else lambda: self._end(rank)
        return None

    def _ask(self, rank, kind):
        rank.asked.add(rank.begun + 1)
        rank.say(kind(rank.run, "asked") if kind is StopRequested else kind(rank.run))

    def _hold(self, rank):
        rank.asked.add("hold")
        rank.is_held = True
        rank.say(LastStarted(rank.run, rank.begun))

    def _give_up(self, rank):
        rank.given_up = True
        rank.say(DataGivenUp(rank.run, rank.begun))

    def _all_begun(self, rank, step):
        """Whether a step's collective is over: all ranks have come to it, in this run or later."""
        return all(
            [o.run > rank.run or (o.run == rank.run and o.begun >= step) for o in self.ranks]
        )

    def _begin(self, rank):
        rank.begun += 1
        if rank.other_end is not None and rank.begun > rank.other_end:
            rank.say(DataRemains(rank.run, rank.begun))

    def _finish(self, rank):
        rank.finished += 1
        rank.say(StepReached(rank.run, rank.finished))

    def _end(self, rank):
        is_cut = rank.given_up and rank.finished == rank.last
        if (
            rank.finished < rank.begun and not is_cut
        ):  # its data has ended, what has begun is still to be finished
            if "end" not in rank.asked:
                rank.asked.add("end")
                rank.say(DataEnded(rank.run, rank.begun))
            return
        rank.say(DataEnded(rank.run, rank.finished))
        rank.log.append(("trained", rank.run, rank.finished))
        rank.at, rank.waits = rank.at + 1, False

    def _hear(self, rank, message):
        if isinstance(message, Aborted):
            rank.aborted = message
        elif isinstance(message, GatherDone):
            rank.log.append((rank.doing.name, message.values))
            rank.at, rank.waits = rank.at + 1, False
        elif isinstance(message, Welcome | Ack):
            pass
        elif message.run == rank.run and rank.trains:
            self._hear_of_run(rank, message)

    def _hear_of_run(self, rank, message):
        if isinstance(message, StepsGranted):
            rank.granted = max(rank.granted, message.steps)
            if message.is_last:
                assert rank.last is None
                assert rank.begun <= message.steps
                rank.last = message.steps
        elif isinstance(message, EndAt):
            assert rank.begun <= message.step <= rank.last
            rank.last = rank.granted = message.step
            rank.is_held, rank.is_settled = False, True
        elif isinstance(message, GiveUpData):
            if not rank.given_up:
                self._give_up(rank)
        elif isinstance(message, CutAt):
            assert rank.finished <= message.step <= rank.begun
            rank.last = rank.granted = message.step
        elif isinstance(message, HoldRequested):
            if "hold" not in rank.asked:
                self._hold(rank)
        elif isinstance(message, CheckpointAt):
            assert rank.begun < message.step, "told of a checkpoint when its step had begun"
            rank.log.append(("checkpoint", rank.run, message.step))
        elif isinstance(message, PeerDataEnded):
            rank.other_end = message.step
            if rank.begun > message.step:
                rank.say(DataRemains(rank.run, rank.begun))


def play_on(play, choose):
    """Make moves until there is none; `choose` picks one."""
    while moves := play.moves():
        play.make(choose(moves))
    return play
