"""Memory that the processes of one host share, and the C functions and boards that lie on it.

A segment is a file without a name, mapped by each process. A memfd vanishes with the last process
that has it, so nothing is left behind by a rank that is killed. Another process of the same user
opens it as /proc/PID/fd/FD; where ranks are threads of one process it is the same path.

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
from pathlib import Path

import numpy as np

from actors.kernels.library.runtime import text_of
from actors.kernels.library.toolchain import Toolchain
from actors.machine.errors import forkable_lock
from actors.machine.protocol import Array
from compiler.contract.errors import DeviceError
from compiler.contract.types import DType

PAGE_BYTES = mmap.PAGESIZE

_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
# MAP_FAILED is (void *)-1.
_NO_ADDRESS = ctypes.c_void_p(-1).value
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


@dataclass(slots=True)
class Segment:
    """Shared memory mapped into this process; it is unmapped with the last array on it."""

    array: Array
    size_bytes: int
    fd: int = -1

    @property
    def address(self) -> int:
        """Where it begins here."""
        start: int = self.array.__array_interface__["data"][0]
        return start

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether so many bytes lie in it."""
        return self.address <= address and address + size_bytes <= self.address + self.size_bytes

    def close_file(self) -> None:
        """Close the file; the mapping stays."""
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
        # At least a page: mmap refuses a length of 0.
        size = max(PAGE_BYTES, -(-size_bytes // PAGE_BYTES) * PAGE_BYTES)
        try:
            fd = os.memfd_create(f"actorflow {name}")
        except OSError as error:
            check_descriptors(error)
            raise MemoryError(f"no shared memory can be had: {error}") from error
        try:
            os.ftruncate(fd, size)
            segment = Segment(_mapped(fd, size), size, fd)
        # The last two: a size that C or ctypes cannot hold.
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
        """Close all files; a process that has mapped them keeps the memory."""
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
    segments = []
    for number, size in files:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            # The peer may have ended and its pid, or its descriptor, be another's by now.
            if os.fstat(fd).st_size != size:
                raise OSError(f"file {number} of process {pid} is not the one that it offered")
            segments.append(Segment(_mapped(fd, size), size))
        finally:
            os.close(fd)
    return segments


def _mapped(fd: int, size_bytes: int) -> Array:
    """Return a file's bytes; they stay mapped as long as an array on them. Raises OSError.

    By the system's own calls: `mmap.mmap` keeps a copy of the descriptor as long as the mapping, of
    which a rank would then have one for each segment of each other rank and plan.
    """
    library = ctypes.CDLL(None, use_errno=True)
    # Without a declared type ctypes would cut addresses to 32 bits.
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (_ADDRESS, _SIZE, _INT, _INT, _INT, ctypes.c_int64)
    library.munmap.argtypes = (_ADDRESS, _SIZE)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    address = library.mmap(None, size_bytes, protection, flags, fd, 0)
    if address == _NO_ADDRESS:
        # errno of this thread as ctypes saved it: other calls may have changed the C one since.
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    mapping = (ctypes.c_uint8 * size_bytes).from_address(address)
    # Not at exit: threads that are cut off then may still be in it.
    weakref.finalize(mapping, library.munmap, address, size_bytes).atexit = False
    return np.frombuffer(memoryview(mapping), np.uint8)


# The structures of meet.c as ctypes sees them, and its functions, built once.

DTYPES = (
    DType.FLOAT64,
    DType.FLOAT32,
    DType.FLOAT16,
    DType.BFLOAT16,
    DType.INT64,
    DType.INT32,
    DType.INT16,
    DType.INT8,
    DType.UINT64,
    DType.UINT32,
    DType.UINT16,
    DType.UINT8,
    DType.BOOL,
)
"""Dtypes of tensors in collectives, in the order of meet.c."""

REDUCTIONS = ("sum", "max", "min")
"""Reductions of collectives, in the order of meet.c."""

ALL_REDUCE, REDUCE_SCATTER, MOVE, TRANSFER = range(4)
DONE, ABORTED, TIMED_OUT, PEER_EXITED, WRONG_COLLECTIVE, WRONG_FIRING = range(6)
END, JOIN, AS_SUM = -2, -1, 1 << 16
"""Steps of a sum beside the numbers of operands: see `af_reduce` in meet.c."""
MAX_RANKS = 256
"""Ranks of one host."""
MAX_SOURCES = 1024
"""Operands of one sum over several hosts."""

SOURCE = Path(__file__).with_name("meet.c")
_libraries: dict[str, ctypes.CDLL] = {}
_lock = forkable_lock()


class Arrival(ctypes.Structure):
    """What a rank arrives for."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("digest", "firing", "row")]


class ArrivalLine(ctypes.Structure):
    """The state of one rank in a lane: two cache lines of 64 bytes."""

    _fields_ = [
        ("arrivals", ctypes.c_uint32),
        # `arrivals` is written by all ranks, the rest by one: on one cache line they would contend.
        ("_apart", ctypes.c_uint8 * 60),
        ("arrived", ctypes.c_uint64),
        ("came_to", Arrival * 2),
        ("_end", ctypes.c_uint8 * 8),
    ]


class GroupState(ctypes.Structure):
    """The ranks that meet in a lane, as one of them sees them."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("num_ranks", "own", "deadline_ns", "staging_bytes")],
        *[(name, ctypes.c_uint64) for name in ("num_arrivals", "num_blind", "next_look")],
        *[(name, ctypes.c_void_p) for name in ("lines", "staging", "processes")],
        ("waited_ns", ctypes.c_uint64),
    ]


class SumByPieces(ctypes.Structure):
    """A sum that is made piece by piece for another host, or of what came from there."""

    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in (
                "dtype", "by", "itemsize", "sum_size", "num_sources", "num_to", "run",
                "from_offset", "from_stride", "to_offset", "to_stride", "is_packed",
            )
        ],
        ("order", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
    ]  # fmt: skip


