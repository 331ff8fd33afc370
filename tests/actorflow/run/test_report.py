import io
import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorflow.run.progress import ConsoleView
from actorflow.run.report import Console, Reporter, read_metrics


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Run:
    """A reporter, its clock and its output; `steps` advances both."""

    def __init__(self, stream=None, **options):
        columns = options.pop("columns", 100)
        self.clock, self.stream = Clock(), stream or io.StringIO()
        view = ConsoleView(Console(lambda: self.stream), columns)
        self.reporter = Reporter(view, self.clock, **options)

    def steps(self, numbers, seconds, loss=lambda step: 2.0):
        for number in numbers:
            self.clock.now += seconds
            self.reporter.step(number, {"loss": loss(number)})

    @property
    def lines(self):
        return self.stream.getvalue().splitlines()


def screen(text, columns=200):
    """What a terminal shows after `text`: an independent reading of \\r and \\n."""
    rows, column = [[" "] * columns], 0
    for char in text:
        if char == "\r":
            column = 0
        elif char == "\n":
            rows.append([" "] * columns)
            column = 0
        else:
            rows[-1][column] = char
            column += 1
    return ["".join(row).rstrip() for row in rows]


def test_a_line_of_metrics_has_what_is_told_of_ranks_beside_the_users_values(tmp_path):
    run = Run(metrics_path=tmp_path / "metrics.jsonl")
    run.reporter.start(1, 0, 1, "samples", lambda: {"waiting_by_rank": [0.4, 0.1], "loss": 7})
    run.steps([1], 1.0)
    run.reporter.finish()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (row["loss"], row["waiting_by_rank"]) == (2.0, [0.4, 0.1])


def test_one_plain_line_for_each_interval_and_for_first_and_last():
    run = Run()
    run.reporter.start(1300, 0, 2048, "tokens")
    run.steps(range(1, 1301), 0.0625)
    run.reporter.finish()
    reported = [int(line.split()[1].split("/")[0]) for line in run.lines]
    assert reported == [1, *range(81, 1300, 80), 1300]
    assert run.lines[0] == "step 1/1300  loss 2.0000"
    assert run.lines[1] == "step 81/1300  loss 2.0000  32.8k tokens/s  1 min 16 s left"
    assert run.lines[-1] == "step 1300/1300  loss 2.0000  32.8k tokens/s"


def test_a_line_tells_the_mean_since_the_line_before():
    run = Run(interval_s=4.0)
    run.reporter.start(100, 0, 1, "samples")
    run.steps(range(1, 10), 1.0, loss=float)
    assert [line.split()[3] for line in run.lines] == ["1.0000", "3.5000", "7.5000"]


def test_a_slow_step_in_the_warm_up_spoils_neither_rate_nor_time_left():
    run = Run(interval_s=5.0)
    run.reporter.start(21, 0, 10, "samples")
    run.steps([1], 300.0)
    run.steps(range(2, 12), 1.0)
    assert run.lines[-1] == "step 11/21  loss 2.0000  10.0 samples/s  10 s left"


def test_a_terminal_shows_one_line_that_is_rewritten():
    run = Run(Terminal())
    run.reporter.start(None, 0, 1, "samples")
    run.steps(range(1, 4), 1.0, loss=lambda step: 12345.0 if step == 2 else 1.0)
    assert screen(run.stream.getvalue()) == ["step 3  loss 1.0000  (of one step)  1.0 samples/s"]
    assert "\n" not in run.stream.getvalue()
    run.reporter.finish("saved in runs/demo")
    assert screen(run.stream.getvalue())[1:] == ["saved in runs/demo", ""]


def test_a_terminal_gets_the_place_ten_times_and_new_means_twice_a_second(tmp_path):
    run = Run(Terminal(), metrics_path=tmp_path / "m")
    run.reporter.start(None, 0, 1, "samples")
    run.steps(range(1, 257), 1 / 64)
    drawn = run.stream.getvalue().split("\r")[1:]
    assert len(drawn) == 8 * 5
    assert len({line.split("  ")[1] for line in drawn}) == 1
    run.reporter.finish()
    assert len(read_metrics(tmp_path / "m")) == 8 + 1
    assert [drawn[k].split()[1] for k in (0, 1, 2)] == ["1", "8", "15"]


