"""Memory and captures as a CUDA driver has them, on the host.

Addresses are real, bounds are known, and guards lie around each block. A block begins as 0xFF,
which is NaN for floating point, so that what is read before it is written shows; so does what is
read after it was freed, as long as nobody else has got those bytes.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from actors.device.cuda.driver import CudaError
from actors.machine.protocol import Array, Launch
from compiler.contract.placement import Memory

INVALID_VALUE, OUT_OF_MEMORY, ILLEGAL_ADDRESS = 1, 2, 700

_ALIGNMENT = 256
_GUARD = bytes([0x5A]) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class EmulatedBlock:
    """Bytes that were allocated, by whom and of what kind. `raw` holds them and the guards."""

    address: int
    size_bytes: int
    memory: Memory
    owner: object
    raw: Array

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.address + self.size_bytes

    @property
    def is_whole(self) -> bool:
        """Whether the guards before and after it are as they were."""
        before = ctypes.string_at(self.address - _ALIGNMENT, _ALIGNMENT)
        return before == _GUARD == ctypes.string_at(self.end, _ALIGNMENT)

    def __str__(self) -> str:
        return f"{self.size_bytes} bytes of {self.memory.value} memory at {self.address:#x}"


class EmulatedMemory:
    """All blocks of some drivers, whose addresses mean the same to each of them."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._blocks: dict[int, EmulatedBlock] = {}

    def allocate(self, size_bytes: int, memory: Memory, owner: object) -> int:
        """Return the address of new bytes. Raises CudaError where the host has not so many."""
        if size_bytes < 1:
            raise CudaError(f"{size_bytes} bytes were asked for", code=INVALID_VALUE, call="malloc")
        try:
            raw = np.full(size_bytes + 3 * _ALIGNMENT, _GUARD[0], np.uint8)
        except (MemoryError, ValueError) as error:
            message = f"the host has no {size_bytes} bytes to act as {memory.value} memory"
            raise CudaError(message, code=OUT_OF_MEMORY, call="malloc") from error
        start = -raw.ctypes.data % _ALIGNMENT + _ALIGNMENT
        raw[start : start + size_bytes] = 0xFF
        block = EmulatedBlock(raw.ctypes.data + start, size_bytes, memory, owner, raw)
        bisect.insort(self._addresses, block.address)
        self._blocks[block.address] = block
        return block.address

    def free(self, address: int, memory: Memory) -> None:
        """Give a block back. Raises CudaError for what is none of this kind."""
        block = self._blocks.get(address)
        if block is None or block.memory is not memory:
            raise CudaError(
                f"no {memory.value} memory begins at {address:#x}", code=INVALID_VALUE, call="free"
            )
        block.raw.fill(0xFF)
        self._addresses.remove(address)
        del self._blocks[address]

    def of(self, owner: object) -> tuple[EmulatedBlock, ...]:
        """Return what a driver has allocated and not freed."""
        return tuple([b for b in self._blocks.values() if b.owner is owner])

    def used_bytes(self, owner: object) -> int:
        """Return the bytes of device memory that a driver has given out."""
        return sum([b.size_bytes for b in self.of(owner) if b.memory is Memory.DEVICE])

    def find(self, address: int, size_bytes: int) -> EmulatedBlock | None:
        """Return the block in which a range lies; None where it leaves all of them."""
        index = bisect.bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        block = self._blocks[self._addresses[index]]
        return block if address + size_bytes <= block.end else None

    def spoiled(self) -> EmulatedBlock | None:
        """Return a block beside which somebody wrote, if there is one."""
        return next((block for block in [*self._blocks.values()] if not block.is_whole), None)

    def expect(self, address: int, size_bytes: int) -> None:
        """Raise CudaError where bytes that a stream's work needs are nobody's."""
        if self.find(address, size_bytes) is None:
            message = f"{size_bytes} bytes at {address:#x} are nobody's"
            raise CudaError(message, code=ILLEGAL_ADDRESS, call="stream")

    def check_guards(self, who: str) -> None:
        """Raise CudaError where `who` wrote beside a block."""
        spoiled = self.spoiled()
        if spoiled is not None:
            message = f"{who} wrote outside {spoiled}"
            raise CudaError(message, code=ILLEGAL_ADDRESS, call="launch")


# What CUDA allows during a capture: streams join a capture by waiting for an event that was
# recorded in it, and must be waited for in turn before it ends. Whatever is put on them is kept, in
# that order, which is one of those that the graph allows. A call that is not allowed fails and
# breaks the capture: all that comes after fails.
#
# Source: CUDA Programming Guide, "CUDA Graphs", stream capture; the codes are cudaError_t's.

UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION = range(900, 906)
CAPTURED_EVENT, WRONG_THREAD = 907, 908


