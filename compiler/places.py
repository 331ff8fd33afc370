"""Where the versions of a plan lie: windows on registers, each written whole.

A *place* is a window on a register into which something writes. It holds one version at a time.
Places of a register never overlap, so a view lies inside one of them or shows what nobody writes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

from compiler.errors import InternalError
from compiler.plan import ActorKind, Plan, View
from compiler.types import contiguous_strides

NO_BYTES = -1
"""The place of a view without elements."""

NOWHERE = -2
"""The place of a view on bytes into which nothing writes."""


class Places:
    """Windows on registers into which something writes; `of_view` has the place of every view.

    A view lies inside one place, or has no bytes (NO_BYTES), or shows what nobody writes
    (NOWHERE).
    """

    __slots__ = ("extents", "of_view", "register")

    def __init__(self, plan: Plan) -> None:
        every = [view.extent for view in plan.views]
        found: dict[int, dict[tuple[int, int], None]] = {}
        for index in _written_views(plan):
            if every[index][0] < every[index][1]:
                found.setdefault(plan.views[index].register, {})[every[index]] = None
        self.extents: list[tuple[int, int]] = []
        self.register: list[int] = []
        starts: dict[int, tuple[int, list[int]]] = {}
        for register, windows in found.items():
            ordered = sorted(windows)
            starts[register] = len(self.extents), [start for start, _ in ordered]
            for (_, end), (start, _) in pairwise(ordered):
                if start < end:
                    raise InternalError(
                        f"two results lie across one another in register"
                        f" {plan.registers[register].name!r}, at byte {start}"
                    )
            self.extents += ordered
            self.register += [register] * len(ordered)
        self.of_view: list[int] = []
        for view, (start, end) in zip(plan.views, every, strict=True):
            self.of_view.append(self._place(starts.get(view.register), start, end))

    def _place(self, found: tuple[int, list[int]] | None, start: int, end: int) -> int:
        if start >= end:
            return NO_BYTES
        if found is None:
            return NOWHERE
        first, starts = found
        place = first + bisect_right(starts, start) - 1
        return place if place >= first and end <= self.extents[place][1] else NOWHERE


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


def is_row_by_row(view: View) -> bool:
    """Whether the elements lie row by row without gaps."""
    shape, itemsize = view.type.shape, view.type.dtype.itemsize
    dense = contiguous_strides(shape, itemsize)
    return view.strides_bytes == dense or all(
        [
            length <= 1 or own == other
            for length, own, other in zip(shape, view.strides_bytes, dense, strict=True)
        ]
    )
