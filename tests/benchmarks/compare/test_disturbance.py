"""A turn that lost time is run again, and a comparison that is stopped leaves no process."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from benchmarks.compare.disturbance import (
    Disturbance,
    HostTimes,
    disturbance_between,
    read_host_times,
)
from benchmarks.compare.engines import Child, Engine
from benchmarks.compare.measure import BenchTask, Method, measure_row

FAKE = str(Path(__file__).with_name("fake_engine.py"))
ROOT = Path(__file__).resolve().parents[3]


def host(folder, stolen, waited_us):
    """Write counters of a host of 1,000 ticks besides those that were stolen, and read them."""
    (folder / "pressure").mkdir(exist_ok=True)
    cpu = f"cpu  600 50 100 200 20 10 20 {stolen} 77 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n"
    (folder / "stat").write_text(cpu)
    some = f"some avg10=1.00 avg60=2.00 avg300=3.00 total={waited_us}\nfull avg10=0 total=9\n"
    (folder / "pressure" / "cpu").write_text(some)
    return read_host_times(folder)


def test_shares_are_of_all_ticks_and_of_the_time_between_two_readings(tmp_path):
    before, after = host(tmp_path, 30, 1_000), host(tmp_path, 70, 3_000)
    assert before.at_ns < after.at_ns
    assert replace(before, at_ns=0) == HostTimes(30, 780, 1_030, 1_000, 0)
    found = disturbance_between(before, after)
    assert (found.stolen, found.others) == (1.0, 0.0)  # of the 40 ticks that passed
    assert found.waiting == pytest.approx(2e6 / (after.at_ns - before.at_ns))
    assert [Disturbance(share).is_over for share in (None, 0.02, 0.021)] == [False, False, True]


def test_others_have_what_is_busy_less_the_engine_itself():
    ticks = os.sysconf("SC_CLK_TCK")
    begin, end = HostTimes(0, 0, 0, 0, 0), HostTimes(0, 3 * ticks, 4 * ticks, 0, 1)
    shares = [disturbance_between(begin, end, own_s).others for own_s in (0.0, 2.0, 3.5)]
    assert shares == [0.75, 0.25, 0.0]
    assert disturbance_between(begin, begin, 1.0).others is None


def test_a_host_that_tells_nothing_is_no_error_and_says_so(tmp_path):
    times = read_host_times(tmp_path)
    assert [text.partition(" is not known")[0] for text in times.untold] == [
        "stolen time",
        "waiting for cores",
    ]
    assert disturbance_between(times, times) == Disturbance()
    (tmp_path / "stat").write_text("cpu 1 2 3 4\n")  # of a kernel before steal
    assert read_host_times(tmp_path).stolen_ticks is None


def measured(log, stolen, rounds):
    """Measure a fake engine of whose runs these percents were stolen, and nothing of the rest."""
    at, percents, calls = HostTimes(0, 0, 0, 0, 0), iter(stolen), count()

    def read():
        nonlocal at
        if next(calls) % 2:  # the end of a run
            lost, ticks = at.stolen_ticks + next(percents, 0), at.all_ticks + 100
            at = HostTimes(lost, 0, ticks, at.waited_us + 25_000, at.at_ns + 10**8)
        return at

    def start(engine, task, variant, is_cold):
        command = (sys.executable, "-S", FAKE, "2.5", "4.0", str(log), "", engine.name)
        return Child(engine.name, command, os.environ)

    method = Method(start, rounds, False, False, lambda text: None, read)
    return measure_row(BenchTask("gpt", "fp32", 1, "x"), [Engine("a", "", "", ("",))], method).ours


@pytest.mark.parametrize(
    ("stolen", "repeated", "disturbed", "share"),
    [
        ([0, 2, 1], 0, 0, 0.01),
        ([9, 0, 0, 0], 1, 0, 0.0),
        ([9, 1, 5, 2, 0], 2, 0, 0.01),
        ([9, 8, 7, 6, 6, 6], 3, 3, 0.06),  # as many repeats as rounds, and no more
        ([3, 9, 9, 9, 0, 0], 3, 1, 0.01),  # the least disturbed run of a turn counts
    ],
)
def test_turns_that_lost_too_much_are_run_again_as_often_as_there_are_rounds(
    tmp_path, stolen, repeated, disturbed, share
):
    ours = measured(tmp_path / "log", stolen, 3)
    assert (ours.num_repeated, ours.num_disturbed) == (repeated, disturbed)
    assert (ours.host.stolen, ours.host.waiting) == pytest.approx((share, 0.25))
    assert ours.num_chunks == 15
    assert (tmp_path / "log").read_text().count("a run") == 2 + 3 + repeated
    assert [f"ran {repeated} turns again" in text for text in ours.warnings] == [True] * bool(
        repeated
    )


# What a stopped comparison leaves. The engine, and a process of its own where `forks`, hold a pipe
# open, whose end is read when all of them are gone.
STUCK = """
import os, signal, sys
pipe = os.open(sys.argv[1], os.O_WRONLY)
if sys.argv[2] == "forks":
    os.fork()
os.write(pipe, b"x")
while True:
    signal.pause()
"""
COMPARISON = """
import sys
from benchmarks.compare import command
from benchmarks.compare.engines import Child
stuck = (sys.executable, "-S", "-c", *sys.argv[1:4])
tools = command.BenchTools(start=lambda *_: Child("stuck", stuck, {}))
sys.exit(command.main(sys.argv[4:], tools))
"""


@pytest.mark.parametrize(
    ("number", "code", "why"),
    [
        (signal.SIGINT, 130, "stopped by SIGINT"),
        (signal.SIGTERM, 143, "stopped by SIGTERM"),
        (signal.SIGALRM, 0, "--seconds 900 are over"),
        (signal.SIGKILL, -9, None),  # the engine dies with what started it
    ],
)
def test_a_comparison_that_is_stopped_leaves_no_process_and_names_its_rows(
    tmp_path, number, code, why
):
    pipe, file = tmp_path / "pipe", tmp_path / "found.json"
    os.mkfifo(pipe)
    forks = "" if number == signal.SIGKILL else "forks"
    words = ["tiny", "mlp", "--against", "", "--seconds", "900", "--json", str(file)]
    command = [sys.executable, "-c", COMPARISON, STUCK, str(pipe), forks, *words]
    bench = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with pipe.open("rb") as held:
        held.read(len(forks[:1]) + 1)
        bench.send_signal(number)
        assert held.read() == b""
    out = bench.communicate()[0]
    assert bench.returncode == code
    if why is not None:
        found = json.loads(file.read_text())
        assert (found["rows"], found["why_not_measured"]) == ([], why)
        assert found["not_measured"] == ["tiny fp32", "mlp fp32", "mlp bf16"]
        assert f"- not measured ({why}): tiny fp32, mlp fp32, mlp bf16" in out
