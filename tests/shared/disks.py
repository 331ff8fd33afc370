"""Disks to test against: one that can lose power after any operation, one whose k-th call fails.

`LogFs` keeps files in memory, as inodes, and records every operation. `crash` builds the disk that
a power cut after k operations may leave, as POSIX allows it: an operation survives for certain only
if a later sync covers it; of the others any subset survives, and of an unsynced write any of its
sectors. A write is covered by `fsync` of the file, a name by `fsync_dir` of the directory it stands
in; syncing a directory says nothing about what its names lead to. After Pillai et al., "All File
Systems Are Not Created Equal" (OSDI 2014).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from actorflow.checkpoint.fs import FileStat, is_safe_name

SECTOR_BYTES = 512
_ROOT = 0


@dataclass(slots=True)
class Inode:
    """A file's bytes, or (`entries` is not None) a directory's names with their inode numbers."""

    data: bytearray = field(default_factory=bytearray)
    entries: dict[str, int] | None = None


@dataclass(frozen=True, slots=True)
class MakeLink:
    """A new name `name` in directory `parent`, leading to inode `target`."""

    parent: int
    name: str
    target: int


@dataclass(frozen=True, slots=True)
class Unlink:
    """The name `name` of directory `parent` is gone."""

    parent: int
    name: str


@dataclass(frozen=True, slots=True)
class Rename:
    """A name moves."""

    parent: int
    name: str
    new_parent: int
    new_name: str


@dataclass(frozen=True, slots=True)
class DiskWrite:
    """Bytes appended to a file at `offset_bytes`."""

    inode: int
    offset_bytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Sync:
    """What was done to this inode before is durable."""

    inode: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A note of the test's own, such as an acknowledgement."""

    text: str


Operation = MakeLink | Unlink | Rename | DiskWrite | Sync | Mark


