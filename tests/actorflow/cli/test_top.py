import argparse
import json
import math
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

from actorflow.cli.main import main
from actorflow.cli.top import (
    Trends,
    add_arguments,
    bar_text,
    bars_of,
    is_alive,
    note,
    render,
    run,
    watch,
)
from actorflow.run.status import ActorStatus, RankStatus, Status, StatusError
from compiler.contract.errors import ActorflowError

STATUS = Status(
    job="char_gpt", pid=4711, host="box", state="running", written_at_s=1000.0, elapsed_s=3725.4,
    step=1200, total_steps=5000, steps_per_s=20.417, loss=1.83421, arena_bytes=312 << 20,
    streams={"compute": 0.971, "data": 0.031},
    actors=(
        ActorStatus("step", "compute", 1200, 0.971, 48.2004, {"register loss": 12, "self": 1188}),
        ActorStatus("data", "data", 1203, 0.031, 1.5, {"input admission": 0}),
    ),
)  # fmt: skip


def test_the_view_has_a_head_the_streams_and_a_row_per_actor():
    assert render(STATUS, 200) == [
        "char_gpt  step 1200/5000 (24%)  running  pid 4711",
        "1:02:05  20.42 steps/s  loss 1.8342  memory 312.0 MiB",
        "busy  compute 97%  data 3%",
        "",
        "actor  stream     firings    busy   ms/firing  waited for last",
        "step   compute       1200   97.1%      48.200  self 99%, register loss 1%",
        "data   data          1203    3.1%       1.500",
    ]


def test_the_share_of_time_that_waits_for_data_is_shown():
    (_, facts, *_) = render(replace(STATUS, data_wait=0.336), 200)
    assert facts == ("1:02:05  20.42 steps/s  loss 1.8342  waits for data 34%  memory 312.0 MiB")


def test_a_small_loss_keeps_its_digits():
    assert "loss 1.200e-05  " in render(replace(STATUS, loss=1.2e-5), 80)[1]


def test_what_is_not_known_is_left_out():
    lines = render(
        replace(STATUS, total_steps=None, loss=None, steps_per_s=None, streams={}, actors=()), 80
    )
    assert lines == ["char_gpt  step 1200  running  pid 4711", "1:02:05  memory 312.0 MiB"]


def test_ranks_are_counted_and_so_are_their_starts():
    (head, *_) = render(replace(STATUS, ranks=4), 200)
    assert head.endswith("pid 4711  4 ranks")
    (head, *_) = render(replace(STATUS, ranks=4, epoch=2), 200)
    assert head.endswith("pid 4711  4 ranks  epoch 2")


def test_each_rank_has_a_row_with_its_host_and_who_is_waited_for_is_marked():
    hosts = RankStatus("0 (nodeA)", 0.414), RankStatus("1 (nodeB)", 0.02)
    lines = render(replace(STATUS, ranks=2, by_rank=hosts, rank_behind=1, actors=()), 200)
    assert lines[3:] == [
        "",
        "rank  host       waiting",
        "   0  0 (nodeA)      41%",
        "   1  1 (nodeB)       2%  the others wait for it",
    ]


def test_of_many_ranks_those_are_shown_that_wait_least():
    ranks = tuple(RankStatus("box", ((7 * rank) % 20) / 20) for rank in range(20))
    lines = render(replace(STATUS, ranks=20, by_rank=ranks, actors=()), 200)[4:]
    shown = [line.split() for line in lines[1:-1]]
    assert [int(row[0]) for row in shown] == [0, 1, 3, 6, 9, 12, 15, 18]
    assert sorted([int(row[2][:-1]) for row in shown]) == [0, 5, 10, 15, 20, 25, 30, 35]
    assert lines[-1] == "  12  more, which wait longer"


@pytest.mark.parametrize("width", [1, 20, 60])
def test_no_line_is_wider_than_the_terminal(width):
    assert max(len(line) for line in render(STATUS, width, "stale: process gone")) <= width


def trends_of(*statuses, bars="01234567"):
    trends = Trends(bars)
    for second, status in enumerate(statuses):
        trends.add(replace(status, written_at_s=float(second)))
    return trends


def test_numbers_that_were_shown_before_are_drawn_between_their_bounds():
    losses = [7.0, 5.5, 4.25, 0.0]
    statuses = [replace(STATUS, loss=v, data_wait=v / 10, steps_per_s=2.5) for v in losses]
    assert render(STATUS, 80, trends=trends_of(*statuses))[2:5] == [
        "loss            7640  0 to 7",
        "steps/s         0000  2.5 to 2.5",
        "waits for data  7640  0% to 70%",
    ]
    ranks = replace(STATUS, by_rank=(RankStatus("a", 0.2), RankStatus("b", 0.4)))
    assert "waits for ranks  00  30% to 30%" in trends_of(ranks, ranks).lines(80)


