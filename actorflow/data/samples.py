"""Samples by number: what a pipeline reads, and the functions that change or drop one of them.

A reader is a numbered set of samples, each a mapping of names to arrays, numbers or texts. A stage
wraps a reader and is a reader again, so that a chain of them is read by one call and travels to a
worker process as one value. A sample is a function of (number, epoch) and of nothing else: no stage
has a state, and the order in which samples are read, or by which process, changes none of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, is_dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

from actorflow.data.source import DataError, content_hash, line_of, plain_array

Sample = Mapping[str, Any]
ColumnArrays = dict[str, npt.NDArray[Any]]


class Samples(Protocol):
    """A numbered set of samples. Used by one thread at a time; pickled to reach a worker."""

    def __len__(self) -> int: ...

    def row(self, number: int, epoch: int) -> Sample:
        """Return a sample, whose arrays the caller owns: functions of users write into them.

        Raises Dropped for one that a filter refuses, and anything else.
        """

    def where(self, number: int) -> str:
        """Return where a sample comes from, for messages: a file, and the row in it."""

    def fingerprint(self) -> str:
        """Return what identifies the samples: equal where the sequence of samples is equal."""


@runtime_checkable
class HasColumns(Protocol):
    """Samples that are read many at a time, as an array [samples, ...] of each name."""

    def columns(self, numbers: npt.NDArray[np.int64]) -> ColumnArrays:
        """Return the arrays of some samples, which the caller owns."""


@runtime_checkable
class HasBlocks(Protocol):
    """Samples that lie together in blocks, each of which is read as one."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many samples are in each block."""

    def keep_blocks(self, count: int) -> None:
        """Keep at least the last `count` blocks, once read, for samples that are asked for next."""


def blocks_of(samples: Samples) -> tuple[int, ...]:
    """Return how many samples are in each block; () for no blocks."""
    return samples.blocks if isinstance(samples, HasBlocks) else ()


def keep_blocks(samples: Samples, count: int) -> None:
    """Keep at least that many blocks, where there are some."""
    if isinstance(samples, HasBlocks):
        samples.keep_blocks(count)


@runtime_checkable
class ReadsAhead(Protocol):
    """Samples in blocks that other threads can read while earlier ones are used."""

    def read_ahead(self, numbers: npt.NDArray[np.int64]) -> None:
        """Begin to read the blocks of some samples; of none forgets what was begun."""


class Dropped(Exception):  # no error: what a filter does
    """A filter refused a sample."""


class SampleError(DataError):
    """A sample could not be read, or a user's function raised for it; says where it comes from."""


class ArraySamples:
    """Row i of every array, or of a list of arrays, is sample i. The arrays are read in place."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any] | Sequence[Any]]) -> None:
        """Take the arrays. Raises DataError where they differ in length, or are no arrays."""
        if not isinstance(arrays, Mapping) or not arrays:
            raise DataError(
                f"from_arrays: expected {{name: array}} with at least one array, came"
                f" {type(arrays).__name__ if not isinstance(arrays, Mapping) else 'no array'}"
            )
        self._arrays = {name: _with_rows(name, array) for name, array in arrays.items()}
        lengths = {name: len(array) for name, array in self._arrays.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name!r} {length:,}" for name, length in lengths.items())
            raise DataError(f"from_arrays: expected arrays of equal length, came {listed}")
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def row(self, number: int, epoch: int) -> Sample:
        """Return copies of the rows."""
        return {name: owned(array[number]) for name, array in self._arrays.items()}

    def columns(self, numbers: npt.NDArray[np.int64]) -> ColumnArrays:
        """Return copies of some rows."""
        return {name: array[numbers] for name, array in self._arrays.items()}

    def where(self, number: int) -> str:
        """Return the number of the row."""
        return f"row {number:,} of the arrays"

    def fingerprint(self) -> str:
        """Return a hash of all bytes."""
        hashes = [f"{n}={content_hash(_rows_hashed(a))}" for n, a in sorted(self._arrays.items())]
        return f"arrays({self._length},{','.join(hashes)})"


def owned(value: Any) -> Any:
    """Return a value of a sample without what others read, too: of an array a copy."""
    return value.copy() if isinstance(value, np.ndarray) else value


def _rows_hashed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return what of an array is hashed: of texts, and of rows of several lengths, a hash each."""
    if array.dtype != object:
        return array
    digest = xxhash.xxh3_128_hexdigest
    hashes = [
        content_hash(r) if isinstance(r, np.ndarray) else digest(repr(r).encode()) for r in array
    ]
    return np.array(hashes)


