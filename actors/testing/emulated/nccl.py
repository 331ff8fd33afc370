"""NCCL on the host: the ranks of a communicator meet in a segment that they share.

Ranks are processes or threads. The unique id says where the segment of the rank that made it is. A
call goes by chunks: each rank copies its own to its place in the segment, all meet (`meet.c`), and
each makes its result of what all have there, sums in the order of ranks.

Like NCCL, nobody sees here that another rank has ended: a call waits until it is aborted. Stricter:
ranks that come to different calls, or captured and not captured, are an error of all of them. More
lenient: an abort ends the call on the other ranks, too, with an error.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from actors.collectives import segments
from actors.collectives.segments import (
    ArrivalLine,
    ByteBlocks,
    GroupState,
    OwnSegments,
    Segment,
    map_all,
)
from actors.collectives.shared_memory import CollectiveLaunch
from actors.device.cuda.driver import CudaError
from actors.device.cuda.nccl import UNIQUE_ID_BYTES
from actors.kernels.cuda.calls import NCCL_DTYPES, CollectiveKind, RunCollective
from actors.kernels.library.toolchain import Toolchain
from actors.machine.protocol import Array
from actors.testing.emulated.memory import EmulatedMemory
from compiler.contract.types import HALVES, DType, from_bits, numpy_dtype, to_bits

INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 4, 5, 6
"""NCCL's own codes."""

_STAGING_BYTES = 64 << 10
_EVER_NS = 1 << 62
_LINE_BYTES = ctypes.sizeof(ArrivalLine)
_ID = struct.Struct("<qqq")


class _Meeting(ctypes.Structure):
    """What C reads of a call of `af_meet`."""

    _fields_ = CollectiveLaunch._fields_


_UFUNCS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class OfferedIds:
    """The unique ids that a driver has made, whose segments other ranks may still open."""

    def __init__(self, num_gpus: int) -> None:
        self._own = OwnSegments()
        self._num_gpus = num_gpus

    def make(self) -> bytes:
        """Return a new id. A communicator has one rank a GPU at most, so the size is known."""
        size_bytes = self._num_gpus * (_LINE_BYTES + 2 * _STAGING_BYTES)
        segment = self._own.allocate("communicator", size_bytes)
        unique_id = _ID.pack(os.getpid(), segment.fd, segment.size_bytes)
        return unique_id.ljust(UNIQUE_ID_BYTES, b"\0")

    def open(self, unique_id: bytes) -> Segment:
        """Return the segment of an id, mapped. Raises CudaError for what is none."""
        pid, fd, size_bytes = _ID.unpack(unique_id[: _ID.size])
        try:
            return map_all(pid, [(fd, size_bytes)])[0]
        except OSError as error:
            message = f"no communicator is known by this id: {error}"
            raise CudaError(message, code=INVALID_ARGUMENT, call="ncclCommInitRank") from error

    def close(self, unique_id: bytes) -> None:
        """Let an id go whose segment all ranks have mapped."""
        pid, fd, _ = _ID.unpack(unique_id[: _ID.size])
        for segment in [s for s in self._own.made if (os.getpid(), s.fd) == (pid, fd)]:
            segment.close_file()
            self._own.made.remove(segment)


