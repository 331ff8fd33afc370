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

from actorflow.cli.main import main
from actorflow.cli.top import add_arguments, is_alive, note, render, run, watch
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
