"""`actorflow top RUN`: watch a run from another terminal, actor by actor.

The run writes its status into its directory (`actorflow.run.status`); this reads and shows it. On a
terminal the view is redrawn in place until the run is over, or q or Ctrl-C is pressed; elsewhere
each view is printed below the last. What was read before is drawn as lines of small bars, without
colours: in blocks, or in ASCII where the terminal's encoding lacks them.
"""

from __future__ import annotations

import argparse
import math
import os
import select
import shutil
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from actorflow.run.progress import number_text
from actorflow.run.status import Status, read_status
from compiler.contract.errors import ActorflowError
from memory.report import format_bytes

_HOME_AND_CLEAR, _HIDE_CURSOR, _SHOW_CURSOR = "\x1b[H\x1b[J", "\x1b[?25l", "\x1b[?25h"
_UNCUT = 1 << 16
_LATE_S = 10.0
"""After so long without a new status the view says so."""
_BLOCKS, _ASCII = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588", "_.:-=+*#"
"""Bars from the least to the largest value."""
_NO_NUMBER = "!"
_MOST_SAMPLES = 120
_BOUNDS_WIDTH = len("  ") + len("  -1.234e-05 to -1.234e-05")
"""What stands beside the bars, less the name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", metavar="RUN", help="directory of the run (fit's checkpoint=)")
    parser.add_argument("--once", action="store_true", help="print one view and exit")
    parser.add_argument("--json", action="store_true", help="print the status as JSON and exit")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between views (default 1)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code. Raises StatusError, ActorflowError."""
    if not 0 < options.interval < 1e6:
        raise ActorflowError(
            f"--interval: expected a number of seconds above 0, came {options.interval}"
        )

    trends = Trends(bars_of(sys.stdout.encoding))

    def view() -> tuple[list[str], bool]:
        status = read_status(options.run)
        trends.add(status)
        notes = note(status, time.time(), is_alive)
        # A process that was killed leaves "running" behind.
        is_over = status.state != "running" or notes.startswith("stale")
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNCUT
        return render(status, columns, notes, trends), is_over

    if options.json:
        print(read_status(options.run).to_json().decode().strip())
        return 0
    if options.once:
        print("\n".join(view()[0]))
        return 0
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return watch(view, _print, lambda: _key(options.interval, can_read=False))
    with _keys() as can_read:
        sys.stdout.write(_HIDE_CURSOR)
        try:
            return watch(view, _redraw, lambda: _key(options.interval, can_read=can_read))
        finally:
            sys.stdout.write(_SHOW_CURSOR + "\n")
            sys.stdout.flush()


def watch(
    view: Callable[[], tuple[list[str], bool]],
    draw: Callable[[list[str]], object],
    key: Callable[[], str],
) -> int:
    """Draw a view again and again until the run is over, or until q or Ctrl-C is pressed.

    `view` returns the lines and whether they are the last; `key` waits, and returns the key that
    was pressed meanwhile, or nothing.
    """
    try:
        while True:
            lines, is_over = view()
            draw(lines)
            if is_over or key() in ("q", "Q"):
                return 0
    except KeyboardInterrupt:
        return 0


def note(status: Status, now_s: float, is_process_alive: Callable[[int], bool]) -> str:
    """Return what the reader should know about the age of a status, or nothing."""
    if status.state != "running":
        return ""
    if status.host == socket.gethostname() and not is_process_alive(status.pid):
        return "stale: process gone"
    age_s = now_s - status.written_at_s
    return f"no news for {age_s:.0f} s" if age_s > _LATE_S else ""


