import io
import os
import subprocess
import sys

import pytest

from actorflow.run.report import Console


class Pipe:
    """A text stream on a pipe, as Python makes its stdout, and the other end."""

    def __init__(self, encoding="utf-8"):
        self.read_end, write_end = os.pipe()
        self.stream = os.fdopen(write_end, "w", encoding=encoding)

    def fill(self):
        """Leave no room in the pipe; return how much was written."""
        os.set_blocking(self.stream.fileno(), False)
        written = 0
        try:
            while True:
                written += os.write(self.stream.fileno(), bytes(4096))
        except BlockingIOError:
            os.set_blocking(self.stream.fileno(), True)
            return written

    def read(self, size=1 << 20):
        return os.read(self.read_end, size)


@pytest.fixture
def pipe():
    made = Pipe()
    yield made
    made.stream.close()
    os.close(made.read_end)


def test_text_comes_after_what_the_program_printed(pipe):
    print("printed", file=pipe.stream)
    Console(lambda: pipe.stream).write("progress\n", is_kept=False)
    assert pipe.read() == b"printed\nprogress\n"


def test_nobody_waits_for_a_reader_who_is_asleep(pipe):
    console = Console(lambda: pipe.stream)
    filled = pipe.fill()
    for step in range(5):
        console.write(f"step {step}\n", is_kept=False)
    console.write("a warning\n", is_kept=True)
    console.write("step 5\n", is_kept=False)
    assert len(pipe.read(filled)) == filled
    console.write("step 6\n", is_kept=False)
    assert pipe.read() == b"a warning\nstep 6\n"


def test_what_waits_for_a_reader_is_bounded_and_the_newest_is_kept(pipe):
    console = Console(lambda: pipe.stream)
    filled = pipe.fill()
    for number in range(1000):
        console.write(f"warning {number}\n", is_kept=True)
    while filled:
        filled -= len(pipe.read(filled))
    console.write("", is_kept=False)
    lines = pipe.read().split(b"\n")[:-1]
    assert lines == [b"warning %d" % n for n in range(1000 - 256, 1000)]


def test_a_long_text_goes_through_a_pipe_in_pieces_without_a_wait(pipe):
    console = Console(lambda: pipe.stream)
    text = "0123456789" * 40_000
    console.write(text, is_kept=True)
    came = pipe.read()
    while len(came) < 256 * 400 and console._waiting:
        console.write("", is_kept=False)
        came += pipe.read()
    assert came == text.encode()[-256 * 400 :], "a text beyond what is kept loses its beginning"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_letter_that_the_encoding_lacks_is_written_as_its_number(encoding):
    pipe = Pipe(encoding)
    Console(lambda: pipe.stream).write("größe Ω \udcff\n", is_kept=False)
    pipe.stream.close()
    assert pipe.read() == "größe Ω \udcff\n".encode(encoding, "backslashreplace")
    os.close(pipe.read_end)


class Foreign:
    """A stream of somebody else, who raises what he likes."""

    def __init__(self, error):
        self.error, self.texts = error, []

    def write(self, text):
        if self.error is not None:
            raise self.error
        self.texts.append(text)

    def flush(self):
        pass


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error"),
        OSError(28, "No space left on device"), ValueError("I/O operation on closed file"),
        AttributeError("encoding"), RuntimeError("a widget is gone"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_stream_that_raises_is_told_once_and_used_again_when_it_works(error, caplog):
    stream = Foreign(error)
    console = Console(lambda: stream)
    for step in range(3):
        console.write(f"step {step}\n", is_kept=step == 1)
    stream.error = None
    console.write("step 3\n", is_kept=False)
    assert stream.texts == ["step 3\n"]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"progress cannot be written ({error}); the run continues without it"
    )


def test_a_foreign_stream_that_lacks_a_letter_gets_its_number():
    class Ascii(Foreign):
        def write(self, text):
            text.encode("ascii")
            super().write(text)

    stream = Ascii(None)
    Console(lambda: stream).write("größe", is_kept=False)
    assert stream.texts == ["gr\\xf6\\xdfe"]


def test_a_stream_that_is_not_there_takes_all(caplog):
    console = Console(lambda: None)
    console.write("text", is_kept=True)
    assert not console.is_terminal()
    assert not console._waiting
    assert caplog.text == ""


def test_the_stream_of_the_moment_is_used():
    streams = [io.StringIO(), io.StringIO()]
    console = Console(lambda: streams[0])
    console.write("first", is_kept=False)
    streams[0].close()
    del streams[0]
    console.write("second", is_kept=False)
    assert streams[0].getvalue() == "second"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_failure_leaves_nothing_behind_for_python_to_fail_on_at_exit(unbuffered):
    code = """
import sys
from actorflow.run.report import Console
Console(lambda: sys.stdout).write("progress", is_kept=True)
print("on", file=sys.stderr)
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *(["-u"] if unbuffered else []), "-c", code],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "progress cannot be written ([Errno 28] No space left on device)" in done.stderr
    assert done.stderr.endswith("on\n")
