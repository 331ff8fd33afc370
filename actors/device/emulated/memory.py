"""Memory as a CUDA driver gives it, on the host: real addresses, known bounds, guards around.

A block begins as 0xFF, which is NaN for floating point, so that what is read before it is written
shows; so does what is read after it was freed, as long as nobody else has got those bytes.
"""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass

import numpy as np

from actors.device.cuda.driver import CudaError
from actors.protocol import Array
from compiler.placement import Memory

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
            message = f"{who} wrote beside {spoiled}"
            raise CudaError(message, code=ILLEGAL_ADDRESS, call="launch")
