"""The places of a plan's versions: windows on registers, each written whole.

A *place* is a window on a register into which something writes. It holds one version at a time. A
window is runs of bytes at one distance: a dense tensor is one run, and a part that is written into
its slice of a joined tensor is a column of it. Of two windows of a register that share bytes one
holds the other, and what lies inside a window tiles it: such a window is a *joint*, and what it
holds is what the windows inside hold. Places that are no joints never overlap, so a view lies
inside one place, or shows what nobody writes. What a place carries from firing to firing is
counted while a period is played (`LoopCarriedCount`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations, pairwise
from typing import NamedTuple

from compiler.contract.errors import InternalError
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import ActorKind, View
from compiler.contract.types import RegisterId, contiguous_strides, runs_of
from compiler.ops.primitives.sources import EVALUATED, SCRATCH

NO_BYTES = -1
"""The place of a view without elements."""

NOWHERE = -2
"""The place of a view on bytes into which nothing writes."""


class StridedRange(NamedTuple):
    """Bytes of a register: from `start`, runs of `run` bytes that begin `period` bytes apart.

    `end` is the end of the last run. `is_dense`: all elements of the view, row by row, in one run.
    `is_exact`: the runs are the elements and nothing else; where a view is not that regular, one
    run holds all of it.
    """

    start: int
    end: int
    is_dense: bool
    run: int
    period: int
    is_exact: bool

    @property
    def size_bytes(self) -> int:
        """Bytes in the runs."""
        return self.run * (1 + (self.end - self.start - self.run) // self.period)

    def is_apart(self, other: StridedRange) -> bool:
        """Whether no byte is in both; of one register."""
        if self.end <= other.start or other.end <= self.start:
            return True
        # Only an extent of several runs has a period that counts.
        periods = {e.period for e in (self, other) if e.run < e.end - e.start}
        if len(periods) != 1:
            return False
        (period,) = periods
        # Columns of one table: each begins, in the row of the other, where the other has ended.
        distance = (other.start - self.start) % period
        return self.run <= distance and distance + other.run <= period

    def holds(self, other: StridedRange) -> bool:
        """Whether all bytes of another extent are in this one; of one register."""
        if other.start < self.start or self.end < other.end:
            return False
        within = (other.start - self.start) % self.period
        is_one_run = other.run == other.end - other.start
        return within + other.run <= self.run and (
            self.run == self.end - self.start or is_one_run or other.period == self.period
        )


Window = tuple[int, StridedRange]
"""A register and bytes of it."""


class WrittenWindows:
    """Windows on registers into which something writes; `of_view` has the place of every view.

    A view lies inside one place, or has no bytes (NO_BYTES), or shows what nobody writes
    (NOWHERE). Of several places that hold it, `of_view` has the smallest, and `joints` those around
    a place, the smallest first. `atoms` of a place are those inside it that are no joints.
    """

    __slots__ = (
        "_sorted",
        "_starts",
        "_windows",
        "atoms",
        "extents",
        "is_whole",
        "joints",
        "of_view",
        "register",
    )

    def __init__(self, plan: Plan, extents: Sequence[StridedRange]) -> None:
        self.extents = extents
        windows: dict[tuple[int, ...], StridedRange] = {}
        for index in _written_views(plan):
            extent = extents[index]
            if extent.start < extent.end:
                windows[_key(plan.views[index].register, extent)] = extent
        keys = sorted(windows)
        self._windows = [windows[key] for key in keys]
        self.register = [key[0] for key in keys]
        self._starts: dict[int, tuple[int, list[int]]] = {}
        for place, key in enumerate(keys):
            self._starts.setdefault(key[0], (place, []))[1].append(key[1])
        self.joints: dict[int, tuple[int, ...]] = {}
        self.atoms: dict[int, tuple[int, ...]] = {}
        self._sorted: dict[int, list[int]] = {}
        for register, first, last in _crossing(self.register, self._windows):
            self._nest(plan, register, range(first, last))
        # Most views show a place as it was written, and a look into a table tells which.
        place_of = {key: place for place, key in enumerate(keys)}
        self.of_view: list[int] = []
        self.is_whole: list[bool] = []
        """By view, whether its elements are all of its place."""
        for view, extent in zip(plan.views, extents, strict=True):
            exact = place_of.get(_key(view.register, extent))
            self.is_whole.append(extent.is_exact and exact is not None)
            self.of_view.append(self._around(view, extent) if exact is None else exact)

    def __len__(self) -> int:
        return len(self._windows)

    def start(self, place: int) -> int:
        """Return the first byte of a place in its register."""
        return self._windows[place].start

    def size_bytes(self, place: int) -> int:
        """Return the bytes of a place."""
        return self._windows[place].size_bytes

    def atoms_of(self, place: int) -> tuple[int, ...]:
        """Return the places that hold what a place holds."""
        return self.atoms.get(place, (place,))

    def around(self, view: int) -> tuple[int, ...]:
        """Return all places that hold the bytes of a view that lies in one, the smallest first."""
        place = self.of_view[view]
        return (place, *self.joints.get(place, ()))

    def _nest(self, plan: Plan, register: int, places: range) -> None:
        """Find the joints among the windows of a register. Raises InternalError for other overlaps.

        O(n**2) for windows that overlap, which a joined tensor has one of for each part.
        """
        # By size, so that a window can only lie in one that comes later.
        by_size = sorted(places, key=lambda place: self._windows[place].size_bytes)
        inside: dict[int, list[int]] = {place: [] for place in places}
        for small, large in combinations(by_size, 2):
            one, two = self._windows[small], self._windows[large]
            if two.holds(one):
                inside[large].append(small)
                self.joints[small] = (*self.joints.get(small, ()), large)
            elif not one.is_apart(two):
                name = plan.registers[register].name
                raise InternalError(
                    f"two results lie across one another in register {name!r}, at byte"
                    f" {max(one.start, two.start)}"
                )
        for place, nested in inside.items():
            atoms = tuple([other for other in nested if not inside[other]])
            if nested and sum([self.size_bytes(a) for a in atoms]) != self.size_bytes(place):
                name = plan.registers[register].name
                raise InternalError(
                    f"results that lie in a larger one leave gaps in it, in register {name!r}"
                )
            if nested:
                self.atoms[place] = atoms
        self._sorted[register] = by_size

    def _around(self, view: View, extent: StridedRange) -> int:
        """Return the place that a view shows a part of."""
        if extent.start >= extent.end:
            return NO_BYTES
        register = view.register
        if register not in self._starts:
            return NOWHERE
        if register in self._sorted:
            # The smallest first, so that the first match is the innermost place.
            for place in self._sorted[register]:
                if _holds_view(self._windows[place], view, extent):
                    return place
            return NOWHERE
        first, starts = self._starts[register]
        # Windows of this register are disjoint: only the last one that begins at or before can hold
        # it.
        place = first + bisect_right(starts, extent.start) - 1
        return place if place >= first and self._windows[place].holds(extent) else NOWHERE


def _holds_view(window: StridedRange, view: View, extent: StridedRange) -> bool:
    """Whether all elements of a view are in a window; `extent` is the view's."""
    if window.holds(extent):
        return True
    if extent.is_exact or extent.start < window.start or window.end < extent.end:
        return False
    # Steps by whole rows of a column stay in it; the others must not lead out of it.
    axes = zip(view.type.shape, view.strides_bytes, strict=True)
    reach = sum([(n - 1) * step for n, step in axes if step % window.period])
    within = (view.offset_bytes - window.start) % window.period
    return within + reach + view.type.dtype.itemsize <= window.run


