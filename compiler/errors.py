"""The exception families. A message says what was expected, what came, where, and how to mend it.

Three families by who is at fault: the user's program (`CompileError`, `DataError`, ...), the
machine's limits (`OutOfMemory`, `DeviceError`), our own bug (`InternalError`).
"""

from __future__ import annotations


class ActorflowError(Exception):
    """Base of every error that actorflow raises on purpose."""


class CompileError(ActorflowError):
    """The user's program cannot be compiled: wrong types, no path to the loss, no feasible plan."""


class BudgetError(CompileError):
    """No plan of the job fits its byte budget.

    `smallest_bytes` is a budget that is feasible, the smallest one found with the job's options.
    """

    def __init__(self, message: str, *, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class PlanFormatError(ActorflowError):
    """A plan file is of another version, truncated or damaged."""


class OutOfMemory(ActorflowError):
    """The machine cannot hold what the plan needs; the message gives both sizes."""


class DeviceError(ActorflowError):
    """A device refused an allocation, a launch or a synchronisation."""


class InternalError(ActorflowError):
    """A bug of ours. Please report it with the message and the plan."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} (this is a bug in actorflow: please report it)")