def is_alive(pid: int) -> bool:
    """Whether a process of this machine exists."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    # The process is there and belongs to another user.
    except PermissionError:
        return True
    return True


def bars_of(encoding: str | None) -> str:
    """Return the bars that an encoding has, the lowest first."""
    try:
        _BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _ASCII
    return _BLOCKS


class Trends:
    """The numbers of the last statuses, by name; `bars` are drawn from the lowest to the highest.

    Nothing is read for them: they keep what was shown.
    """

    def __init__(self, bars: str) -> None:
        self._bars = bars
        self._written_at_s: float | None = None
        self._samples: dict[str, deque[float]] = {}

    def add(self, status: Status) -> None:
        """Keep the numbers of a status; one that is there already counts once."""
        if status.written_at_s == self._written_at_s:
            return
        self._written_at_s = status.written_at_s
        shares = [rank.waiting_share for rank in status.by_rank]
        numbers = {
            "loss": status.loss,
            "steps/s": status.steps_per_s,
            "waits for data": status.data_wait,
            "waits for ranks": sum(shares) / len(shares) if shares else None,
        }
        for name, value in numbers.items():
            if value is not None:
                self._samples.setdefault(name, deque(maxlen=_MOST_SAMPLES)).append(value)

    def lines(self, width: int) -> list[str]:
        """Return a line for each number that was read twice, of at most `width` columns."""
        shown = {name: samples for name, samples in self._samples.items() if len(samples) > 1}
        label = max(map(len, shown), default=0)
        room = max(1, width - label - _BOUNDS_WIDTH)
        lines = []
        for name, samples in shown.items():
            values = list(samples)[-room:]
            finite = [value for value in values if math.isfinite(value)]
            form = ".0%" if name.startswith("waits") else ".4g"
            bounds = [f"{bound(finite):{form}}" for bound in (min, max) if finite]
            lines.append(f"{name:<{label}}  {bar_text(values, self._bars)}  {' to '.join(bounds)}")
        return lines


def bar_text(values: Sequence[float], bars: str) -> str:
    """Return numbers as bars between their least and largest; "!" for what is no number."""
    # Halves: the difference of two numbers may be larger than a number can be.
    halves = [value / 2 for value in values]
    finite = [half for half in halves if math.isfinite(half)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    last = len(bars) - 1
    return "".join(
        [
            _NO_NUMBER
            if not math.isfinite(half)
            else bars[round((half - low) / (high - low) * last) if high > low else 0]
            for half in halves
        ]
    )


def render(status: Status, width: int, notes: str = "", trends: Trends | None = None) -> list[str]:
    """Return the view as lines of at most `width` columns: a head, the streams, a row per actor."""
    lines = [_head(status, notes), _facts(status)]
    lines += [] if trends is None else trends.lines(width)
    if status.streams:
        shares = [f"{name} {share:.0%}" for name, share in status.streams.items()]
        lines.append("busy  " + "  ".join(shares))
    if status.by_rank:
        lines += ["", *_ranks(status)]
    if status.actors:
        lines += ["", *_table(status)]
    return [line[:width].rstrip() for line in lines]


def _head(status: Status, notes: str) -> str:
    total = "" if status.total_steps is None else f"/{status.total_steps}"
    percent = f" ({status.step / status.total_steps:.0%})" if status.total_steps else ""
    state = f"{status.state}, {notes}" if notes else status.state
    ranks = f"  {status.ranks} ranks" if status.ranks > 1 else ""
    epoch = f"  epoch {status.epoch}" if status.epoch > 1 else ""
    where = f"pid {status.pid}{ranks}{epoch}"
    return f"{status.job}  step {status.step}{total}{percent}  {state}  {where}"


def _facts(status: Status) -> str:
    parts = [_duration(status.elapsed_s)]
    if status.steps_per_s is not None:
        parts.append(f"{status.steps_per_s:.4g} steps/s")
    if status.loss is not None:
        parts.append(f"loss {number_text(status.loss)}")
    if status.data_wait is not None:
        parts.append(f"waits for data {status.data_wait:.0%}")
    return "  ".join([*parts, f"memory {format_bytes(status.arena_bytes)}"])


_MOST_RANKS = 8


def _ranks(status: Status) -> list[str]:
    """Return a row for each rank; of many for those that wait least."""
    shares = [one.waiting_share for one in status.by_rank]
    shown = sorted(range(len(shares)), key=shares.__getitem__)[:_MOST_RANKS]
    width = max([len("host"), *[len(status.by_rank[rank].host) for rank in shown]])
    rows = [f"{'rank':>4}  {'host':<{width}}  {'waiting':>7}"]
    for rank in sorted(shown):
        row = f"{rank:>4}  {status.by_rank[rank].host:<{width}}  {shares[rank]:>7.0%}"
        rows.append(f"{row}  the others wait for it" if rank == status.rank_behind else row)
    left_out = len(shares) - len(shown)
    return [*rows, f"{left_out:>4}  more, which wait longer"] if left_out else rows


def _table(status: Status) -> list[str]:
    widths = [
        max([len(title), *cells])
        for title, cells in (
            ("actor", [len(actor.name) for actor in status.actors]),
            ("stream", [len(actor.stream) for actor in status.actors]),
        )
    ]
    name, stream = widths
    head = f"{'actor':<{name}}  {'stream':<{stream}}  {'firings':>9}  {'busy':>6}  "
    rows = [head + f"{'ms/firing':>10}  waited for last"]
    rows += [
        f"{actor.name:<{name}}  {actor.stream:<{stream}}  {actor.firings:>9}"
        f"  {actor.busy_share:>6.1%}  {actor.ms_per_firing:>10.3f}  {actor.waited_for}"
        for actor in status.actors
    ]
    return rows


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _print(lines: list[str]) -> None:
    print("\n".join(lines), end="\n\n", flush=True)


def _redraw(lines: list[str]) -> None:
    height = shutil.get_terminal_size().lines
    sys.stdout.write(_HOME_AND_CLEAR + "\r\n".join(lines[: height - 1]))
    sys.stdout.flush()


def _key(seconds: float, *, can_read: bool) -> str:
    """Wait so long, or until a key is pressed; return it."""
    if not can_read:
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""


@contextmanager
def _keys() -> Iterator[bool]:
    """Let keys through without Enter while the view is shown; yield whether they can be read."""
    if not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
