"""`WriterLock`: the right to write a run directory, and whether it is still this run's.

The lock is a `flock` on the file `.lock` in the directory; the system drops it when the process
dies. A flock belongs to the file and not to its path: once somebody moves the directory away,
removes it or removes the lock, another run can lock what now lies at the path, and both would
write. So a writer compares what it holds with what the path leads to before it writes.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

from actorflow.checkpoint.errors import CheckpointLocked, CheckpointLockLost
from actorflow.checkpoint.fs import FileId, Fs
from actorflow.checkpoint.layout import LOCK_NAME


class WriterLock:
    """The lock of an existing run directory, held from construction to `release`.

    Args:
        fs: the file system.
        directory: the run directory.

    Raises:
        CheckpointLocked: another manager, in this process or another, is the writer.
        CheckpointLockLost: the directory or its lock was replaced while the lock was taken.
        OSError: the lock cannot be made.
    """

    def __init__(self, fs: Fs, directory: Path) -> None:
        self._fs = fs
        self._directory = directory
        self._path = directory / LOCK_NAME
        self._directory_id = fs.stat(directory).identity
        try:
            fd = fs.lock(self._path, f"process {os.getpid()} on {platform.node()}")
        except BlockingIOError as error:
            raise CheckpointLocked(directory, str(error.strerror)) from None
        self._fd: int | None = fd
        self._owner_pid = os.getpid()
        try:
            self._lock_id = fs.stat_open(fd).identity
            self.check()
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Return if the path still leads to what is locked; writes nothing.

        Raises:
            CheckpointLockLost: the directory or the lock was moved, removed or replaced, or this
                process was forked from the writer.
            OSError: the system cannot say.
        """
        if self._owner_pid != os.getpid():
            what = f"this process was forked from the writer, process {self._owner_pid}"
            raise CheckpointLockLost(self._directory, what)
        # Looked for first and told last: a lock that is gone with its directory was not removed.
        lock = self._found(self._path)
        directory = self._found(self._directory)
        if directory != self._directory_id:
            what = "the directory was " + ("moved or removed" if directory is None else "replaced")
            raise CheckpointLockLost(self._directory, what)
        if lock != self._lock_id:
            what = f"its {LOCK_NAME} was " + ("removed" if lock is None else "replaced")
            raise CheckpointLockLost(self._directory, what)

    def release(self) -> None:
        """Stop being the writer. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):  # nothing unsynced hangs on this descriptor
                self._fs.close(fd)

    def _found(self, path: Path) -> FileId | None:
        try:
            return self._fs.stat(path).identity
        except (FileNotFoundError, NotADirectoryError):
            return None
