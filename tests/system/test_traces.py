"""The trace of a whole run, read by its format: tracks, firings, launches and counters."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from trace_format import counters_of, read_trace

import actorflow as af
from actorflow.environment.settings import Settings
from actorflow.run.runner import Runner

DOCS = Path(__file__).resolve().parents[2] / "docs" / "tracing.md"


@pytest.fixture
def traced(mlp, classification, tmp_path):
    """A plan, and the events of a run of it of four steps."""

    @af.job(optimizer=af.optim.AdamW(1e-3))
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    plan = train.compile(mlp(), classification())
    settings = replace(Settings.from_env(os.environ), trace=tmp_path / "trace.json")
    Runner(plan, settings=settings).fit(classification(), steps=4, progress=False)
    return plan, tmp_path / "trace.json"


def test_live_bytes_reach_the_plans_peak_and_fall_back_between_steps(traced):
    plan, path = traced
    events = read_trace(path.read_text())
    counters = counters_of(events)
    for arena, account in zip(plan.arenas, plan.memory, strict=True):
        values = [value for _, value in counters[f"live bytes of {arena.device}", "bytes"]]
        assert max(values) == account.peak_live_bytes
        assert values.count(min(values)) >= 3
    launches = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "launch"]
    times = {ts for ts, _ in counters[f"live bytes of {plan.arenas[0].device}", "bytes"]}
    assert len(times) <= 2 * len(launches)


def test_every_track_and_process_has_a_name_and_every_register_a_counter(traced):
    plan, path = traced
    events = read_trace(path.read_text())
    tracks = {(e["pid"], e["tid"]) for e in events if "tid" in e}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {*named}
    assert {*named.values()} == {stream.name for stream in plan.streams}
    assert {e["pid"] for e in events} == {1}
    registers = {name.removeprefix("register ") for name, _ in counters_of(events)}
    assert {"batch", "metrics"} <= registers


def test_traces_are_put_together_by_the_command_of_the_docs(traced, tmp_path):
    _, path = traced
    (command,) = [
        line for line in DOCS.read_text().splitlines() if "traceEvents" in line and "python" in line
    ]
    second = path.with_name("trace.rank1.json")
    second.write_text(path.read_text().replace('"pid": 1', '"pid": 2'))
    words = command.strip().replace("python ", f"{sys.executable} ", 1)
    subprocess.run(words, shell=True, cwd=tmp_path, check=True)
    whole = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert len(whole) == 2 * len(json.loads(path.read_text())["traceEvents"])
    assert {e["pid"] for e in whole} == {1, 2}