def _key(register: int, extent: StridedRange) -> tuple[int, ...]:
    return register, extent.start, extent.end, extent.run, extent.period


def _crossing(registers: list[int], windows: list[StridedRange]) -> Iterable[tuple[int, int, int]]:
    """Yield registers of which windows overlap, or have gaps, with the range of their places."""
    first = 0
    for place in range(1, len(registers) + 1):
        if place < len(registers) and registers[place] == registers[first]:
            continue
        group = windows[first:place]
        is_plain = all([w.run == w.end - w.start for w in group])
        if not is_plain or any([two.start < one.end for one, two in pairwise(group)]):
            yield registers[first], first, place
        first = place


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
    for join in plan.joins:
        yield from (*join.inputs, join.output)


def extents_of(views: Iterable[View]) -> list[StridedRange]:
    """Return where all elements of each view lie. O(views)."""
    cache: dict[tuple[object, ...], StridedRange] = {}
    extents: list[StridedRange] = []
    for view in views:
        key = (view.type.dtype, view.type.shape, view.strides_bytes)
        extent = cache.get(key)
        if extent is None:
            extent = cache[key] = _extent(view)
        offset = view.offset_bytes
        extents.append(StridedRange(offset + extent.start, offset + extent.end, *extent[2:]))
    return extents