class ByteBlocks(ctypes.Structure):
    """Blocks of bytes in two arrays, in steps: see `Collective.region`."""

    _fields_ = [
        ("extents", ctypes.c_int64 * 3),
        ("from_strides", ctypes.c_int64 * 3),
        ("to_strides", ctypes.c_int64 * 3),
        *[(name, ctypes.c_int64) for name in ("from_offset", "to_offset", "run_bytes")],
    ]


def library(toolchain: Toolchain) -> ctypes.CDLL:
    """Return the functions of meet.c. Raises CompilerError."""
    with _lock:  # ranks may be threads of one process
        functions = _libraries.get(toolchain.fingerprint)
        if functions is None:
            functions = toolchain.library(text_of(SOURCE))
            functions.af_meet.argtypes = (ctypes.c_void_p,)
            functions.af_meet.restype = ctypes.c_int32
            functions.af_begin.argtypes = (ctypes.c_void_p,) * 3
            functions.af_begin.restype = ctypes.c_int32
            functions.af_end.argtypes = (ctypes.c_void_p,)
            functions.af_end.restype = ctypes.c_int32
            functions.af_sum.argtypes = (*(ctypes.c_void_p,) * 3, *(ctypes.c_int64,) * 2)
            functions.af_sum.restype = None
            functions.af_copy.argtypes = (ctypes.c_void_p,) * 3
            functions.af_copy.restype = None
            functions.af_give_up.argtypes = (ctypes.c_void_p,)
            functions.af_give_up.restype = None
            functions.af_mark.argtypes = (ctypes.c_void_p, ctypes.c_uint32)
            functions.af_mark.restype = ctypes.c_uint32
            _libraries[toolchain.fingerprint] = functions
        return functions


def addresses(values: list[int]) -> ctypes.Array[ctypes.c_void_p]:
    """Return an array of pointers, to be kept alive as long as C has its address."""
    return (ctypes.c_void_p * max(1, len(values)))(*values)


# A rank's board is what all others look at while they meet. First comes the word of who gave the
# run up, with the reason of the rank whose board it is; then, for each lane, the two lines of the
# rank (`ArrivalLine`); then two places aside for each lane.

