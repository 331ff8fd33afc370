"""Batches of rows from arrays of equal length, and the shuffled order that the rows come in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from fractions import Fraction
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from actorflow.data.source import (
    Batch,
    DataError,
    EndlessSource,
    content_hash,
    plain_array,
    position_of,
    position_state,
    positive,
    spec_of,
)
from compiler.contract.html_table import html_table
from compiler.contract.types import TensorType

# The order of an epoch is a keyed bijection of [0, length): position -> item. So a source seeks in
# O(1), stores no permutation (8 bytes for each item would be 37 MB for a corpus of 300 million
# tokens in windows of 64), and a resumed run continues with the very item that would have come.
#
# Source: the generalized Feistel cipher with cycle walking of Black & Rogaway, "Ciphers with
# Arbitrary Finite Domains" (CT-RSA 2002, sections 4 and 5). A number m < a * b is split into (m mod
# a, m div a); each round adds a keyed hash of one half to the other. With a, b near sqrt(length)
# fewer than one number in sqrt(length) falls outside [0, length), and is enciphered again until it
# falls inside. The round function is the 64-bit finalizer "Mix13" of Stafford as used by SplitMix64
# (Steele, Lea & Flood, OOPSLA 2014). This is a shuffle, not a cipher: nobody may rely on its
# secrecy.

# 4 rounds make a strong pseudo-random permutation of large domains (Luby & Rackoff 1988); small
# domains, such as a test corpus of ten windows, need more to look shuffled.
_NUM_ROUNDS = 8

_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_ONE, _SHIFT_27, _SHIFT_30, _SHIFT_31 = (np.uint64(n) for n in (1, 27, 30, 31))

_BLOCK = 1024
"""Positions that are enciphered at once."""

_ROUNDS_AHEAD = 2
"""Rounds of the next block that each call does. A block takes 8, and a few times 8 more, of some 10
us each: all at once they made every 32nd step of a small job eight times as long."""

_Words = npt.NDArray[np.uint64]


class EpochOrder:
    """The order of `length` items in every epoch: a pure function of (seed, epoch, position).

    Args:
        length: items of an epoch, above 0.
        seed: any integer from 0 up; another seed gives another order.
        shuffle: False gives the items in their own order.

    Raises:
        DataError: the seed is no integer from 0 up.
    """

    def __init__(self, length: int, seed: int, *, shuffle: bool = True) -> None:
        if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or seed < 0:
            raise DataError(
                f"data source: expected seed= to be an integer from 0 up, came {seed!r}"
            )
        self._length = np.uint64(length)
        self._seed = int(seed)
        self._shuffle = shuffle
        # ceil(sqrt(length)) for length >= 1, in integers: a float root is wrong for large ones.
        left = math.isqrt(length - 1) + 1
        self._left = np.uint64(left)
        self._right = np.uint64(-(-length // left))
        self._words: dict[int, _Words] = {}
        # (epoch, block) of `_items`; no block has these numbers.
        self._kept = (-1, -1)
        self._items: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._ahead: tuple[tuple[int, int], _Enciphering] | None = None

    def items(self, epoch: int, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the items at positions [first, first + count) of an epoch.

        Over the positions [0, length) every item comes exactly once. O(count) in expectation, and
        read-only. A cipher of a few numbers costs as much as one of a thousand, so small counts are
        cut from the last block that was computed, and each call does a share of the next one.
        """
        if not self._shuffle:
            return np.arange(first, first + count, dtype=np.int64)
        if count > _BLOCK:
            return self._compute(epoch, first, count)
        number, offset = divmod(first, _BLOCK)
        if offset + count <= _BLOCK:
            part = self._block(epoch, number)[offset : offset + count]
        else:
            # Two blocks at most, since count <= _BLOCK. A view of the first stays valid: blocks are
            # not reused.
            head = self._block(epoch, number)[offset:]
            part = np.concatenate([head, self._block(epoch, number + 1)[: count - len(head)]])
        if self._ahead is not None:
            self._ahead[1].advance(_ROUNDS_AHEAD)
        return part

    def _block(self, epoch: int, number: int) -> npt.NDArray[np.int64]:
        """Return the items of a block of positions; the last one asked for is kept."""
        if self._kept != (epoch, number):
            if self._ahead is not None and self._ahead[0] == (epoch, number):
                started = self._ahead[1]
            else:
                started = self._start(epoch, number)
            self._items = started.finish()
            self._items.flags.writeable = False
            self._kept = (epoch, number)
            is_last = (number + 1) * _BLOCK >= int(self._length)
            # Batches run on into the next epoch, so its first block is what comes next.
            after = (epoch + 1, 0) if is_last else (epoch, number + 1)
            self._ahead = (after, self._start(*after))
        return self._items

    def _start(self, epoch: int, number: int) -> _Enciphering:
        first = number * _BLOCK
        last = min(first + _BLOCK, int(self._length))
        return self._enciphering(epoch, np.arange(first, last, dtype=np.uint64))

    def _compute(self, epoch: int, first: int, count: int) -> npt.NDArray[np.int64]:
        positions = np.arange(first, first + count, dtype=np.uint64)
        return self._enciphering(epoch, positions).finish()

    def _enciphering(self, epoch: int, positions: _Words) -> _Enciphering:
        keys = self._keys(epoch)[:_NUM_ROUNDS]
        return _Enciphering(positions, keys, (self._left, self._right), self._length)

    def draw(self, epoch: int, bound: int) -> int:
        """Return the epoch's own random integer in [0, bound), independent of its order."""
        # The word after those of the rounds. The bias of the modulus is below bound / 2**64.
        return int(self._keys(epoch)[_NUM_ROUNDS]) % bound

    def _keys(self, epoch: int) -> _Words:
        """Return the random words of an epoch; those of the last two asked for are kept.

        `spawn_key` and not a second entropy word: SeedSequence pads entropy with zeros, so the
        pairs (5, 0) and (5,) would share a stream.
        """
        if epoch not in self._words:
            sequence = np.random.SeedSequence(self._seed, spawn_key=(epoch,))
            words = sequence.generate_state(_NUM_ROUNDS + 1, np.uint64)
            # Two epochs: a batch may reach over the end of one, and the block ahead is of the next.
            newest = list(self._words.items())[-1:]
            self._words = {**dict(newest), epoch: words.astype(np.uint64, copy=False)}
        return self._words[epoch]


