"""Ownership of a parameter's values: by the parameter itself, or by one training run at a time.

The values of a parameter lie in its `ParameterStorage`. A training run takes a `Lease` on the cells
of its model before it reads them, and has the values until it ends; a second one on any of them is
refused, for it would train a copy. A plan that is stepped holds its lease only while it steps:
between two steps whoever reads or trains brings the values home, which ends the lease.

While a lease is open, reads and writes go to the run (`actorflow.run.live_variables`). The
hand-back is one assignment, to `Lease.left`: from then on every cell of the lease has its new
array, whether it has taken it over or not, so that no interrupt leaves some of them old and some
new. An interrupt before it loses nothing either: the values stay with the run until somebody asks,
and are handed back then. The same assignment makes `assign_values` of several cells one.

Arrays in cells are never written into, so they can be handed out: read-only, and not copied.

A plan that changes nothing reads the arrays of cells themselves. Of those that it has packed for
its kernels it takes a lease as well (`lend_packed`), so that the plain array goes: it is free at
all times, and what came home once stays.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, Protocol, TypeVar

import numpy as np

from actorflow.tensor.tracer import find_source
from actors.machine.errors import ForkedRun, forkable_lock
from compiler.contract.errors import CompileError
from compiler.contract.host_arrays import aligned_empty, freeze, is_frozen
from compiler.graph.graph import SourceLocation

Array = np.ndarray[Any, Any]
T = TypeVar("T")

_LOCK = forkable_lock()
"""Guards all cells and leases; held for a few assignments, never while something is waited for.

It is taken again by finalizers, which may run within.
"""


class OpenRun(Protocol):
    """What a lease asks of the run that has the values."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all its variables."""

    @property
    def pending(self) -> Mapping[str, Array]:
        """What was written and is not there yet."""

    @property
    def can_be_lost(self) -> bool:
        """Whether a failure can take the values away."""

    @property
    def is_over(self) -> bool:
        """Whether nothing will change the variables any more."""

    def __contains__(self, name: str) -> bool:
        """Whether a variable is here."""

    def may_have(self, name: str) -> bool:
        """Whether a variable is here, or may be on other stages."""

    def read(self, names: Iterable[str]) -> dict[str, Array] | None:
        """Return read-only copies of variables, all of them after one step."""

    def write(self, values: Mapping[str, Array]) -> None:
        """Give variables new values from the next step on."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Who wants to change values: a call in words, and the user's line.

    `names` are the buffers that a job which does not train assigns; a training has all values.
    """

    what: str
    source: SourceLocation
    names: frozenset[str] | None = None

    def part_of(self, cells: Mapping[str, ParameterStorage]) -> Mapping[str, ParameterStorage]:
        """Return those cells of a model that are claimed."""
        names = self.names
        return cells if names is None else {n: cell for n, cell in cells.items() if n in names}

    def __str__(self) -> str:
        return f"{self.what} ({self.source})"


class OpenLoop:
    """Whether a loop over a generator still goes on; the generator is not kept."""

    __slots__ = ("_generator",)

    def __init__(self) -> None:
        self._generator: Callable[[], Generator[Any, None, None] | None] = lambda: None

    def of(self, generator: Generator[T, None, None]) -> Generator[T, None, None]:
        """Take and return the generator."""
        self._generator = weakref.ref(generator)
        return generator

    @property
    def is_open(self) -> bool:
        """Whether the generator can still yield; one that an exception left cannot."""
        generator = self._generator()
        return generator is not None and getgeneratorstate(generator) != GEN_CLOSED


