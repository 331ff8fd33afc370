"""The metrics of a run as columns, read on from where the last look ended.

A metrics file is only ever appended to (`actorflow.run.report`), so a page that is shown again
reads what is new. A million lines are columns of numbers here: as rows they would take gigabytes.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from actorflow.run.report import MOST_METRICS_BYTES, RESERVED, metrics_rows
from compiler.contract.files import open_regular

Points = np.ndarray[Any, np.dtype[np.float64]]
"""Steps and values, [n, 2]."""

_MOST_SERIES = 100
_CHUNK_BYTES = 1 << 20
_KEPT_BYTES = 64
_MOST_OF_BLOCK = 1_000
_NUMBERS = frozenset({int, float, bool})


class MetricSeries(Mapping[str, Points]):
    """The values of each metric of one file, which may grow between two calls of `read_on`.

    They are in the order of steps. A resumed run writes steps again: of equal steps the last one
    counts. Points are made anew whenever they are asked for: kept, they would double the memory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._forget()

    def __getitem__(self, name: str) -> Points:
        """Return the points of a metric."""
        return _ordered(*self._columns[name])

    def __iter__(self) -> Iterator[str]:
        """Iterate the names of metrics."""
        return iter(self._columns)

    def __len__(self) -> int:
        """Return how many metrics there are."""
        return len(self._columns)

    def _forget(self) -> None:
        self._columns: dict[str, tuple[array[float], array[float]]] = {}
        self._num_bytes, self._end = 0, b""

    def read_on(self) -> None:
        """Read the lines that are new; all of them where the file is another one.

        A line without an end is one that is being written: it is read when it has one.

        Raises OSError where there is no regular file, or one of more than 1 GiB.
        """
        fd = open_regular(self._path, os.O_RDONLY)
        try:
            size_bytes = os.fstat(fd).st_size
            if size_bytes > MOST_METRICS_BYTES:
                why = f"it has {size_bytes:,} bytes, and at most {MOST_METRICS_BYTES:,} are read"
                raise OSError(errno.EFBIG, why, os.fspath(self._path))
            # What was read last stands there still, unless the file was replaced or written anew.
            start = self._num_bytes - len(self._end)
            if os.pread(fd, len(self._end), start) != self._end:
                self._forget()
            rows = metrics_rows(self._new_lines(fd, size_bytes))
            # Lines of the same names are taken as a block, by columns: one value at a time takes
            # longer than its text.
            for names, block in groupby(rows, tuple):
                while part := [*islice(block, _MOST_OF_BLOCK)]:
                    self._add(names, part)
        finally:
            os.close(fd)

    def _new_lines(self, fd: int, size_bytes: int) -> Iterator[bytes]:
        """Yield whole lines from the place where the last call ended, and note the new place."""
        place = self._num_bytes
        pieces: list[bytes] = []  # of a line that goes on
        while place < size_bytes and (
            part := os.pread(fd, min(_CHUNK_BYTES, size_bytes - place), place)
        ):
            place += len(part)
            *lines, rest = part.split(b"\n")
            if lines:
                lines[0] = b"".join([*pieces, lines[0]])
                pieces.clear()
                self._num_bytes = place - len(rest)
                self._end = (lines[-1] + b"\n")[-_KEPT_BYTES:]
            pieces.append(rest)
            yield from lines

    def _add(self, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        """Take lines that have the same names in one order; those without a step are none."""
        numbered = [row.values() for row in rows if type(row.get("step")) in _NUMBERS]
        columns = dict(zip(names, zip(*numbered, strict=True), strict=False))
        for name, column in columns.items():
            steps = columns["step"]
            if not _NUMBERS.issuperset(map(type, column)):
                are_numbers = [type(value) in _NUMBERS for value in column]
                steps, column = [tuple(compress(x, are_numbers)) for x in (steps, column)]
            is_kept = name in self._columns or len(self._columns) < _MOST_SERIES
            if column and is_kept and name not in RESERVED:
                own = self._columns.setdefault(name, (array("d"), array("d")))
                own[0].extend(array("d", steps))
                own[1].extend(array("d", column))


def _ordered(steps: array[float], values: array[float]) -> Points:
    points = np.column_stack([np.array(steps), np.array(values)])
    if not _rises(points).all():
        points = points[np.argsort(points[:, 0], kind="stable")]
        points = points[np.append(_rises(points), True)]
    return points


def _rises(points: Points) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each point but the last whether the next one has a larger step."""
    # Compared, not subtracted: two steps of any file may differ by more than a number holds.
    is_before: np.ndarray[Any, np.dtype[np.bool_]] = points[:-1, 0] < points[1:, 0]
    return is_before
