"""The watchdog: a thread that says when a run stands still, who holds it up, and when it goes on.

It waits on the end of the run and looks at it a few times per limit. It reports a stall once, again
whenever its length has doubled, and says when the run goes on. It never ends a run: a slow disk is
no deadlock.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from actors.loop.failure import place_of
from actors.loop.worker import RunningLaunch
from actors.machine.table import OUTSIDE, MachineTable
from actors.machine.transitions import Message, State, kind_of, subject_of
from compiler.contract.files import open_regular
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import ActorKind

# `diagnose` is pure: from a `RunSnapshot` it follows the waits, from the sinks to an actor that is
# running (a source that blocks in user code, a kernel that hangs, a sink whose callback does not
# return) or round a cycle. An actor waits for *all* that it lacks, so a cycle never resolves. A run
# whose sources have used up what was admitted is idle, and no stall.
#
# Source: waits-for graphs (Holt, "Some Deadlock Properties of Computer Systems", 1972).

_STARTED = (State.FIRING, State.FLUSHING)


class WaitKind(Enum):
    """What an actor waits for."""

    INPUT = "input"
    """A token, or the end, of a register, from its producer."""
    REGISTER = "register"
    """A free slot of a register, from its consumer."""
    STREAM = "stream"
    """The stream, or the dispatcher, from the actor that occupies it."""
    PEER = "peer"
    """Another rank, in a collective operation."""
    ADMISSION = "admission"
    """The permission for another step, from outside."""


@dataclass(frozen=True, slots=True)
class WaitReason:
    """One thing that an actor waits for. `on` is the actor that must act, or `OUTSIDE`."""

    cause: WaitKind
    on: int
    register: str = ""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run at one moment. Columns are by actor.

    `lacks` are the messages that an actor waits for (`Machine.missing_messages`); `in_flight` says
    what runs, by actor; `is_delivered` is False where a thread has ended a firing whose message the
    dispatcher has not taken. `dispatcher` is the actor whose chain it runs, or None.
    """

    plan: Plan
    table: MachineTable
    states: tuple[State, ...]
    firings: tuple[int, ...]
    lacks: tuple[tuple[int, ...], ...]
    in_flight: Mapping[int, RunningLaunch]
    is_delivered: tuple[bool, ...]
    dispatcher: int | None
    is_halted: bool
    now_ns: int
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ActorReport:
    """One actor in a stalled run: its state, its last firing, its waits and that in words.

    `stack` are the innermost calls of a launch that runs.
    """

    name: str
    state: str
    firing: int
    waits: tuple[WaitReason, ...]
    doing: str
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stall:
    """Why a run stands still. `roots` are the actors that hold it up, by name.

    `is_deadlock` says that they wait for one another; else each of them is running. `reason` is one
    line; `actors` are those that have not ended; `messages` the last ones, oldest first.
    """

    seconds: float
    roots: tuple[str, ...]
    is_deadlock: bool
    reason: str
    actors: tuple[ActorReport, ...]
    messages: tuple[str, ...]

    def lines(self) -> tuple[str, ...]:
        """Return the report in words, without the messages."""
        head = f"no firing began or ended for {self.seconds:.0f} s: {self.reason}"
        width = max([len(actor.name) for actor in self.actors], default=0)
        rows = [head]
        for actor in self.actors:
            rows.append(f"  {actor.name:<{width}}  firing {actor.firing}, {actor.doing}")
            rows += [f"  {'':<{width}}    {call}" for call in actor.stack]
        return tuple(rows)


def diagnose(situation: RunSnapshot, seconds: float) -> Stall | None:
    """Return why nothing happens, or None when the run only waits for more steps.

    Linear in actors and edges.
    """
    waits = tuple([_waits_of(situation, a) for a in range(situation.table.num_actors)])
    is_open = [s not in (State.ENDED, State.FAILED) for s in situation.states]
    # From the sinks first: whatever they wait for holds up the run, other actors that run may not.
    sinks = [a for a, edges in enumerate(situation.table.outputs) if not edges and is_open[a]]
    reachable = _reached(waits, sinks)
    # Nothing that runs was reached, or the run is ending: then any open actor may be the cause.
    if situation.is_halted or not any(a in situation.in_flight for a in reachable):
        reachable = _reached(waits, [a for a, still in enumerate(is_open) if still])
    roots = tuple(sorted([a for a in reachable if a in situation.in_flight]))
    cycle: tuple[int, ...] = ()
    if not roots:
        cycle = () if situation.is_halted else _cycle(waits, reachable)
        if not cycle:
            return None
    names = situation.table.names
    return Stall(
        seconds,
        tuple([names[a] for a in roots or cycle]),
        bool(cycle),
        _reason(situation, waits, roots, cycle),
        tuple([_report_on(situation, waits[a], a) for a, still in enumerate(is_open) if still]),
        situation.messages,
    )


