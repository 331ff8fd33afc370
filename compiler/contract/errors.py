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


class PeerFailed(ActorflowError):
    """Another rank of the run has failed, or does not do what this one does.

    `rank` is the one at fault, where that is known.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


def bad_index(
    what: str, value: int, position: tuple[int, ...], extent: int, axes: tuple[int, ...] = ()
) -> IndexError:
    """Return the error of an index outside of 0..extent - 1: `what` it is ("id"), and where.

    With `axes` the value is what `compiler.ops.families.embedding.FLAT_INDEX` made of a bad index
    of one of several axes of these extents; it is told as the user gave it.
    """
    where = position[0] if len(position) == 1 else position
    allowed = f"0..{extent - 1}" if extent else "an empty range"
    if axes and value >= extent:
        beyond, number = divmod(value - extent, len(axes))
        what, extent = "index", axes[number]
        value = -extent - 1 - beyond // 2 if beyond % 2 else extent + beyond // 2
        allowed = f"{-extent}..{extent - 1}" if extent else "an empty range"
    return IndexError(f"{what} {value} at position {where} is outside {allowed}")


class InternalError(ActorflowError):
    """A bug of ours. Please report it with the message and the plan.

    `reason` is what was said, for whoever tells it on.
    """

    def __init__(self, message: str) -> None:
        self.reason = message
        super().__init__(f"{message} (this is a bug in actorflow: please report it)")
