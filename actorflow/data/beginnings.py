"""Where pipelines begin: arrays, datasets, files, mixtures, and rows of different lengths."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from actorflow.data.files import ImageSamples, ParquetSamples, Paths, TextSamples, read_csv
from actorflow.data.order import Mixed, Passes, checked_weights
from actorflow.data.pipeline import Pipeline
from actorflow.data.reading import Description
from actorflow.data.samples import ArraySamples, Concatenated, DatasetSamples, Samples, blocks_of
from actorflow.data.source import DataError, checked_seed


def _pipeline(samples: Samples) -> Pipeline:
    return Pipeline(Description(samples, Passes(len(samples), blocks_of(samples))))


def from_arrays(arrays: Mapping[str, npt.NDArray[Any] | Sequence[Any]]) -> Pipeline:
    """Return a pipeline of arrays: row i of each is sample i.

    Args:
        arrays: with the samples along the first axis; or lists of arrays [length, ...], one for
            each sample, that differ in length alone.

    Raises:
        DataError: they differ in the number of samples, or are no arrays.
    """
    return _pipeline(ArraySamples(arrays))


def from_dataset(dataset: Any, *, names: Sequence[str] | None = None) -> Pipeline:
    """Return a pipeline of what has `__len__` and `__getitem__`, as torch's datasets.

    Args:
        dataset: an item is a dict, or a tuple; of two values these are `x` and `y`.
        names: of the values of a tuple.

    Raises:
        DataError: it has no length or no items.
    """
    return _pipeline(DatasetSamples(dataset, names))


def from_parquet(paths: Paths, *, columns: Sequence[str] | None = None) -> Pipeline:
    """Return a pipeline of the rows of Parquet files; needs the extra [data].

    Args:
        paths: a file, a folder with files in any depth (also as Spark writes one, partitioned by
            folders `key=value`, which become columns), or several of them.
        columns: those that are read; None for all. Lists of equal length are arrays.

    Raises:
        DataError: there is no file, one is damaged, a column is missing, or files differ.
    """
    return _pipeline(ParquetSamples(paths, columns))


def from_csv(paths: Paths, *, columns: Sequence[str] | None = None) -> Pipeline:
    """Return a pipeline of the rows of CSV files with a header; needs the extra [data].

    They are read into memory. Numbers with a point are float32, others int64.

    Raises:
        DataError: there is no file, a row is ragged, a value is missing, or files differ.
    """
    return _pipeline(read_csv(paths, columns))


def from_image_folder(root: str | os.PathLike[str]) -> Pipeline:
    """Return a pipeline of images in folders, one for each class; needs the extra [data].

    A sample has `image`, uint8 [height, width, 3], and `label`, the number of its folder by name.

    Raises:
        DataError: there is no such folder, or no image in it.
    """
    return _pipeline(ImageSamples(root))


def from_text(paths: Paths) -> Pipeline:
    """Return a pipeline of the lines of text files that are not empty, as `text`.

    Raises:
        DataError: there is no file, or no line.
    """
    return _pipeline(TextSamples(paths))


def mix(parts: Sequence[Pipeline], weights: Sequence[float], *, seed: int = 0) -> Pipeline:
    """Return a pipeline that takes turns between others, in the proportion of weights.

    Each part repeats for ever; the proportion holds to within a sample over every 256.

    Args:
        parts: pipelines of samples, each with its own order and functions.
        weights: how often each has its turn, from 0 up; they need not add up to 1.
        seed: of the order of turns.

    Raises:
        DataError: a part has batches or no samples, or weights are not one for each part.
    """
    descriptions = [part.description for part in parts if isinstance(part, Pipeline)]
    is_empty = not descriptions or any([not len(d.samples) for d in descriptions])
    if is_empty or len(descriptions) < len(parts) or any([d.collations for d in descriptions]):
        raise DataError("mix: expected pipelines, each with samples; put .batch behind the mixture")
    samples = Concatenated([d.samples for d in descriptions])
    order = Mixed(
        tuple([d.order for d in descriptions]),
        tuple([int(start) for start in samples.starts[:-1]]),
        checked_weights(weights, len(descriptions), "part"),
        checked_seed(seed),
    )
    limits = [d.skip_limit for d in descriptions if d.skip_limit is not None]
    return Pipeline(
        Description(
            samples,
            order,
            can_drop=any([d.can_drop for d in descriptions]),
            num_stages=max([d.num_stages for d in descriptions]),
            skip_limit=max(limits) if limits else None,
        )
    )


def bucket(
    rows: Mapping[str, Any],
    *,
    batch: int | Sequence[int],
    edges: Sequence[int] = (),
    pad: float | Mapping[str, float] = 0,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    group: int = 1,
) -> Pipeline:
    """Return `from_arrays(rows).bucket(...)`, shuffled and repeated.

        data = af.data.bucket({"ids": texts, "label": labels}, edges=(32, 64, 128), batch=16)

    Entries that are lists are padded; without any there are no edges. With `shuffle=False` rows
    come in their own order, short buckets first. Without `epochs` there is no end.

    Raises:
        DataError: what came, what was expected and how to mend it.
    """
    data = from_arrays(rows).repeat(epochs)
    by = [name for name, given in rows.items() if isinstance(given, (list, tuple))]
    data = data.shuffle(seed) if shuffle else data
    data = data.bucket(batch, by=by, edges=edges, pad=pad, group=group)
    data.specs()  # the rows are at hand: what is wrong with one is said now
    return data


def pack(
    rows: Sequence[Any] | Mapping[str, Sequence[Any]],
    *,
    length: int,
    batch: int,
    pad: float | Mapping[str, float] = 0,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
) -> Pipeline:
    """Return `from_arrays(rows).pack(...)`, shuffled and repeated.

        data = af.data.pack(texts, length=512, batch=8)  # texts: arrays of ids

    `rows` are a list of arrays of ids [n], or name -> such a list, `ids` among the names. Without
    `epochs` there is no end.

    Raises:
        DataError: what came, what was expected and how to mend it.
    """
    data = from_arrays(rows if isinstance(rows, Mapping) else {"ids": rows}).repeat(epochs)
    data = (data.shuffle(seed) if shuffle else data).pack(length, batch=batch, pad=pad)
    data.specs()
    return data