class ParameterStorage:
    """The values of one parameter: an array that nobody writes into, or the lease that has them.

    `is_wanted` says that somebody asked for values that only a plan had, in a form of its own: they
    stay here from then on.
    """

    __slots__ = ("array", "is_wanted", "lease")

    def __init__(self) -> None:
        self.array: Array | None = None
        self.is_wanted = False
        self.lease: Lease | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the newest values and no lease, also of a model that is being trained."""
        return _cell_with, (newest({"array": self}).get("array"),)

    def reclaim(self) -> None:
        """Take over what an ended lease left; under the lock. An interrupt may cut it anywhere."""
        lease = self.lease
        if lease is not None and lease.left is not None:
            self.array = lease.left[self]
            self.is_wanted |= lease.is_of_packed
            self.lease = None


class Lease:
    """One training run's hold on the values of some cells; see `lease` for how to get one.

    Args:
        cells: by the name of the run's variable.
        claim: who trains; None for nobody, where values are only carried over.
        is_stepped: whether the run stands still between steps, so that the lease may end there.
        loop: of the user's, that ends the lease when it ends; None for a call in this thread.
        is_of_packed: whether a plan that changes nothing has the values, in a form of its own.
    """

    def __init__(
        self,
        cells: Mapping[str, ParameterStorage],
        claim: Claim | None,
        *,
        is_stepped: bool = False,
        loop: OpenLoop | None = None,
        is_of_packed: bool = False,
    ) -> None:
        self.claim, self.is_of_packed = claim, is_of_packed
        self.left: Mapping[ParameterStorage, Array | None] | None = None
        self._names = {cell: name for name, cell in cells.items()}
        # The arrays that the run begins with, by identity: another one at `attach` was written
        # meanwhile.
        self._given = {cell: cell.array for cell in self._names}
        self._is_stepped = is_stepped
        self._loop = loop
        self._live: OpenRun | None = None
        self._num_steps = 0
        self._thread: int | None = threading.get_ident()
        """Who opens the run or steps it; None between steps."""

    def attach(self, live: OpenRun) -> None:
        """Set the run that holds the values from now on; before its first step.

        What was written since the lease was taken is written into the first run; one that takes its
        turn on the same memory has it.
        """
        with _LOCK:
            # `is not`, since arrays in cells are never written into: a new value is always a new
            # array.
            given = self._given
            changed = {
                n: c.array for c, n in self._names.items() if c.array is not given.get(c, c.array)
            }
            live.write({name: array for name, array in changed.items() if array is not None})
            self._given.clear()
            self._live = live

    @property
    def is_begun(self) -> bool:
        """Whether the values are in the memory of a run."""
        return self._live is not None

    def begin_step(self) -> bool:
        """Keep the values with the run until `end_step`; False where the lease has ended."""
        with _LOCK:
            # Somebody brought the values home since the last step; the caller takes a new lease.
            if self.left is not None:
                return False
            self._num_steps += 1
            self._thread = threading.get_ident()
            return True

    def end_step(self) -> None:
        """Allow any reader to bring the values home."""
        self._thread = None

    def end(self, values: Mapping[str, Array] | None) -> None:
        """Give the cells these values, read-only arrays by name, and end the lease. Idempotent.

        Where there are none a cell keeps its own.
        """
        with _LOCK:
            if self.left is None:
                written = {} if self._live is None else self._live.pending
                values = {**(values or {}), **written}
                # Built whole before the one assignment that hands all cells back.
                left = {cell: values.get(n, cell.array) for cell, n in self._names.items()}
                self.left = left
            # After `left`: a reader without the lock sees the run or the values, never neither.
            self._live = None
            for cell in self._names:
                if cell.lease is self:
                    cell.reclaim()

    def renewed(self) -> Lease:
        """Return a lease on the same cells for the same claim, after this one has ended."""
        cells = {name: cell for cell, name in self._names.items()}
        return self if self.claim is None else lease(cells, self.claim)

    def left_by_name(self) -> dict[str, Array]:
        """Return the values that an ended lease left."""
        left = self.left or {}
        return {n: a for cell, n in self._names.items() if (a := left.get(cell)) is not None}

    def sync_back(self) -> None:
        """Read the newest values, and end the lease if it is free."""
        if self._live is None and self.is_free:
            self.end(None)  # nothing was trained yet
        self.read(self._names)

    def give_back(self) -> None:
        """Bring the values home at the end of the call that took the lease."""
        self._loop, self._thread = None, threading.get_ident()
        self.sync_back()

    def read(self, cells: Iterable[ParameterStorage]) -> dict[ParameterStorage, Array | None]:
        """Return the newest values of some cells of this lease, all of one moment."""
        # Read without the lock: `live.read` below waits for the dispatcher, and nothing is waited
        # for under it.
        live, num_steps = self._live, self._num_steps
        if self.left is None and live is not None:
            is_free = self.is_free
            names = self._names if is_free else {cell: self._names[cell] for cell in cells}
            to_read = [name for name in names.values() if live.may_have(name)]
            if is_free and live.can_be_lost:  # all of it, to begin with again after a failure
                to_read = list(live.names)
            values = self._values(live, to_read)
            with _LOCK:
                # A step that began during the read makes the copies old: then the lease stays open.
                if is_free and self.is_free and num_steps == self._num_steps:
                    self.end(values)
                elif values is not None:
                    return {cell: values.get(self._names[cell], cell.array) for cell in cells}
        with _LOCK:
            left = self.left
            return {cell: cell.array if left is None else left[cell] for cell in cells}

    def write(self, arrays: Mapping[ParameterStorage, Array]) -> None:
        """Give some cells of this lease new values; under the lock, and it is open."""
        live = self._live
        if live is not None:
            live.write({self._names[cell]: array for cell, array in arrays.items()})
        for cell, array in arrays.items():
            if live is None or self._names[cell] not in live:
                cell.array = array

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its cells."""
        return tuple(self._names.values())

    @property
    def is_free(self) -> bool:
        """Whether nobody trains the values now: between steps, or where an interrupt cut a call.

        A thread that asks is in no call of its own any more. A run may be over, and the user's loop
        over its outputs not yet: he is still told that the model is in training.
        """
        if self.is_of_packed:  # whoever steps the plan that has them
            return True
        is_here = self._thread == threading.get_ident()
        if self._live is None:
            return is_here or self._thread is None or self.claim is None
        if self._is_stepped:
            return self._live.is_over or self._thread is None or is_here
        return self._live.is_over and (is_here if self._loop is None else not self._loop.is_open)

    def _values(self, live: OpenRun, names: list[str]) -> dict[str, Array] | None:
        try:
            return live.read(names)
        except CompileError:
            if self.left is None:
                raise
            return None


