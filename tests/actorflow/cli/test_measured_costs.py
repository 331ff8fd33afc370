import json
import math
import os

import pytest

from actorflow.cli import simulate
from actorflow.cli.simulate import calibration, costs_of, least_of
from actorflow.environment.settings import Settings
from actors.kernels.common.files import read_checksummed, write_checksummed
from actors.simulation.costs import RunCosts

COSTS = RunCosts(1.0, 2.0, 3.0, 4.0, 5.0)


def firing(name, number, begin_us, end_us):
    return {"ph": "X", "name": name, "ts": begin_us, "dur": end_us - begin_us,
            "args": {"firing": number}}  # fmt: skip


def test_a_trace_tells_turns_hops_and_ports():
    """Steps of 100 us with 7 us between them; a listener begins 12 us after each step."""
    events = [{"ph": "M", "name": "thread_name"}]
    for n in range(8):
        end = 107 * n + 100
        events += [
            firing("step", n, 107 * n, end),
            firing("metrics", n, end + 12, end + 32),
            firing("data", n, 107 * n, 107 * n + 30),
        ]
    costs = costs_of(events, 1000)
    assert costs == RunCosts(7e3, 5e3, 15e3, 20e3, 15.0)


def test_the_median_of_a_moment_counts():
    events = [firing("metrics", n, 0, took) for n, took in enumerate((1, 2, 9))]
    assert costs_of(events, 1000).sink_ns == 2e3


def test_of_some_runs_each_cost_is_the_least():
    assert least_of([COSTS, RunCosts(5.0, 1.0, 9.0, 9.0, 0.5)]) == RunCosts(1.0, 1.0, 3.0, 4.0, 0.5)


def test_a_trace_with_nothing_in_it_costs_nothing():
    assert costs_of([], 1000) == RunCosts()


@pytest.fixture
def measured(tmp_path, monkeypatch, probes):
    """Let a calibration take no time, and be kept in a new folder; returns what was measured."""
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path))
    probes.costs = COSTS
    return probes.settings


def calibrated(is_fresh=False):
    return calibration(Settings.from_env(os.environ), is_fresh=is_fresh)


def stored_file(tmp_path):
    (path,) = (tmp_path / "rates").iterdir()
    return path


def test_a_machine_is_measured_once_and_again_on_demand(measured):
    first = calibrated()
    for is_fresh, count in ((False, 1), (False, 1), (True, 2)):
        assert calibrated(is_fresh) == first
        assert len(measured) == count


def test_measurements_of_another_version_are_not_read(measured, tmp_path, monkeypatch):
    first = calibrated()
    monkeypatch.setattr(simulate, "_FORMAT", simulate._FORMAT + 1)
    assert calibrated() == first
    assert len(measured) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content.replace(b"1.0", b"9.0"),
        lambda content: b"",
        lambda content: b"[" * 100_000,
    ],
)
def test_damaged_measurements_are_taken_anew_with_a_line(measured, tmp_path, damage, caplog):
    first, path = calibrated(), stored_file(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert calibrated() == first
    assert len(measured) == 2
    assert f"{path} is damaged" in caplog.text
    assert "measured again" in caplog.text


ABSURD = {
    "rates is a mapping of 9, expected an object with call_ns": ("rates", "call_ns", None),
    "rates is a mapping of 11, expected an object with call_ns": ("rates", "in_c", 3.0),
    "rates.pass_ns is a sequence of 1, expected a sequence of": ("rates", "pass_ns", [1.0]),
    "rates.miss_ns[1] is 'far', expected a finite": ("rates", "miss_ns", [0.0, "far", 0, 0, 0]),
    "rates.loop_ns is -1.0, expected a number from 0.0": ("rates", "loop_ns", -1.0),
    "rates.flops_per_ns[0] is 0.0, expected a number": ("rates", "flops_per_ns", [0.0, 1.0]),
    "rates.move_gain is 0.0, expected a number from 1.0": ("rates", "move_gain", 0.0),
    "costs.hop_ns is 'fast', expected a finite number": ("costs", "hop_ns", "fast"),
    "costs.sink_ns is 1e+300, expected a number from 0.0": ("costs", "sink_ns", 1e300),
    "the text is not JSON: NaN is not JSON": ("costs", "turn_ns", math.nan),
}


@pytest.mark.parametrize("why", ABSURD)
def test_a_sealed_file_that_holds_no_measurements_is_damaged(measured, tmp_path, why, caplog):
    first, path = calibrated(), stored_file(tmp_path)
    fields = json.loads(read_checksummed(path))
    part, name, value = ABSURD[why]
    fields[part][name] = value
    if value is None:
        del fields[part][name]
    write_checksummed(path, json.dumps(fields).encode())
    assert calibrated() == first
    assert len(measured) == 2
    assert why in caplog.text
    assert "measured again" in caplog.text


def test_measurements_that_cannot_be_kept_are_used(measured, tmp_path, caplog):
    first, path = calibrated(), stored_file(tmp_path)
    path.unlink()
    path.mkdir()
    assert calibrated() == first
    assert "not a regular file" in caplog.text
    assert "cannot be written" in caplog.text
    assert list(path.parent.iterdir()) == [path]
