"""What becomes of the rows that a job computes over a source: arrays, a callback, or Parquet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import wraps
from typing import Any

import numpy as np

from actorflow.callbacks.protocol import Metrics
from actorflow.data import DataError
from actorflow.data.files import ParquetWriter
from actorflow.options.run_spec import describe_value
from actorflow.run.evaluation import too_few_batches
from compiler.contract.errors import CompileError

Array = np.ndarray[Any, Any]
Rows = dict[str, Array]
RowSink = str | os.PathLike[str] | Callable[[Rows], object]

MASK = "which rows count"
"""The output that has the mask of the rows of a batch."""


def with_mask(function: Callable[[Any, Any], Any], entry: str) -> Callable[[Any, Any], Any]:
    """Return the function of a job whose outputs have an entry of the batch, too."""

    @wraps(function)
    def masked(model: Any, batch: Any) -> dict[str, Any]:
        returned = function(model, batch)
        outputs = returned if isinstance(returned, Mapping) else {"output": returned}
        return {**outputs, MASK: batch[entry]}

    return masked


def rows_sink(to: Any, where: object, *, is_first: bool) -> Any:
    """Return the context that is what takes rows, None where they are kept.

    Of several ranks the first one writes the file. Raises CompileError for what cannot take any,
    and on entry DataError for a path that is taken.
    """
    if to is None or callable(to):
        return nullcontext(to)
    if isinstance(to, (str, os.PathLike)):
        return ParquetWriter(to, f"{where}: predict") if is_first else nullcontext(len)
    raise CompileError(
        f"{where}: to= of predict takes the path of a Parquet file, or a function that is called"
        f" with the arrays of each batch; came {describe_value(to)}"
    )


def gathered_rows(batches: Iterable[Metrics], sink: Any, where: object, wanted: int | None) -> Any:
    """Give the rows of all batches to a sink and return how many they were; or return all.

    Raises DataError where there are fewer batches than wanted.
    """
    columns: dict[str, list[Array]] = {}
    num_batches = num_rows = 0
    for rows in _counting_rows(batches, where):
        num_batches += 1
        num_rows += len(next(iter(rows.values())))
        if sink is not None:
            sink(rows)
            continue
        for name, array in rows.items():
            columns.setdefault(name, []).append(array)
    if num_batches < (wanted or 0):
        raise too_few_batches(f"{where}: predict", wanted, num_batches)
    if sink is not None:
        return num_rows
    for name, arrays in columns.items():
        if len(shapes := {array.shape[1:] for array in arrays}) > 1:
            raise DataError(
                f"{where}: rows of {name!r} have several shapes, {sorted(shapes)}, as batches have,"
                " and are no array; give to= a function, which gets those of each batch"
            )
    return {name: np.concatenate(columns.pop(name)) for name in list(columns)}


def _counting_rows(batches: Iterable[Metrics], where: object) -> Iterator[Rows]:
    """Yield the outputs of each batch without the rows that fill it up. Raises CompileError."""
    for outputs in batches:
        arrays = {name: np.asarray(value) for name, value in outputs.items()}
        firsts = {array.shape[:1] for array in arrays.values()}
        if len(firsts) > 1 or () in firsts:
            shapes = ", ".join([f"{name!r}: {list(a.shape)}" for name, a in arrays.items()])
            raise CompileError(
                f"{where}: predict returns a row for each row of a batch, so all outputs have these"
                f" as their first axis; came {shapes}. Return only such outputs from the job;"
                " evaluate has numbers of the whole set"
            )
        mask = arrays.pop(MASK, None)
        if mask is not None and not mask.all():
            arrays = {name: array[mask != 0] for name, array in arrays.items()}
        yield arrays