class LogFs:
    """An `Fs` in memory that records what is done to it.

    Args:
        directory: exists from the start, durably, with its parents.
        capacity_bytes: a write beyond it fails with ENOSPC; None for no limit.
        max_write_bytes: the most that one write takes, to provoke short writes; None for no limit.
    """

    def __init__(
        self,
        directory: Path,
        *,
        capacity_bytes: int | None = None,
        max_write_bytes: int | None = None,
    ) -> None:
        self.inodes: dict[int, Inode] = {_ROOT: Inode(entries={})}
        self.log: list[Operation] = []
        self.open_files: dict[int, int] = {}
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._max_write_bytes = max_write_bytes
        self._positions: dict[int, int] = {}
        self._locks: dict[int, tuple[int, str]] = {}
        self._owners: dict[int, str] = {}
        self._next_fd = 3
        for path in [*reversed(directory.parents), directory][1:]:
            self.mkdir(path)
        self.log.clear()

    def mark(self, text: str) -> None:
        """Note something in the log."""
        self.log.append(Mark(text))

    def kill_processes(self) -> None:
        """Close every descriptor, as the system does for a killed process; the disk stays as is."""
        self.open_files.clear()
        self._positions.clear()
        self._locks.clear()

    def lock(self, path: Path, owner: str) -> int:
        """See `Fs.lock`; the lock dies with this object, as with a machine."""
        parent, entries = self._parent(path)
        if path.name not in entries:
            self._link(parent, path.name, Inode())
        inode = entries[path.name]
        for locked, holder in self._locks.values():
            if locked == inode:
                raise BlockingIOError(errno.EWOULDBLOCK, holder, str(path))
        fd = self._open(inode)
        self._locks[fd], self._owners[inode] = (inode, owner), owner
        return fd

    def lock_owner(self, path: Path) -> str:
        """See `Fs.lock_owner`; a machine that loses power loses the note, too."""
        return self._owners.get(self._parent(path)[1].get(path.name), "")

    def forget_locks(self) -> None:
        """Release all locks, as the server of a network disk does with a machine that is silent."""
        self._locks.clear()

    def create(self, path: Path) -> int:
        """See `Fs.create`."""
        parent, entries = self._parent(path)
        if path.name in entries:
            raise _error(errno.EEXIST, path)
        return self._open(self._link(parent, path.name, Inode()))

    def open_read(self, directory: Path, name: str) -> int:
        """See `Fs.open_read`."""
        inode = self._find(directory / name)
        if not is_safe_name(name) or self.inodes[inode].entries is not None:
            raise _error(errno.ENXIO, directory / name)
        return self._open(inode)

    def write(self, fd: int, data: memoryview) -> int:
        """See `Fs.write`."""
        inode = self.open_files[fd]
        chunk = bytes(data[: self._max_write_bytes])
        if self._capacity_bytes is not None:
            chunk = chunk[: max(0, self._capacity_bytes - self.used_bytes())]
            if data and not chunk:
                raise _error(errno.ENOSPC, "write")
        content = self.inodes[inode].data
        self.log.append(DiskWrite(inode, len(content), chunk))
        content += chunk
        return len(chunk)

    def readinto(self, fd: int, buffer: memoryview) -> int:
        """See `Fs.readinto`."""
        at = self._positions[fd]
        data = self.inodes[self.open_files[fd]].data[at : at + len(buffer)]
        buffer[: len(data)] = data
        self._positions[fd] = at + len(data)
        return len(data)

    def seek(self, fd: int, offset_bytes: int) -> None:
        """See `Fs.seek`."""
        self._positions[fd] = offset_bytes

    def stat_open(self, fd: int) -> FileStat:
        """See `Fs.stat_open`."""
        return self._stat_of(self.open_files[fd])

    def fsync(self, fd: int) -> None:
        """See `Fs.fsync`."""
        self.log.append(Sync(self.open_files[fd]))

    def close(self, fd: int) -> None:
        """See `Fs.close`."""
        del self.open_files[fd]
        del self._positions[fd]
        self._locks.pop(fd, None)

    def fsync_dir(self, path: Path) -> None:
        """See `Fs.fsync_dir`."""
        self._entries(path)
        self.log.append(Sync(self._find(path)))

    def mkdir(self, path: Path) -> None:
        """See `Fs.mkdir`."""
        parent, entries = self._parent(path)
        if path.name in entries:
            raise _error(errno.EEXIST, path)
        self._link(parent, path.name, Inode(entries={}))

    def rename(self, source: Path, target: Path) -> None:
        """See `Fs.rename`; as in POSIX, a directory replaces an empty one and no other."""
        inode = self._find(source)
        new_parent, entries = self._parent(target)
        if target.name in entries and self.inodes[entries[target.name]].entries:
            raise _error(errno.ENOTEMPTY, target)
        parent, _ = self._parent(source)
        entries[target.name] = inode
        del self._parent(source)[1][source.name]
        self.log.append(Rename(parent, source.name, new_parent, target.name))

    def unlink(self, path: Path) -> None:
        """See `Fs.unlink`."""
        self._unlink(path, is_directory=False)

    def rmdir(self, path: Path) -> None:
        """See `Fs.rmdir`."""
        if self._entries(path):
            raise _error(errno.ENOTEMPTY, path)
        self._unlink(path, is_directory=True)

    def listdir(self, path: Path) -> list[str]:
        """See `Fs.listdir`."""
        return sorted(self._entries(path))

    def stat(self, path: Path) -> FileStat:
        """See `Fs.stat`; there is no time on this disk."""
        return self._stat_of(self._find(path))

    def free_bytes(self, path: Path) -> int:
        """See `Fs.free_bytes`."""
        self._find(path)
        return (self._capacity_bytes or 1 << 60) - self.used_bytes()

    def used_bytes(self) -> int:
        """Return the bytes of all files that have a name."""
        return sum(len(data) for data in self.files().values())

    def files(self) -> dict[Path, bytes]:
        """Return every file by path."""
        contents: dict[Path, bytes] = {}
        stack = [(Path("/"), _ROOT)]
        while stack:
            path, number = stack.pop()
            inode = self.inodes[number]
            if inode.entries is None:
                contents[path] = bytes(inode.data)
            else:
                stack += [(path / name, child) for name, child in inode.entries.items()]
        return contents

    def crash(self, num_operations: int, random: Random, drop: float) -> LogFs:
        """Return a disk as a power cut may leave it.

        Args:
            num_operations: how much of the log was done.
            random: chooses what survives.
            drop: probability that an operation no sync covers is lost.
        """
        disk = LogFs(self._directory)
        operations = self.log[:num_operations]
        for operation, is_durable in zip(operations, _durable(operations), strict=True):
            is_kept = is_durable or random.random() >= drop
            if is_kept and not isinstance(operation, Sync | Mark):
                disk._replay(operation, self.inodes, None if is_durable else random)
        return disk

    def _replay(
        self, operation: Operation, origin: dict[int, Inode], random: Random | None
    ) -> None:
        match operation:
            case MakeLink(parent, name, target):
                is_directory = origin[target].entries is not None
                self._inode(target, is_directory)
                self._directory_of(parent)[name] = target
            case Unlink(parent, name):
                self._directory_of(parent).pop(name, None)
            case Rename(parent, name, new_parent, new_name):
                # The name may not have survived; then there is nothing to move.
                if name in self._directory_of(parent):
                    moved = self._directory_of(parent).pop(name)
                    self._directory_of(new_parent)[new_name] = moved
            case DiskWrite(inode, offset, data):
                _replay_write(self._inode(inode, is_directory=False).data, offset, data, random)

    def _directory_of(self, number: int) -> dict[str, int]:
        entries = self._inode(number, is_directory=True).entries
        return {} if entries is None else entries

    def _inode(self, number: int, is_directory: bool) -> Inode:
        return self.inodes.setdefault(number, Inode(entries={} if is_directory else None))

    def _open(self, inode: int) -> int:
        fd, self._next_fd = self._next_fd, self._next_fd + 1
        self.open_files[fd] = inode
        self._positions[fd] = 0
        return fd

    def _link(self, parent: int, name: str, inode: Inode) -> int:
        number = max(self.inodes) + 1
        self.inodes[number] = inode
        self._directory_of(parent)[name] = number
        self.log.append(MakeLink(parent, name, number))
        return number

    def _unlink(self, path: Path, is_directory: bool) -> None:
        parent, entries = self._parent(path)
        if (self.inodes[self._find(path)].entries is not None) != is_directory:
            raise _error(errno.EISDIR, path)
        del entries[path.name]
        self.log.append(Unlink(parent, path.name))

    def _stat_of(self, number: int) -> FileStat:
        inode = self.inodes[number]
        return FileStat(inode.entries is not None, len(inode.data), 0, (0, number))

    def _find(self, path: Path) -> int:
        number = _ROOT
        for part in path.parts[1:]:
            entries = self.inodes[number].entries
            if entries is None:
                raise _error(errno.ENOTDIR, path)
            if part not in entries:
                raise _error(errno.ENOENT, path)
            number = entries[part]
        return number

    def _entries(self, path: Path) -> dict[str, int]:
        entries = self.inodes[self._find(path)].entries
        if entries is None:
            raise _error(errno.ENOTDIR, path)
        return entries

    def _parent(self, path: Path) -> tuple[int, dict[str, int]]:
        return self._find(path.parent), self._entries(path.parent)