def extent_of(view: View) -> StridedRange:
    """Return where the elements of one view lie."""
    return extents_of((view,))[0]


def form_of(view: View) -> tuple[tuple[int, int], ...]:
    """Return extents and strides of a view, with axes joined that lie like one.

    Equal forms at one offset show the same elements in the same order.
    """
    axes: list[tuple[int, int]] = []
    for length, stride in zip(view.type.shape, view.strides_bytes, strict=True):
        # An axis of one element takes no step, whatever its stride.
        if length == 1:
            continue
        if axes and axes[-1][1] == length * stride:
            axes[-1] = (axes[-1][0] * length, stride)
        else:
            axes.append((length, stride))
    return tuple(axes)


def _extent(view: View) -> StridedRange:
    """Return the extent of a view as if it were at offset 0."""
    start, end = view.extent
    if start == end:
        return StridedRange(0, 0, is_dense=True, run=0, period=1, is_exact=True)
    item = view.type.dtype.itemsize
    dense = contiguous_strides(view.type.shape, item)
    pairs = zip(view.type.shape, view.strides_bytes, dense, strict=True)
    is_dense = all([length <= 1 or stride == row for length, stride, row in pairs])
    start, end = start - view.offset_bytes, end - view.offset_bytes
    # A negative stride (start < 0) has no runs from the start on: one run holds all of it.
    runs = None if start else runs_of(view.type.shape, view.strides_bytes, item)
    run, period = runs or (end - start, end - start)
    return StridedRange(start, end, is_dense, run, period, runs is not None)


# Which version a read finds of what another actor updates in place depends on how often that one
# has fired by then. One order of firings stands for all: no plan runs unless `actors.race.race`
# finds that every two conflicting accesses come in the same order in all of them.


class ReadTime(Enum):
    """Which version a read names: see `compiler.contract.plan_tables.Variable`."""

    BEFORE = "before"
    AFTER = "after"
    BETWEEN = "between"


@dataclass(frozen=True, slots=True)
class LoopCarriedRead:
    """An actor reads, in every firing, what another actor updates in each of its own."""

    actor: int
    launch: int
    writer: int
    register: RegisterId
    when: ReadTime


@dataclass(frozen=True, slots=True)
class LoopCarried:
    """What goes from firing to firing: such reads, and pairs (variable, actor that writes it)."""

    reads: tuple[LoopCarriedRead, ...]
    writers: tuple[tuple[int, int], ...]


