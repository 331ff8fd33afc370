"""The errors of checkpoints, which of them an `OSError` becomes, and when a checkpoint is due.

The errors are one family, so that a caller can treat a failed save in one `except`; the members
differ in what mends them: free some space, stop the other writer, restore a file, choose another
directory.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compiler.contract.errors import ActorflowError, CompileError
from memory.report import format_bytes

_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_DAMAGE_ERRNOS = frozenset(
    getattr(errno, name, errno.EIO)  # some of them exist on Linux only
    for name in ("ENOENT", "ENOTDIR", "EISDIR", "ELOOP", "ENXIO", "EIO", "EBADMSG", "EUCLEAN")
)


class CheckpointError(ActorflowError):
    """A checkpoint cannot be written or read; `__cause__` is the system's error, if any."""


class CheckpointDamaged(CheckpointError):
    """The bytes on the disk are not those of a complete checkpoint; it is never used."""


class CheckpointSpaceError(CheckpointError):
    """The disk or the quota is full; `path`, `need_bytes`, `free_bytes` say where and how much."""

    def __init__(self, path: Path, need_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"no space for a checkpoint in {path}: it needs {format_bytes(need_bytes)}, "
            f"{format_bytes(free_bytes)} are free; earlier checkpoints are untouched. "
            "Free some space (or quota), keep fewer with keep_last, or choose another directory"
        )
        self.path = path
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes


class CheckpointLocked(CheckpointError):
    """Another writer holds the run directory; `directory` and `owner` say which and who."""

    def __init__(self, directory: Path, owner: str) -> None:
        super().__init__(
            f"{directory} is being written by {owner}: two runs cannot share a run directory. "
            "Stop the other one or give this one a directory of its own"
        )
        self.directory = directory
        self.owner = owner


class CheckpointLockLost(CheckpointError):
    """The run directory or its lock is no longer the one this run took; `directory` says which.

    Nothing is written then: another run may own what lies at the path now.
    """

    def __init__(self, directory: Path, what: str) -> None:
        super().__init__(
            f"{directory} no longer belongs to this run: {what} during the run. Another run may"
            " own the directory that is there now, so nothing is written. Move it back, or start"
            " again with the directory that has the checkpoints"
        )
        self.directory = directory


class CheckpointDropped(CheckpointError):
    """A checkpoint of several ranks was not written, because `rank` could not write its part."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} could not write its part of a checkpoint: {reason}")
        self.rank = rank


class CheckpointUnfit(CheckpointError, CompileError):
    """A whole checkpoint, of another model or optimizer than the one that is to go on from it."""


class NoValidCheckpoint(CheckpointError):
    """There are checkpoints, and none can be used; a run never starts afresh over them."""


@contextmanager
def writing(
    path: Path, action: str, free_bytes: Callable[[Path], int], need_bytes: int = 0
) -> Iterator[None]:
    """Turn an `OSError` inside the block into one error of this family, with its cause.

    Args:
        path: the run directory the message names.
        action: what was being done, as in "cannot <action>".
        free_bytes: measures the free space, called only when it ran out.
        need_bytes: size of what is being written.

    Raises:
        CheckpointSpaceError: on ENOSPC and EDQUOT.
        CheckpointError: on every other `OSError`.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _SPACE_ERRNOS:
            try:
                free = free_bytes(path)
            except OSError:
                free = 0
            raise CheckpointSpaceError(path, need_bytes, free) from error
        raise CheckpointError(f"cannot {action} in {path}: {os_text(error)}") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an `OSError` inside the block into `CheckpointDamaged` or `CheckpointError`.

    Only what the checkpoint itself causes counts as damage (a missing file, a link, a bad sector)
    and lets a reader fall back to an older one. Want of permission, of descriptors or of memory
    does not: falling back then would throw good steps away.
    """
    try:
        yield
    except OSError as error:
        kind = CheckpointDamaged if error.errno in _DAMAGE_ERRNOS else CheckpointError
        raise kind(f"cannot read {path}: {os_text(error)}") from error


def os_text(error: OSError) -> str:
    """Return errno, text and path of a system error: `EIO (Input/output error) at /x`."""
    name = errno.errorcode.get(error.errno or 0, "OSError")
    text = error.strerror or os.strerror(error.errno or 0)
    where = f" at {error.filename}" if error.filename else ""
    return f"{name} ({text}){where}"


_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*\Z")
_HOW = 'give a number of steps (500) or a time ("30s", "10min", "1h")'


@dataclass(frozen=True, slots=True)
class Every:
    """A period in steps or in seconds of the caller's clock; exactly one of the two is set.

    In steps, a checkpoint is due at the first snapshot that reaches or passes a multiple of the
    period. A run that starts at a multiple has its snapshots just there; one that was stopped
    between two multiples has them as far after each.

    Raises:
        CheckpointError: none or both are set, or the period is not positive.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise CheckpointError(f"expected a period in steps or in seconds, got {self}; {_HOW}")
        period = self.steps if self.seconds is None else self.seconds
        if period is None or not 0 < period < float("inf"):
            raise CheckpointError(f"expected a positive period, got {period}; {_HOW}")

    @classmethod
    def parse(cls, text: object) -> Every:
        """Return the period a user wrote: `500`, `"500"`, `"500 steps"`, `"5s"`, `"10min"`, `"1h"`.

        Raises:
            CheckpointError: the text says nothing of the kind.
        """
        if isinstance(text, Every):
            return text
        if isinstance(text, int) and not isinstance(text, bool):
            return cls(steps=text)
        match = _TEXT.match(text) if isinstance(text, str) else None
        if match is not None:
            number, unit = match.groups()
            if unit in ("", "step", "steps") and "." not in number:
                return cls(steps=int(number))
            if unit in _SECONDS:
                return cls(seconds=float(number) * _SECONDS[unit])
        raise CheckpointError(f"cannot read the checkpoint period {text!r}; {_HOW}")

    def is_due(self, *, step: int, now_ns: int, last_step: int, last_ns: int) -> bool:
        """Whether to save after `step`, the last save (or the start) having been at `last_step`.

        Args:
            step: updates done so far.
            now_ns: the clock now, monotonic.
            last_step: updates done at the last save, or at the start of this process.
            last_ns: the clock then.
        """
        if step <= last_step:
            return False
        if self.steps is not None:
            return step // self.steps > last_step // self.steps
        return self.seconds is not None and now_ns - last_ns >= self.seconds * 1e9
