"""A launch that failed: its place in the user's program, its words, and what it means for a run.

A thread notes of a failure only what it knows. The words are made once, on the dispatcher's thread,
when the run fails (`explain`).
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.machine.errors import ActorFailed
from actors.machine.protocol import DeviceFailure
from compiler.contract.errors import PeerFailed
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import PORTED, Actor

_NAMED = 4
"""How many ops, and lines, stand for a launch that can be any of a chain."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error with the launch and firing that raised it; `launch` is None where unknown."""

    actor: int
    firing: int
    launch: int | None
    error: BaseException


def failed_launch(failure: DeviceFailure) -> Failure:
    """Return the failure of the launch that failed on a device."""
    # The cause is the kernel's own error; the wrapper only says which launch it was.
    cause = failure.__cause__ or failure
    return Failure(failure.actor, failure.firing, failure.launch, cause)


def root_failure(failure: Failure) -> Failure:
    """Return the failure of a device's launch where this one only found it, else itself."""
    error = failure.error
    return failed_launch(error) if isinstance(error, DeviceFailure) else failure


@dataclass(frozen=True, slots=True)
class LaunchPlace:
    """The place of a launch in the user's program; `what` names it within its actor."""

    what: str
    op: str
    scope: str
    source: str

    def __str__(self) -> str:
        return "".join(
            [
                self.what,
                f" in {self.scope!r}" if self.scope else "",
                f" ({self.source})" if self.source else "",
            ]
        )


def place_of(plan: Plan, actor: int, launch: int | None) -> LaunchPlace:
    """Return the place of a launch; a source or sink has a port instead of launches.

    An unknown launch (None) gets the ops and lines of all launches that it may be.
    """
    entry = plan.actors[actor]
    if entry.kind in PORTED:
        kind = entry.kind.value
        return LaunchPlace(f"its {kind} port", kind, "", _line(plan, entry))
    if launch is None and entry.launches:
        return _one_of(plan, entry)
    if launch is None or launch >= len(entry.launches):
        return LaunchPlace("its chain", entry.kind.value, "", _line(plan, entry))
    planned = entry.launches[launch]
    op = " + ".join(planned.made_of)
    what = f"launch {launch + 1} of {len(entry.launches)}, op {op!r}"
    return LaunchPlace(what, op, planned.scope, str(plan.sources[planned.source]))


def _one_of(plan: Plan, actor: Actor) -> LaunchPlace:
    """Return the place of some launch of an actor."""
    launches = actor.launches
    ops = _some([op for launch in launches for op in launch.made_of])
    lines = _some([str(plan.sources[launch.source]) for launch in launches])
    scopes = list(dict.fromkeys([launch.scope for launch in launches]))
    what = f"one of its {len(launches)} launches (ops {ops})"
    return LaunchPlace(what, ops, scopes[0] if len(scopes) == 1 else "", lines)


def _some(names: list[str]) -> str:
    """Return the first of some names in words."""
    distinct = list(dict.fromkeys([name for name in names if name]))
    more = ", ..." if len(distinct) > _NAMED else ""
    return ", ".join(distinct[:_NAMED]) + more


def explain(plan: Plan, failure: Failure, story: tuple[str, ...]) -> ActorFailed:
    """Return the error to raise; its cause is the original exception with its own traceback."""
    name = plan.actors[failure.actor].name
    place = place_of(plan, failure.actor, failure.launch)
    error = failure.error
    message = (
        f"actor {name!r} failed in firing {failure.firing}: {place} raised"
        f" {type(error).__name__}: {error}"
    )
    if story:
        message += "\nLast messages to the actor:" + "".join([f"\n  {row}" for row in story])
    failed = ActorFailed(
        message,
        actor=name,
        op=place.op,
        scope=place.scope,
        source=place.source,
        firing=failure.firing,
        launch=failure.launch,
        story=story,
    )
    failed.__cause__ = error
    return failed


def is_same_failure(failed: ActorFailed, by: BaseException) -> bool:
    """Whether an error is about the same launch: every wait for a failed device reports it.

    An unknown launch matches none.
    """
    if not isinstance(by, ActorFailed) or failed.launch is None:
        return False
    reported = (by.actor, by.firing, by.launch)
    return (failed.actor, failed.firing, failed.launch) == reported


def _line(plan: Plan, actor: Actor) -> str:
    """Return the user's line of the first field that a port fills or reads."""
    registers = [port.register for port in actor.inputs + actor.outputs]
    lines = [str(plan.sources[f.source]) for f in plan.fields if f.register in registers]
    return lines[0] if lines else ""


class RunOutcome:
    """How a run ends: `failure` is what ended it, or None.

    `is_closing` says that its end was asked for, `is_cut` that it ends in the middle of a step:
    what launches raise from then on is no failure. Any thread may set the two, and `report`; all
    else belongs to the dispatcher's.

    Args:
        plan: of the run, for words.
        sources: actors that fail because their port is closed, once another has failed.
    """

    __slots__ = ("_plan", "_reported", "_sources", "failure", "is_closing", "is_cut")

    def __init__(self, plan: Plan, sources: frozenset[int]) -> None:
        self.failure: BaseException | None = None
        self.is_closing = self.is_cut = False
        self._plan, self._sources = plan, sources
        # Written by workers before they post FAILED; read when that message is taken.
        self._reported: dict[int, Failure] = {}

    def report(self, failure: Failure) -> None:
        """Keep a failure until its message arrives."""
        self._reported[failure.actor] = failure

    def take_reported(self, actor: int) -> Failure:
        """Return what an actor's message FAILED is about."""
        return root_failure(self._reported.pop(actor))

    def fail(self, error: BaseException) -> None:
        """End the run with an error that no launch raised; the first failure counts."""
        if self.failure is None:
            self.failure = error

    def fail_by(self, failure: Failure, story: tuple[str, ...]) -> None:
        """Keep the first failure of a launch, with its actor's story; note the others on it.

        What a launch raises because its port was closed, or the run was cut, is none.
        """
        if self.is_closing or self.is_cut:
            return
        if self.failure is None:
            self.failure = explain(self._plan, failure, story)
        # A source fails here because its port was closed after the first failure, and a launch that
        # waits for other ranks because they were released: that says nothing.
        elif failure.actor not in self._sources and not isinstance(failure.error, PeerFailed):
            also = explain(self._plan, failure, ())
            if not is_same_failure(also, self.failure):
                self.failure.add_note(f"at the same time {also}")

    def note_closing(self, errors: tuple[BaseException, ...]) -> None:
        """Note on the failure what closing the sources raised."""
        for error in errors:
            if self.failure is not None:
                self.failure.add_note(f"closing a source then raised {error!r}")

    def forget_reported(self) -> None:
        """Drop the errors that nobody will ask for: they may keep an arena alive."""
        self._reported.clear()