def test_the_width_is_asked_of_the_terminal_if_it_is_not_given(monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    run = Run(Terminal(), columns=None)
    run.reporter.start(10**9, 0, 1, "samples")
    run.reporter.step(1, {"loss": 1.0})
    assert screen(run.stream.getvalue()) == ["step 1/1000"]


def test_a_line_longer_than_the_terminal_is_cut():
    run = Run(Terminal(), columns=20)
    run.reporter.start(10**9, 0, 1, "samples")
    run.reporter.step(1, {"loss": 1.0, "accuracy": 0.5})
    assert screen(run.stream.getvalue()) == ["step 1/1000000000"]


@pytest.mark.parametrize("text", ["short", "a notice that is longer than the progress line " * 2])
def test_a_notice_stands_above_the_progress_line(text):
    run = Run(Terminal())
    run.reporter.notice("before")
    run.reporter.start(None, 0, 1, "samples")
    run.steps([1, 2], 1.0)
    run.reporter.notice(text)
    run.steps([3], 1.0)
    progress = "step 3  loss 2.0000  (of one step)  1.0 samples/s"
    assert screen(run.stream.getvalue()) == ["before", text.rstrip(), progress]


def test_a_notice_off_a_terminal_is_a_plain_line():
    run = Run()
    run.reporter.start(None, 0, 1, "samples")
    run.steps([1], 1.0)
    run.reporter.notice("saved step 1")
    assert run.lines == ["step 1  loss 2.0000", "saved step 1"]


def test_notices_from_other_threads_never_cut_a_line():
    run = Run(interval_s=0.0)
    run.reporter.start(None, 0, 1, "samples")
    threads = [
        threading.Thread(target=lambda: [run.reporter.notice("notice") for _ in range(200)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    run.steps(range(1, 201), 1.0)
    for thread in threads:
        thread.join()
    assert run.lines.count("notice") == 400
    assert sum(line.startswith("step ") for line in run.lines) == 200
    assert len(run.lines) == 600


def test_the_file_holds_the_same_facts(tmp_path):
    run = Run(interval_s=2.0, metrics_path=tmp_path / "runs" / "metrics.jsonl")
    run.reporter.start(4, 0, 10, "tokens")
    run.steps(range(1, 5), 1.0, loss=float)
    run.reporter.finish()
    assert read_metrics(tmp_path / "runs" / "metrics.jsonl") == [
        {
            "step": 1,
            "since_step": 0,
            "loss": 1.0,
            "loss_last": 1.0,
            "tokens_per_s": None,
            "elapsed_s": 1.0,
        },
        {
            "step": 3,
            "since_step": 0,
            "loss": 2.5,
            "loss_last": 3.0,
            "tokens_per_s": 10.0,
            "elapsed_s": 3.0,
        },
        {
            "step": 4,
            "since_step": 0,
            "loss": 4.0,
            "loss_last": 4.0,
            "tokens_per_s": 10.0,
            "elapsed_s": 4.0,
        },
    ]


def test_a_resumed_run_continues_file_and_count(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = Run(metrics_path=path)
    first.reporter.start(40, 0, 1, "samples")
    first.steps([1], 1.0)
    with path.open("ab") as file:
        file.write(b'{"step": 2, "lo')  # killed while it wrote
    before = path.read_bytes()
    resumed = Run(metrics_path=path)
    resumed.reporter.start(40, 20, 1, "samples")
    resumed.steps(range(21, 41), 1.0)
    resumed.reporter.finish()
    assert path.read_bytes().startswith(before + b"\n{")
    assert [row["step"] for row in read_metrics(path)] == [1, 21, 26, 31, 36, 40]
    first.reporter.finish()


def test_an_interrupted_run_reports_its_last_step():
    run = Run()
    run.reporter.start(100, 0, 1, "samples")
    run.steps([1, 2, 3], 0.5)
    run.reporter.finish("stopped by the user")
    assert run.lines[-2:] == [
        "step 3/100  loss 2.0000  2.0 samples/s  48 s left",
        "stopped by the user",
    ]


def test_a_run_without_a_step_is_finished_quietly():
    run = Run()
    run.reporter.start(100, 100, 1, "samples")
    assert run.reporter.finish() == (None, 0)
    assert run.lines == []


def test_a_run_may_be_finished_twice(tmp_path):
    run = Run(metrics_path=tmp_path / "m")
    run.reporter.start(5, 0, 1, "samples")
    run.steps([1], 1.0)
    assert run.reporter.finish() == run.reporter.finish()
    assert len(run.lines) == len(read_metrics(tmp_path / "m")) == 1


def test_metrics_that_come_in_some_steps_only_are_averaged_over_those(tmp_path):
    run = Run(metrics_path=tmp_path / "m", interval_s=10.0)
    run.reporter.start(3, 0, 1, "samples")
    run.reporter.step(1, {"loss": 1.0})
    run.reporter.step(2, {"loss": 1.0, "accuracy": 0.5})
    run.reporter.step(3, {"loss": 1.0})
    run.reporter.finish()
    rows = read_metrics(tmp_path / "m")
    assert "accuracy" not in rows[0]
    assert rows[1]["accuracy"] == 0.5


def test_a_metric_cannot_take_the_place_of_a_fact(tmp_path):
    run = Run(metrics_path=tmp_path / "m")
    run.reporter.start(1, 0, 1, "samples")
    run.reporter.step(1, {"step": 7.0, "samples_per_s": 8.0})
    run.reporter.finish()
    (row,) = read_metrics(tmp_path / "m")
    assert (row["step"], row["metric_step"], row["metric_samples_per_s"]) == (1, 7.0, 8.0)


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b'{"step": NaN}', b'{"step": 1, "step": 2}', b"\xff"]
)
def test_a_line_that_is_no_json_is_left_out(tmp_path, line):
    (tmp_path / "m").write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    assert read_metrics(tmp_path / "m") == [{"step": 1}, {"step": 2}]


PIECES = st.sampled_from([
    '{"a":1', "}", "{", '"b":{', '"', ",", "}{", "[", "]", '{"c":"}', "5", "\n", '{"d":2}',
    '{"d":2}\n{"e":3.5}', '"f":1e400', "\\u0041",
])  # fmt: skip


def row_of(line):
    """A line by itself, as the standard library reads it; None of one that is no row."""

    def unique(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError
        return dict(pairs)

    try:
        row = json.loads(line, object_pairs_hook=unique)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


@given(st.lists(PIECES, max_size=12).map("".join), st.booleans())
def test_lines_are_read_one_by_one_whatever_stands_in_their_neighbours(
    tmp_path_factory, text, is_broken
):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    lines = [
        *text.split("\n"),
        '{"a":1,"a":2}' if is_broken else '{"a":1}',
        '{"g":' + "9" * 310 + "}",
    ]
    path.write_text("\n".join(lines))
    expected = [row for row in map(row_of, lines[:-1]) if row is not None]
    assert read_metrics(path) == expected


@pytest.mark.parametrize("others", [['{"a":"}', '{"}'], ['{"a":1},{"b":2}', '{"c":[1', "2]}"]])
def test_lines_that_are_rows_together_alone_are_none(tmp_path, others):
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(['{"step":1}', *others, '{"step":2}']))
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_values_may_be_numpy_scalars_and_are_summed_in_double(tmp_path):
    run = Run(metrics_path=tmp_path / "m", interval_s=1e9)
    run.reporter.start(1001, 0, 1, "samples")
    for step in range(1, 1002):
        run.reporter.step(step, {"loss": np.float32(0.1)})
    run.reporter.finish()
    assert read_metrics(tmp_path / "m")[-1]["loss"] == pytest.approx(float(np.float32(0.1)), 1e-12)


def test_a_loss_that_is_not_a_number_is_shown():
    run = Run()
    run.reporter.start(1, 0, 1, "samples")
    run.reporter.step(1, {"loss": math.nan})
    assert run.lines == ["step 1/1  loss nan"]


@given(st.lists(st.floats(-1e6, 1e6), max_size=120))
def test_the_end_tells_the_mean_of_the_last_hundred_losses(losses):
    run = Run(interval_s=1e9)
    run.reporter.start(None, 0, 1, "samples")
    for step, loss in enumerate(losses, 1):
        run.reporter.step(step, {"loss": loss})
    last = losses[-100:]
    mean = pytest.approx(np.mean(last), abs=1e-6) if last else None
    assert run.reporter.finish() == (mean, len(last))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_told_once_and_does_not_end_the_run():
    run = Run(metrics_path="/dev/full", interval_s=0.0)
    run.reporter.start(3, 0, 1, "samples")
    run.steps([1, 2, 3], 1.0)
    run.reporter.finish()
    warnings = [line for line in run.lines if line.startswith("warning: ")]
    assert "/dev/full cannot be written" in warnings[0]
    assert warnings[1:] == ["warning: 3 rows of metrics are not in /dev/full"]
    assert "step 3/3  loss 2.0000  1.0 samples/s" in run.lines


def test_a_metrics_file_that_cannot_be_opened_is_told_at_the_start(tmp_path):
    run = Run(metrics_path=tmp_path)
    run.reporter.start(3, 0, 1, "samples")
    assert run.lines[0].startswith(f"warning: {tmp_path} cannot be written")


@pytest.mark.parametrize(
    ("rate", "shown"),
    [
        (0.5, "0.5"),
        (99.9, "99.9"),
        (99.96, "100"),
        (999.6, "1.0k"),
        (31_249, "31.2k"),
        (2e6, "2.0M"),
    ],
)
def test_rates_are_shown_in_three_digits(rate, shown):
    run = Run(interval_s=0.0)
    run.reporter.start(None, 0, 1, "tokens")
    run.steps([1, 2], 1 / rate)
    assert run.lines[1] == f"step 2  loss 2.0000  {shown} tokens/s"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(59, "59 s"), (59.6, "1 min 00 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"),
     (3600, "1 h 00 min"), (100_000, "27 h 46 min")],
)  # fmt: skip
def test_the_time_left_is_shown_in_fitting_units(seconds, shown):
    run = Run(interval_s=0.0)
    run.reporter.start(3, 0, 1, "tokens")
    run.steps([1, 2], seconds)
    assert run.lines[1].endswith(f"  {shown} left")


@pytest.mark.parametrize(
    ("loss", "shown"),
    [(0.0, "0.0000"), (2.0123, "2.0123"), (1e-5, "1.000e-05"), (123456.0, "1.235e+05")],
)
def test_small_and_large_values_keep_their_digits(loss, shown):
    run = Run()
    run.reporter.start(None, 0, 1, "tokens")
    run.reporter.step(1, {"loss": loss})
    assert run.lines == [f"step 1  loss {shown}"]