class _Enciphering:
    """Numbers on their way through the cipher, round by round."""

    def __init__(
        self,
        positions: _Words,
        keys: _Words,
        halves: tuple[np.uint64, np.uint64],
        length: np.uint64,
    ) -> None:
        self._items = positions
        self._keys = keys
        self._split, self._modulus = halves
        self._length = length
        self._outside: npt.NDArray[np.bool_] | None = None
        self._turn = 0
        # m = right * split + left, left < split: `_walk` puts them together in the same way.
        self._right, self._left = np.divmod(positions, self._split)
        self._is_done = False

    def finish(self) -> npt.NDArray[np.int64]:
        """Do all rounds that are left and return the items."""
        while not self._is_done:
            self.advance(_NUM_ROUNDS)
        return self._items.view(np.int64)

    def advance(self, rounds: int) -> None:
        """Do some rounds, no more than up to the last; nothing once all are done."""
        if self._is_done:
            return
        for key in self._keys[self._turn : self._turn + rounds]:
            # The halves take turns. Addition modulo the size of a half can be undone, so this stays
            # a bijection.
            if self._turn % 2:
                self._right += _mixed(self._left, key)
                self._right %= self._modulus
            else:
                self._left += _mixed(self._right, key)
                self._left %= self._split
            self._turn += 1
        if self._turn == len(self._keys):
            self._walk()

    def _walk(self) -> None:
        """Put the numbers in place; let those that fell outside go round once more."""
        self._right *= self._split
        self._right += self._left
        if self._outside is None:
            self._items = self._right
        else:
            self._items[self._outside] = self._right
        self._outside = self._items >= self._length
        again = self._items[self._outside]
        self._is_done = not len(again)
        self._turn = 0
        self._right, self._left = np.divmod(again, self._split)