def _with_rows(name: str, value: object) -> npt.NDArray[Any]:
    array = _rows_of(name, value) if isinstance(value, (list, tuple)) else plain_array(value)
    if array is None or not array.ndim:
        came = "a scalar" if array is not None else type(value).__name__
        raise DataError(
            f"from_arrays: expected an array with the samples along its first axis for {name!r},"
            f" came {came}"
        )
    return array


def _rows_of(name: str, values: Sequence[Any]) -> npt.NDArray[Any]:
    """Return a list of arrays that differ in length alone as an array of objects."""
    rows = np.empty(len(values), object)
    for number, value in enumerate(values):
        rows[number] = np.asarray(value) if isinstance(value, (list, tuple)) else plain_array(value)
        if rows[number] is None or not rows[number].ndim:
            raise DataError(
                f"from_arrays: expected a list of arrays [length, ...] for {name!r}, came"
                f" {type(value).__name__} in row {number:,}; of numbers give np.array(...)"
            )
    return rows


class DatasetSamples:
    """What has a length and items by number, such as a dataset of torch or Hugging Face.

    An item is a mapping, or a tuple that `names` gives names to.
    """

    def __init__(self, dataset: Any, names: Sequence[str] | None) -> None:
        """Take the dataset. Raises DataError where it has no length or no items."""
        if not isinstance(dataset, Sized) or not hasattr(type(dataset), "__getitem__"):
            raise DataError(
                "from_dataset: expected an object with __len__ and __getitem__, came"
                f" {type(dataset).__name__}; give an iterator to af.data.from_iterable"
            )
        self._dataset: Any = dataset
        self._names = None if names is None else tuple(names)
        self._kind = type(dataset).__name__

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, number: int, epoch: int) -> Sample:
        """Return an item with names. Raises DataError where it has none."""
        item = self._dataset[number]
        if isinstance(item, Mapping):
            return {name: owned(value) for name, value in item.items()}
        if isinstance(item, (tuple, list)):
            names = self._names or (("x", "y") if len(item) == 2 else ())
            if len({*names}) == len(item):
                return dict(zip(names, map(owned, item), strict=True))
            raise DataError(
                f"{self.where(number)} is a tuple of {len(item)}, and {len(names)} names are given;"
                f" give from_dataset(..., names=) a name of its own for each"
            )
        if self._names is not None and len(self._names) == 1:
            return {self._names[0]: owned(item)}
        raise DataError(
            f"{self.where(number)}: expected a dict or a tuple, came {type(item).__name__}; give"
            " from_dataset(..., names=[name])"
        )

    def where(self, number: int) -> str:
        """Return the number of the item."""
        return f"{self._kind}[{number}]"

    def fingerprint(self) -> str:
        """Return kind and length: nothing can be hashed here."""
        return f"dataset({self._kind},{len(self)},{self._names})"


