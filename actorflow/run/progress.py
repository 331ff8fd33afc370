"""What is shown of a run while it goes: a line of a terminal, plain lines, or a cell of a notebook.

On a terminal one line is written over itself, in one write, so nothing flickers. What the program
and its loggers print to the same terminal meanwhile stands above it: `write` of `sys.stdout` and
`sys.stderr` is watched while the line is there, and the line gives way first. Text that C code
writes past these streams is not seen. There are no colours, so there is nothing for NO_COLOR to
turn off; a terminal that says TERM=dumb gets plain lines, as a file does.
"""

from __future__ import annotations

import html
import importlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from actors.machine.errors import forkable_lock
from compiler.graph.target import LEARNING_RATE

_LEAST_BAR, _MOST_BAR = 8, 30
_TOLD_WAIT = 0.05
"""Share of time from which on a line says that steps wait for data."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A run at one moment.

    `means` are over the last `num_averaged` steps, `last` are rates of the last step alone;
    `evaluated` are the means of the newest evaluation, which came after step `evaluated_at`.
    `data_wait` is the share of time in which steps waited for data, None where it is not known.
    """

    step: int
    total: int | None = None
    epoch: int | None = None
    epochs: int = 0
    means: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    num_averaged: int = 0
    evaluated: Mapping[str, float] = field(default_factory=dict)
    evaluated_at: int = 0
    items_per_s: float | None = None
    item_name: str = "samples"
    left_s: float | None = None
    data_wait: float | None = None


class TextOutput(Protocol):
    """Where text goes: `actorflow.run.report.Console`."""

    def is_terminal(self) -> bool:
        """Whether what is written now is seen on a terminal."""

    def write(self, text: str, *, is_kept: bool) -> None:
        """Write a text; one that is not kept may be lost where there is no room for it."""


class ConsoleView:
    """A line that is rewritten where the console is a terminal, and plain lines where it is none.

    Args:
        console: where the text goes.
        columns: width of the terminal; None asks it each time.
    """

    def __init__(self, console: TextOutput, columns: int | None = None) -> None:
        self._console, self._given_columns = console, columns
        self._lock = forkable_lock()  # reentrant: a signal's handler may print
        self._line = ""  # the last one
        self._shown = ""  # what of it is on the terminal now
        self._num_writers, self._is_begun = 0, False
        self._unwatch: list[Callable[[], object]] = []

    def is_rewritten(self) -> bool:
        """Whether what is shown takes the place of what was, and may come often."""
        return self._console.is_terminal()

    def show(self, progress: Progress) -> None:
        """Show where the run is; one thread at a time."""
        with self._lock:
            if not self._console.is_terminal():
                self._console.write("  ".join(texts_of(progress)) + "\n", is_kept=False)
                return
            if not self._unwatch:
                self._watch()
            self._line = terminal_line(progress, self._columns)
            if not self._num_writers and not self._is_begun:
                self._draw(is_kept=False)

    def notice(self, text: str) -> None:
        """Print a line that stays; any thread."""
        with self._lock:
            shown, width = self._shown, self._width_shown
            # Spaces cover the rest of the line, which is written again below the notice.
            text = f"\r{text.ljust(width)}\n{shown[:width]}" if shown else f"{text}\n"
            self._console.write(self._end_of_begun() + text, is_kept=True)

    def close(self, text: str) -> None:
        """Leave what was shown last, and print a last line where there is one."""
        with self._lock:
            while self._unwatch:
                self._unwatch.pop()()
            end = self._end_of_begun()
            if self._line and not self._shown:
                self._console.write(end, is_kept=True)
                self._draw(is_kept=True)
            end = "\n" if self._shown else end
            self._line = self._shown = ""
            if end or text:
                self._console.write(end + (f"{text}\n" if text else ""), is_kept=True)

    @property
    def _columns(self) -> int:
        return self._given_columns or shutil.get_terminal_size().columns

    @property
    def _width_shown(self) -> int:
        # A terminal that became narrower shows a part of it, and spaces beyond would wrap.
        return min(len(self._shown), max(0, self._columns - 1))

    def _end_of_begun(self) -> str:
        """Return what ends a line that the program has begun, so that ours does not go over it."""
        was_begun, self._is_begun = self._is_begun, False
        return "\n" if was_begun else ""

    def _draw(self, *, is_kept: bool) -> None:
        self._console.write("\r" + self._line.ljust(self._width_shown), is_kept=is_kept)
        self._shown = self._line

    def _watch(self) -> None:
        self._unwatch.append(lambda: None)
        for stream in {id(s): s for s in (sys.stdout, sys.stderr)}.values():
            # By attribute of the stream itself, so that a logger that has it is watched as well.
            # Only of Python's own class: what another one does with an attribute is not known.
            is_own = type(stream) is io.TextIOWrapper and "write" not in vars(stream)
            if is_own and _is_terminal(stream):
                vars(stream)["write"] = watched = self._watched(stream.write)
                self._unwatch.append(partial(_unwatch, stream, watched))

    def _watched(self, write: Callable[[str], int]) -> Callable[[str], int]:
        owner = os.getpid()

        def give_way(text: str) -> int:
            if os.getpid() != owner:  # a forked child has no line
                return write(text)
            with self._lock:
                if self._shown:
                    self._console.write(f"\r{' ' * self._width_shown}\r", is_kept=True)
                    self._shown = ""
                self._num_writers += 1
            try:
                # Without the lock: the program may wait here for its terminal, a run must not.
                count = write(text)
            finally:
                with self._lock:
                    self._num_writers -= 1
            if text:
                self._is_begun = not text.endswith("\n")
            return count

        return give_way


def _unwatch(stream: Any, watched: object) -> None:
    if vars(stream).get("write") is watched:  # not what the program has put there since
        del stream.write