def test_a_status_that_was_there_already_counts_once_and_one_alone_has_no_bars():
    trends = trends_of(STATUS)
    trends.add(replace(STATUS, written_at_s=0.0))
    assert trends.lines(80) == []
    assert render(STATUS, 200, trends=trends) == render(STATUS, 200)


@given(st.lists(st.floats() | st.none(), max_size=200), st.integers(1, 150))
def test_bars_fit_the_width_and_show_the_newest_in_the_order_of_size(losses, width):
    trends = trends_of(*[replace(STATUS, loss=loss, steps_per_s=None) for loss in losses])
    for line in render(replace(STATUS, actors=()), width, trends=trends):
        assert len(line) <= width
    for line in trends.lines(width):
        shown = [loss for loss in losses if loss is not None][-len(line.split()[1]) :]
        heights = ["!01234567".index(bar) for bar in line.split()[1]]
        for height, loss in zip(heights, shown, strict=True):
            assert (height == 0) == (not math.isfinite(loss))
        pairs = [pair for pair in zip(shown, heights, strict=True) if pair[1]]
        rising = [height for _, height in sorted(pairs)]
        assert rising == sorted(rising)


@pytest.mark.parametrize("encoding", [None, "ascii", "iso-8859-1", "nothing", "utf-8", "cp437"])
def test_bars_are_letters_that_the_encoding_has_and_no_escapes(encoding):
    bars = bars_of(encoding)
    assert len({*bars}) == 8
    assert bars.isascii() == (encoding != "utf-8")
    text = bar_text([1.0, math.nan, 2.0, 1.5], bars)
    assert text == f"{bars[0]}!{bars[7]}{bars[4]}"
    assert text.isprintable()


def test_a_run_whose_process_is_gone_is_stale_and_a_silent_one_says_for_how_long():
    here = replace(STATUS, host=socket.gethostname())
    assert note(here, 1001.0, lambda pid: True) == ""
    assert note(here, 1001.0, lambda pid: pid != 4711) == "stale: process gone"
    assert note(here, 1075.0, lambda pid: True) == "no news for 75 s"
    assert note(replace(here, state="finished"), 1075.0, lambda pid: False) == ""
    assert "running, stale: process gone" in render(here, 99, "stale: process gone")[0]


def test_a_process_on_another_machine_is_not_looked_for():
    elsewhere = replace(STATUS, host=socket.gethostname() + "x")
    assert note(elsewhere, 1001.0, pytest.fail) == ""