@dataclass(frozen=True, slots=True)
class Staged:
    """Samples and what a user's function does to each: it maps a sample, or drops it.

    A function that maps and has a parameter `rng` gets a generator of its own for each sample,
    drawn from (seed, epoch, number).
    """

    samples: Samples
    function: Callable[..., Any]
    is_filter: bool
    seed: int = 0
    stage: int = 0

    @property
    def blocks(self) -> tuple[int, ...]:
        """Those of the samples."""
        return blocks_of(self.samples)

    def keep_blocks(self, count: int) -> None:
        """Have the reader keep that many."""
        keep_blocks(self.samples, count)

    def read_ahead(self, numbers: npt.NDArray[np.int64]) -> None:
        """Have the reader begin, if it can."""
        if isinstance(self.samples, ReadsAhead):
            self.samples.read_ahead(numbers)

    def __len__(self) -> int:
        return len(self.samples)

    def row(self, number: int, epoch: int) -> Sample:
        """Return a sample. Raises Dropped, and SampleError from what the function raises."""
        sample = self.samples.row(number, epoch)
        if self.is_filter:
            if not called(self.function, sample, (), "filter", lambda: self.where(number)):
                raise Dropped
            return sample
        key = (self.seed, self.stage, epoch, number)
        return mapped(self.function, sample, key, "map", lambda: self.where(number))

    def where(self, number: int) -> str:
        """Return where the sample comes from."""
        return self.samples.where(number)

    def fingerprint(self) -> str:
        """Return the name of the function beside what it is called with."""
        how = "filter" if self.is_filter else f"map {self.seed}"
        return f"{self.samples.fingerprint()}|{how}({name_of(self.function)})"


class Concatenated:
    """The samples of several readers, one after the other."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        self.parts = tuple(parts)
        self.starts = np.cumsum([0, *[len(part) for part in parts]])

    @property
    def blocks(self) -> tuple[int, ...]:
        """Those of the parts, where each has some."""
        blocks = [blocks_of(part) for part in self.parts]
        return sum(blocks, ()) if all(blocks) else ()

    def keep_blocks(self, count: int) -> None:
        """Have each part keep that many."""
        for part in self.parts:
            keep_blocks(part, count)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def _find(self, number: int) -> tuple[Samples, int]:
        part = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.parts[part], number - int(self.starts[part])

    def row(self, number: int, epoch: int) -> Sample:
        """Return a sample of the part that has it."""
        part, inside = self._find(number)
        return part.row(inside, epoch)

    def where(self, number: int) -> str:
        """Return where the sample comes from."""
        part, inside = self._find(number)
        return part.where(inside)

    def fingerprint(self) -> str:
        """Return those of the parts."""
        return f"[{';'.join([part.fingerprint() for part in self.parts])}]"


def called(
    function: Callable[..., Any],
    value: Any,
    key: tuple[int, ...],
    what: str,
    where: Callable[[], str],
) -> Any:
    """Call a user's function. Raises SampleError, which names the sample, from what it raises."""
    try:
        if key and "rng" in _parameters(function):
            return function(value, rng=generator(key))
        return function(value)
    except Exception as error:
        raise SampleError(
            f"{where()}: {what} {line_of(function)} raised {type(error).__name__}: {error}"
        ) from error


def mapped(
    function: Callable[..., Any],
    value: Any,
    key: tuple[int, ...],
    what: str,
    where: Callable[[], str],
) -> Mapping[str, Any]:
    """Call a user's function that returns a dict. Raises SampleError, also for what is none."""
    returned = called(function, value, key, what, where)
    if isinstance(returned, Mapping) and returned:
        return returned
    came = "an empty dict" if isinstance(returned, Mapping) else type(returned).__name__
    raise SampleError(
        f"{where()}: {what} {line_of(function)} returned {came}, expected a dict {{name: value}}"
    )


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return _known_parameters(function)
    except TypeError:  # an object that cannot be hashed
        return _known_parameters.__wrapped__(function)


@lru_cache(maxsize=256)  # `signature` takes 20 us, and is asked once a sample
def _known_parameters(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin has none
        return frozenset()


def generator(key: tuple[int, ...]) -> np.random.Generator:
    """Return the random numbers of a key: equal keys give equal numbers, others independent ones.

    Philox is keyed by 128 bits (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011,
    section 4); here they are a hash of the key.
    """
    digest = xxhash.xxh3_128_intdigest(np.array(key, np.int64).tobytes())
    return np.random.Generator(np.random.Philox(key=digest))


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function in its module; of a value of a dataclass, its fields too."""
    if isinstance(function, partial):
        return f"partial({name_of(function.func)})"
    named = function if hasattr(function, "__qualname__") else type(function)
    fields = f" {function!r}" if is_dataclass(function) else ""
    return f"{named.__module__}.{named.__qualname__}{fields}"