class EmulatedCommunicator:
    """One rank of a communicator. One call runs at a time, on any thread.

    `error` is what a call has failed with: every later one fills its result with 0xFF.
    """

    def __init__(
        self, segment: Segment, num_ranks: int, rank: int, toolchain: Toolchain, deadline_s: float
    ) -> None:
        self._segment, self._library = segment, segments.library(toolchain)
        self.num_ranks, self.rank = num_ranks, rank
        self.error: CudaError | None = None
        self.is_aborted = False
        starts = [num_ranks * _LINE_BYTES + i * 2 * _STAGING_BYTES for i in range(num_ranks)]
        self._staging = [segment.array[start : start + 2 * _STAGING_BYTES] for start in starts]
        # C holds addresses of these only.
        self._lines = segments.addresses(
            [segment.address + i * _LINE_BYTES for i in range(num_ranks)]
        )
        self._places = segments.addresses([segment.address + start for start in starts])
        self._processes = (ctypes.c_int32 * num_ranks)(*[-1] * num_ranks)
        self._regions = (ByteBlocks * num_ranks)()
        self._firings = ctypes.c_uint64()
        self._group = GroupState(
            num_ranks, rank, int(deadline_s * 1e9), _STAGING_BYTES, 0, 0, 0,
            *[ctypes.addressof(x) for x in (self._lines, self._places, self._processes)],
        )  # fmt: skip

    def check_gpus(self, index: int) -> None:
        """Meet all ranks for the first time. Raises CudaError without one, or for one GPU twice."""
        own = np.array([index], np.int64)
        views = self.meet(own.view(np.uint8), 0, "ncclCommInitRank")
        gpus = [int(view.view(np.int64)[0]) for view in views]
        self._group.deadline_ns = _EVER_NS
        if len({*gpus}) < len(gpus):
            message = f"two ranks have one GPU: those of the ranks are {gpus}"
            raise CudaError(message, code=INVALID_USAGE, call="ncclCommInitRank")

    def abort(self) -> None:
        """End what waits on any rank."""
        self.is_aborted = True
        self._library.af_give_up(self._lines[0])

    def meet(self, own: Array, digest: int, call: str = "ncclGroupEnd") -> list[Array]:
        """Return what all ranks have brought, by rank, until the next but one meeting.

        Raises CudaError where a rank does not come, comes to something else, or aborts.
        """
        state = _Meeting(
            group=ctypes.addressof(self._group),
            digest=digest,
            firings=ctypes.addressof(self._firings),
            op=segments.MOVE,
            itemsize=1,
            is_aside=1,
            input_bytes=own.nbytes,
            input=own.ctypes.data,
            regions=ctypes.addressof(self._regions),
        )
        status = self._library.af_meet(ctypes.addressof(state))
        if status:
            words = {
                segments.ABORTED: "a rank has aborted it",
                segments.TIMED_OUT: f"rank {status >> 8} did not come in time",
            }
            message = words.get(status & 255, f"rank {status >> 8} came to another call")
            raise CudaError(message, code=REMOTE_ERROR, call=call)
        start = (self._group.num_arrivals & 1) * _STAGING_BYTES
        return [place[start : start + _STAGING_BYTES] for place in self._staging]


