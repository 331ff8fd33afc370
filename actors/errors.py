"""How a run fails: what a launch may raise on purpose, and what reaches the caller."""

from __future__ import annotations

from compiler.errors import ActorflowError


class SourceExhausted(Exception):
    """Raised by a source's launch when there is no more data; End flows through the plan."""


class ActorFailed(ActorflowError):
    """A launch raised. `__cause__` is the original exception with its own traceback.

    The message names actor, launch, firing and the user's line; `story` holds the last rows of what
    happened to this actor. `launch` is None where a device that runs a chain as a whole cannot tell
    which of its launches it was; `op` and `source` name what it can have been then.
    """

    def __init__(
        self,
        message: str,
        *,
        actor: str,
        op: str,
        scope: str,
        source: str,
        firing: int,
        launch: int | None,
        story: tuple[str, ...],
    ) -> None:
        super().__init__(message)
        self.actor = actor
        self.op = op
        self.scope = scope
        self.source = source
        self.firing = firing
        self.launch = launch
        self.story = story


class ForkedRun(ActorflowError):
    """A run was used in a child process that was forked from the one that runs it.

    The threads of a run stay with the process that started them.
    """


class ProtocolError(ActorflowError):
    """A message that the transition table does not allow; the machine is left unchanged."""
