"""Memory of eager values: blocks are used again, and a step finds the addresses of the last one.

A block belongs to whoever refers to it, and goes back to its pool when nobody does. Of the free
blocks of a size the one of the lowest address is taken: which one depends on what is in use alone,
so a loop that computes the same soon gets the same blocks in each turn, and with them the launches
that are bound to their addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from actorflow.tensor.tracer import find_source
from actors.kernels.common.host_memory import address
from actors.machine.protocol import Block, FullDevice
from compiler.contract.errors import OutOfMemory
from memory.report import format_bytes

_ALIGNMENT = 64

_ROOM_BYTES = 64 << 20
"""What a pool may hold beside twice what was in use at once."""

_Free = list[tuple[int, Block]]
"""A heap by address."""


class PoolBlock:
    """Bytes at an address; they are free again when the object goes."""

    __slots__ = ("_home", "address", "memory")

    def __init__(self, memory: Block, address: int, home: _Free) -> None:
        self.memory = memory
        self.address = address
        self._home = home

    def __del__(self) -> None:
        heappush(self._home, (self.address, self.memory))


class Pool:
    """Free blocks by size. `generation` counts how often they were let go.

    What is bound to blocks of an earlier generation keeps them alive, and is to be dropped.

    Args:
        allocate: returns a block of so many bytes, aligned so, in the memory of a device.
    """

    def __init__(self, allocate: Callable[[int, int], Block]) -> None:
        self.generation = 0
        self._allocate = allocate
        self._free: dict[int, _Free] = {}
        self._total_bytes = 0
        self._most_used_bytes = 0

    def allocate(self, size_bytes: int) -> PoolBlock:
        """Return a block of at least so many bytes."""
        size = -(-max(size_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        free = self._free.get(size)
        if free:
            lowest, memory = heappop(free)
            return PoolBlock(memory, lowest, free)
        return self._new(size)

    def _new(self, size: int) -> PoolBlock:
        used = self._total_bytes - sum([n * len(free) for n, free in self._free.items()]) + size
        self._most_used_bytes = max(self._most_used_bytes, used)
        self._total_bytes += size
        # Blocks of sizes that are not asked for any more would stay for good.
        if self._total_bytes > 2 * self._most_used_bytes + _ROOM_BYTES:
            self._free = {}
            self.generation += 1
            self._total_bytes = self._most_used_bytes = used
        try:
            memory = self._allocate(size, _ALIGNMENT)
        except FullDevice as error:
            raise OutOfMemory(
                f"{find_source()}: an eager value needs {format_bytes(size)} of a GPU, of which"
                f" {format_bytes(error.free_bytes)} are free; let go of tensors that are not needed"
                " any more, or detach them from what led to them"
            ) from error
        at = address(memory) if isinstance(memory, np.ndarray) else memory.address
        return PoolBlock(memory, at, self._free.setdefault(size, []))
