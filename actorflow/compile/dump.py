"""Graphs after each pass as text files, for people who watch the compiler (ACTORFLOW_DUMP)."""

from __future__ import annotations

from pathlib import Path

from actorflow.logs import logger
from compiler.graph import Graph
from compiler.pipeline import Watch
from compiler.printer import print_graph


def dumper(directory: Path | None) -> Watch | None:
    """Return a watcher that writes `NN-pass.txt` into `directory`, or None without one.

    Where it cannot, the log says so once, and the compiler is not watched any further.
    """
    return None if directory is None else _Dump(directory)


class _Dump:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self._is_broken = False

    def __call__(self, name: str, graph: Graph) -> None:
        """Write the graph after a pass."""
        if self._is_broken:
            return
        path = self._directory / f"{self._count:02d}-{name}.txt"
        self._count += 1
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            text = "\n".join(print_graph(graph)) + "\n"
            path.write_text(text, encoding="utf-8", errors="backslashreplace")  # names of files
        except OSError as error:
            self._is_broken = True
            logger.warning("ACTORFLOW_DUMP: cannot write %s: %s", path, error.strerror)