class LoopCarriedCount:
    """Counts the firings of writers at every firing that reads what they carry over.

    Raises InternalError, at once, where variables are written at other rates than their roles say.
    """

    def __init__(self, plan: Plan, carried: LoopCarried, repetitions: Sequence[int]) -> None:
        self._plan = plan
        self._repetitions = repetitions
        self._check_rates(carried.writers)
        self._fired = [0] * len(plan.actors)
        # All that one writer updates is alike to one reader.
        # Reversed, so that the first read of each kind stays.
        first = {(r.actor, r.writer, r.when): r for r in reversed(carried.reads)}
        self._reads: dict[int, list[LoopCarriedRead]] = {}
        for read in first.values():
            self._reads.setdefault(read.actor, []).append(read)

    def visit(self, actor: int, firing: int, times: int) -> None:
        """Take some firings in a row, the first one `firing`. Raises InternalError."""
        reads = self._reads.get(actor, ())
        for read in reads:
            fired = self._fired[read.writer]
            if read.when is ReadTime.BETWEEN:
                self._check_between(read, reads, firing)
            else:
                # The first and the last firing of the row: expected counts only grow between them.
                for k in dict.fromkeys((firing, firing + times - 1)):
                    expected = self._expected(read, k)
                    if fired != expected:
                        raise self._error(
                            read,
                            f"{k} wants {expected} firings of it before, and comes after {fired}",
                        )
        self._fired[actor] = firing + times

    def skip(self, fired: Sequence[int], times: int) -> None:
        """Take some rounds, each like the one before: what held in it holds in these.

        What is found and what is expected grow alike where both actors fire, and where only one
        does the round that is visited next tells, because neither ever shrinks.
        """
        self._fired = [n + times * more for n, more in zip(self._fired, fired, strict=True)]

    def _check_rates(self, writers: tuple[tuple[int, int], ...]) -> None:
        """Check that all scratch is written at one rate, and so are counts and all state."""
        plan, times = self._plan, self._repetitions
        first: dict[str, tuple[int, int]] = {}
        for index, actor in writers:
            role = plan.variables[index].role
            kind = role if role in (SCRATCH, EVALUATED) else "state"
            other, rate = first.setdefault(kind, (index, actor))
            if times[actor] != times[rate]:
                names = [plan.variables[i].name for i in (index, other)]
                raise InternalError(
                    f"{plan.actors[actor].name!r} writes variable {names[0]!r} {times[actor]} times"
                    f" in a period, and {plan.actors[rate].name!r} writes {names[1]!r}"
                    f" {times[rate]} times"
                )

    def _expected(self, read: LoopCarriedRead, firing: int) -> int:
        """Return how often the writer has to have fired before this firing of the reader."""
        num_reads, num_writes = self._repetitions[read.actor], self._repetitions[read.writer]
        is_after = read.when is ReadTime.AFTER
        # Whole ratios alone: only then does a firing of one side belong to one of the other.
        if num_reads % num_writes == 0:
            return firing // (num_reads // num_writes) + is_after
        if num_writes % num_reads == 0:
            return (firing + is_after) * (num_writes // num_reads)
        raise self._error(
            read,
            f"{firing} is one of {num_reads} of the reader in a period, which has {num_writes} of"
            " the writer",
        )

    def _check_between(
        self, read: LoopCarriedRead, reads: Sequence[LoopCarriedRead], firing: int
    ) -> None:
        """Check that all writers have done the same share of their period."""
        one = self._fired[read.writer], self._repetitions[read.writer]
        for other in reads:
            two = self._fired[other.writer], self._repetitions[other.writer]
            # Cross-multiplied: shares compare exactly without fractions.
            if other.when is ReadTime.BETWEEN and one[0] * two[1] != two[0] * one[1]:
                name = self._plan.actors[other.writer].name
                raise self._error(
                    read,
                    f"{firing} follows {one[0]} firings of it and {two[0]} of {name!r}, which"
                    " belong to different steps",
                )

    def _error(self, read: LoopCarriedRead, problem: str) -> InternalError:
        plan = self._plan
        actor = plan.actors[read.actor]
        launch = actor.launches[read.launch]
        return InternalError(
            f"launch {read.launch} ({launch.op}, {plan.sources[launch.source]}) of {actor.name!r}"
            f" reads {plan.registers[read.register].name!r} {read.when.value} the writes of"
            f" {plan.actors[read.writer].name!r}: firing {problem}"
        )
