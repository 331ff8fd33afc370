"""Live progress on a stream, and the same facts as lines of JSON in a file.

The reporter is fed by the metrics thread with values that are already on the host, so it never
makes the device wait. A step costs some additions; text is made once in an interval. Means are over
the steps since the line before, so a line stands for all of them and not for the one it happened to
meet; of a learning rate it has that of the last step.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from actorflow.callbacks.protocol import EVALUATION
from actorflow.environment.settings import logger, once
from actorflow.run.progress import Progress, ProgressView, is_rate, number_text
from compiler.contract.codec import DecodeError, from_json
from compiler.contract.files import open_regular, read_regular, user_path

# Progress text is never the reason for which a run ends, or waits. A stream may be full, closed,
# replaced or not there, its reader may be gone or asleep, its encoding may lack a letter. The first
# of these troubles is said in the log; the text is lost, and the run goes on.

_PIECE = 400
"""Letters written at once: at 10 bytes each they fit the 4,096 that a ready pipe takes whole."""

_KEPT = 256
"""Pieces that wait for a reader who is asleep; the oldest are dropped first."""


class Console:
    """Writes text to the stream that `stream` returns at that moment, such as `sys.stdout`.

    Nobody waits for a reader: what finds no room is dropped, or kept until there is. Belongs to one
    thread at a time.
    """

    def __init__(self, stream: Callable[[], Any]) -> None:
        self._stream = stream
        self._waiting: deque[str] = deque(maxlen=_KEPT)
        self._tell_trouble = once(logger.warning)

    def is_terminal(self) -> bool:
        """Whether the stream of this moment is a terminal that can write over a line."""
        try:
            return bool(self._stream().isatty()) and os.environ.get("TERM") != "dumb"
        except Exception:  # a stream is whatever somebody put there
            return False

    def write(self, text: str, *, is_kept: bool) -> None:
        """Write a text; where there is no room for it now, keep it for the next call or drop it."""
        try:
            self._send()  # what waits comes first
            if is_kept or (not self._waiting and _has_room(self._stream())):
                self._waiting.extend(_pieces(text))
                self._send()
        except Exception as error:  # whatever a foreign stream raises
            self._waiting.clear()
            self._tell_trouble(
                f"progress cannot be written ({error}); the run continues without it"
            )

    def _send(self) -> None:
        while self._waiting:
            stream = self._stream()
            if not _has_room(stream):
                return
            if stream is not None:
                _write(stream, self._waiting[0])
            self._waiting.popleft()


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


def _has_room(stream: Any) -> bool:
    """Whether a piece can be written, or has nowhere to go, without waiting for who reads it."""
    try:
        fd = stream.fileno()
    except Exception:  # no file at all, or no stream
        return True
    # A pipe is ready for writing when PIPE_BUF (4,096) bytes fit, so a piece is written whole.
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))  # a broken one is ready too: to fail


def _write(stream: Any, text: str) -> None:
    """Write so that a failure leaves nothing behind that Python would fail on again at exit."""
    fd = _plain_file(stream)
    if fd is None:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode("ascii", "backslashreplace").decode())
        stream.flush()
        return
    stream.flush()  # what the program itself has printed comes first
    buffer = memoryview(text.encode(stream.encoding, "backslashreplace"))
    while buffer:
        buffer = buffer[os.write(fd, buffer) :]


def _plain_file(stream: Any) -> int | None:
    """Return the descriptor of a text stream as Python makes it, or None for any other."""
    # Exact types: a subclass (a notebook's, a test's capture) may do something else with what is
    # written.
    if type(stream) is not io.TextIOWrapper:
        return None
    buffer: Any = stream.buffer
    raw = buffer.raw if type(buffer) is io.BufferedWriter else buffer
    return raw.fileno() if type(raw) is io.FileIO else None


# The metrics file is only ever appended to. One line is one write, so a killed run leaves at most
# one line without its end; the next run ends that line before it appends. A resumed run may write
# steps again that a killed run had written after its last checkpoint: of lines with the same step
# the last one counts.

MOST_METRICS_BYTES = 1 << 30
_LINES_AT_ONCE = 1_000
"""Of a metrics file that is read."""
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
        open_file: opens the file; see `MetricsFile`.
        most_rows: how many rows wait at most for a disk that does not take them.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        report: Callable[[str], object],
        *,
        open_file: OpenFile | None = None,
        most_rows: int = _KEPT_ROWS,
    ) -> None:
        self._path = Path(path)
        self._open_file, self._most_rows = open_file or open_for_lines, most_rows
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
            # The oldest go: the newest rows say how the run stands when the disk takes them again.
            while len(self._rows) > self._most_rows:
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
                self._file = MetricsFile(self._path, self._open_file)  # it ends a line that was cut
            while self._rows:
                self._file.append(self._rows[0])
                # After the write: a row that failed stays first in the queue.
                self._rows.popleft()
        except OSError as error:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._tell_trouble(
                f"warning: {self._path} cannot be written ({error}); the run continues and keeps"
                f" up to {self._most_rows:,} rows in memory until it can: free some space"
            )


OpenFile = Callable[[Path], io.RawIOBase]


def open_for_lines(path: Path) -> io.RawIOBase:
    """Open a file for appending whole lines. Raises OSError."""
    # O_RDWR: the last byte is read to see whether a line was cut. O_APPEND: a write goes to the
    # end whatever else has the file open.
    fd = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    return os.fdopen(fd, "ab", buffering=0)  # unbuffered: one line is one write


class MetricsFile:
    """An open metrics file of one writer.

    Args:
        path: the file; it and its folder are made if they are not there.
        open_file: opens it, unbuffered and for appending.

    Raises:
        OSError: it cannot be opened for appending.
    """

    def __init__(self, path: str | os.PathLike[str], open_file: OpenFile = open_for_lines) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_file(path)
        if _ends_cut(self._file.fileno()):
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
        # Unbuffered writes may be short on a full disk; the next run then ends the line.
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of a metrics file in the order written.

    A line that was cut by a kill is left out, and one with an integer that no float64 holds.

    Raises OSError where it is no regular file, or has more than 1 GiB.
    """
    content = read_regular(user_path(path), MOST_METRICS_BYTES, is_link_followed=True)
    return [*metrics_rows(content.split(b"\n"))]