@dataclass(frozen=True, slots=True)
class CollectiveWork:
    """A call on its way: what a stream executes, which waits for the other ranks."""

    communicator: EmulatedCommunicator
    call: RunCollective
    memory: EmulatedMemory
    is_captured: bool

    def __call__(self) -> None:
        """Do it. Like NCCL it raises nothing: `error` of the communicator has what went wrong."""
        c, source, target = self.communicator, *self.operands()
        try:
            if c.error is None:
                self._run(source, target)
        except CudaError as error:
            c.error = error
        if c.error is not None:
            target.view(np.uint8).fill(0xFF)
        self.memory.check_guards(f"nccl {self.call.kind.value}")

    def operands(self) -> tuple[Array, Array]:
        """Return what this rank reads and writes. Raises CudaError for bytes that are nobody's."""
        call, rank = self.call, self.communicator.rank
        whole, own = sum(call.counts), call.counts[rank if len(call.counts) > 1 else 0]
        sizes = {
            CollectiveKind.ALL_REDUCE: (whole, whole),
            CollectiveKind.REDUCE_SCATTER: (whole, own),
            CollectiveKind.ALL_GATHER: (own, whole),
            CollectiveKind.EXCHANGE: (whole, sum(call.received)),
        }
        places = zip((call.source, call.target), sizes[call.kind], strict=True)
        source, target = [self._array(address, count) for address, count in places]
        return source, target

    def _array(self, address: int, count: int) -> Array:
        size_bytes = count * self.call.dtype.itemsize
        if not size_bytes:
            return np.zeros(0, numpy_dtype(self.call.dtype))
        self.memory.expect(address, size_bytes)
        buffer = (ctypes.c_uint8 * size_bytes).from_address(address)
        block: Array = np.frombuffer(memoryview(buffer), np.uint8)
        return block.view(numpy_dtype(self.call.dtype))

    def _run(self, source: Array, target: Array) -> None:
        call, rank = self.call, self.communicator.rank
        starts = np.concatenate([[0], np.cumsum(call.counts)]).astype(int).tolist()
        if call.kind is CollectiveKind.EXCHANGE:
            self._exchange(source, target, starts)
            return
        if call.kind is CollectiveKind.ALL_GATHER:
            for begin, end in self._chunks(max(call.counts)):
                views = self._meet(source[begin:end])
                for start, count, view in zip(starts, call.counts, views, strict=False):
                    part = target[start + begin : start + min(end, count)]
                    part[...] = view[: len(part)]
            return
        first, last = 0, starts[-1]
        if call.kind is CollectiveKind.REDUCE_SCATTER:
            first, last = starts[rank], starts[rank + 1]
        for begin, end in self._chunks(starts[-1]):
            views = self._meet(source[begin:end])
            result = _reduced([view[: end - begin] for view in views], call.dtype, call.by)
            low, high = max(begin, first), min(end, last)
            if low < high:
                target[low - first : high - first] = result[low - begin : high - begin]

    def _exchange(self, source: Array, target: Array, starts: Sequence[int]) -> None:
        call, c = self.call, self.communicator
        most = np.array([max(*call.counts, *call.received)], np.int64)
        # Ranks may send more or less: all go on as long as one of them has something.
        views = c.meet(most.view(np.uint8), self._digest(of_counts=False))
        longest = max([int(view.view(np.int64)[0]) for view in views])
        piece = _STAGING_BYTES // call.dtype.itemsize // c.num_ranks
        for begin in range(0, longest, piece):
            parts = np.zeros((c.num_ranks, piece), source.dtype)
            for part, start, count in zip(parts, starts, call.counts, strict=False):
                taken = source[start + begin : start + max(begin, min(begin + piece, count))]
                part[: len(taken)] = taken
            place = 0
            for view, count in zip(self._meet(parts.reshape(-1)), call.received, strict=True):
                size = max(0, min(begin + piece, count) - begin)
                given = view[c.rank * piece : c.rank * piece + size]
                target[place + begin : place + begin + size] = given
                place += count

    def _chunks(self, count: int) -> Iterator[tuple[int, int]]:
        # At least one: ranks that have nothing to move still wait for each other.
        step = _STAGING_BYTES // self.call.dtype.itemsize
        for begin in range(0, max(1, count), step):
            yield begin, min(begin + step, count)

    def _meet(self, own: Array) -> list[Array]:
        views = self.communicator.meet(own.view(np.uint8), self._digest())
        return [view.view(own.dtype) for view in views]

    def _digest(self, *, of_counts: bool = True) -> int:
        call = self.call
        is_exchange = call.kind is CollectiveKind.EXCHANGE
        counts = () if is_exchange or not of_counts else call.counts
        text = f"{call.kind} {counts} {call.dtype} {call.by} {self.is_captured}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def wrong_call(call: RunCollective, num_ranks: int) -> str:
    """Return what NCCL would not take of a call; "" for nothing."""
    if call.dtype not in NCCL_DTYPES:
        return f"NCCL has no type for {call.dtype.value}"
    is_reduced = call.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
    if is_reduced and call.by not in _UFUNCS:
        return f"NCCL reduces by nothing called {call.by!r}"
    expected = 1 if call.kind is CollectiveKind.ALL_REDUCE else num_ranks
    if len(call.counts) != expected:
        return f"{call.kind.value} of {len(call.counts)} counts; expected {expected}"
    return ""


def _reduced(views: Sequence[Array], dtype: DType, by: str) -> Array:
    """Return the sum or extreme of some arrays in their order; halves are added in float32."""
    wide = views
    if dtype in HALVES:
        wide = [from_bits(v) if dtype is DType.BFLOAT16 else v.astype(np.float32) for v in views]
    total = wide[0].copy()
    with np.errstate(all="ignore"):
        for other in wide[1:]:
            total = _UFUNCS[by](total, other)
        return to_bits(total) if dtype is DType.BFLOAT16 else total.astype(views[0].dtype)
