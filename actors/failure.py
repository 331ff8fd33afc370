"""From an exception in a launch to the error that the caller sees.

A worker notes only what it knows; the words are made once, when the run fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.errors import ActorFailed
from compiler.plan import Actor, ActorKind, Plan


@dataclass(frozen=True, slots=True)
class Failure:
    """Which launch of which firing raised what."""

    actor: int
    firing: int
    launch: int
    error: BaseException


def explain(plan: Plan, failure: Failure, story: tuple[str, ...]) -> ActorFailed:
    """Return the error to raise; its cause is the original exception with its own traceback."""
    actor = plan.actors[failure.actor]
    if actor.kind in (ActorKind.SOURCE, ActorKind.SINK):
        what, op, scope, source = (
            f"its {actor.kind.value} port",
            actor.kind.value,
            "",
            _line(plan, actor),
        )
    else:
        launch = actor.launches[failure.launch]
        op, scope, source = launch.op, launch.scope, str(plan.sources[launch.source])
        what = f"launch {failure.launch + 1} of {len(actor.launches)}, op {op!r}"
    where = "".join([f" in {scope!r}" if scope else "", f" ({source})" if source else ""])
    error = failure.error
    message = (
        f"actor {actor.name!r} failed in firing {failure.firing}: {what}{where} raised"
        f" {type(error).__name__}: {error}"
    )
    if story:
        message += "\nLast messages to the actor:" + "".join([f"\n  {row}" for row in story])
    failed = ActorFailed(
        message,
        actor=actor.name,
        op=op,
        scope=scope,
        source=source,
        firing=failure.firing,
        launch=failure.launch,
        story=story,
    )
    failed.__cause__ = error
    return failed


def _line(plan: Plan, actor: Actor) -> str:
    """Return the user's line of the first field that a port fills or reads."""
    registers = [port.register for port in actor.inputs + actor.outputs]
    lines = [str(plan.sources[f.source]) for f in plan.fields if f.register in registers]
    return lines[0] if lines else ""
