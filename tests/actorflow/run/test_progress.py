"""What a terminal shows of a run, read from the other end of a pseudo-terminal."""

import fcntl
import html
import io
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
import textwrap
import types
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorflow.run.progress import ConsoleView, Progress, html_of, terminal_line, view_of
from actorflow.run.report import Console


class Screen:
    """A pseudo-terminal whose slave is a text stream, and what it shows."""

    def __init__(self, columns=80):
        self.read_end, self.write_end = pty.openpty()
        self.resize(columns)
        self.stream = os.fdopen(os.dup(self.write_end), "w")
        self.text = ""

    def resize(self, columns):
        fcntl.ioctl(self.write_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self):
        """Return its rows: a reading of \\r and \\n of its own."""
        os.write(self.write_end, b"\0")  # an end, so that no read waits
        while "\0" not in self.text:
            self.text += os.read(self.read_end, 1 << 16).decode()
        self.text = self.text.replace("\0", "")
        return rows_of(self.text)

    def close(self):
        self.stream.close()
        os.close(self.read_end)
        os.close(self.write_end)


def rows_of(text):
    rows, column = [[]], 0
    for char in text:
        if char == "\r":
            column = 0
        elif char == "\n":
            rows.append([])
            column = 0
        else:
            rows[-1][column:] = [" "] * (column - len(rows[-1])) + [char, *rows[-1][column + 1 :]]
            column += 1
    return ["".join(row).rstrip() for row in rows]


@pytest.fixture
def screen():
    made = Screen()
    yield made
    made.close()


@pytest.fixture
def on_screen(screen, monkeypatch):
    """Return what lets the streams of this process be a terminal."""
    monkeypatch.setenv("TERM", "xterm")

    @contextmanager
    def run():
        errors = os.fdopen(os.dup(screen.write_end), "w")
        with errors, redirect_stdout(screen.stream), redirect_stderr(errors):
            yield

    return run()


def view(columns=80):
    return ConsoleView(Console(lambda: sys.stdout), columns)


def at(step, **values):
    return Progress(step, total=10, means={"loss": step / 2}, num_averaged=1, **values)


def test_the_line_is_written_over_itself_and_stays_at_the_end(on_screen, screen):
    with on_screen:
        shown = view()
        for step in (9, 10):
            shown.show(at(step))
        assert screen.text.count("\n") == 0
        shown.close("done")
        line = "step 10/10  [##############################]  loss 5.0000  (of one step)"
        assert screen.read() == [line, "done", ""]


@pytest.mark.parametrize("columns", [20, 40, 60, 100, 200])
def test_the_line_has_the_width_of_the_terminal_at_that_moment(
    on_screen, screen, columns, monkeypatch
):
    with on_screen:
        shown = view(columns=None)
        shown.show(at(2))
        monkeypatch.setenv("COLUMNS", str(columns))
        shown.show(at(3, left_s=7.0, items_per_s=1e4))
        screen.read()
        row = screen.text.rpartition("\r")[2]
        assert len(row) < columns
        assert row.startswith("step 3/10")
        assert ("loss 1.5000" in row) == (columns >= 40)


def test_nothing_wraps_on_a_terminal_that_became_narrower(on_screen, screen, monkeypatch):
    with on_screen:
        shown = view(columns=None)
        monkeypatch.setenv("COLUMNS", "100")
        shown.show(at(1, left_s=7.0, items_per_s=1e4))
        before = len(screen.read()[0])
        monkeypatch.setenv("COLUMNS", "40")
        shown.notice("a notice")
        shown.show(at(2))
        print("printed")
        screen.read()
        written = screen.text[before + 1 :].replace("\n", "\r").split("\r")
        assert max(map(len, written)) == 39


def test_what_the_program_prints_stands_above_the_line(on_screen, screen):
    with on_screen:
        shown, handler = view(), logging.StreamHandler(sys.stderr)
        shown.show(at(1))
        print("one", "row")
        shown.show(at(2))
        handler.emit(logging.LogRecord("a", logging.WARNING, "", 1, "a warning", None, None))
        shown.show(at(3))
        assert screen.read()[:2] == ["one row", "a warning"]
        assert screen.read()[2].startswith("step 3/10  [")


def test_a_line_that_the_program_has_begun_is_left_alone(on_screen, screen):
    with on_screen:
        shown = view()
        shown.show(at(1))
        print("half", end=" ", flush=True)
        shown.show(at(2))
        assert screen.read() == ["half"]
        print("a line")
        shown.show(at(3))
        assert screen.read()[0] == "half a line"
        assert screen.read()[1].startswith("step 3/10")


def test_a_line_that_the_program_has_begun_is_ended_before_ours(on_screen, screen):
    with on_screen:
        shown = view()
        shown.show(at(1))
        print("one..", end="", flush=True)
        shown.notice("a notice")
        print("two..", end="", flush=True)
        shown.show(at(10))
        shown.close("done")
        begun, notice, again, last, *end = screen.read()
        assert (begun, notice, again, end) == ("one..", "a notice", "two..", ["done", ""])
        assert last.startswith("step 10/10")


def test_streams_are_as_they_were_when_the_run_is_over(on_screen, screen):
    with on_screen:
        shown = view()
        shown.show(at(1))
        assert "write" in vars(sys.stdout)
        shown.close("")
        assert not {"write"} & (vars(sys.stdout).keys() | vars(sys.stderr).keys())
        print("later")
        assert screen.read()[1:] == ["later", ""]


