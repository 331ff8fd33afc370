"""The metrics file: lines of JSON, only ever appended to.

One line is one write, so a killed run leaves at most one line without its end; the next run ends
that line before it appends, and changes nothing that was written. A resumed run may write steps
again that a killed
run had written after its last checkpoint: of lines with the same step the last one counts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