def _waits_of(situation: RunSnapshot, actor: int) -> tuple[WaitReason, ...]:
    """Return what an actor waits for; nothing when it runs on its own account."""
    table, kind = situation.table, situation.plan.actors[actor].kind
    if actor in situation.in_flight:
        return (WaitReason(WaitKind.PEER, OUTSIDE),) if kind is ActorKind.COMM else ()
    if situation.states[actor] in _STARTED:
        occupant = _occupant(situation, actor)
        return () if occupant is None else (WaitReason(WaitKind.STREAM, occupant),)
    waits = []
    for code in situation.lacks[actor]:
        edge = table.edges[subject_of(code)]
        if kind_of(code) is Message.FREE:
            waits.append(WaitReason(WaitKind.REGISTER, edge.consumer, edge.name))
        elif edge.producer == OUTSIDE:
            waits.append(WaitReason(WaitKind.ADMISSION, OUTSIDE))
        else:
            waits.append(WaitReason(WaitKind.INPUT, edge.producer, edge.name))
    return tuple(waits)


def _occupant(situation: RunSnapshot, actor: int) -> int | None:
    """Return the actor that keeps a started firing from beginning, or its message waiting."""
    # Not delivered: the thread is done, and the dispatcher is too busy to take its message.
    if situation.table.is_detached[actor] and situation.is_delivered[actor]:
        stream = situation.table.streams[actor]
        on_stream = [a for a in situation.in_flight if situation.table.streams[a] == stream]
        return on_stream[0] if on_stream else situation.dispatcher
    return situation.dispatcher


def _reached(waits: tuple[tuple[WaitReason, ...], ...], starts: Iterable[int]) -> tuple[int, ...]:
    """Return `starts` and all actors that they wait for, directly or through others."""
    # A dict keeps the order of discovery, so that reports of one situation are alike.
    seen = dict.fromkeys(starts)
    stack = list(seen)
    while stack:
        for wait in waits[stack.pop()]:
            if wait.on != OUTSIDE and wait.on not in seen:
                seen[wait.on] = None
                stack.append(wait.on)
    return tuple(seen)


def _cycle(waits: tuple[tuple[WaitReason, ...], ...], seen: Iterable[int]) -> tuple[int, ...]:
    """Return actors that wait for one another, in order, the lowest first; () if there are none."""
    # Depth-first search with an explicit stack: long chains would exceed Python's recursion limit.
    colour: dict[int, bool] = {}  # True while an actor is on the path
    for root in sorted(seen):
        path = [root] if root not in colour else []
        for_each = [iter([w.on for w in waits[a] if w.on != OUTSIDE]) for a in path]
        colour.update(dict.fromkeys(path, True))
        while path:
            on = next(for_each[-1], None)
            if on is None:
                colour[path.pop()] = False
                for_each.pop()
            elif colour.get(on):
                loop = path[path.index(on) :]
                # Rotated to begin with the lowest actor, so that one cycle always reads the same.
                first = loop.index(min(loop))
                return tuple(loop[first:] + loop[:first])
            elif on not in colour:
                colour[on] = True
                path.append(on)
                for_each.append(iter([w.on for w in waits[on] if w.on != OUTSIDE]))
    return ()


def _reason(
    situation: RunSnapshot,
    waits: tuple[tuple[WaitReason, ...], ...],
    roots: tuple[int, ...],
    cycle: tuple[int, ...],
) -> str:
    names = situation.table.names
    if cycle:
        steps = [
            next(w for w in waits[a] if w.on == on)
            for a, on in zip(cycle, (*cycle[1:], cycle[0]), strict=True)
        ]
        chain = ", ".join(
            [
                f"{names[a]!r} waits for {_words(names, w)}"
                for a, w in zip(cycle, steps, strict=True)
            ]
        )
        # Only missing slots can be mended by a plan; a cycle of inputs alone never had its tokens.
        full = list(dict.fromkeys([w.register for w in steps if w.cause is WaitKind.REGISTER]))
        mend = (
            f"; more slots of {' or '.join(map(repr, full))} would let it continue" if full else ""
        )
        return f"the actors wait for one another: {chain}{mend}"
    text = "; ".join([f"{names[a]!r} {_doing(situation, waits[a], a)}" for a in roots])
    return f"{text}; after a failure the run waits for it" if situation.is_halted else text


def _report_on(situation: RunSnapshot, waits: tuple[WaitReason, ...], actor: int) -> ActorReport:
    running = situation.in_flight.get(actor)
    return ActorReport(
        situation.table.names[actor],
        situation.states[actor].name,
        situation.firings[actor] - 1,
        waits,
        _doing(situation, waits, actor),
        () if running is None else running.stack,
    )


