"""How a run fails: what a launch may raise, what reaches the caller, and what a fork leaves usable.

The locks of `forkable_lock` stand here because every room above shares them.
"""

from __future__ import annotations

import os
import threading
import weakref

from compiler.contract.errors import ActorflowError


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


def forkable_lock() -> threading.RLock:
    """Return a reentrant lock that a forked child finds open, unless the forking thread held it.

    Only that thread lives on in the child; whoever else held the lock would hold it for ever there.
    It is a lock of C: in an `__enter__` of Python's an interrupt could come between the lock and
    the `with` that lets go of it, and nobody would.
    """
    lock = threading.RLock()
    _all.add(lock)
    return lock


# Weak: a lock goes with the object that it guards.
_all: weakref.WeakSet[threading.RLock] = weakref.WeakSet()


def _open_all_in_child() -> None:
    for lock in list(_all):
        if not lock._is_owned():  # type: ignore[attr-defined]  # what Condition asks too
            lock._at_fork_reinit()  # type: ignore[attr-defined]  # what threading does to its own


os.register_at_fork(after_in_child=_open_all_in_child)
