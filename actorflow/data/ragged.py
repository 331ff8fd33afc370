"""Samples of different lengths in batches of few shapes: buckets pad them, packs join them.

A plan has static shapes. The last batch of an epoch is filled up with padding, of the weight 0 in
its array `weights`: a smaller one would be another plan, perhaps of fewer rows than ranks. Means by
these weights (`af.weighted_mean`) are those over the samples that there are.

All lengths are known before the first batch: they are given, or all samples are read once for them.
So batch k is a pure function of (seed, k): the lines of a bucket, and the groups of batches of an
epoch, each come in an `EpochOrder`. A line is a row of a batch: a sample, or several one after the
other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from actorflow.data.arrays import EpochOrder
from actorflow.data.order import Numbers
from actorflow.data.recipe import (
    Arrays,
    Collates,
    Collation,
    Fill,
    PackedRows,
    ReadUnit,
    common_length,
)
from actorflow.data.samples import SampleError
from actorflow.data.source import DataError, content_hash


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which samples make a batch together, by their lengths.

    Args:
        names: of the arrays whose lengths count; () packs all of a sample.
        edges: lengths that rows are padded to, ascending.
        sizes: rows of a batch, for each edge.
        fill: what fills up, or one number for each name.
        group: so many batches of one edge come one after the other.
        is_packed: whether a row has several samples.
        lengths: of all samples; None reads them.
    """

    names: tuple[str, ...]
    edges: tuple[int, ...]
    sizes: tuple[int, ...]
    fill: Fill = 0
    group: int = 1
    is_packed: bool = False
    lengths: Numbers | None = None

    @property
    def collations(self) -> tuple[Collates, ...]:
        """How batches are made, for each edge."""
        pairs = list(zip(self.edges, self.sizes, strict=True))
        if self.is_packed:
            return tuple([PackedRows(size, edge, self.fill) for edge, size in pairs])
        return tuple([
            Collation(size, tuple([(name, edge) for name in self.names]), None, "weights",
                      self.fill, is_bucket=True)
            for edge, size in pairs
        ])  # fmt: skip

    def length_of(self, sample: Arrays, where: Callable[[], str]) -> int:
        """Return how long a sample is. Raises SampleError where that is nothing to go by."""
        if self.is_packed:
            return common_length(sample, where)
        for name in self.names:
            if name not in sample or not sample[name].ndim:
                raise SampleError(
                    f"{where()}: .bucket(by=) expected an array [length, ...] {name!r}, came"
                    f" {'a number' if name in sample else ', '.join(map(repr, sample))}"
                )
        return max([0, *[len(sample[name]) for name in self.names]])

    def fingerprint(self) -> str:
        """Return what the batches depend on beside the samples."""
        lengths = "" if self.lengths is None else content_hash(self.lengths)
        return f"{replace(self, lengths=None)},{lengths}"


@dataclass(frozen=True, slots=True)
class _LengthBucket:
    """Lines of one edge. Line i is `numbers[starts[i]:starts[i + 1]]`, or number i alone."""

    place: int
    size: int
    numbers: Numbers
    starts: Numbers | None

    def __len__(self) -> int:
        return len(self.numbers) if self.starts is None else len(self.starts) - 1

    def unit(self, lines: Numbers, epoch: int, batch: int, size: int = 0) -> ReadUnit:
        """Return what is read of some lines."""
        counts: tuple[int, ...] | None = None
        if not len(lines):
            numbers, counts = self.numbers[:1], ()
        elif self.starts is None:
            numbers = self.numbers[lines]
        else:
            pieces = [self.numbers[self.starts[i] : self.starts[i + 1]] for i in lines.tolist()]
            numbers, counts = np.concatenate(pieces), tuple(map(len, pieces))
        return ReadUnit(numbers, np.full(len(numbers), epoch), batch, self.place, counts, size)