def _doing(situation: RunSnapshot, waits: tuple[WaitReason, ...], actor: int) -> str:
    names = situation.table.names
    running = situation.in_flight.get(actor)
    if running is not None:
        place = place_of(situation.plan, actor, running.launch)
        seconds = (situation.now_ns - running.since_ns) / 1e9
        text = f"has been in {place} for {seconds:.0f} s"
        if running.where:
            text += f", now at {running.where}"
        if waits:
            text += "; it waits for another rank"
        return text
    if waits:
        return "waits for " + " and ".join([_words(names, wait) for wait in waits])
    if situation.states[actor] in _STARTED:
        return "was started and dropped" if situation.is_halted else "is just beginning or ending"
    return "starts nothing more" if situation.is_halted else "lacks nothing"


def _words(names: tuple[str, ...], wait: WaitReason) -> str:
    if wait.cause is WaitKind.INPUT:
        return f"input {wait.register!r} from {names[wait.on]!r}"
    if wait.cause is WaitKind.REGISTER:
        return f"a free slot of register {wait.register!r} from {names[wait.on]!r}"
    if wait.cause is WaitKind.STREAM:
        return f"its stream, which {names[wait.on]!r} occupies"
    return "another rank" if wait.cause is WaitKind.PEER else "more steps to be admitted"


MESSAGES_TOLD = 1000
"""How many of the last messages a report holds."""

_LEAST_INTERVAL_S, _MOST_INTERVAL_S = 1.0, 3600.0
_LOOKS_PER_LIMIT = 4


@dataclass(frozen=True, slots=True)
class WatchdogOptions:
    """How a run is watched.

    Args:
        seconds: Time without a firing before a stall is reported; 0 disables the watchdog.
        on_stall: Called on the watchdog's thread with every report.
        folder: Where every report is appended to `stall.txt`, or None.
    """

    seconds: float = 60.0
    on_stall: Callable[[Stall], object] | None = None
    folder: Path | None = None


class Watchdog:
    """Looks at a run now and then, and reports when it stands still.

    Args:
        watch: Limit, listener and folder.
        progress: Returns a value that changes whenever a firing begins or ends.
        examine: Returns the situation now.
        wait: Waits that many seconds or until the run is over; returns whether it is over.
        report: Takes the text of a report.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        watch: WatchdogOptions,
        *,
        progress: Callable[[], object],
        examine: Callable[[], RunSnapshot],
        wait: Callable[[float], bool],
        report: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch = watch
        self._progress = progress
        self._examine = examine
        self._wait = wait
        self._clock = clock
        self._report = report
        self.thread = threading.Thread(target=self.run, name="actorflow-watchdog", daemon=True)

    def run(self) -> None:
        """Watch until the run is over. A stall is seen at most a quarter of the limit late."""
        limit_s = self._watch.seconds
        # However long the limit is, the wait stays far below the largest timeout of a lock.
        interval_s = max(_LEAST_INTERVAL_S, min(limit_s / _LOOKS_PER_LIMIT, _MOST_INTERVAL_S))
        progress, since, due_s = self._progress(), self._clock(), limit_s
        while not self._wait(interval_s):
            now, stood_s = self._progress(), self._clock() - since
            if now != progress:
                if due_s > limit_s:
                    self._report(f"the run continues after about {stood_s:.0f} s")
                # The clock is read once per look; `since` moves to that reading.
                progress, since, due_s = now, since + stood_s, limit_s
            elif stood_s >= due_s:
                stall = diagnose(self._examine(), stood_s)
                if stall is not None:
                    self._tell(stall, is_first=due_s == limit_s)
                    # Doubling: n hours of standing still make some log2(n) reports.
                    due_s = 2 * stood_s

    def _tell(self, stall: Stall, *, is_first: bool) -> None:
        """Report a stall; the messages are told once, and in the file rather than in the log."""
        lines, messages = list(stall.lines()), []
        if is_first:
            messages = [f"the last {len(stall.messages)} messages:", *stall.messages]
        folder = self._watch.folder
        if folder is not None:
            path = folder / "stall.txt"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                fd = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                with os.fdopen(fd, "a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write("\n".join([*lines, *messages, "", ""]))
                messages = [f"the last messages are in {path}"] if is_first else []
            # A full disk must not end the watchdog: the report goes on in the log.
            except OSError as error:
                lines.append(f"{path} cannot be written: {error.strerror}")
        self._report("\n".join([*lines, *messages]))
        if self._watch.on_stall is not None:
            try:
                self._watch.on_stall(stall)
            # The user's listener; the watchdog outlives what it raises.
            except Exception as error:
                self._report(f"on_stall raised {error!r}; the run continues")