STAGING_BYTES = 16 << 10
"""Operands up to this size are copied aside: one arrival, which costs as much as copying them."""

# Bytes from the board's start: word of who gave up at 0, then fault, reason, and lines.
_AT_FAULT_AT, _WAITS_AT, _REASON_AT, _LINES_AT = 32, 36, 64, 4096
_REASON_BYTES = _LINES_AT - _REASON_AT
_LINE_BYTES = ctypes.sizeof(ArrivalLine)


class StatusPage:
    """A board in a segment of this process; `num_lanes` is that of the rank."""

    __slots__ = ("_num_lanes", "_segment")

    def __init__(self, segment: Segment, num_lanes: int) -> None:
        self._segment, self._num_lanes = segment, num_lanes

    @property
    def num_lanes(self) -> int:
        """How many lanes it has."""
        return self._num_lanes

    @staticmethod
    def size_bytes(num_lanes: int) -> int:
        """Return the bytes of a board."""
        return _LINES_AT + num_lanes * (_LINE_BYTES + 2 * STAGING_BYTES)

    @property
    def abort_word(self) -> int:
        """The address of the word of who gave up first: 0, or one more than the rank."""
        return self._segment.address

    def marked_by(self) -> int | None:
        """Return the rank that gave up first, or None."""
        number = ctypes.c_uint32.from_address(self.abort_word).value
        return number - 1 if number else None

    def line(self, lane: int) -> int:
        """Return the address of the rank's line of a lane."""
        return self._segment.address + _LINES_AT + lane * _LINE_BYTES

    def staging_buffers(self, lane: int) -> int:
        """Return the address of the two places aside of a lane."""
        lines = _LINES_AT + self._num_lanes * _LINE_BYTES
        return self._segment.address + lines + lane * 2 * STAGING_BYTES

    def arrived(self, lane: int) -> int:
        """Return the number of arrivals of the rank in a lane."""
        return int(ArrivalLine.from_address(self.line(lane)).arrived)

    def last_arrival(self, lane: int, turn: int) -> Arrival:
        """Return what the rank said of an arrival; `turn` is the arrival's number, modulo 2."""
        arrival: Arrival = ArrivalLine.from_address(self.line(lane)).came_to[turn]
        return arrival

    def write_reason(self, text: str, at_fault: int) -> None:
        """Write why this rank gives up, and the rank at fault; to be done before the abort word."""
        ctypes.c_uint32.from_address(self._segment.address + _AT_FAULT_AT).value = at_fault
        # Names of files may hold what is no text: a reason must not be lost for it.
        data = text.encode("utf-8", "replace")[: _REASON_BYTES - 1]
        ctypes.memmove(self._segment.address + _REASON_AT, data + b"\0", len(data) + 1)

    def note_waiting(self, rank: int | None) -> None:
        """Write which rank of another host this one waits for, None for none."""
        word = ctypes.c_uint32.from_address(self._segment.address + _WAITS_AT)
        word.value = 0 if rank is None else rank + 1

    def waits_for(self) -> int | None:
        """Return the rank of another host that this board's rank waits for, or None."""
        number = ctypes.c_uint32.from_address(self._segment.address + _WAITS_AT).value
        return number - 1 if number else None

    def at_fault(self) -> int:
        """Return the rank at fault, as this board's rank wrote it."""
        return ctypes.c_uint32.from_address(self._segment.address + _AT_FAULT_AT).value

    def reason(self) -> str:
        """Return what the rank wrote."""
        at = self._segment.address + _REASON_AT
        return ctypes.string_at(at, _REASON_BYTES).partition(b"\0")[0].decode("utf-8", "replace")


def open_pidfd(pid: int) -> int:
    """Return a descriptor that tells when a process has ended; -1 for this one.

    A number of a process may be given to another one later; the descriptor stays with this one.
    Raises OSError when it has ended.
    """
    if pid == os.getpid() or not hasattr(os, "pidfd_open"):
        # Threads of this process end with it; a system without pidfd relies on the deadline.
        return -1
    return os.pidfd_open(pid)
