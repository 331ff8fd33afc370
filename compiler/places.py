"""Where the versions of a plan lie: windows on registers, each written whole.

A *place* is a window on a register into which something writes. It holds one version at a time.
Places of a register never overlap, so a view lies inside one of them or shows what nobody writes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from compiler.errors import InternalError
from compiler.plan import ActorKind, Plan, View
from compiler.types import contiguous_strides

NO_BYTES = -1
"""The place of a view without elements."""

NOWHERE = -2
"""The place of a view on bytes into which nothing writes."""


class Extent(NamedTuple):
    """Bytes [start, end) of a register; `is_dense`: row by row, without gaps."""

    start: int
    end: int
    is_dense: bool


class Places:
    """Windows on registers into which something writes; `of_view` has the place of every view.

    A view lies inside one place, or has no bytes (NO_BYTES), or shows what nobody writes
    (NOWHERE).
    """

    __slots__ = ("_starts", "_windows", "extents", "is_whole", "of_view", "register")

    def __init__(self, plan: Plan, extents: Sequence[Extent]) -> None:
        self.extents = extents
        self._starts: dict[int, tuple[int, list[int]]] = {}
        windows = {
            (plan.views[index].register, extents[index].start, extents[index].end)
            for index in _written_views(plan)
            if extents[index].start < extents[index].end
        }
        self._windows = sorted(windows)
        for one, two in pairwise(self._windows):
            if one[0] == two[0] and two[1] < one[2]:
                name = plan.registers[one[0]].name
                raise InternalError(
                    f"two results lie across one another in register {name!r}, at byte {two[1]}"
                )
        for place, (register, start, _) in enumerate(self._windows):
            self._starts.setdefault(register, (place, []))[1].append(start)
        self.register = [register for register, _, _ in self._windows]
        # Most views show a place as it was written, and a look into a table tells which.
        place_of = {window: place for place, window in enumerate(self._windows)}
        self.of_view: list[int] = []
        self.is_whole: list[bool] = []
        """By view, whether it shows all of its place, row by row."""
        for view, (start, end, is_dense) in zip(plan.views, extents, strict=True):
            known = place_of.get((view.register, start, end))
            self.is_whole.append(is_dense and known is not None)
            self.of_view.append(self._around(view, start, end) if known is None else known)

    def __len__(self) -> int:
        return len(self._windows)

    def start(self, view: int) -> int:
        """Return the first byte, in its register, of the place of a view that has one."""
        return self._windows[self.of_view[view]][1]

    def _around(self, view: View, start: int, end: int) -> int:
        """Return the place that a view shows a part of."""
        if start >= end:
            return NO_BYTES
        if view.register not in self._starts:
            return NOWHERE
        first, starts = self._starts[view.register]
        place = first + bisect_right(starts, start) - 1
        return place if place >= first and end <= self._windows[place][2] else NOWHERE


def _written_views(plan: Plan) -> Iterable[int]:
    for actor in plan.actors:
        for launch in actor.launches:
            yield from launch.outputs
            if launch.workspace is not None:
                yield launch.workspace
        if actor.kind is ActorKind.SOURCE:
            registers = {port.register for port in actor.outputs}
            yield from [f.view for f in plan.fields if f.register in registers]
    yield from [variable.view for variable in plan.variables]
    yield from [constant.view for constant in plan.constants]


def extents_of(views: Iterable[View]) -> list[Extent]:
    """Return the smallest range of bytes that holds all elements of each view. O(views)."""
    known: dict[tuple[object, ...], Extent] = {}
    extents: list[Extent] = []
    for view in views:
        key = (view.type.dtype, view.type.shape, view.strides_bytes)
        found = known.get(key)
        if found is None:
            found = known[key] = _extent(view)
        offset = view.offset_bytes
        extents.append(Extent(offset + found.start, offset + found.end, found.is_dense))
    return extents


def _extent(view: View) -> Extent:
    """Return the extent of a view as if it were at offset 0."""
    start, end = view.extent
    if start == end:
        return Extent(0, 0, is_dense=True)
    dense = contiguous_strides(view.type.shape, view.type.dtype.itemsize)
    pairs = zip(view.type.shape, view.strides_bytes, dense, strict=True)
    is_dense = all([length <= 1 or own == row for length, own, row in pairs])
    return Extent(start - view.offset_bytes, end - view.offset_bytes, is_dense)
