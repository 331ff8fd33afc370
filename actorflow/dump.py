"""Graphs after each pass as text files, for people who watch the compiler (ACTORFLOW_DUMP)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from compiler.graph import Graph
from compiler.pipeline import Watch
from compiler.printer import print_graph


def dumper(directory: Path | None) -> Watch | None:
    """Return a watcher that writes `NN-pass.txt` into `directory`, or None without one."""
    if directory is None:
        return None
    directory.mkdir(parents=True, exist_ok=True)
    counter = iter(range(1_000_000))
    write: Callable[[str, Graph], None] = lambda name, graph: _write(  # noqa: E731  # a watcher
        directory / f"{next(counter):02d}-{name}.txt", graph
    )
    return write


def _write(path: Path, graph: Graph) -> None:
    path.write_text("\n".join(print_graph(graph)) + "\n", encoding="utf-8")
