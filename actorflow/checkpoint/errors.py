"""The errors of checkpoints, and which of them an `OSError` becomes.

One family, so that a caller can treat a failed save in one `except`; the members differ in what
mends them: free some space, stop the other writer, restore a file, choose another directory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from compiler.errors import ActorflowError, CompileError
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
            f"{directory} is no longer this run's: {what} while it went on, and another run may"
            " own what is there now, so nothing is written. Put it back as it was, or start again"
            " with the directory that holds the checkpoints"
        )
        self.directory = directory


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