def _cell_with(array: Array | None) -> ParameterStorage:
    cell = ParameterStorage()
    if array is not None:
        freeze(array)
        cell.array = array
    return cell


def frozen(array: Array) -> Array:
    """Return an array that nobody can write into: itself, or a copy."""
    if is_frozen(array):
        return array
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    freeze(copy)
    return copy


def lease(
    cells: Mapping[str, ParameterStorage],
    claim: Claim,
    *,
    is_stepped: bool = False,
    loop: OpenLoop | None = None,
) -> Lease:
    """Take a lease on those cells that a claim is of, with their newest values in them.

    Raises CompileError with both lines when somebody else trains some of them.
    """
    cells = claim.part_of(cells)
    # The lock is let go while others sync back, so anybody may take the cells meanwhile: look
    # again.
    while True:
        with _LOCK:
            leases = _open_leases(cells, claim)
            if not leases:
                new_lease = Lease(cells, claim, is_stepped=is_stepped, loop=loop)
                for cell in cells.values():
                    cell.lease = new_lease
                return new_lease
        for other in leases:
            other.sync_back()


def lend_packed(
    cells: Mapping[str, ParameterStorage], arrays: Mapping[str, Array], live: OpenRun
) -> Lease | None:
    """Leave the values of those cells that have these arrays to a plan that can give them back.

    Cells whose values were asked for since a plan had them keep them. The lease is free at all
    times: whoever reads ends it. None where no cell has such an array.
    """
    with _LOCK:
        for cell in cells.values():
            cell.reclaim()
        handed = {
            name: cell
            for name, cell in cells.items()
            if cell.lease is None
            and not cell.is_wanted
            and cell.array is not None
            and cell.array is arrays.get(name)
        }
        if not handed:
            return None
        new_lease = Lease(handed, None, is_of_packed=True)
        new_lease.attach(live)
        for cell in handed.values():
            cell.lease, cell.array = new_lease, None
        return new_lease


