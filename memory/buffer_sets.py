"""Sets of buffers as the bits of integers: which lie within a span, which cover a section.

Buffers are numbered by *rank*, their place in a preorder, so that the lowest bit of a set is its
best buffer. Intersections of such sets are what the search does all day; on integers of some
thousand bits one costs about 0.1 us.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memory.liveness import IntArray
from memory.sections import Instance


@dataclass(frozen=True, slots=True, eq=False)
class BufferSets:
    """An instance in the order of a preorder, with its sets; indexed by rank or by section.

    lower, upper, size: columns by rank. starting_from[s] holds the buffers that start at section s
    or later, ending_by[s] those that end at s or earlier, covering[s] those live in section s.
    alike[i] holds the buffers that equal buffer i, itself included. full holds all.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    size: tuple[int, ...]
    starting_from: tuple[int, ...]
    ending_by: tuple[int, ...]
    covering: tuple[int, ...]
    alike: tuple[int, ...]
    full: int

    @classmethod
    def build(cls, instance: Instance, order: IntArray) -> BufferSets:
        """Build the sets in O((n + sections) n / 64) words of work."""
        lower = tuple(instance.lower[order].tolist())
        upper = tuple(instance.upper[order].tolist())
        size = tuple(instance.size[order].tolist())
        num_sections, full = instance.num_sections, (1 << len(size)) - 1
        starts, ends = [0] * (num_sections + 1), [0] * (num_sections + 1)
        of_shape: dict[tuple[int, int, int], int] = {}
        shapes = tuple(zip(lower, upper, size, strict=True))
        for i, shape in enumerate(shapes):
            starts[shape[0]] |= 1 << i
            ends[shape[1]] |= 1 << i
            of_shape[shape] = of_shape.get(shape, 0) | 1 << i
        for s in range(num_sections):
            ends[s + 1] |= ends[s]
            starts[-s - 2] |= starts[-s - 1]
        covering = tuple([full & ~starts[s + 1] & ~ends[s] for s in range(num_sections)])
        alike = tuple([of_shape[shape] for shape in shapes])
        return cls(lower, upper, size, tuple(starts), tuple(ends), covering, alike, full)

    def within(self, buffers: int, start: int, end: int) -> int:
        """Return those of `buffers` that are live within [start, end) only."""
        return buffers & self.starting_from[start] & self.ending_by[end]

    def clear_of(self, buffers: int, start: int, end: int) -> int:
        """Return those of `buffers` that are not live in [start, end)."""
        return buffers & (self.starting_from[end] | self.ending_by[start])

    def least_size(self, buffers: int, limit: int) -> int:
        """Return the smallest size in a set, or `limit` where that is smaller."""
        return min([limit, *[self.size[i] for i in members(buffers)]])


def members(buffers: int) -> Iterator[int]:
    """Yield the ranks in a set, ascending."""
    while buffers:
        lowest = buffers & -buffers
        yield lowest.bit_length() - 1
        buffers ^= lowest
