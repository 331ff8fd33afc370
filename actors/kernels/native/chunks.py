"""Where launches are cut: by shapes alone, never by the number of threads.

So the order of every sum is the same on each machine. A chunk is worth 10 to 20 us, below which
handing it to another thread costs more than it saves.
"""

from __future__ import annotations

CHUNK_BYTES = 512 << 10
"""Bytes that a chunk reads and writes, at least."""

MAX_CHUNKS = 256

RUN_BYTES = 64 << 10
"""Where a dense run of one operand is cut, so that there is something to make chunks of."""

CACHED_BYTES = 1 << 20
"""What a second-level cache holds."""


def num_chunks(num_bytes: float) -> int:
    """Return how many chunks there are where so many bytes are moved."""
    return max(1, min(int(num_bytes) // CHUNK_BYTES, MAX_CHUNKS))


def units_per_chunk(num_units: int, num_bytes: int) -> int:
    """Return how many of equal units make a chunk, where all of them together move `num_bytes`."""
    return max(1, -(-num_units // max(1, min(num_chunks(num_bytes), num_units))))