def test_a_process_is_alive_until_it_was_waited_for():
    assert is_alive(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert not is_alive(child.pid)
    assert not is_alive(1 << 80)


def views(*endings):
    left = iter(endings)
    return lambda: (["line"], next(left))


def test_the_view_is_drawn_until_the_run_is_over():
    drawn = []
    assert watch(views(False, False, True), drawn.append, lambda: "") == 0
    assert drawn == [["line"]] * 3


def test_q_and_control_c_leave():
    drawn, keys = [], iter(["", "x", "q"])
    assert watch(views(*[False] * 9), drawn.append, lambda: next(keys)) == 0
    assert len(drawn) == 3

    def interrupt():
        raise KeyboardInterrupt

    assert watch(views(*[False] * 9), drawn.append, interrupt) == 0
    assert len(drawn) == 4


def options(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path):
    status = replace(
        STATUS, pid=os.getpid(), host=socket.gethostname(), written_at_s=time.time(), state="failed"
    )
    (tmp_path / "status.json").write_bytes(status.to_json())
    return tmp_path


def test_once_prints_one_view(folder, capsys):
    assert run(options(folder, "--once")) == 0
    head, *rest = capsys.readouterr().out.splitlines()
    assert head == f"char_gpt  step 1200/5000 (24%)  failed  pid {os.getpid()}"
    assert len(rest) == 6


def test_away_from_a_terminal_views_are_plain_lines_and_end_with_the_run(folder, capsys):
    assert run(options(folder)) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_bad_input_is_an_error_that_says_what_is_wrong(folder, tmp_path):
    with raises(StatusError):
        run(options(tmp_path / "no", "--once"))
    for interval in ("0", "-1", "nan", "1e300"):
        with raises(ActorflowError):
            run(options(folder, "--interval", interval))
    (folder / "status.json").write_text("{")
    with raises(StatusError):
        run(options(folder, "--once"))


# A run directory may be anybody's: of another user, or of a download.

HOSTILE = [
    "\x1b]0;title\x07", "\x1b[2J", "a\nb", "\r", "\x9b31m", "\u202eexe", "\u2028", "\ud800", "\0",
    "x" * 100_000, "", 3, -1, 1 << 70, True, None, 1e300, math.nan, math.inf, -math.inf, [], {},
    [[]], {"\x1b[2J": "\x1b"}, {"\ud800": 1}, {"\x1b": 1}, {"x": math.nan}, [{}],
]  # fmt: skip


def every_change(values):
    """Yield statuses that have one hostile value each, of actors too."""
    for key in values:
        yield from [values | {key: value} for value in HOSTILE]
    actor = values["actors"][0]
    for key in actor:
        yield from [values | {"actors": [actor | {key: value}]} for value in HOSTILE]


def test_no_status_draws_on_the_terminal_or_ends_in_a_traceback(folder, capsys):
    values = json.loads((folder / "status.json").read_text())
    codes = []
    for changed in every_change(values):
        (folder / "status.json").write_text(json.dumps(changed))
        codes.append(main(["top", str(folder), "--once"]))
        said = capsys.readouterr()
        shown = said.out + said.err
        assert all(line.isprintable() for line in shown.split("\n")), (changed, shown)
        assert len(shown) < 4_000
        assert (said.err == "") == (codes[-1] == 0)
    assert min(codes.count(0), codes.count(1)) > 50


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "the text is not JSON: NaN is not JSON"),
        (math.inf, "the text is not JSON: Infinity is not JSON"),
        pytest.param(10**400, "elapsed_s is 1000", id="beyond all floats"),
        ("1", "elapsed_s is '1', expected a finite number"),
        (True, "elapsed_s is True, expected a finite number"),
        (1e300, "elapsed_s is 1e+300, expected a number from"),
    ],
)
def test_a_number_that_is_none_is_damage_in_words(folder, capsys, value, said):
    values = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(values | {"elapsed_s": value}))
    assert main(["top", str(folder), "--once"]) == 1
    assert f"status.json is damaged ({said}" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_shown(folder, capsys):
    values = json.loads((folder / "status.json").read_text())
    for loss in ("nan", "inf", "-inf"):
        (folder / "status.json").write_text(json.dumps(values | {"loss": loss}))
        assert main(["top", str(folder), "--once"]) == 0
        assert f"loss {loss}" in capsys.readouterr().out


def a_large_file(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (os.mkfifo, "not a regular file"),
        (os.mkdir, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "a symbolic link, which is not followed"),
        (lambda path: path.symlink_to(path), "a symbolic link, which is not followed"),
        (lambda path: path.symlink_to("/etc/passwd"), "a symbolic link, which is not followed"),
        (a_large_file, "it has 1,099,511,627,776 bytes, and at most"),
    ],
)
def test_what_is_no_status_is_said_at_once(tmp_path, capsys, put, said):
    put(tmp_path / "status.json")
    assert main(["top", str(tmp_path), "--once"]) == 1
    assert f"status.json cannot be read: {said}" in capsys.readouterr().err


def test_letters_that_the_output_lacks_are_shown_as_numbers(folder):
    values = json.loads((folder / "status.json").read_text()) | {"job": "naïve"}
    (folder / "status.json").write_text(json.dumps(values))
    shown = subprocess.run(
        [sys.executable, "-m", "actorflow", "top", str(folder), "--once"], capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii",
             "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert shown.stdout.startswith(b"na\\xefve  step")


TERMINAL = """
import argparse, sys
from actorflow.cli.main import main
from actorflow.cli.top import add_arguments, run
parser = argparse.ArgumentParser()
add_arguments(parser)
sys.exit(run(parser.parse_args([sys.argv[1], "--interval", "60"])))
"""


def test_on_a_terminal_the_view_is_redrawn_in_place_and_q_gives_the_terminal_back(folder):
    running = Status.from_json((folder / "status.json").read_bytes())
    (folder / "status.json").write_bytes(replace(running, state="running").to_json())
    ours, theirs = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", TERMINAL, str(folder)], stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while b"data   data" not in shown:
        shown += os.read(ours, 4096)
    os.write(ours, b"q")
    assert child.wait(30) == 0
    shown += os.read(ours, 4096)
    os.close(ours)
    assert shown.startswith(b"\x1b[?25l\x1b[H\x1b[J")
    assert shown.rstrip().endswith(b"\x1b[?25h")