class LineOrder:
    """Which lines make batch k.

    Args:
        grouping: by which samples lie together.
        rows: number and length of each sample that there is, [samples, 2].
        seed: of the order; None for that of the samples, short ones first, in every epoch.
        where: names a sample, for messages.

    Raises:
        DataError: there is no sample, or one is too long.
    """

    def __init__(
        self,
        grouping: Grouping,
        rows: Numbers,
        seed: int | None,
        where: Callable[[int], str],
    ) -> None:
        kind = "pack" if grouping.is_packed else "bucket"
        if not len(rows):
            raise DataError(f"{kind}: there are no samples, or none that is kept")
        numbers, lengths = rows.T
        if lengths.max() > grouping.edges[-1]:
            longest = int(lengths.argmax())
            mend = "give a larger length=" if grouping.is_packed else "add an edge"
            raise DataError(
                f"{kind}: {where(int(numbers[longest]))} has the length {lengths[longest]:,}, and"
                f" the most is {grouping.edges[-1]:,}; cut it, or {mend}"
            )
        self._buckets = _buckets(grouping, numbers, lengths)
        group, shuffle = grouping.group, seed is not None
        self._group = group
        self._orders = [EpochOrder(len(b), seed or 0, shuffle=shuffle) for b in self._buckets]
        counts = [-(-len(b) // (b.size * group)) for b in self._buckets]
        self._ends = np.cumsum(counts)
        self._order = EpochOrder(sum(counts), seed or 0, shuffle=shuffle)
        self.per_epoch = sum(counts) * group
        """Batches of an epoch."""
        self.samples_per_batch = max(1, round(len(numbers) / self.per_epoch))
        """The mean, rounded."""

    def examples(self) -> list[ReadUnit]:
        """Return a batch of each edge that there are samples for."""
        return [b.unit(np.arange(min(b.size, len(b))), 0, 0) for b in self._buckets]

    def unit(self, batch: int, part: slice | None = None) -> ReadUnit:
        """Return what is read for a batch, or for some of its rows."""
        epoch, number = divmod(batch, self.per_epoch)
        group, offset = divmod(number, self._group)
        group = int(self._order.items(epoch, group, 1)[0])
        place = int(np.searchsorted(self._ends, group, "right"))
        within = group - (int(self._ends[place - 1]) if place else 0)
        bucket = self._buckets[place]
        first = (within * self._group + offset) * bucket.size
        start, stop = (0, bucket.size) if part is None else (part.start, part.stop)
        # The last ones of an epoch may have none.
        count = max(0, min(stop - start, len(bucket) - first - start))
        lines = np.empty(0, np.int64)
        if count:
            lines = self._orders[place].items(epoch, first + start, count)
        return bucket.unit(lines, epoch, batch, 0 if part is None else stop - start)


def _buckets(grouping: Grouping, numbers: Numbers, lengths: Numbers) -> list[_LengthBucket]:
    if grouping.is_packed:
        lines = _best_fit(lengths.tolist(), grouping.edges[0])
        starts = np.cumsum([0, *map(len, lines)])
        return [_LengthBucket(0, grouping.sizes[0], numbers[np.concatenate(lines)], starts)]
    places = np.searchsorted(grouping.edges, lengths)
    buckets = [
        _LengthBucket(place, size, numbers[places == place], None)
        for place, size in enumerate(grouping.sizes)
    ]
    return [bucket for bucket in buckets if len(bucket)]


def _best_fit(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Return the rows of each line. O(n log n), besides moves in a list of free spaces."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    lines: list[list[int]] = []
    by_space: dict[int, list[list[int]]] = {}
    spaces: list[int] = []  # with a line in `by_space`, ascending
    for row in order:
        place = bisect_left(spaces, lengths[row])
        if place == len(spaces):
            space, line = length, list[int]()
            lines.append(line)
        else:
            space = spaces[place]
            line = by_space[space].pop()
            if not by_space[space]:
                spaces.pop(place)
        line.append(row)
        waiting = by_space.setdefault(space - lengths[row], [])
        if not waiting and space > lengths[row]:
            insort(spaces, space - lengths[row])
        waiting.append(line)
    return lines
