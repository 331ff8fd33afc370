"""A simple cost model of the host's kernels: the same on every machine, never measured.

Time = start of the calls + bytes from memory + passes over cached blocks + arithmetic. The
constants are those of one core of a server of 2024; the planner only compares them with each
other.
"""

from __future__ import annotations

from collections.abc import Iterable

from actors.kernels.kernel import Operand

LAUNCH_NS = 1500.0
MEMORY_BYTES_PER_NS = 10.0
CACHE_BYTES_PER_NS = 40.0
FLOPS_PER_NS = 100.0


def duration_ns(operands: Iterable[Operand], *, passes: float = 0.0, flops: float = 0.0) -> float:
    """Estimate a launch: once over memory, `passes` times over the largest operand in cache."""
    sizes = [operand.type.size_bytes for operand in operands]
    swept = passes * max(sizes, default=0)
    return (
        LAUNCH_NS
        + sum(sizes) / MEMORY_BYTES_PER_NS
        + swept / CACHE_BYTES_PER_NS
        + flops / FLOPS_PER_NS
    )
