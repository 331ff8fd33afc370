"""How a tensor gets from one layout over a mesh to another: the cheapest way, step by step.

A step changes the word of one axis of the mesh. A tensor that two axes of the mesh split along one
of its own lies in parts of parts: the outer axis cannot move while the inner one splits the same
rows, so that these are gathered first, or the way goes around. All ways are looked at: states are
the layouts that a tensor can have, of which there are few.

The time of a step is that of its collective (`compiler.contract.placement.AxisLinks`). On one host
each rank sends, for p ranks and T bytes of the tensor that the step gathers, reduces or exchanges:

    P -> B  2 T (p - 1) / p        P -> S, S -> B  T (p - 1) / p
    S(i) -> S(j)  T (p - 1) / p^2  B -> S, B -> P, S -> P  0

What becomes a term of a sum without a message is written beside zeros, all of it: that takes time,
too, and memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import lru_cache

from compiler.contract.errors import InternalError
from compiler.contract.placement import AxisLinks, MeshLinks
from compiler.contract.sbp import (
    BROADCAST,
    Broadcast,
    NdSbp,
    Partial,
    ReduceOp,
    Sbp,
    Split,
    format_sbp,
    shard_range,
)
from compiler.contract.types import TensorType
from compiler.ops.primitives.transfer import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
)

LAUNCH_NS = 500.0
"""What any step takes: a slice is a launch, too. Of ways that cost the same, the shorter counts."""


WRITTEN_BYTES_PER_NS = 20.0
"""What a rank reads or writes in its own memory, as stated."""


@lru_cache(maxsize=65_536)
def cheapest_boxing(
    type_: TensorType, source: NdSbp, target: NdSbp, mesh: tuple[int, ...], wires: MeshLinks
) -> tuple[float, tuple[NdSbp, ...]]:
    """Return the time in ns of the cheapest way between two layouts of a tensor, and the way.

    That is the layouts after each step, of which the last one is the target. There is always one: a
    tensor may be whole everywhere on the way.
    """
    # Dijkstra over layouts; steps cost more than 0, so the first time a layout is taken is final.
    best = {source: 0.0}
    queue: list[tuple[float, int, NdSbp, tuple[NdSbp, ...]]] = [(0.0, 0, source, ())]
    count = 0
    done: set[NdSbp] = set()
    while queue:
        time, _, words, steps = heapq.heappop(queue)
        if words == target:
            return time, steps
        if words in done:
            continue
        done.add(words)
        for axis, new in _steps(type_, words, target, mesh):
            # `count` breaks ties in the order of finding, so that all ranks take the same way.
            size = _gathered_bytes(type_, words, axis, mesh)
            sent_ns = _sent_ns(wires[axis], size, words[axis], new, mesh[axis])
            is_written = isinstance(new, Partial) and new.by is ReduceOp.SUM
            later = time + (sent_ns + LAUNCH_NS)
            later += size / WRITTEN_BYTES_PER_NS if is_written else 0.0
            after = (*words[:axis], new, *words[axis + 1 :])
            if later < best.get(after, float("inf")):
                best[after] = later
                count += 1
                heapq.heappush(queue, (later, count, after, (*steps, after)))
    raise InternalError(f"{type_} as {format_sbp(source)} cannot become {format_sbp(target)}")


def _steps(
    type_: TensorType, words: NdSbp, target: NdSbp, mesh: tuple[int, ...]
) -> Iterator[tuple[int, Sbp]]:
    """Yield the steps that a layout can take: an axis of the mesh, and its new word."""
    for axis, old in enumerate(words):
        candidates: list[Sbp] = [BROADCAST, *map(Split, range(type_.rank))]
        aim = target[axis]
        # Beside slices there are zeros, which are shares of a sum and of nothing else.
        if isinstance(aim, Partial) and (aim.by is ReduceOp.SUM or isinstance(old, Broadcast)):
            candidates.append(aim)
        for new in candidates:
            if new != old and _may(type_, words, axis, new, mesh):
                yield axis, new


def _may(type_: TensorType, words: NdSbp, axis: int, new: Sbp, mesh: tuple[int, ...]) -> bool:
    """Whether an axis of the mesh may take a word while the others have theirs."""
    old = words[axis]
    if isinstance(new, Partial) and isinstance(old, Partial):
        return False
    axes = {word.axis for word in (old, new) if isinstance(word, Split)}
    inner = {word.axis for word in words[axis + 1 :] if isinstance(word, Split)}
    # An inner axis cuts what the outer ones left: under it the split of the same tensor axis may
    # not change.
    if axes & inner:
        return False
    if isinstance(new, Split):
        rows = type_.shape[new.axis]
        for word, parts in zip(words[:axis], mesh, strict=False):
            if word == new:
                # The last part is the shortest one.
                rows = len(shard_range(rows, parts, parts - 1))
        return rows >= mesh[axis]
    return True


def _gathered_bytes(type_: TensorType, words: NdSbp, axis: int, mesh: tuple[int, ...]) -> float:
    """Return the bytes of the tensor that the ranks along an axis have together."""
    size = float(type_.size_bytes)
    for other, (word, parts) in enumerate(zip(words, mesh, strict=True)):
        if other != axis and isinstance(word, Split):
            size /= parts
    return size


def _sent_ns(wire: AxisLinks, size: float, old: Sbp, new: Sbp, parts: int) -> float:
    """Return the time of what ranks send each other."""
    # From the whole a slice is cut without a message; a share of a sum is zeros beside it.
    if isinstance(old, Broadcast) or isinstance(new, Partial):
        return 0.0
    # True is 1: to slices the second op of the pair, to the whole the first.
    ops = (ALL_REDUCE, REDUCE_SCATTER) if isinstance(old, Partial) else (ALL_GATHER, ALL_TO_ALL)
    return wire.time_ns(ops[isinstance(new, Split)].name, size, parts)
