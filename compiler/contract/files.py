"""The one door to files in folders that others may write: run directories, caches, plan files.

A name in such a folder may lead anywhere. A symbolic link, or a second name of a file, would have
us overwrite what it leads to; a FIFO or a device would block the process or never end. So a file is
opened without following a link at its name and without waiting (O_NOFOLLOW, O_NONBLOCK), and is
refused unless it is a regular file. One that is written to must also be ours and have no other
name. What is replaced is written under a name that did not exist (O_EXCL), and then renamed.

Every error is an `OSError`, whose `strerror` says what lies there.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from contextlib import suppress

PARTIAL = ".partial"
"""How the name of a file ends that is being written."""

_CHUNK_BYTES = 1 << 20

StrPath = str | os.PathLike[str]


def user_path(path: StrPath) -> str:
    """Return a path that a user wrote, with the home folder in place of a leading `~` or `~name`.

    As in a shell, one of a user that there is not stays as it is.
    """
    return os.path.expanduser(os.fspath(path))


def open_regular(
    path: StrPath,
    flags: int,
    *,
    mode: int = 0o666,
    dir_fd: int | None = None,
    is_link_followed: bool = False,
) -> int:
    """Open a regular file and return its descriptor, which is not inherited by children.

    Args:
        path: the file.
        flags: of `os.open`. O_TRUNC must not be among them, for it acts before any check.
        mode: of a file that is created, less the umask.
        dir_fd: of the directory that `path` is relative to.
        is_link_followed: whether a symbolic link at the name is followed: where the user named the
            file, and nobody else.

    Raises:
        OSError: ELOOP for a symbolic link, ENXIO for anything else that is no regular file, EPERM
            for a file to write that is another user's or has another name; else the system's.
    """
    follow = 0 if is_link_followed else os.O_NOFOLLOW
    try:
        always = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        fd = os.open(path, flags | follow | always, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP and not is_link_followed:
            raise _refusal(errno.ELOOP, "a symbolic link, which is not followed", path) from None
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a FIFO without a reader, a folder
            raise _refusal(error.errno, "not a regular file", path) from None
        raise
    try:
        # Of the open descriptor, not of the name, which could be another file's by now.
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise _refusal(errno.ENXIO, "not a regular file", path)
        if flags & (os.O_WRONLY | os.O_RDWR):
            _check_ours(path, facts, dir_fd)
    # BaseException: an interrupt must not leak the descriptor either.
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_ours(path: StrPath, facts: os.stat_result, dir_fd: int | None) -> None:
    """Raise OSError for a file that is not ours to write, or that has a second name.

    Ours is what belongs to the user, to root, or to the owner of its folder, who may replace it
    anyway: some network file systems and containers give all files one owner. The kernel's
    `fs.protected_regular` draws the same line.
    """
    if facts.st_uid not in (os.geteuid(), 0):
        folder = os.stat(os.path.dirname(os.fspath(path)) or ".", dir_fd=dir_fd)
        if facts.st_uid != folder.st_uid:
            raise _refusal(errno.EPERM, f"it belongs to another user (uid {facts.st_uid})", path)
    if facts.st_nlink > 1:
        raise _refusal(
            errno.EPERM, f"it has {facts.st_nlink} names (hard links), so it is not written", path
        )


def _refusal(code: int, why: str, path: StrPath) -> OSError:
    return OSError(code, why, os.fspath(path))


def read_regular(path: StrPath, most_bytes: int, *, is_link_followed: bool = False) -> bytes:
    """Return the content of a regular file. Raises OSError: EFBIG where it has more bytes."""
    fd = open_regular(path, os.O_RDONLY, is_link_followed=is_link_followed)
    try:
        size_bytes = os.fstat(fd).st_size
        if size_bytes > most_bytes:
            why = f"it has {size_bytes:,} bytes, and at most {most_bytes:,} are read"
            raise _refusal(errno.EFBIG, why, path)
        parts, remaining = [], most_bytes  # it may grow meanwhile
        while remaining and (part := os.read(fd, min(remaining, max(size_bytes, _CHUNK_BYTES)))):
            parts.append(part)
            remaining -= len(part)
    finally:
        os.close(fd)
    return b"".join(parts)


def create_regular(path: StrPath, mode: int = 0o666) -> int:
    """Create a file to write, and return its descriptor.

    Raises OSError: EEXIST where the name is taken, if only by a link that leads nowhere.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def replace_regular(
    path: StrPath, content: bytes, *, is_shared: bool = False, mode: int = 0o666
) -> None:
    """Replace whatever has a name by a file with this content: no reader sees half of it.

    Until the rename it is `<name>.partial`. Where several processes may replace the same file at
    the same time, as in a cache (`is_shared`), each writes under a name of its own. `mode` is that
    of a new file, less the umask.

    Raises:
        OSError: the folder cannot be written; nothing of ours is left in it then.
    """
    suffix = f".{uuid.uuid4().hex}" if is_shared else ""
    # In the same folder: a rename is atomic only within one file system.
    temporary = f"{os.fspath(path)}{suffix}{PARTIAL}"
    if not is_shared:
        with suppress(FileNotFoundError):  # of a writer that was killed, or somebody's trap
            # Removed, not opened: O_EXCL below then never writes through somebody's link.
            os.unlink(temporary)
    fd = create_regular(temporary, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        # The name changes from the old file to the new one in one step.
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
