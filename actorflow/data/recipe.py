"""What a pipeline makes of some numbers of samples: a list of samples, or a batch.

A `BatchRecipe` has no position and no state: it is what travels to worker processes, once. A unit
of work is the numbers of some samples; where no sample can be dropped it is a batch, and all of a
batch is made where its samples are read. Else the samples go back one by one, and are put into
batches by whoever knows how many came before (`actorflow.data.pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from actorflow.data.samples import Dropped, HasColumns, Sample, SampleError, Samples, mapped
from actorflow.data.source import DataError, listed, plain_array, shown

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ReadUnit:
    """Some samples to be read: their numbers, the epoch of each, and the number of their batch.

    `place` is that of the collation that makes a batch of them. `lines` are the samples in each row
    of the batch; None for one in each. Rows behind them are filled up. A unit without rows has one
    sample, which tells of which types the padding is. `size` is how many rows the part of a batch
    has that is read here, 0 for all of it.
    """

    numbers: npt.NDArray[np.int64]
    epochs: npt.NDArray[np.int64]
    batch: int = -1
    place: int = 0
    lines: tuple[int, ...] | None = None
    size: int = 0


@dataclass(frozen=True, slots=True)
class SampleOutcome:
    """What became of a sample: its arrays; or none, where a filter or an error (`why`) took it."""

    arrays: Arrays | None
    why: str = ""


_IGNORED = -100

Where = Callable[[int], str]
Fill = float | tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Collation:
    """One sample in each row.

    `pad` gives the length of the first axis, by name, of arrays whose lengths differ, and `fill`
    what fills them up, and rows without a sample; `collate` is the user's function, if any; `mask`
    names an array that is 1 for each sample and 0 where a batch is filled up. Where it `is_bucket`,
    the lengths of padded arrays are beside them.
    """

    size: int
    pad: tuple[tuple[str, int], ...] = ()
    collate: Callable[..., Any] | None = None
    mask: str = ""
    fill: Fill = 0
    is_bucket: bool = False

    @property
    def takes_columns(self) -> bool:
        """Whether nothing looks at single samples."""
        return self.collate is None and not self.pad

    def batch(self, rows: Sequence[Arrays], where: Where, lines: tuple[int, ...] | None) -> Arrays:
        """Return samples as one batch. Raises DataError, with `where` it comes from."""
        if self.collate is not None:
            whole = mapped(self.collate, list(rows), (), "collate", lambda: where(0))
            return {name: _array(name, value, lambda: where(0)) for name, value in whole.items()}
        _check_names(rows, where)
        if unknown := [name for name, _ in self.pad if name not in rows[0]]:
            raise DataError(
                f"{where(0)}: expected pad= lengths for names of {listed(rows[0])}, came one for"
                f" {unknown[0]!r}"
            )
        batch = {name: self._stacked(name, [row[name] for row in rows], where) for name in rows[0]}
        batch = self.filled(batch, lines)
        if not self.is_bucket:
            return batch
        lengths = {f"{name}_lengths": np.zeros(self.size, np.int32) for name, _ in self.pad}
        for name, _ in self.pad if lines is None else ():
            lengths[f"{name}_lengths"][: len(rows)] = [len(row[name]) for row in rows]
        return _added(batch, lengths)

    def filled(self, batch: Arrays, lines: tuple[int, ...] | None) -> Arrays:
        """Return a batch of `size` samples with its mask, the rest of them padding."""
        if not self.mask:
            return batch
        values = _fillers(batch, self.fill)
        count = len(next(iter(batch.values()))) if lines is None else len(lines)
        if count < self.size:
            whole = {}
            for name, array in batch.items():
                whole[name] = np.full((self.size, *array.shape[1:]), values[name])
                whole[name][:count] = array[:count]
            batch = whole
        mask = (np.arange(self.size) < count).astype(np.float32)
        return _added(batch, {self.mask: mask})

    def _stacked(self, name: str, rows: list[npt.NDArray[Any]], where: Where) -> npt.NDArray[Any]:
        if (length := dict(self.pad).get(name)) is not None:
            return self._padded(name, rows, length, where)
        first = rows[0]
        for place, row in enumerate(rows):
            if row.shape != first.shape or row.dtype != first.dtype:
                raise DataError(
                    f"{where(place)}: {name!r} is {shown(row)}, and of {where(0)} it is"
                    f" {shown(first)}; make them alike in a .map, or give .batch(pad={{{name!r}:"
                    " length})"
                )
        return np.stack(rows)

    def _padded(
        self, name: str, rows: list[npt.NDArray[Any]], length: int, where: Where
    ) -> npt.NDArray[Any]:
        _check_alike(name, rows, where)
        value = _fillers({name: rows[0]}, self._fill_of(name))[name]
        out = np.full((len(rows), length, *rows[0].shape[1:]), value)
        for place, row in enumerate(rows):
            if len(row) > length:
                raise DataError(
                    f"{where(place)}: {name!r} has {len(row):,} rows, and is padded to {length:,};"
                    " raise pad= of .batch or edges= of .bucket, or cut the sample in a .map"
                )
            out[place, : len(row)] = row
        return out

    def _fill_of(self, name: str) -> float:
        return dict(self.fill).get(name, 0) if isinstance(self.fill, tuple) else self.fill


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Several samples in each row, one after the other; see `Pipeline.pack`."""

    size: int
    length: int
    fill: Fill = 0

    def batch(self, rows: Sequence[Arrays], where: Where, lines: tuple[int, ...] | None) -> Arrays:
        """Return samples as one batch. Raises DataError, with `where` it comes from."""
        _check_names(rows, where)
        lengths = [common_length(row, partial(where, place)) for place, row in enumerate(rows)]
        rows = [row if "labels" in row else row | {"labels": _next_ids(row["ids"])} for row in rows]
        values = _fillers(rows[0], self.fill) | {"labels": np.asarray(_IGNORED)}
        arrays: Arrays = {}
        for name, first in rows[0].items():
            _check_alike(name, [row[name] for row in rows], where)
            shape = (self.size, self.length, *first.shape[1:])
            arrays[name] = np.full(shape, values[name], first.dtype)
        positions, segments = np.zeros((2, self.size, self.length), np.int32)
        sample = 0
        for line, count in enumerate(lines or ()):
            stop = 0
            for segment in range(1, count + 1):
                start, stop = stop, stop + lengths[sample]
                if stop > self.length:
                    raise DataError(
                        f"{where(sample)}: it has the length {lengths[sample]:,}, and lengths= of"
                        " .pack gives less; give that of what the functions before it return"
                    )
                for name, array in arrays.items():
                    array[line, start:stop] = rows[sample][name]
                positions[line, start:stop] = np.arange(stop - start)
                segments[line, start:stop] = segment
                sample += 1
        weights = (arrays["labels"] != _IGNORED).astype(np.float32)
        more = {"positions": positions, "segments": segments, "weights": weights}
        return _added(arrays, more)


