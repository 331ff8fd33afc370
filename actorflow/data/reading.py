"""A position in the batches of a pipeline, and how the next ones are made.

**Two ways to batches.** Where no sample can be dropped, batch k is a function of k, and a worker
makes all of it. Behind a filter, or where samples that cannot be read are skipped, nobody knows
what batch k holds before those in front of it were made: there workers make samples, and they are
put together here, in their order.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from actorflow.data.order import Numbers, SampleOrder
from actorflow.data.ragged import Grouping, LineOrder
from actorflow.data.recipe import (
    Arrays,
    BatchRecipe,
    Collates,
    Collation,
    ReadUnit,
    SampleOutcome,
)
from actorflow.data.samples import ReadsAhead, Samples, blocks_of, name_of
from actorflow.data.source import DataError
from compiler.contract.html_table import html_table

if TYPE_CHECKING:
    from actorflow.data.workers import Workers


@dataclass(frozen=True, slots=True)
class Description:
    """All that a pipeline is, but its position.

    With a `grouping` its batches are those of `lines`, which are None until the lengths are known.
    """

    samples: Samples
    order: SampleOrder
    can_drop: bool = False
    num_stages: int = 0
    collation: Collation | None = None
    drop_last: bool = True
    stages: tuple[tuple[Callable[..., Any], int], ...] = ()
    skip_limit: int | None = None
    num_workers: int = 0
    grouping: Grouping | None = None
    lines: LineOrder | None = None

    @property
    def collations(self) -> tuple[Collates, ...]:
        """How batches are made; () for a pipeline of samples."""
        if self.grouping is not None:
            return self.grouping.collations
        return () if self.collation is None else (self.collation,)

    @property
    def ends_epochs(self) -> bool:
        """Whether the samples at the end of an epoch that fill no batch are dropped."""
        return self.drop_last and not self.order.is_seamless

    @property
    def drops(self) -> bool:
        """Whether samples may be dropped while batches are made; lines have none of those."""
        return self.grouping is None and (self.can_drop or self.skip_limit is not None)

    def __str__(self) -> str:
        size = f", batches of {self.collations[-1].size:,}" if self.collations else ""
        epochs = "no end" if self.order.epochs is None else f"{self.order.epochs:,} epochs"
        return f"{len(self.samples):,} samples{size}, {epochs}, {self.num_workers} workers"

    def html(self, specs: Sequence[Mapping[str, object]]) -> str:
        """Return it as a table, with the types of batches where those are known."""
        return html_table("Pipeline", {"made of": str(self), **dict(*specs[:1])})

    def fingerprint(self) -> str:
        """Return what the batches depend on; the number of workers is not among it."""
        stages = [f"{name_of(function)},{seed}" for function, seed in self.stages]
        collation = self.collation
        batch = ""
        if collation is not None:
            collate = "" if collation.collate is None else name_of(collation.collate)
            batch = f"{collation.size},{collation.pad},{collation.mask},{collate},{self.drop_last}"
        elif self.grouping is not None:
            batch = self.grouping.fingerprint()
        return (
            f"pipeline:{self.samples.fingerprint()}|{self.order.fingerprint()}|batch({batch})"
            f"|{stages}|skip={self.skip_limit is not None}"
        )


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """A batch, and where it ends: after so many samples read, of which so many were skipped."""

    arrays: Arrays
    read: int = 0
    num_skipped: int = 0


def recipe_of(description: Description) -> BatchRecipe:
    """Return how a pipeline makes its batches, in any process."""
    collations = description.collations or (Collation(1),)
    skips = description.skip_limit is not None
    stages = () if description.drops else description.stages
    return BatchRecipe(description.samples, description.drops, skips, collations, stages)


def num_batches(description: Description) -> int:
    """Return how many batches there are, where none is dropped and the epochs end."""
    size = 1 if description.collation is None else description.collation.size
    length, epochs = description.order.length, description.order.epochs or 0
    if description.lines is not None:
        return description.lines.per_epoch * epochs
    if description.ends_epochs:
        return length // size * epochs
    total = length * epochs
    return total // size if description.drop_last else -(-total // size)


@dataclass
class Cursor:
    """Batches from a position on.

    Args:
        description: of the pipeline.
        batches: done before the first one.
        read: samples read for those, where samples may be dropped.
        num_skipped: of those, that could not be read.
        part: of each batch, that is read; None for all.
        workers: make the units; None for this process.
        report: is told why a sample is skipped, with how many that are by now.
    """

    description: Description
    batches: int = 0
    read: int = 0
    num_skipped: int = 0
    part: slice | None = None
    workers: Workers | None = None
    report: Callable[[str, int], None] | None = None
    _batches: Generator[MadeBatch, None, None] | None = field(default=None, repr=False)
    _turn: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __iter__(self) -> Generator[MadeBatch, None, None]:
        return self._dropping() if self.description.drops else self._whole()

    def next(self) -> MadeBatch:
        """Return the next batch. Raises StopIteration at the end."""
        with self._alone():
            if self._batches is None:
                self._batches = self.__iter__()
            return next(self._batches)

    def origins(self) -> tuple[str, ...]:
        """Return where each row of the next batch comes from; () behind what may drop samples."""
        unit = None if self.description.drops else next(self._units(), None)
        if unit is None:
            return ()
        names = iter([self.description.samples.where(int(number)) for number in unit.numbers])
        counts = [1] * len(unit.numbers) if unit.lines is None else unit.lines
        return tuple([" + ".join(itertools.islice(names, count)) for count in counts])

    def close(self) -> None:
        """Give back what was taken ahead: a worker's slot that nobody reads would stay taken."""
        if self._batches is not None:
            with self._alone():
                self._batches.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a call that comes while another one reads: Python would name a generator."""
        if not self._turn.acquire(blocking=False):
            raise DataError(
                "pipeline: this one is read by another call at the same time, on another thread or"
                " in a function of its own, and has one position; make a second pipeline by the"
                " same calls"
            )
        try:
            yield
        finally:
            self._turn.release()

    def _results(self, units: Iterator[ReadUnit]) -> Iterator[Arrays | list[SampleOutcome]]:
        if self.workers is not None:
            return self.workers.run(units)
        samples = self.description.samples
        if isinstance(samples, ReadsAhead) and (blocks := blocks_of(samples)):
            units = self._read_ahead(units, samples, max(blocks))
        return map(recipe_of(self.description).make, units)

    def _read_ahead(
        self, units: Iterator[ReadUnit], samples: ReadsAhead, block: int
    ) -> Iterator[ReadUnit]:
        """Yield units; the blocks of those within the next two are read meanwhile."""
        ahead: deque[ReadUnit] = deque()
        try:
            for unit in units:
                samples.read_ahead(unit.numbers)
                ahead.append(unit)
                if len(ahead) > min(2 * block // self._size, _MOST_AHEAD):
                    yield ahead.popleft()
            yield from ahead
        finally:
            samples.read_ahead(np.empty(0, np.int64))

    # Batches by number.

    def _whole(self) -> Generator[MadeBatch, None, None]:
        for made in self._results(self._units()):
            yield MadeBatch(cast("Arrays", made), self.read, self.num_skipped)

    def _units(self) -> Iterator[ReadUnit]:
        description, size = self.description, self._size
        if description.lines is not None:
            yield from self._line_units(description.lines)
            return
        length = description.order.length
        used = length - length % size if description.ends_epochs else length
        epochs = description.order.epochs
        end = None if epochs is None else used * epochs
        if end is not None and description.drop_last:
            end -= end % size
        batch = self.batches
        while used and (end is None or batch * size < end):
            first = batch * size + (0 if self.part is None else self.part.start)
            last = batch * size + (size if self.part is None else self.part.stop)
            rows = 0 if self.part is None else last - first
            last = last if end is None else min(last, end)
            if first < last:
                yield ReadUnit(*self._numbers(first, last, used), batch, size=rows)
            else:  # a part that is all padding: one sample tells of which types
                one = self._numbers(batch * size, batch * size + 1, used)
                yield ReadUnit(*one, batch, lines=(), size=rows)
            batch += 1

    def _line_units(self, lines: LineOrder) -> Iterator[ReadUnit]:
        for batch in itertools.count(self.batches):
            if self.description.order.epochs and batch >= num_batches(self.description):
                return
            yield lines.unit(batch, self.part)

    @property
    def _size(self) -> int:
        return 1 if self.description.collation is None else self.description.collation.size

    def _numbers(self, first: int, last: int, used: int) -> tuple[Numbers, Numbers]:
        """Return the samples of positions [first, last), of which each epoch has `used`."""
        pieces = []
        while first < last:
            epoch, inside = divmod(first, used)
            count = min(last - first, used - inside)
            pieces.append(self.description.order.at(epoch, inside, count))
            first += count
        numbers, epochs = zip(*pieces, strict=True)
        return np.concatenate(numbers), np.concatenate(epochs)

    # Batches of the samples that are left.

    def _dropping(self) -> Generator[MadeBatch, None, None]:
        description, recipe = self.description, recipe_of(self.description)
        kept: list[tuple[Arrays, int]] = []
        read, batch, num_kept, num_skipped = self.read, self.batches, 0, self.num_skipped
        for begin, unit, outcomes in self.outcomes():
            for place, outcome in enumerate(outcomes):
                read = begin + place + 1
                if outcome.why:
                    num_skipped += 1
                    self.skip(outcome.why, num_skipped)
                if outcome.arrays is None:
                    continue
                num_kept += 1
                kept.append((outcome.arrays, int(unit.numbers[place])))
                if len(kept) == self._size:
                    yield MadeBatch(self._put_together(kept, recipe, batch), read, num_skipped)
                    kept, batch = [], batch + 1
            if read % description.order.length == 0:
                if read - self.read >= description.order.length:
                    self._check_kept(num_kept)
                num_kept = 0
                kept = [] if description.ends_epochs else kept
        if kept and not description.drop_last:
            yield MadeBatch(self._put_together(kept, recipe, batch), read, num_skipped)

    def skip(self, why: str, number: int) -> None:
        """Report a sample that is skipped. Raises DataError where that is one too many."""
        if self.report is not None:
            self.report(why, number)
        limit = self.description.skip_limit or 0
        if number > limit:
            raise DataError(
                f"pipeline: {number:,} samples were skipped, and on_error allows {limit:,}; the"
                f" last one: {why}"
            )

    def _check_kept(self, num_kept: int) -> None:
        """Raise DataError where an epoch does not give one batch: there would be no end."""
        needed = self._size if self.description.ends_epochs else 1
        if num_kept < needed:
            raise DataError(
                f"pipeline: a batch of {self._size:,} samples is asked for, and .filter and"
                f" on_error leave {num_kept:,} of an epoch of {self.description.order.length:,};"
                " make the batch smaller, or keep more samples"
            )

    def outcomes(self) -> Iterator[tuple[int, ReadUnit, list[SampleOutcome]]]:
        """Yield what became of samples, with the position of the first and their unit."""
        handed: deque[tuple[int, ReadUnit]] = deque()

        def units() -> Iterator[ReadUnit]:
            for begin, unit in self._unit_bounds():
                handed.append((begin, unit))
                yield unit

        for made in self._results(units()):
            yield *handed.popleft(), cast("list[SampleOutcome]", made)

    def _unit_bounds(self) -> Iterator[tuple[int, ReadUnit]]:
        order = self.description.order
        end = None if order.epochs is None else order.length * order.epochs
        begin = self.read
        while end is None or begin < end:
            epoch, inside = divmod(begin, order.length)
            count = min(self._size, order.length - inside)
            yield begin, ReadUnit(*order.at(epoch, inside, count))
            begin += count

    def _put_together(
        self, kept: Sequence[tuple[Arrays, int]], recipe: BatchRecipe, batch: int
    ) -> Arrays:
        samples = self.description.samples
        rows = [arrays for arrays, _ in kept]
        where = lambda place: samples.where(kept[place][1])  # noqa: E731
        arrays = recipe.collations[0].batch(rows, where, None)
        numbers = np.array([number for _, number in kept])
        staged = replace(recipe, stages=self.description.stages)
        return staged.finished(arrays, ReadUnit(numbers, np.zeros_like(numbers), batch))


_MOST_AHEAD = 512
"""Units that are known before they are made."""
