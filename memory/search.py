"""Branch and bound: does a packing within a capacity exist?

In a packing in which no buffer can be moved to a lower place, each lies on the floor or on a buffer
live at the same time. Such packings are built from below. A node of the search takes the most
urgent pit of the skyline (see `memory.skyline`) and decides what lies over one section of it:
one of the unplaced buffers that fit, or nothing. These choices exclude each other and leave none
out, so a search that ends without a packing proves that there is none.

Going back is directed by conflicts. A dead end has looked at a span of sections; what was decided
wholly outside this span did not cause it, so the other choices of such decisions are not tried.
States that failed are remembered with their spans, for stacks of buffers are reached in many
orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from operator import itemgetter

from memory.skyline import Skyline, SkylineSpan, Terrain

_MAX_REMEMBERED = 100_000
"""Failed states remembered per search: bounds the memory, not the result."""

_START, _HEIGHT = itemgetter(0), itemgetter(2)
"""Of a `Segment`. Every node of the search reads those of hundreds: by name it is a third slower.
"""


class Outcome(Enum):
    """What a search has shown."""

    PACKED = "packed"
    EXHAUSTED = "exhausted"
    OUT_OF_NODES = "out of nodes"


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The outcome, the nodes it took, and where it is packed the offset of each rank."""

    outcome: Outcome
    nodes: int
    offsets: tuple[int, ...] = ()


class _SearchFrame:
    """A decision: the state before, what is left to try, and the span that failures looked at."""

    __slots__ = ("changed", "failed", "k", "key", "left", "may_leave", "num_placed", "state")

    def __init__(self, state: Skyline, key: tuple[int, ...], num_placed: int) -> None:
        self.state, self.key, self.num_placed = state, key, num_placed
        self.k = state.urgencies.index(min(state.urgencies))
        pit = state.segments[self.k]
        self.left = pit.options
        self.may_leave = True
        self.failed = self.changed = SkylineSpan()
        self.failed.add(pit.start - 1, pit.end + 1)


def search(terrain: Terrain, spare: list[int], max_nodes: int) -> Result:
    """Search for a packing with `spare[s]` bytes free in section s; visit at most `max_nodes`.

    Deterministic. A node costs about 20 us for some hundred buffers, and grows with the buffers
    and the sections: 100 us for 4,000 buffers.
    """
    state = terrain.start(spare)
    if state is None:
        return Result(Outcome.EXHAUSTED, 0)
    placed: list[tuple[int, int]] = []
    frames: list[_SearchFrame] = []
    remembered: dict[tuple[int, ...], SkylineSpan] = {}
    nodes = 0
    while state is not None and state.unplaced:
        if nodes == max_nodes:
            return Result(Outcome.OUT_OF_NODES, nodes)
        nodes += 1
        starts, heights = map(_START, state.segments), map(_HEIGHT, state.segments)
        key = (state.unplaced, state.barred, *starts, *heights)
        conflict = remembered.get(key)
        if conflict is None:
            frames.append(_SearchFrame(state, key, len(placed)))
            state = _descend(terrain, frames[-1], placed)
        else:
            state = None
        while state is None and frames:
            frame = frames[-1]
            if conflict is None:
                conflict = frame.failed
                if len(remembered) < _MAX_REMEMBERED:
                    remembered[frame.key] = conflict
                frames.pop()
            elif conflict.end <= frame.changed.start or frame.changed.end <= conflict.start:
                frames.pop()
            else:
                frame.failed.add(conflict.start, conflict.end)
                conflict = None
                state = _descend(terrain, frame, placed)
    if state is None:
        return Result(Outcome.EXHAUSTED, nodes)
    offsets = [0] * len(placed)
    for i, offset in placed:
        offsets[i] = offset
    return Result(Outcome.PACKED, nodes, tuple(offsets))


def _descend(
    terrain: Terrain, frame: _SearchFrame, placed: list[tuple[int, int]]
) -> Skyline | None:
    """Return the state after the next choice that is no dead end at once; None when all are."""
    del placed[frame.num_placed :]
    state, k = frame.state, frame.k
    pit = state.segments[k]
    while frame.left:
        i = (frame.left & -frame.left).bit_length() - 1
        frame.left &= ~terrain.sets.alike[i]
        frame.changed, seen = SkylineSpan(), SkylineSpan()
        after = terrain.lay(state, k, i, frame.changed, seen)
        if after is not None:
            placed.append((i, pit.height))
            return after
        frame.failed.add(seen.start, seen.end)
    if frame.may_leave:
        frame.may_leave = False
        frame.changed, seen = SkylineSpan(), SkylineSpan()
        after = terrain.leave(state, k, frame.changed, seen)
        if after is not None:
            return after
        frame.failed.add(seen.start, seen.end)
    return None
