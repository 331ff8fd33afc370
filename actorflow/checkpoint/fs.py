"""The one door to the disk: every file access of the checkpoint code is a call of an `Fs`.

So the same code runs on the real disk, on one that loses power at any moment (`testing.LogFs`) and
on one whose k-th call fails (`testing.FaultFs`). The door is wide for that reason: what does not go
through it cannot be checked. Descriptors are plain ints, which keeps all calls at one object.

What the durability of POSIX asks for: `fsync(fd)` makes the bytes of a file durable, but not its
name; `fsync_dir` makes the names inside one directory durable, but not what they lead to. On Linux
both reach the device; on macOS `fsync` stops at the drive's own cache.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_IO_BYTES = 8 << 20
"""Most bytes that one `write` or `readinto` is asked for."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,119}\Z")
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|\Z)")  # devices on some systems
_OWNER_BYTES = 200

_locks: set[int] = set()
"""Descriptors that hold a lock. State of the process, because what a fork inherits is."""

_no_fork = threading.RLock()
"""Held while a lock is taken: no child is forked between its descriptor and the note of it."""


FileId = tuple[int, int]
"""Device and inode: what a name leads to, whatever it is called."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """Kind, size, time of last change and identity of what a name or a descriptor leads to."""

    is_directory: bool
    size_bytes: int
    modified_ns: int
    identity: FileId


class Fs:
    """The operating system's files: all that checkpoints ask of it. Methods may raise `OSError`."""

    def lock(self, path: Path, owner: str) -> int:
        """Create and lock the file, note `owner` in it, return the descriptor that holds the lock.

        It is a non-blocking exclusive `flock`, which the system drops when the process dies.

        A `flock` belongs to the open file, which a forked child shares: it would outlive us in
        children of a data source. So a child lets go of it at once. (A POSIX lock would not be
        shared, but any `close` of the file in this process would drop it.)

        Raises:
            BlockingIOError: somebody else holds it; `strerror` says who.
        """
        with _no_fork:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(fd, _OWNER_BYTES, 0).decode("utf-8", "replace").strip()
                os.close(fd)
                raise BlockingIOError(error.errno, holder or "another process", str(path)) from None
            except OSError:
                os.close(fd)
                raise
            _locks.add(fd)
        with suppress(OSError):  # a courtesy to whoever is refused: a full disk must not forbid it
            os.ftruncate(fd, 0)
            os.write(fd, owner.encode()[:_OWNER_BYTES])
        return fd

    def create(self, path: Path) -> int:
        """Create a file to write; a name that exists, even as a dangling link, is refused."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def open_read(self, directory: Path, name: str) -> int:
        """Open the regular file `name` in `directory`, following no symbolic link at either.

        Through a descriptor of the directory; O_NONBLOCK so that a FIFO cannot block us.

        Raises:
            OSError: ENXIO if `name` is not a plain file or not a permitted name, else the system's.
        """
        if not is_safe_name(name):
            raise OSError(errno.ENXIO, "not a permitted file name", repr(name))
        directory_fd = os.open(
            directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=directory_fd)
        finally:
            os.close(directory_fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.ENXIO, "not a regular file", str(directory / name))
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        """Append from `data`; return how many bytes were taken, which may be fewer than offered."""
        return os.write(fd, data)

    def readinto(self, fd: int, buffer: memoryview) -> int:
        """Fill the front of `buffer`; return how many bytes came, 0 at the end of the file."""
        return os.readv(fd, [buffer])

    def stat_open(self, fd: int) -> FileStat:
        """Return what an open descriptor leads to."""
        return _stat_of(os.fstat(fd))

    def fsync(self, fd: int) -> None:
        """Make a file durable, by the descriptor that wrote: no write-back error is missed."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor; a lock ends here, whoever else has its file open."""
        if fd in _locks:
            _locks.remove(fd)
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked just now may not have let go of it yet
        os.close(fd)

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def mkdir(self, path: Path) -> None:
        """Create a directory whose parent exists."""
        os.mkdir(path)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or directory another name, atomically."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a name that is not a directory."""
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def listdir(self, path: Path) -> list[str]:
        """Return the names in a directory, sorted, since its order is the file system's own."""
        return sorted(os.listdir(path))

    def stat(self, path: Path) -> FileStat:
        """Return what a name leads to, without following a symbolic link."""
        return _stat_of(os.lstat(path))

    def free_bytes(self, path: Path) -> int:
        """Return the space left for us on the file system of `path`, no superuser's reserve."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize


def _stat_of(status: os.stat_result) -> FileStat:
    return FileStat(
        stat.S_ISDIR(status.st_mode),
        status.st_size,
        status.st_mtime_ns,
        (status.st_dev, status.st_ino),
    )


def is_safe_name(name: object) -> bool:
    """Whether a manifest may name a file so: lower case, no separator, nothing hidden or reserved.

    Lower case only, so that no two names fall together on a file system that ignores case.
    """
    return (
        isinstance(name, str)
        and _NAME.match(name) is not None
        and not name.endswith(".")
        and _RESERVED.match(name) is None
    )


def _let_go_in_child() -> None:
    """Take the place of each lock by a file that is nothing.

    The numbers stay taken: whoever still closes one in the child closes nothing of the child's.
    """
    _no_fork.release()
    for fd in _locks:
        os.close(fd)  # first, so that the lock is gone even where no file can be opened
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if nothing != fd:  # the lowest free number may be another
            os.dup2(nothing, fd, inheritable=False)
            os.close(nothing)
    _locks.clear()


os.register_at_fork(
    before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_let_go_in_child
)


def write_all(fs: Fs, fd: int, data: memoryview) -> None:
    """Write every byte of `data` (a view of bytes), however short the single writes are."""
    while data:
        taken = fs.write(fd, data[:MAX_IO_BYTES])
        if taken <= 0:
            raise OSError(errno.EIO, "a write took no bytes")
        data = data[taken:]


def read_up_to(fs: Fs, fd: int, buffer: memoryview) -> int:
    """Fill `buffer` (a view of bytes); return how many came, fewer only at the end of the file."""
    filled = 0
    while filled < len(buffer):
        came = fs.readinto(fd, buffer[filled : filled + MAX_IO_BYTES])
        if came == 0:
            break
        filled += came
    return filled


def remove_tree(fs: Fs, path: Path) -> None:
    """Remove a name and all below it; a symbolic link is removed, not followed."""
    if not fs.stat(path).is_directory:
        fs.unlink(path)
        return
    for name in fs.listdir(path):
        remove_tree(fs, path / name)
    fs.rmdir(path)