def metrics_rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield what lines of a metrics file say; nothing of a line that says nothing, as above."""
    waiting = iter(lines)
    while some := [*itertools.islice(waiting, _LINES_AT_ONCE)]:
        values = _flat_objects(some)
        for row in map(_json_or_none, some) if values is None else values:
            if isinstance(row, dict) and all(
                [abs(x) <= sys.float_info.max for x in row.values() if type(x) is int]
            ):
                yield row


def _flat_objects(lines: Sequence[bytes]) -> list[Any] | None:
    """Return lines that are objects without parts, read as one array, which takes half the time.

    The only braces are the first and the last byte of each line. So no object can end but at a
    line's end, or hold another one: as many objects as lines are one for each.
    """
    content = b",".join(lines)
    are_alone = len(lines) == content.count(b"{") == content.count(b"}") and b"[" not in content
    if not are_alone or any([line[:1] + line[-1:] != b"{}" for line in lines]):
        return None
    objects = _json_or_none(b"[" + content + b"]")
    return objects if objects is not None and len(objects) == len(lines) else None


def _json_or_none(data: bytes) -> Any:
    try:
        return from_json(data)
    except DecodeError:
        return None


def _ends_cut(fd: int) -> bool:
    size_bytes = os.fstat(fd).st_size
    return size_bytes > 0 and os.pread(fd, 1, size_bytes - 1) != b"\n"


_TTY_INTERVAL_S = 0.5
_REDRAW_S = 0.1
"""Least time between two places of a line that is rewritten; its means are of `_TTY_INTERVAL_S`."""
_PLAIN_INTERVAL_S = 5.0
_RATE_WINDOW = 16  # intervals over which the time left is estimated
_LAST_LOSSES = 100
METRICS_FILE = "metrics.jsonl"
RESERVED = frozenset({"step", "since_step", "elapsed_s"})
"""Names in a row of metrics that are no metrics."""


class Reporter:
    """Progress line and metrics file of one run.

    `start`, `step` and `finish` belong to one thread at a time; `notice` may come from any.
    Steps count from 1: step n is the n-th update of the whole training, across resumes.

    Args:
        view: where progress goes, and how.
        clock: seconds, monotonic.
        metrics_path: the JSON-lines file, or None for none; its folder is made.
        warn: takes what is wrong with the metrics file; None makes it a notice.
        interval_s: least time between two lines; None is 0.5 s where the view takes the place of
            what was shown, and 5 s elsewhere.
    """

    def __init__(
        self,
        view: ProgressView,
        clock: Callable[[], float],
        *,
        metrics_path: str | os.PathLike[str] | None = None,
        warn: Callable[[str], object] | None = None,
        interval_s: float | None = None,
    ) -> None:
        self._view = view
        self._clock = clock
        # A log that is kept gets a tenth of the lines of a terminal, which rewrites its one.
        default_s = _TTY_INTERVAL_S if self._view.is_rewritten() else _PLAIN_INTERVAL_S
        self._interval_s = default_s if interval_s is None else interval_s
        self._metrics_path = None if metrics_path is None else Path(metrics_path)
        self._warn = warn or self.notice
        self._file: MetricsKeeper | None = None
        self._progress = Progress(0)
        self._evaluated: tuple[int, Mapping[str, float]] = (0, {})
        self._data_wait: Callable[[], float | None] = lambda: None
        self._losses: deque[float] = deque(maxlen=_LAST_LOSSES)
        self._sums: dict[str, _Sum] = {}
        # (seconds, step) of the last reports.
        self._marks: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)
        self._total_steps: int | None = None
        self._items_per_step, self._item_name = 1, "samples"
        self._more: Callable[[], Mapping[str, Any]] = dict
        self._epoch_of: Callable[[int], tuple[int | None, int]] = lambda step: (None, 0)
        self._start_s = self._due_s = self._redraw_s = 0.0
        self._steps_before = self._last_step = self._reported_step = 0

    def start(
        self,
        total_steps: int | None,
        first_step: int,
        items_per_step: int,
        item_name: str,
        more: Callable[[], Mapping[str, Any]] = dict,
        epoch_of: Callable[[int], tuple[int | None, int]] = lambda step: (None, 0),
        data_wait: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Begin a run: open the metrics file and set the clock to zero.

        Args:
            total_steps: the last step of the training, or None if that is open.
            first_step: steps done before this run: 0, or the step of the checkpoint. The first step
                reported is the one after it.
            items_per_step: such as the tokens of a batch.
            item_name: the plural, such as "tokens".
            more: returns what else a line of the metrics file has.
            epoch_of: returns the epoch of a step, None for none, and how many there are.
            data_wait: returns the share of time since it was asked last in which steps waited for
                data; None where that is not known.
        """
        self._total_steps = total_steps
        self._steps_before = first_step
        self._last_step = self._reported_step = first_step
        self._items_per_step, self._item_name = items_per_step, item_name
        self._more, self._epoch_of, self._data_wait = more, epoch_of, data_wait
        self._start_s = self._clock()
        if self._metrics_path is not None:
            self._file = MetricsKeeper(self._metrics_path, self._warn)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step; report if due, as first and last always are."""
        self._last_step = step
        for name, value in metrics.items():
            total = self._sums.get(name)
            if total is None:
                total = self._sums[name] = _Sum()
            total.add(value)
        if "loss" in metrics:
            self._losses.append(float(metrics["loss"]))
        now = self._clock()
        # No mark yet: the first step is reported at once.
        if not self._marks or now >= self._due_s or step == self._total_steps:
            self._report(now)
        elif now >= self._redraw_s:
            self._redraw(now)

    def evaluation(self, step: int, means: Mapping[str, float]) -> None:
        """Print the results of an evaluation and write them to the metrics file; any thread."""
        self._evaluated = step, dict(means)
        text = "  ".join([f"{name} {number_text(value)}" for name, value in means.items()])
        self.notice(f"evaluation after step {step}: {text}")
        file = self._file
        if file is not None:
            file.append(
                {"step": step} | {f"{EVALUATION}{name}": value for name, value in means.items()}
            )

    def finish(self, text: str = "") -> tuple[float | None, int]:
        """Report what is still unreported, leave the progress line, close the file; may come twice.

        Return the mean of the last losses of this run, at most 100, or None, and how many they are.

        Args:
            text: a last line to print, such as why the run ended.
        """
        now = self._clock()
        if self._last_step > self._reported_step:
            self._report(now)
        self._view.close(text)
        file, self._file = self._file, None
        if file is not None:
            file.close()
        count = len(self._losses)
        return math.fsum(self._losses) / count if count else None, count

    def notice(self, text: str) -> None:
        """Print a line of its own above the progress line. Safe from any thread."""
        self._view.notice(text)

    def _report(self, now: float) -> None:
        rate = self._steps_per_s(now)
        items_per_s = None if rate is None else rate * self._items_per_step
        self._write_json(now, items_per_s)
        self._progress = self._progress_now(items_per_s, now)
        self._view.show(self._progress)
        self._redraw_s = now + _REDRAW_S if self._view.is_rewritten() else math.inf
        self._marks.append((now, self._last_step))
        self._reported_step = self._last_step
        self._due_s = now + self._interval_s
        for total in self._sums.values():
            total.clear()

    def _steps_per_s(self, now: float) -> float | None:
        """Return the rate since the line before; None on the first, which carries the warm-up."""
        if not self._marks or now <= self._marks[-1][0]:
            return None
        before_s, before_step = self._marks[-1]
        return (self._last_step - before_step) / (now - before_s)

    def _left_s(self, now: float) -> float | None:
        if self._total_steps is None or not self._marks or self._last_step >= self._total_steps:
            return None
        # Over the whole window, so that one slow step does not throw the estimate about.
        since_s, since_step = self._marks[0]
        if self._last_step <= since_step:
            return None
        return (
            (self._total_steps - self._last_step) * (now - since_s) / (self._last_step - since_step)
        )

    def _redraw(self, now: float) -> None:
        """Show the place of the run anew, beside the means of the report before."""
        step, left_s = self._last_step, self._left_s(now)
        epoch, _ = self._epoch_of(step)
        self._view.show(replace(self._progress, step=step, epoch=epoch, left_s=left_s))
        self._redraw_s = now + _REDRAW_S

    def _progress_now(self, items_per_s: float | None, now: float) -> Progress:
        epoch, epochs = self._epoch_of(self._last_step)
        evaluated_at, evaluated = self._evaluated
        sums = {name: total for name, total in self._sums.items() if total.count}
        return Progress(
            step=self._last_step,
            total=self._total_steps,
            epoch=epoch,
            epochs=epochs,
            means={name: total.mean for name, total in sums.items() if not is_rate(name)},
            last={name: total.last for name, total in sums.items() if is_rate(name)},
            num_averaged=self._last_step - self._reported_step,
            evaluated=evaluated,
            evaluated_at=evaluated_at,
            items_per_s=items_per_s,
            item_name=self._item_name,
            left_s=self._left_s(now),
            # Asked where it is shown alone: it counts the waits of all actors.
            data_wait=self._data_wait() if self._view.is_rewritten() else None,
        )

    def _write_json(self, now: float, items_per_s: float | None) -> None:
        if self._file is None:
            return
        rate_name = f"{self._item_name}_per_s"
        row: dict[str, Any] = {"step": self._last_step, "since_step": self._steps_before}
        for name, total in self._sums.items():
            if total.count:
                key = f"metric_{name}" if name in RESERVED or name == rate_name else name
                row[key], row[f"{key}_last"] = total.mean, total.last
        row[rate_name] = None if items_per_s is None else round(items_per_s, 3)
        row["elapsed_s"] = round(now - self._start_s, 3)
        more, (epoch, _) = {**self._more()}, self._epoch_of(self._last_step)
        if epoch is not None:
            more["epoch"] = epoch
        # A metric of this name, which the user gave, comes first.
        self._file.append({**row, **{k: v for k, v in more.items() if k not in row}})


class _Sum:
    """Sum, count and last value of one metric over an interval; kept and cleared, never rebuilt."""

    __slots__ = ("count", "last", "total")

    def __init__(self) -> None:
        self.total, self.count, self.last = 0.0, 0, math.nan

    def add(self, value: float) -> None:
        self.last = float(value)  # a float32 scalar would keep the sum in float32
        self.total += self.last
        self.count += 1

    def clear(self) -> None:
        self.total, self.count = 0.0, 0

    @property
    def mean(self) -> float:
        return self.total / self.count