class FaultFs:
    """Stands in for the `Fs` it wraps; its k-th call, counted from 0, fails with an errno.

    Args:
        fs: does the work.
        k: which call fails.
        code: the errno.
        is_sticky: every later call fails too, as on a disk that has become read-only.
    """

    def __init__(self, fs: Any, k: int, code: int, *, is_sticky: bool = False) -> None:
        self._fs = fs
        self._k = k
        self._code = code
        self._is_sticky = is_sticky
        self.calls: list[str] = []

    @property
    def has_failed(self) -> bool:
        """Whether the failing call was reached."""
        return len(self.calls) > self._k

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            at = len(self.calls) - 1
            is_failing = at == self._k or (self._is_sticky and at > self._k)
            if is_failing and name != "close":
                raise _error(self._code, arguments[0])
            result = getattr(self._fs, name)(*arguments)
            if is_failing:  # a close that fails has closed all the same
                raise _error(self._code, arguments[0])
            return result

        return call


def _durable(done: list[Operation]) -> list[bool]:
    # Backwards: an inode in `synced` has a sync after the operation looked at.
    synced: set[int] = set()
    durable: list[bool] = []
    for operation in reversed(done):
        match operation:
            case Sync(inode):
                synced.add(inode)
                durable.append(True)
            case DiskWrite(inode):
                durable.append(inode in synced)
            case Rename(parent, _, new_parent):
                durable.append(parent in synced and new_parent in synced)
            case MakeLink(parent) | Unlink(parent):
                durable.append(parent in synced)
            case Mark():
                durable.append(True)
    return durable[::-1]


def _replay_write(content: bytearray, offset: int, data: bytes, random: Random | None) -> None:
    end = offset + len(data)
    if random is None:
        content.extend(bytes(max(0, end - len(content))))
        content[offset:end] = data
        return
    end = random.choice((end, random.randint(offset, end)))  # the length may be an older one
    content.extend(bytes(max(0, end - len(content))))
    for sector in range(offset - offset % SECTOR_BYTES, end, SECTOR_BYTES):
        if random.random() < 0.5:
            first, last = max(offset, sector), min(end, sector + SECTOR_BYTES)
            content[first:last] = data[first - offset : last - offset]


def _error(code: int, where: object) -> OSError:
    return OSError(code, os.strerror(code), str(where))