def test_a_stream_that_the_program_has_changed_since_is_left_so(on_screen, screen):
    with on_screen:
        shown, texts = view(), []
        shown.show(at(1))
        sys.stdout.write = texts.append
        shown.close("")
        print("caught")
        assert texts == ["caught", "\n"]
        del sys.stdout.write


def test_two_runs_at_a_time_leave_the_streams_as_they_were(on_screen, screen):
    with on_screen:
        first, second = view(), view()
        first.show(at(1))
        second.show(at(2))
        first.close("")
        second.close("")
        assert "write" not in vars(sys.stdout)


def test_a_terminal_that_cannot_write_over_a_line_gets_lines(on_screen, screen, monkeypatch):
    with on_screen:
        monkeypatch.setenv("TERM", "dumb")
        shown = view()
        shown.show(at(1))
        shown.show(at(2))
        assert not shown.is_rewritten()
        assert screen.read() == ["step 1/10  loss 0.5000", "step 2/10  loss 1.0000", ""]


def test_the_line_says_what_is_a_mean_and_what_is_of_the_last_step():
    progress = Progress(
        40, 100, 2, 5, {"loss": 1.5}, {"lr": 0.01}, 12, {"loss": 1.25}, 30, 512.0, "tokens", 61.0,
        0.25,
    )  # fmt: skip
    assert terminal_line(progress, 200) == (
        "step 40/100  [############..................]  epoch 2/5  loss 1.5000"
        "  (means of 12 steps)  lr 0.01 (last step)  evaluation at 30: loss 1.2500"
        "  512 tokens/s  waits for data 25%  1 min 01 s left"
    )
    assert terminal_line(progress, 60) == (
        "step 40/100  loss 1.5000  512 tokens/s  1 min 01 s left"
    )


@given(st.integers(1, 300), st.integers(0, 50), st.lists(st.floats(), max_size=9))
def test_a_line_of_any_width_fits_and_begins_with_the_place(columns, step, values):
    means = {f"metric{k}": value for k, value in enumerate(values)}
    line = terminal_line(Progress(step, 20, 1, 2, means, num_averaged=3, left_s=5.0), columns)
    assert len(line) <= columns - 1
    assert line == f"step {step}/20"[: columns - 1] or line.startswith(f"step {step}/20  ")


SCRIPT = """
    import logging, numpy as np, actorflow as af
    from actorflow import nn
    logging.basicConfig()

    class Net(nn.Module):
        def __init__(self):
            self.layer = nn.Linear(4, 1)
        def __call__(self, x):
            return self.layer(x)

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return af.square(model(batch.x)).mean()

    def on_step(step, metrics):
        if step % 50 == 0:
            print("printed", step)
            logging.warning("logged %d", step)

    data = af.data.from_iterable([{"x": np.ones((2, 4), np.float32)}] * 200)
    train.fit(Net(), data, steps=200, on_step=on_step)
    print("the end")
"""


def test_a_run_on_a_terminal_tears_no_line(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(SCRIPT))
    read_end, write_end = pty.openpty()
    fcntl.ioctl(write_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 90, 0, 0))
    environ = os.environ | {"TERM": "xterm", "ACTORFLOW_NATIVE": "0"}
    environ.pop("COLUMNS", None)
    started = subprocess.Popen(
        [sys.executable, file], stdout=write_end, stderr=write_end, stdin=write_end, env=environ
    )
    os.close(write_end)
    text = b""
    try:
        while chunk := os.read(read_end, 1 << 16):
            text += chunk
    except OSError:  # EIO: nobody has the other end any more
        pass
    os.close(read_end)
    assert started.wait() == 0
    rows = rows_of(text.decode())
    told = [row for row in rows if row.startswith(("printed", "WARNING:root:logged"))]
    expected = [(f"printed {k}", f"WARNING:root:logged {k}") for k in (50, 100, 150, 200)]
    assert told == [row for pair in expected for row in pair]
    (last,) = [k for k, row in enumerate(rows) if "200/200" in row]
    assert last > rows.index("WARNING:root:logged 200")
    assert len(rows[last]) < 90
    assert rows[-2:] == ["the end", ""]


class Shell:
    kernel = object()


class Handle:
    def __init__(self, shown):
        self.shown = shown

    def update(self, content):
        self.shown.append(content)


@pytest.fixture
def notebook(monkeypatch):
    shown = []
    display = types.ModuleType("IPython.display")
    display.HTML = str
    display.display = lambda content, display_id: shown.append(content) or Handle(shown)
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = Shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_a_notebook_has_one_element_that_is_replaced_and_lines_of_text(notebook):
    stream = io.StringIO()
    shown = view_of(Console(lambda: stream))
    shown.show(at(1))
    shown.notice("evaluation after step 1")
    shown.show(at(2))
    shown.close("done")
    assert [text.partition(" max")[0] for text in notebook] == [
        '<div><progress value="1"', '<div><progress value="2"'
    ]  # fmt: skip
    assert stream.getvalue() == "evaluation after step 1\ndone\n"


def test_a_console_of_ipython_is_no_notebook(notebook):
    sys.modules["IPython"].get_ipython = object
    assert isinstance(view_of(Console(io.StringIO)), ConsoleView)


def test_names_in_a_notebook_are_text():
    text = html_of(Progress(1, means={"<b>&": 1.0}, item_name="<i>", items_per_s=2.0))
    assert "<b>" not in text
    assert "<i>" not in text
    assert "<b>&" in html.unescape(text)
