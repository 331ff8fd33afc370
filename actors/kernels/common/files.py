"""Files of a cache: the user's own, sealed against accidents, and replaced as a whole.

What somebody else may write is not run, and not believed. A library from a cache runs with all
rights of the user, so the folder that keeps it, the folders above it and the file itself must
belong to the user or to root, and nobody else may write them. Above a folder, one with the sticky
bit (like /tmp) will do, where nobody renames what is another's. Links are followed, and what they
lead through is held to the same. A group that is the user's alone counts as the user: some systems
give everyone such a group, and write permission to it.

After OpenSSH's StrictModes (auth_secure_path, misc.c).
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from compiler.contract.codec import DecodeError, from_json, from_object, to_json, to_object
from compiler.contract.files import PARTIAL, read_regular, replace_regular

_MAX_PATHS = 2560
"""Folders and links that are looked at; a system follows 40 links, each of which may be deep."""


def distrust_of_folder(folder: Path) -> str | None:
    """Return why files in a folder cannot be trusted: path, owner, mode and remedy.

    None where it is the user's own; one that does not exist is judged by the folders above it.
    """
    if not hasattr(os, "geteuid"):  # no such owners and modes on this system
        return None
    last = Path(os.path.realpath(folder))
    seen: set[Path] = set()
    # What lies behind the links is judged where it lies: the last one's sticky bit does not count.
    waiting = [last, Path(os.path.abspath(folder))]
    while waiting:
        path = waiting.pop()
        # Links may lead in a circle.
        if path in seen:
            continue
        if len(seen) == _MAX_PATHS:
            return f"{folder} leads through more than {_MAX_PATHS} folders and links"
        seen.add(path)
        if path != path.parent:
            waiting.append(path.parent)
        try:
            facts = path.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{path} cannot be looked at: {error.strerror}"
        if stat.S_ISLNK(facts.st_mode):
            if not _is_own(facts.st_uid):
                return _said(path, facts)
            # The target with its own folders: whoever may write one of these may replace the file.
            waiting.append(Path(os.path.abspath(path.parent / os.readlink(path))))
            continue
        # Above the folder, as in /tmp, others may add names but not rename ours.
        is_sticky = path != last and bool(facts.st_mode & stat.S_ISVTX)
        if not _is_own(facts.st_uid) or (_is_open(facts) and not is_sticky):
            return _said(path, facts)
    return None


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone. Raises OSError."""
    if not folder.is_dir():
        if folder != folder.parent:
            make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def distrust_of_file(file: Path) -> str | None:
    """Return why a file of a trusted folder cannot be trusted; None where it is the user's own.

    Raises OSError where there is none.
    """
    facts = file.lstat()
    if not stat.S_ISREG(facts.st_mode):
        return f"{file} is no plain file"
    if not hasattr(os, "geteuid"):
        return None
    return None if _is_own(facts.st_uid) and not _is_open(facts) else _said(file, facts)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file whole, so that no reader sees half of it; makes its folder private.

    Raises OSError, and leaves nothing else in the folder then.
    """
    make_private(path.parent)
    replace_regular(path, content, is_shared=True, mode=0o600)


# A cache is bounded by bytes, of which what was used last is kept, and by age. When a file was used
# last is its time of change, which `mark_used` sets: a file system may not note when it is read.
# Several processes may prune at once, or use what another removes: what is gone is made anew.

KERNEL_BYTES = 1 << 30
"""Of native kernels in a cache, and of those of GPUs."""
_DAY_S = 24 * 3600.0
MOST_DAYS = 90
"""Without use, after which a file of a cache is removed."""


def mark_used(path: Path) -> None:
    """Note that a file of a cache is used now, where that can be noted."""
    with suppress(OSError):
        os.utime(path, follow_symlinks=False)


LOOK_EVERY = 32
"""Files that are written, on average, until `prune_in_turn` looks: 5 to 8 us for each file."""


def prune_in_turn(newest: Path, most_bytes: int) -> None:
    """Call `prune` after one of `LOOK_EVERY` files, whose turn follows from its name.

    A cache that grows has new names; one whose names all stand there already does not grow.
    """
    if zlib.crc32(os.fsencode(newest.name)) % LOOK_EVERY == 0:
        prune(newest, most_bytes)


def prune(newest: Path, most_bytes: int) -> list[Path]:
    """Remove files of the kind of one that was just written, and return them; never that one.

    Removed are those that were not used for `MOST_DAYS`, those used longest ago while all of them
    take more than `most_bytes`, and files that a writer left unfinished a day ago. Needs one look
    at each file of the folder. A folder that cannot be written stays as it is.
    """
    now_s, expired, left_bytes = time.time(), list[str](), most_bytes
    files: list[tuple[float, int, str]] = []
    with suppress(OSError), os.scandir(newest.parent) as entries:
        for entry in entries:
            with suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                if entry.name == newest.name:
                    left_bytes -= facts.st_size
                elif not stat.S_ISREG(facts.st_mode):
                    continue
                elif entry.name.endswith(newest.suffix):
                    files.append((facts.st_mtime, facts.st_size, entry.name))
                elif entry.name.endswith(PARTIAL) and now_s - facts.st_mtime > _DAY_S:
                    expired.append(entry.name)
    # Newest first: the budget is spent on what was used last.
    for used_s, size_bytes, name in sorted(files, reverse=True):
        left_bytes -= size_bytes
        if left_bytes < 0 or now_s - used_s > MOST_DAYS * _DAY_S:
            expired.append(name)
    removed = [newest.parent / name for name in expired]
    for path in removed:
        with suppress(OSError):
            path.unlink()
    return removed


def _is_own(uid: int) -> bool:
    # Root can replace anything anyway.
    return uid in (os.geteuid(), 0)


def _is_open(facts: os.stat_result) -> bool:
    """Whether others than the owner may write."""
    if facts.st_mode & stat.S_IWOTH:
        return True
    return bool(facts.st_mode & stat.S_IWGRP) and not _is_private(facts.st_gid)


def _is_private(gid: int) -> bool:
    """Whether a group is that of the user alone: it has his name, and no other member."""
    import grp  # neither is there on every system
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _said(path: Path, facts: os.stat_result) -> str:
    mode = stat.S_IMODE(facts.st_mode)
    if not _is_own(facts.st_uid):
        return f"{path} belongs to another user (uid {facts.st_uid}, mode {mode:o})"
    return (
        f"others may write {path} (uid {facts.st_uid}, mode {mode:o}); mend it with"
        f" chmod go-w {path}"
    )


# A seal is a hash of a file's name and content at its end, which finds accidents.
#
# A file is written under a temporary name and renamed, so that two processes may write the same
# one. Half a file, left by a full disk or a loss of power, would end the process with SIGBUS when
# it is loaded as a library; one under another's name would be taken for that one. A loader ignores
# the seal. It proves no author: `distrust_of_file` asks for that. A file that is not as it was
# written is made anew; nothing in it is worth an error.

_SEAL_BYTES = 16
MOST_BYTES = 1 << 30
"""Of a file: a plan, a library, a table of what was measured."""


class DamagedFile(ValueError):
    """What lies at the path is not what was written under its name; the message says why."""


def write_checksummed(path: Path, content: bytes) -> None:
    """Replace a file whole by some content under its seal; makes its folder private.

    Raises OSError, and leaves nothing else in the folder then.
    """
    replace_file(path, content + _seal(path.name, content))


def read_checksummed(path: Path) -> bytes:
    """Return what `write_checksummed` wrote.

    Raises DamagedFile, or OSError where nothing is there.
    """
    try:
        whole = read_regular(path, MOST_BYTES)
    except OSError as error:
        # A link, a pipe or a file that is too large, in place of ours.
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EFBIG):
            raise DamagedFile(f"{error.strerror}") from None
        raise
    content = whole[:-_SEAL_BYTES]
    if whole[-_SEAL_BYTES:] != _seal(path.name, content):
        raise DamagedFile("its content does not match its hash")
    return content


def _seal(name: str, content: bytes) -> bytes:
    # The name as the key, which blake2b takes up to 64 bytes of: a file under another's name does
    # not match.
    return hashlib.blake2b(content, digest_size=_SEAL_BYTES, key=name.encode()[:64]).digest()


# What was measured on this machine is kept as a JSON object under a seal.

T = TypeVar("T")

_report = logging.getLogger("actorflow").warning


def read_object(path: Path, cls: type[T]) -> T | None:
    """Return the dataclass in a file, None where there is nothing. Raises DamagedFile."""
    try:
        return from_object(cls, from_json(read_checksummed(path)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedFile(error.strerror or str(error)) from None
    except DecodeError as error:
        raise DamagedFile(str(error)) from None


def load_measurements(path: Path, cls: type[T], anew: str) -> T | None:
    """Return the dataclass in a file; None where there is nothing of use.

    A line says that a damaged file is not used, and what is measured `anew`.
    """
    try:
        return read_object(path, cls)
    except DamagedFile as error:
        report_damage(path, error, anew)
        return None


def replace_object(path: Path, value: object) -> None:
    """Replace a file by a dataclass, so that no reader sees half of it; makes its folder private.

    Raises OSError, and leaves nothing behind then.
    """
    write_checksummed(path, to_json(to_object(value)))


def report_damage(path: Path, error: DamagedFile, anew: str) -> None:
    """Say in one line that a file is not used, and what is measured anew."""
    _report("%s is damaged (%s) and not used: %s", path, error, anew)