class StreamCapture:
    """A capture that is going on, begun by one thread on one stream."""

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.thread = threading.get_ident()
        self.is_broken = False
        self._launches: list[Launch] = []
        self._seen: dict[int, dict[int, int]] = {origin: {origin: 0}}
        self._records: dict[int, dict[int, int]] = {}

    def has_stream(self, stream: int) -> bool:
        """Whether a stream is captured."""
        return stream in self._seen

    def has_event(self, event: int) -> bool:
        """Whether the latest record of an event is of this capture."""
        return event in self._records

    def put(self, stream: int, launch: Launch) -> None:
        """Keep what was put on a captured stream."""
        self._launches.append(launch)
        self._seen[stream][stream] += 1

    def record(self, event: int, stream: int) -> None:
        """Mark this place of a captured stream."""
        self._records[event] = dict(self._seen[stream])

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait for an event of this capture: so it joins."""
        counts = self._seen.setdefault(stream, {stream: 0})
        for other, count in self._records[event].items():
            counts[other] = max(counts.get(other, 0), count)

    def graph(self) -> tuple[Launch, ...]:
        """Return all that was kept. Raises CudaError where a stream was not waited for."""
        counts = self._seen[self.origin]
        unjoined = [s for s, own_counts in self._seen.items() if counts.get(s, -1) < own_counts[s]]
        if unjoined:
            raise CudaError(
                f"{len(unjoined)} of the streams captured were not waited for before the end",
                code=UNJOINED,
                call="end_capture",
            )
        return tuple(self._launches)


class Captures:
    """The captures that go on at the driver of one device."""

    def __init__(self) -> None:
        self._current: list[StreamCapture] = []
        self._old_events: set[int] = set()

    def of_stream(self, stream: int) -> StreamCapture | None:
        """Return the capture that a stream is in. Raises CudaError where that is broken."""
        capture = next((c for c in self._current if c.has_stream(stream)), None)
        if capture is not None and capture.is_broken:
            _refuse("a call before broke the capture", INVALIDATED, "capture")
        return capture

    def refuse_while_capturing(self, call: str) -> None:
        """Raise CudaError, and break the capture, where this thread captures something."""
        mine = [c for c in self._current if c.thread == threading.get_ident()]
        for capture in mine:
            capture.is_broken = True
        if mine:
            _refuse(f"{call} is not allowed while this thread captures", UNSUPPORTED, call)

    def refuse_event(self, event: int, call: str) -> None:
        """Raise CudaError where an event was last recorded in a capture."""
        capture = next((c for c in self._current if c.has_event(event)), None)
        if capture is not None:
            capture.is_broken = True
        if capture is not None or event in self._old_events:
            _refuse(f"{call} of an event that was recorded in a capture", CAPTURED_EVENT, call)

    def record(self, event: int, stream: int, otherwise: Callable[[], None]) -> None:
        """Record an event in the capture of a stream; in none, do what is done otherwise."""
        capture = self.of_stream(stream)
        for other in self._current:
            if other is not capture:
                other._records.pop(event, None)
        if capture is not None:
            self._old_events.discard(event)
            capture.record(event, stream)
            return
        otherwise()
        self._old_events.discard(event)

    def wait(self, stream: int, event: int, otherwise: Callable[[], None], *, is_new: bool) -> None:
        """Let a stream wait for an event, where capturing allows it; `is_new`: never recorded."""
        own_capture = self.of_stream(stream)
        if event in self._old_events:
            self.refuse_event(event, "wait")
        event_capture = next((c for c in self._current if c.has_event(event)), None)
        if event_capture is not None and event_capture.is_broken:
            _refuse("a call before broke the capture", INVALIDATED, "wait")
        if event_capture is None:
            if own_capture is None:
                otherwise()
            elif not is_new:
                own_capture.is_broken = True
                _refuse("a captured stream waits for what is not captured", ISOLATION, "wait")
            return
        if own_capture is not None and own_capture is not event_capture:
            own_capture.is_broken = event_capture.is_broken = True
            _refuse("a stream would be in two captures", MERGE, "wait")
        event_capture.wait(stream, event)

    def begin(self, stream: int) -> None:
        """Begin to capture a stream."""
        if self.of_stream(stream) is not None:
            _refuse("the stream is captured already", UNMATCHED, "begin_capture")
        self._current.append(StreamCapture(stream))

    def end(self, stream: int) -> tuple[Launch, ...]:
        """Return what was captured; the capture is over, whatever this raises."""
        capture = next((c for c in self._current if c.has_stream(stream)), None)
        if capture is None or capture.origin != stream:
            _refuse("no capture was begun on this stream", UNMATCHED, "end_capture")
        if capture.thread != threading.get_ident():
            _refuse("another thread has begun the capture", WRONG_THREAD, "end_capture")
        self._current.remove(capture)
        self._old_events.update(capture._records)
        if capture.is_broken:
            _refuse("a call before broke the capture", INVALIDATED, "end_capture")
        return capture.graph()


def _refuse(message: str, code: int, call: str) -> NoReturn:
    raise CudaError(message, code=code, call=call)