class NotebookView:
    """An element of a notebook's cell that is replaced, and lines of text below it.

    Args:
        console: where lines go.
        display: `IPython.display`.
    """

    def __init__(self, console: TextOutput, display: Any) -> None:
        self._lines, self._display = ConsoleView(console), display
        self._handle: Any = None

    def is_rewritten(self) -> bool:
        """Whether what is shown takes the place of what was, and may come often."""
        return True

    def show(self, progress: Progress) -> None:
        """Show where the run is; one thread at a time."""
        content = self._display.HTML(html_of(progress))
        with suppress(Exception):  # a page that is gone ends no run
            if self._handle is None:
                self._handle = self._display.display(content, display_id=True)
            else:
                self._handle.update(content)

    def notice(self, text: str) -> None:
        """Print a line that stays; any thread."""
        self._lines.notice(text)

    def close(self, text: str) -> None:
        """Leave what was shown last, and print a last line where there is one."""
        self._lines.close(text)


ProgressView = ConsoleView | NotebookView
"""How the progress of one run is shown."""


def view_of(console: TextOutput) -> ProgressView:
    """Return how progress is shown here: a cell where a notebook runs this process."""
    ipython = sys.modules.get("IPython")
    shell = getattr(ipython, "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return ConsoleView(console)
    return NotebookView(console, importlib.import_module("IPython.display"))


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except ValueError:  # it is closed
        return False


# Progress in words.


def texts_of(progress: Progress) -> list[str]:
    """Return the parts of a plain line."""
    metrics = [*_measured(progress), *_rates(progress)]
    return [*_place(progress), *metrics, *_speed(progress), *_left(progress)]


def terminal_line(progress: Progress, columns: int) -> str:
    """Return the line of a terminal of some width, with a bar where the end is known.

    What finds no room is left out, the least important first.
    """
    place, *epoch = _place(progress)
    parts = [(0, place), *[(4, text) for text in epoch]]
    count = progress.num_averaged
    measured, rates = _measured(progress), _rates(progress)
    parts += [(1 + (number > 0), text) for number, text in enumerate(measured)]
    parts += [(4, "(of one step)" if count == 1 else f"(means of {count} steps)")] * bool(measured)
    parts += [(6, f"{text} (last step)") for text in rates]
    if progress.evaluated:
        means = ", ".join([f"{name} {number_text(v)}" for name, v in progress.evaluated.items()])
        parts.append((5, f"evaluation at {progress.evaluated_at}: {means}"))
    parts += [(3, text) for text in _speed(progress)]
    if progress.data_wait is not None and progress.data_wait >= _TOLD_WAIT:
        parts.append((3, f"waits for data {progress.data_wait:.0%}"))
    parts += [(2, text) for text in _left(progress)]
    room = columns - 1  # a wrapped line cannot be rewritten
    while len(parts) > 1 and len("  ".join([text for _, text in parts])) > room:
        # The last of the least important ones.
        parts.remove(max(reversed(parts), key=lambda part: part[0]))
    texts = [text for _, text in parts]
    width = min(_MOST_BAR, room - len("  ".join(texts)) - 4)
    if progress.total and width >= _LEAST_BAR:
        done = min(width, width * progress.step // progress.total)
        texts.insert(1, f"[{'#' * done}{'.' * (width - done)}]")
    return "  ".join(texts)[:room]


def html_of(progress: Progress) -> str:
    """Return progress for a notebook: a bar and a table, in the colours of the page."""
    bar = ""
    if progress.total:
        bar = f'<progress value="{progress.step}" max="{progress.total}"></progress> '
    rest = _speed(progress)
    if progress.data_wait is not None and progress.data_wait >= _TOLD_WAIT:
        rest.append(f"waits for data {progress.data_wait:.0%}")
    head = html.escape("  ".join([*_place(progress), *rest, *_left(progress)]))
    count = progress.num_averaged
    mean = "of one step" if count == 1 else f"mean of {count} steps"
    rows = [(name, number_text(value), mean) for name, value in progress.means.items()]
    rows += [(name, f"{value:.4g}", "last step") for name, value in progress.last.items()]
    rows += [
        (name, number_text(value), f"evaluation after step {progress.evaluated_at}")
        for name, value in progress.evaluated.items()
    ]
    cells = "".join([f"<tr>{''.join([_cell(text) for text in row])}</tr>" for row in rows])
    return f"<div>{bar}{head}</div><table>{cells}</table>"


def _cell(text: str) -> str:
    return f"<td>{html.escape(text)}</td>"


def _place(progress: Progress) -> list[str]:
    total = "" if progress.total is None else f"/{progress.total}"
    epoch = [f"epoch {progress.epoch}/{progress.epochs}"] * (progress.epoch is not None)
    return [f"step {progress.step}{total}", *epoch]


def _measured(progress: Progress) -> list[str]:
    return [f"{name} {number_text(value)}" for name, value in progress.means.items()]


def _rates(progress: Progress) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in progress.last.items()]


def _speed(progress: Progress) -> list[str]:
    rate = progress.items_per_s
    return [] if rate is None else [f"{_amount(rate)} {progress.item_name}/s"]


def _left(progress: Progress) -> list[str]:
    return [] if progress.left_s is None else [f"{_duration(progress.left_s)} left"]


def is_rate(name: str) -> bool:
    """Whether an output is a learning rate, of which the last value counts and not a mean."""
    return name.partition("/")[0] == LEARNING_RATE


def number_text(value: float) -> str:
    """Return a value with the digits that count."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"


def _amount(value: float) -> str:
    for unit in ("", "k", "M"):
        # 999.5 and 99.95 round up to one digit more.
        if value < 999.5:
            return f"{value:.1f}{unit}" if value < 99.95 else f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.1f}G"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
