"""Memory that the processes of one host share: files without a name, mapped by each.

A memfd vanishes with the last process that has it, so nothing is left behind by a rank that is
killed. Another process of the same user opens it as /proc/PID/fd/FD; where ranks are threads of one
process it is the same path.

Pages are touched when a mapping is made: the first step would fault on each of them. They stay of
4 KiB: huge ones, which the kernel makes of them on demand where all is aligned, took a millisecond
per MiB and made no sum faster.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.protocol import Array
from compiler.errors import DeviceError

PAGE_BYTES = mmap.PAGESIZE

_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_NO_ADDRESS = ctypes.c_void_p(-1).value
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


@dataclass(slots=True)
class Segment:
    """Some memory as this process has it mapped; it goes with the last array on it."""

    array: Array
    size_bytes: int
    fd: int = -1

    @property
    def address(self) -> int:
        """Where it begins here."""
        found: int = self.array.__array_interface__["data"][0]
        return found

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether so many bytes lie in it."""
        return self.address <= address and address + size_bytes <= self.address + self.size_bytes

    def close_file(self) -> None:
        """Let go of the file; the mapping stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(slots=True)
class OwnSegments:
    """The segments of one rank, which others map."""

    made: list[Segment] = field(default_factory=list)

    def allocate(self, name: str, size_bytes: int) -> Segment:
        """Return a new one, all zeros.

        Raises MemoryError, and DeviceError without a file descriptor or off Linux.
        """
        if not hasattr(os, "memfd_create"):
            raise DeviceError("ranks share memory by memfd_create, which only Linux has")
        size = max(PAGE_BYTES, -(-size_bytes // PAGE_BYTES) * PAGE_BYTES)
        try:
            fd = os.memfd_create(f"actorflow {name}")
        except OSError as error:
            check_descriptors(error)
            raise MemoryError(f"no shared memory can be had: {error}") from error
        try:
            os.ftruncate(fd, size)
            segment = Segment(_mapped(fd, size), size, fd)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise MemoryError(f"{size} bytes of shared memory cannot be had: {error}") from error
        self.made.append(segment)
        return segment

    def place(self, address: int, size_bytes: int) -> tuple[int, int]:
        """Return the number of the segment that holds some bytes and where; (-1, 0) for none."""
        for number, segment in enumerate(self.made):
            if segment.holds(address, size_bytes):
                return number, address - segment.address
        return -1, 0

    def offer(self) -> tuple[tuple[int, int], ...]:
        """Return the file and size of each, for `map_all` of another process."""
        return tuple([(segment.fd, segment.size_bytes) for segment in self.made])

    def close_files(self) -> None:
        """Let go of all files; whoever has mapped them keeps the memory."""
        for segment in self.made:
            segment.close_file()


def check_descriptors(error: OSError) -> None:
    """Raise DeviceError where what is missing is a file descriptor."""
    if error.errno in _NO_DESCRIPTORS:
        raise DeviceError(
            f"no file descriptor is left for memory that ranks share: {error}. A plan takes one for"
            " each other rank, and some more while it is opened: raise the limit ('ulimit -n'), or"
            " close plans that are stepped (job.close(model))"
        ) from error


def map_all(pid: int, files: Sequence[tuple[int, int]]) -> list[Segment]:
    """Map the segments that a process offers. Raises OSError where it cannot be."""
    found = []
    for number, size in files:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != size:
                raise OSError(f"file {number} of process {pid} is not the one that it offered")
            found.append(Segment(_mapped(fd, size), size))
        finally:
            os.close(fd)
    return found


def _mapped(fd: int, size_bytes: int) -> Array:
    """Return a file's bytes; they stay mapped as long as an array on them. Raises OSError.

    By the system's own calls: `mmap.mmap` keeps a copy of the descriptor as long as the mapping, of
    which a rank would then have one for each segment of each other rank and plan.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (_ADDRESS, _SIZE, _INT, _INT, _INT, ctypes.c_int64)
    library.munmap.argtypes = (_ADDRESS, _SIZE)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    address = library.mmap(None, size_bytes, protection, flags, fd, 0)
    if address == _NO_ADDRESS:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    held = (ctypes.c_uint8 * size_bytes).from_address(address)
    # Not at exit: threads that are cut off then may still be in it.
    weakref.finalize(held, library.munmap, address, size_bytes).atexit = False
    return np.frombuffer(memoryview(held), np.uint8)
