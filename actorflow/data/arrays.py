"""Batches of rows from arrays of equal length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from actorflow.data.order import EpochOrder
from actorflow.data.source import (
    Batch,
    DataError,
    content_hash,
    position_of,
    position_state,
    positive,
    spec_of,
)
from compiler.types import TensorType


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
        self._spec = {
            name: TensorType(of.dtype, (self._batch, *of.shape[1:]))
            for name, of in spec_of(arrays).items()
        }
        self._arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self._num_samples = _equal_length(self._arrays)
        if self._num_samples < self._batch:
            raise DataError(
                f"ArraySource: a batch of {self._batch} samples is asked for, and the arrays have"
                f" {self._num_samples}; give more data, or batch= at most {self._num_samples}"
            )
        epochs = None if epochs is None else positive("epochs", epochs)
        used = self._num_samples - (self._num_samples % self._batch if drop_last else 0)
        self._samples_per_epoch = used
        self._num_batches = None if epochs is None else _num_batches(used, epochs, self._batch)
        self._order = EpochOrder(self._num_samples, seed, shuffle=shuffle)
        self._parameters = (
            f"batch={self._batch},seed={int(seed)},shuffle={bool(shuffle)},epochs={epochs}"
            f",drop_last={bool(drop_last)}"
        )
        self._batches = 0
        self._rows = np.empty(self._batch, np.int64)
        self._fingerprint: str | None = None

    @property
    def items_per_batch(self) -> int:
        """Samples in a batch."""
        return self._batch

    def __len__(self) -> int:
        """Batches from the start to the end.

        Raises:
            TypeError: the source never ends.
        """
        if self._num_batches is None:
            raise TypeError("an ArraySource without epochs= never ends and has no length")
        return self._num_batches

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
        out = {name: np.empty(of.shape, of.dtype.value) for name, of in self._spec.items()}
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

    def _find_rows(self) -> None:
        epoch, position = divmod(self._batches * self._batch, self._samples_per_epoch)
        filled = 0
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
            self._fingerprint = f"arrays:{self._num_samples}:{hashes}:{self._parameters}"
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
    whole, left = divmod(samples_per_epoch * epochs, batch)
    if left:
        raise DataError(
            f"ArraySource: {epochs} epochs of {samples_per_epoch:,} samples are {whole} batches of"
            f" {batch} and {left} samples over, and a plan has static shapes; give drop_last=True,"
            " or a batch= that divides the samples"
        )
    return whole