@contextmanager
def leased(
    cells: Mapping[str, ParameterStorage], claim: Claim, loop: OpenLoop | None = None
) -> Iterator[Lease]:
    """Take a lease for a block; at its end the cells have the newest values."""
    new_lease = lease(cells, claim, loop=loop)
    try:
        yield new_lease
    finally:
        # Threads that do not end are reported by who closed the run; a forked child has no part.
        with suppress(CompileError, ForkedRun):
            new_lease.give_back()


def make_claim(
    cells: Mapping[str, ParameterStorage], what: str, names: frozenset[str] | None = None
) -> Claim:
    """Return a claim with the user's line, on all cells or some; nothing is held yet.

    Raises CompileError, before anything is compiled for nothing, where `lease` would.
    """
    claim = Claim(what, find_source(), names)
    with _LOCK:
        _open_leases(claim.part_of(cells), claim)
    return claim


def newest(cells: Mapping[str, ParameterStorage]) -> dict[str, Array]:
    """Return the newest values of those cells that have some: read-only, by the same keys.

    Cells that one run trains are read together, after the same step. Callable from any thread.
    """
    groups: dict[Lease, list[ParameterStorage]] = {}
    with _LOCK:
        for cell in cells.values():
            # An interrupt may have cut the hand-back of an ended lease; what is left of it is done
            # here.
            cell.reclaim()
            if cell.lease is not None:
                groups.setdefault(cell.lease, []).append(cell)
        by_cell = {cell: cell.array for cell in cells.values() if cell.lease is None}
    for other, members in groups.items():
        by_cell |= other.read(members)
    arrays = {name: by_cell[cell] for name, cell in cells.items()}
    return {name: array for name, array in arrays.items() if array is not None}


def are_leased(cells: Mapping[str, ParameterStorage]) -> bool:
    """Whether a run has the values of some cells, so that what is read of them is a copy."""
    with _LOCK:
        for cell in cells.values():
            cell.reclaim()
        return any([cell.lease is not None for cell in cells.values()])


def assign_values(arrays: Mapping[ParameterStorage, Array]) -> None:
    """Give cells new values, read-only arrays, all at once; an open run has them in its next step.

    Callable from any thread.
    """
    groups: dict[Lease, dict[ParameterStorage, Array]] = {}
    unleased: dict[ParameterStorage, Array] = {}
    with _LOCK:
        for cell, array in arrays.items():
            cell.reclaim()
            if cell.lease is None:
                unleased[cell] = array
            else:
                groups.setdefault(cell.lease, {})[cell] = array
        for other, members in groups.items():
            other.write(members)
        # A lease for an instant: its one assignment to `left` gives all cells their values at once.
        carrier = Lease({str(i): cell for i, cell in enumerate(unleased)}, None)
        for cell in unleased:
            cell.lease = carrier
        carrier.end({str(i): array for i, array in enumerate(unleased.values())})


def fill(arrays: Mapping[ParameterStorage, Array]) -> None:
    """Give cells without values their first ones, read-only arrays; others keep what they have.

    A run that has taken a lease and not begun yet begins with them.
    """
    with _LOCK:
        for cell, array in arrays.items():
            cell.reclaim()
            is_begun = cell.lease is not None and cell.lease.is_begun
            if cell.array is None and not is_begun:
                cell.array = array


def _open_leases(cells: Mapping[str, ParameterStorage], claim: Claim) -> list[Lease]:
    """Return the open leases on cells, all of which can be ended. Raises CompileError if not."""
    # A dict as an ordered set: the error names the first cell in the model's order.
    leases: dict[Lease, None] = {}
    for name, cell in cells.items():
        cell.reclaim()
        other = cell.lease
        if other is None:
            continue
        if not other.is_free:
            would = "train parameter" if claim.names is None else "assign buffer"
            is_assigned = other.claim is not None and other.claim.names is not None
            how = "assigned" if is_assigned else "trained"
            raise CompileError(
                f"{claim.source}: {claim.what} cannot {would} {name!r}, which is being {how} by"
                f" {other.claim}: two runs cannot change one array. Let the other run end first"
                " (leave its loop, or wait for its thread), or train another model"
            )
        leases[other] = None
    return list(leases)
