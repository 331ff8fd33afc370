"""The metrics file: lines of JSON, only ever appended to.

One line is one write, so a killed run leaves at most one line without its end; the next run ends
that line before it appends, and changes nothing that was written. A resumed run may write steps
again that a killed run had written after its last checkpoint: of lines with the same step the last
one counts.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actorflow.logs import once

_KEPT_ROWS = 10_000
"""Rows that wait for a disk that does not take them; at one in half a second, more than an hour."""


class MetricsKeeper:
    """Appends rows to a metrics file through all troubles of its disk. Never raises OSError.

    Rows come on several threads: a run's outputs on one, its evaluations on another.

    A row that cannot be written is kept and tried again with the next one, so a disk that was full
    for a while costs nothing. The trouble is told once; at the end, what is lost of it.

    Args:
        path: the file.
        report: takes the texts.
    """

    def __init__(self, path: str | os.PathLike[str], report: Callable[[str], object]) -> None:
        self._path = Path(path)
        self._report = report
        self._rows: deque[Mapping[str, Any]] = deque()
        self._num_lost = 0
        self._tell_trouble = once(report)
        self._file: MetricsFile | None = None
        self._lock = threading.Lock()
        self._flush()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row, after those that wait."""
        with self._lock:
            self._rows.append(row)
            self._flush()
            while len(self._rows) > _KEPT_ROWS:
                self._rows.popleft()
                self._num_lost += 1

    def close(self) -> None:
        """Try once more, say what is lost, and close the file."""
        with self._lock:
            self._flush()
            if self._num_lost or self._rows:
                lost = self._num_lost + len(self._rows)
                self._report(f"warning: {lost} rows of metrics are not in {self._path}")
            if self._file is not None:
                self._file.close()

    def _flush(self) -> None:
        try:
            if self._file is None:
                self._file = MetricsFile(self._path)  # it ends a line that was cut
            while self._rows:
                self._file.append(self._rows[0])
                self._rows.popleft()
        except OSError as error:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._tell_trouble(
                f"warning: {self._path} cannot be written ({error}); the run goes on and keeps"
                f" up to {_KEPT_ROWS:,} rows until it can: free some space"
            )


class MetricsFile:
    """An open metrics file of one writer.

    Args:
        path: the file; it and its folder are made if they are not there.

    Raises:
        OSError: it cannot be opened for appending.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        ends_cut = _ends_cut(path)
        self._file = path.open("ab", buffering=0)  # unbuffered: one line is one write
        if ends_cut:
            try:
                self._write(b"\n")
            except OSError:
                self._file.close()
                raise

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line. NaN and infinities become the texts that float() reads: JSON has none.

        Raises:
            OSError: the line could not be written whole, such as on a full disk.
        """
        values = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        self._write(json.dumps(values, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file; every line is already with the operating system."""
        self._file.close()

    def _write(self, line: bytes) -> None:
        written = self._file.write(line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of a metrics file in the order written; a line cut by a kill is left out."""
    rows = []
    for line in Path(path).read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:  # damaged UTF-8 too
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _ends_cut(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False
