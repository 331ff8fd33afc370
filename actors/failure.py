"""From an exception in a launch to the error that the caller sees.

A worker notes only what it knows; the words are made once, when the run fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.device.protocol import DeviceFailure
from actors.errors import ActorFailed
from compiler.plan import PORTED, Actor, Plan

_NAMED = 4
"""How many ops, and lines, stand for a launch that can be any of a chain."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Which launch of which firing raised what; `launch` is None where that is unknown."""

    actor: int
    firing: int
    launch: int | None
    error: BaseException


def blamed(failure: DeviceFailure) -> Failure:
    """Return the failure of the launch that failed on a device."""
    cause = failure.__cause__ or failure
    return Failure(failure.actor, failure.firing, failure.launch, cause)


def traced(failure: Failure) -> Failure:
    """Return the failure of a device's launch where this one only found it, else itself."""
    error = failure.error
    return blamed(error) if isinstance(error, DeviceFailure) else failure


@dataclass(frozen=True, slots=True)
class LaunchPlace:
    """Where in the user's program a launch belongs; `what` names it within its actor."""

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
    """Return the place of a launch; a source or sink has its port in place of launches.

    Of an unknown launch (None), the ops and lines of all that it can be.
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
    known = list(dict.fromkeys([name for name in names if name]))
    more = ", ..." if len(known) > _NAMED else ""
    return ", ".join(known[:_NAMED]) + more


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


def is_told(failed: ActorFailed, by: BaseException) -> bool:
    """Whether an error is of the same launch: every wait for a device tells of the one that failed.

    A launch that is not known may be any other.
    """
    if not isinstance(by, ActorFailed) or failed.launch is None:
        return False
    told = (by.actor, by.firing, by.launch)
    return (failed.actor, failed.firing, failed.launch) == told


def _line(plan: Plan, actor: Actor) -> str:
    """Return the user's line of the first field that a port fills or reads."""
    registers = [port.register for port in actor.inputs + actor.outputs]
    lines = [str(plan.sources[f.source]) for f in plan.fields if f.register in registers]
    return lines[0] if lines else ""
