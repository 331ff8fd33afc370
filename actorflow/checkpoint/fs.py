"""The disk as checkpoints use it: `Fs`, the names in a run directory, and the lock of its writer.

Each file access of the checkpoint code is a call of an `Fs`. So the same code runs on the real
disk, on one that loses power at any moment and on one whose k-th call fails, as the tests have
them. `Fs` has many methods for that reason: what does not go through it cannot be checked.
Descriptors are plain ints, which keeps all calls at one object.

What the durability of POSIX asks for: `fsync(fd)` makes the bytes of a file durable, but not its
name; `fsync_dir` makes the names inside one directory durable, but not what they lead to. On Linux
both reach the device; on macOS `fsync` stops at the drive's own cache.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import stat
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from actorflow.checkpoint.errors import CheckpointLocked, CheckpointLockLost
from compiler.contract.files import create_regular, open_regular

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
            fd = open_regular(path, os.O_RDWR | os.O_CREAT, mode=0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(fd, _OWNER_BYTES, 0).decode("utf-8", "replace").strip()
                os.close(fd)
                # The file is empty for a moment between its lock and the note of the owner.
                raise BlockingIOError(error.errno, holder or "another process", str(path)) from None
            except OSError:
                os.close(fd)
                raise
            # Noted before a fork may happen, so that the child closes it.
            _locks.add(fd)
        with suppress(OSError):  # a courtesy to whoever is refused: a full disk must not forbid it
            os.ftruncate(fd, 0)
            os.write(fd, owner.encode()[:_OWNER_BYTES])
        return fd

    def lock_owner(self, path: Path) -> str:
        """Return what the last one to lock a file noted in it; "" where nobody did."""
        try:
            fd = open_regular(path, os.O_RDONLY)
        except FileNotFoundError:
            return ""
        try:
            return os.pread(fd, _OWNER_BYTES, 0).decode("utf-8", "replace").strip()
        finally:
            os.close(fd)

    def create(self, path: Path) -> int:
        """Create a file to write; a name that exists, even as a dangling link, is refused."""
        return create_regular(path, 0o644)

    def open_read(self, directory: Path, name: str) -> int:
        """Open the regular file `name` in `directory`, following no symbolic link at either.

        Through a descriptor of the directory, which may be replaced by another meanwhile.

        Raises:
            OSError: ENXIO if `name` is not a plain file or not a permitted name, else the system's.
        """
        if not is_safe_name(name):
            raise OSError(errno.ENXIO, "not a permitted file name", repr(name))
        # Name and directory are resolved in two steps, with O_NOFOLLOW at each: a link at either is
        # refused.
        directory_fd = os.open(
            directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
        try:
            return open_regular(name, os.O_RDONLY, dir_fd=directory_fd)
        except OSError as error:
            error.filename = str(directory / name)
            raise
        finally:
            os.close(directory_fd)

    def write(self, fd: int, data: memoryview) -> int:
        """Append from `data`; return how many bytes were taken, which may be fewer than offered."""
        return os.write(fd, data)

    def readinto(self, fd: int, buffer: memoryview) -> int:
        """Fill the front of `buffer`; return how many bytes came, 0 at the end of the file."""
        return os.readv(fd, [buffer])

    def seek(self, fd: int, offset_bytes: int) -> None:
        """Have the next `readinto` begin at an offset from the front of the file."""
        os.lseek(fd, offset_bytes, os.SEEK_SET)

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
    # The child inherits the lock as held by this thread.
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
        # Linux writes at most 2 GiB at a call, and other systems fail above that.
        count = fs.write(fd, data[:MAX_IO_BYTES])
        if count <= 0:
            raise OSError(errno.EIO, "a write wrote 0 bytes")
        data = data[count:]


def read_up_to(fs: Fs, fd: int, buffer: memoryview) -> int:
    """Fill `buffer` (a view of bytes); return how many came, fewer only at the end of the file."""
    filled = 0
    while filled < len(buffer):
        count = fs.readinto(fd, buffer[filled : filled + MAX_IO_BYTES])
        if count == 0:
            break
        filled += count
    return filled


def remove_tree(fs: Fs, path: Path) -> None:
    """Remove a name and all below it; a symbolic link is removed, not followed."""
    if not fs.stat(path).is_directory:
        fs.unlink(path)
        return
    for name in fs.listdir(path):
        remove_tree(fs, path / name)
    fs.rmdir(path)


# The names inside a run directory. Only names that match in full are ever touched.
#
# A final name `step-<10 digits>` means: complete and durable. Everything in the making or on its
# way out has a hidden name with a unique attempt in it, so that two lives of a run never meet in
# one directory.

MAX_STEP = 10**10 - 1
LOCK_NAME = ".lock"
MANIFEST_NAME = "manifest.json"

_STEP = re.compile(r"step-([0-9]{10})\Z")
_TMP = re.compile(r"\.tmp-([0-9]{10})-[0-9a-f]{32}\Z")
_ASIDE = re.compile(r"\.aside-step-([0-9]{10})-[0-9a-f]{32}\Z")
_LEFTOVER = re.compile(r"(\.(tmp|trash-step)-[0-9]{10}|nonce)-[0-9a-f]{32}\Z")


def new_attempt() -> str:
    """Return a fresh 32-digit hexadecimal id for one attempt at saving."""
    return uuid.uuid4().hex


def step_name(step: int) -> str:
    """Return the final name of a checkpoint; sorts like the step."""
    return f"step-{step:010d}"


def step_of(name: str) -> int | None:
    """Return the step of a final name, None for any other name."""
    match = _STEP.match(name)
    return int(match[1]) if match else None


def aside_step_of(name: str) -> int | None:
    """Return the step of a version set aside, None for any other name."""
    match = _ASIDE.match(name)
    return int(match[1]) if match else None


def any_step_of(name: str) -> int:
    """Return the step of a final name, or of a version set aside or under way; -1 for others."""
    match = _STEP.match(name) or _ASIDE.match(name) or _TMP.match(name)
    return int(match[1]) if match else -1


def is_leftover(name: str) -> bool:
    """Whether `name` is unfinished or discarded work, which a lock holder may delete."""
    return _LEFTOVER.match(name) is not None


def tmp_name(step: int, attempt: str) -> str:
    """Return the name under which a checkpoint is written."""
    return f".tmp-{step:010d}-{attempt}"


def nonce_name(attempt: str) -> str:
    """Return the name of a file by which ranks find out whether they have one directory."""
    return f"nonce-{attempt}"


def aside_name(step: int, attempt: str) -> str:
    """Return the name of a version that is about to be replaced."""
    return f".aside-{step_name(step)}-{attempt}"


def trash_name(step: int, attempt: str) -> str:
    """Return the name of a version that is about to be deleted."""
    return f".trash-{step_name(step)}-{attempt}"


# A writer that was taken for lost may still exist, on a host that was cut off or stood still. It
# may have all votes for a checkpoint, so that only the rename is missing. So the writer of a later
# epoch removes the file of its lock, which it notices, and renames what it has begun. (A flock is
# no help: a network disk may release it before the holder learns that, or keep it for its life.)
#
# A flock belongs to the file `.lock` and not to its path: once somebody moves the directory away,
# removes it or removes the lock, another run can lock what now lies at the path, and both would
# write. So a writer compares what it holds with what the path leads to before it writes.


@dataclass(frozen=True, slots=True)
class WriterTerm:
    """Which start of which launch a writer is of; the later one of a launch has the right."""

    launch: str = ""
    epoch: int = 1

    @property
    def note(self) -> str:
        """What the owner of a lock notes of it."""
        return f", epoch {self.epoch} of launch {self.launch}" if self.launch else ""

    def follows(self, owner: str) -> bool:
        """Whether the owner of a lock is of an earlier epoch of the same launch."""
        match = re.search(r", epoch ([0-9]{1,9}) of launch ([0-9a-f]+)\Z", owner)
        return match is not None and match[2] == self.launch and int(match[1]) < self.epoch


ONLY_TERM = WriterTerm()
"""That of a run which nobody launched."""


class WriterLock:
    """The lock of an existing run directory, held from construction to `release`.

    Args:
        fs: the file system.
        directory: the run directory.
        term: takes the lock from a writer of an earlier one.

    Raises:
        CheckpointLocked: another manager, in this process or another, is the writer.
        CheckpointLockLost: the directory or its lock was replaced while the lock was taken.
        OSError: the lock cannot be made.
    """

    def __init__(self, fs: Fs, directory: Path, term: WriterTerm = ONLY_TERM) -> None:
        self._fs = fs
        self._directory = directory
        self._path = directory / LOCK_NAME
        # Taken before the lock and compared after it: a directory replaced in between is noticed.
        self._directory_id = fs.stat(directory).identity
        try:
            if term.follows(fs.lock_owner(self._path)):
                fs.unlink(self._path)
            fd = fs.lock(self._path, f"process {os.getpid()} on {platform.node()}{term.note}")
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
        # NotADirectoryError: a parent of the path became a file.
        except (FileNotFoundError, NotADirectoryError):
            return None