def _next_ids(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the label of each id of a sample: the next one, none for the last."""
    labels = np.full(ids.shape, _IGNORED, np.int32 if ids.dtype == np.int32 else np.int64)
    labels[:-1] = ids[1:]
    return labels


def common_length(sample: Arrays, where: Callable[[], str]) -> int:
    """Return the length of all arrays of a sample. Raises SampleError where they differ."""
    if "ids" not in sample:
        raise SampleError(f"{where()}: .pack expected 'ids', came {', '.join(map(repr, sample))}")
    lengths = {name: len(array) if array.ndim else 0 for name, array in sample.items()}
    if len(set(lengths.values())) != 1 or not lengths["ids"]:
        listed = ", ".join(f"{name!r} {length}" for name, length in lengths.items())
        raise SampleError(
            f"{where()}: .pack expected arrays of one length above 0 for all names, came {listed}"
        )
    labels = sample.get("labels")
    if labels is not None and labels.dtype.kind != "i":
        raise SampleError(
            f"{where()}: .pack expected labels of signed integers, of which {_IGNORED} counts for"
            f" nothing, came {labels.dtype}"
        )
    return lengths["ids"]


Collates = Collation | PackedRows


def _check_names(rows: Sequence[Arrays], where: Where) -> None:
    """Raise DataError unless all samples have the same names."""
    for place, row in enumerate(rows):
        if row.keys() != rows[0].keys() or not row:
            raise DataError(
                f"{where(place)}: the sample has {listed(row)}, and {where(0)}"
                f" {listed(rows[0])}; all samples of a batch have the same names"
            )


def _check_alike(name: str, rows: Sequence[npt.NDArray[Any]], where: Where) -> None:
    """Raise DataError unless arrays of samples differ in the length of the first axis alone."""
    first = rows[0]
    for place, row in enumerate(rows):
        if not row.ndim or row.shape[1:] != first.shape[1:] or row.dtype != first.dtype:
            raise DataError(
                f"{where(place)}: {name!r} is {shown(row)}, and of {where(0)} it is"
                f" {shown(first)}; pad= fills up the first axis alone"
            )


def _fillers(arrays: Mapping[str, npt.NDArray[Any]], fill: Fill) -> Arrays:
    """Return what fills up each of some arrays. Raises DataError where they cannot hold it."""
    numbers = dict(fill) if isinstance(fill, tuple) else dict.fromkeys(arrays, fill)
    if unknown := [name for name in numbers if name not in arrays]:
        raise DataError(
            f"pipeline: expected pad= one number, or one for each name of"
            f" {listed(arrays)}, came one for {unknown[0]!r}"
        )
    out: Arrays = {}
    for name, array in arrays.items():
        number = numbers.get(name, 0)
        out[name] = np.asarray(number).astype(array.dtype)
        if out[name] != number and number == number:
            raise DataError(
                f"pipeline: expected pad= numbers that the arrays can hold, came {number!r} for"
                f" {name!r}, which is {shown(array)}"
            )
    return out


def _added(batch: Arrays, more: Arrays) -> Arrays:
    """Return a batch with further arrays. Raises DataError where the samples have such already."""
    if taken := [name for name in more if name in batch]:
        raise DataError(
            f"pipeline: an array {taken[0]!r} is added to batches, and the samples have one of this"
            " name already; give it another name"
        )
    return batch | more


@dataclass(frozen=True, slots=True)
class BatchRecipe:
    """How numbers of samples become samples or batches.

    Args:
        samples: what is read, with the functions on single samples.
        can_drop: whether a sample may be dropped, so that a unit is no batch.
        skips: whether a sample that cannot be read is dropped, and named.
        collations: of units that are batches, by place.
        stages: functions on a batch, with the seed of each.
    """

    samples: Samples
    can_drop: bool
    skips: bool
    collations: tuple[Collates, ...]
    stages: tuple[tuple[Callable[..., Any], int], ...] = ()

    def make(self, unit: ReadUnit) -> Arrays | list[SampleOutcome]:
        """Return a batch, or what became of each sample. Raises DataError."""
        if self.can_drop:
            return [self._outcome(n, e) for n, e in _pairs(unit)]
        collation: Any = self.collations[unit.place]
        if unit.size:
            collation = replace(collation, size=unit.size)
        if (
            isinstance(collation, Collation)
            and collation.takes_columns
            and isinstance(self.samples, HasColumns)
        ):
            columns = self.samples.columns(unit.numbers)
            if not _has_objects(columns):  # else the rows say which sample is of another type
                return self.finished(collation.filled(columns, unit.lines), unit)
        rows = [_arrays(self.samples, n, self._row(n, e)) for n, e in _pairs(unit)]
        where = lambda place: self.samples.where(int(unit.numbers[place]))  # noqa: E731
        return self.finished(collation.batch(rows, where, unit.lines), unit)

    def finished(self, batch: Arrays, unit: ReadUnit) -> Arrays:
        """Return what the functions on batches make of one."""
        for number, (function, seed) in enumerate(self.stages):
            key = (seed, -1 - number, unit.batch)
            made = mapped(function, batch, key, "map", lambda: f"batch {unit.batch:,}")
            batch = {n: _array(n, v, lambda: f"batch {unit.batch:,}") for n, v in made.items()}
        return batch

    def _row(self, number: int, epoch: int) -> Sample:
        try:
            return self.samples.row(number, epoch)
        except DataError:
            raise
        except Dropped:
            if self.can_drop:
                raise
            raise SampleError(
                f"{self.samples.where(number)}: a filter keeps it in one epoch and drops it in"
                " another; before .bucket and .pack it has to do the same in each"
            ) from None
        except Exception as error:  # of a file, a decoder, or a dataset of the user's
            where = self.samples.where(number)
            raise SampleError(f"{where}: {type(error).__name__}: {error}") from error

    def _outcome(self, number: int, epoch: int) -> SampleOutcome:
        try:
            return SampleOutcome(_arrays(self.samples, number, self._row(number, epoch)))
        except Dropped:
            return SampleOutcome(None)
        except DataError as error:
            if not self.skips:
                raise
            return SampleOutcome(None, str(error))


def _pairs(unit: ReadUnit) -> list[tuple[int, int]]:
    return list(zip(unit.numbers.tolist(), unit.epochs.tolist(), strict=True))


def _has_objects(columns: Arrays) -> bool:
    return any([array.dtype == object for array in columns.values()])


def _arrays(samples: Samples, number: int, row: Sample) -> Arrays:
    where = lambda: samples.where(number)  # noqa: E731
    return {name: _array(name, value, where) for name, value in row.items()}


def _array(name: str, value: Any, where: Callable[[], str]) -> npt.NDArray[Any]:
    """Return a value of a sample as an array; numbers of Python are float32, int64 or bool."""
    array = plain_array(value)
    if array is None and isinstance(value, float):
        array = np.array(value, np.float32)
    elif array is None and isinstance(value, (bool, int, np.generic)):
        array = np.array(value)
    if array is None or (array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16"):
        came = type(value).__name__ if array is None else f"an array of {array.dtype}"
        raise SampleError(
            f"{where()}: {name!r} is {came}, expected a number or an array of numbers; make one in"
            " a .map, such as by a tokenizer, or leave it out"
        )
    return array