def _mixed(numbers: _Words, key: np.uint64) -> _Words:
    """Return a 63-bit hash of each number; 63 bits keep the sum with the other half below 2^64."""
    z: _Words = numbers + key
    z ^= z >> _SHIFT_30
    z *= _MIX_A
    z ^= z >> _SHIFT_27
    z *= _MIX_B
    z ^= z >> _SHIFT_31
    z >>= _ONE
    return z


class ArraySource:
    """Batches {name: rows}: row i of every array is sample i; shuffled anew in each epoch.

    Batch k is a pure function of (seed, k): seeking is O(1). The arrays are read in place, never
    copied; they must not change meanwhile.

    Args:
        arrays: name -> array with the samples along its first axis; may be `np.memmap`s.
        batch: samples in a batch.
        seed: order of the samples.
        shuffle: False gives the samples in their own order in every epoch.
        epochs: how often every sample is seen before the source ends; None never ends.
        drop_last: True drops the samples at an epoch's end that fill no batch (others in each
            shuffled epoch). False drops none: a batch is filled up from the next epoch.

    Raises:
        DataError: the arrays differ in length, hold no batch, are of a type no plan can hold; or
            `drop_last` is False and the last epoch would end in a short batch.
    """

    item_name = "samples"

    def __init__(
        self,
        arrays: Mapping[str, npt.NDArray[Any]],
        *,
        batch: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        drop_last: bool = True,
    ) -> None:
        self._batch = positive("batch", batch)
        types = spec_of(arrays)  # which refuses what is no array
        self._spec = {
            name: TensorType(type_.dtype, (self._batch, *type_.shape[1:]))
            for name, type_ in types.items()
        }
        self._arrays = {name: np.asarray(plain_array(arrays[name])) for name in types}
        self._num_samples = _equal_length(self._arrays)
        if self._num_samples < self._batch:
            raise DataError(
                f"ArraySource: a batch of {self._batch} samples is asked for, and the arrays have"
                f" {self._num_samples}; give more data, or batch= at most {self._num_samples}"
            )
        epochs = None if epochs is None else positive("epochs", epochs)
        self._epochs = epochs
        used = self._num_samples - (self._num_samples % self._batch if drop_last else 0)
        self._samples_per_epoch = used
        self._num_batches = None if epochs is None else _num_batches(used, epochs, self._batch)
        self._order = EpochOrder(self._num_samples, seed, shuffle=shuffle)
        self._parameters = (
            f"batch={self._batch},seed={int(seed)},shuffle={bool(shuffle)},epochs={{}}"
            f",drop_last={bool(drop_last)}"
        )
        self._batches = 0
        self._rows = np.empty(self._batch, np.int64)
        self._fingerprint: str | None = None

    def __repr__(self) -> str:
        texts = [f"{name}: {array.dtype}" for name, array in self._arrays.items()]
        rows, batch = self._num_samples, self._batch
        return f"ArraySource({', '.join(texts)}; {rows:,} samples, batches of {batch:,})"

    def _repr_html_(self) -> str:
        return html_table("ArraySource", {"samples": self._num_samples, **self._spec})

    @property
    def items_per_batch(self) -> int:
        """Samples in a batch."""
        return self._batch

    def __bool__(self) -> bool:
        """Whether there is a source; how many batches it has, `len` says where they are counted."""
        return True

    def __len__(self) -> int:
        """Batches from the start to the end.

        Raises:
            TypeError: the source never ends.
        """
        if self._num_batches is None:
            raise EndlessSource("an ArraySource without epochs= never ends and has no length")
        return self._num_batches

    def passes(self, epochs: int) -> tuple[ArraySource, Fraction]:
        """Return this source without an end, and how many batches so many passes of it are."""
        endless = self
        if self._num_batches is not None:
            endless = copy(self)
            endless._num_batches, endless._fingerprint = None, None
            endless._rows = np.empty_like(self._rows)
            endless._epochs = None
        samples = self._samples_per_epoch * (self._epochs or 1) * epochs
        return endless, Fraction(samples, self._batch)

    def spec(self) -> dict[str, TensorType]:
        """Return the type of every array of a batch: [batch, ...]."""
        return dict(self._spec)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, npt.NDArray[Any]]:
        """Return the next batch in fresh arrays.

        Raises:
            StopIteration: all epochs are over.
        """
        out = {name: np.empty(type_.shape, type_.dtype.value) for name, type_ in self._spec.items()}
        self.next_into(out)
        return out

    def next_into(self, out: Batch) -> None:
        """Write the next batch into the arrays of `out`, of the types of `spec()`.

        Raises:
            StopIteration: all epochs are over; `out` is unchanged.
        """
        self.next_rows_into(out, {})

    def next_rows_into(self, out: Batch, rows: Mapping[str, slice]) -> None:
        """Write some rows of the next batch into `out`; of an array without a slice, all.

        Raises:
            StopIteration: all epochs are over; `out` is unchanged.
        """
        if self._batches == self._num_batches:
            raise StopIteration
        self._find_rows()
        for name, array in self._arrays.items():
            samples = self._rows[rows[name]] if name in rows else self._rows
            if array.flags.c_contiguous:
                # "clip" writes straight into out; the rows are in range by construction.
                np.take(array, samples, axis=0, out=out[name], mode="clip")
            else:  # take would copy the whole array first
                out[name][...] = array[samples]
        self._batches += 1

    def origins(self) -> tuple[str, ...]:
        """Return where each row of the next batch comes from: the numbers of samples."""
        self._find_rows()
        return tuple([f"row {number:,} of the arrays" for number in self._rows])

    def _find_rows(self) -> None:
        epoch, position = divmod(self._batches * self._batch, self._samples_per_epoch)
        filled = 0
        # A batch may hold the end of one epoch and the beginning of the next, or several short
        # ones.
        while filled < self._batch:
            count = min(self._batch - filled, self._samples_per_epoch - position)
            self._rows[filled : filled + count] = self._order.items(epoch, position, count)
            filled, epoch, position = filled + count, epoch + 1, 0

    def state(self) -> dict[str, Any]:
        """Return the number of batches returned so far."""
        return position_state("arrays", self._batches)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches counted in `state`; O(1).

        Raises:
            DataError: the state is of another kind of source, damaged, or past the end.
        """
        batches = position_of(state, "arrays")
        if self._num_batches is not None and batches > self._num_batches:
            raise DataError(
                f"ArraySource: the state is after batch {batches}, and this source ends after"
                f" {self._num_batches}; give epochs= and data as in the run that wrote it"
            )
        self._batches = batches

    def fingerprint(self) -> str:
        """Return length, content hashes and parameters; reads all arrays the first time."""
        if self._fingerprint is None:
            hashes = ",".join(
                f"{name}={content_hash(self._arrays[name])}" for name in sorted(self._arrays)
            )
            parameters = self._parameters.format(self._epochs)
            self._fingerprint = f"arrays:{self._num_samples}:{hashes}:{parameters}"
        return self._fingerprint


def _equal_length(arrays: Mapping[str, npt.NDArray[Any]]) -> int:
    if not arrays:
        raise DataError("ArraySource: expected at least one array, came an empty dict")
    scalars = [name for name, array in arrays.items() if array.ndim == 0]
    if scalars:
        raise DataError(
            f"ArraySource: expected arrays with samples along the first axis, came a scalar in"
            f" {', '.join(map(repr, scalars))}; give a number for all samples to the job itself"
        )
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name!r} {length:,}" for name, length in lengths.items())
        raise DataError(
            f"ArraySource: expected arrays of equal length, came {listed}; row i of every array is"
            " sample i"
        )
    return next(iter(lengths.values()))


def _num_batches(samples_per_epoch: int, epochs: int, batch: int) -> int:
    whole, spare = divmod(samples_per_epoch * epochs, batch)
    if spare:
        raise DataError(
            f"ArraySource: {epochs} epochs of {samples_per_epoch:,} samples are {whole} batches of"
            f" {batch} and {spare} samples over, and a plan has static shapes; give drop_last=True,"
            " or a batch= that divides the samples"
        )
    return whole
