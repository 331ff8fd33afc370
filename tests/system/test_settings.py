"""What the environment variables promise."""

import json

import pytest

from compiler.graph.target import CompileOptions
from compiler.pipeline.pipeline import PASSES

JOB = """
import numpy as np
import actorflow as af
from actorflow import nn

@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)

x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
data = af.data.ArraySource({"x": x, "y": (x[:, 0] > 0).astype(np.int32)}, batch=16)
train.fit(nn.Linear(8, 2), data, steps=5, progress=False)
"""


def test_trace_writes_every_firing_as_a_chrome_trace(run_python, tmp_path):
    run_python(JOB, ACTORFLOW_TRACE=str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    firings = [e for e in events if e["ph"] == "X" and e["name"].startswith("step")]
    assert len(firings) == 5
    assert all(e["dur"] >= 0 for e in firings)
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "data", "metrics"} <= names
    (title,) = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert title.startswith("plan 'train' on ")


@pytest.mark.host("a device has further passes")
def test_dump_writes_the_graph_after_each_pass(run_python, tmp_path):
    run_python(JOB, ACTORFLOW_DUMP=str(tmp_path / "dump"), ACTORFLOW_NATIVE="0")
    names = sorted(p.name for p in (tmp_path / "dump").iterdir())
    assert [name[3:-4] for name in names] == [
        p.name for p in PASSES if p.is_wanted(CompileOptions("train"))
    ]
    assert "cross_entropy" in (tmp_path / "dump" / names[-1]).read_text()


def test_log_info_says_where_the_plan_came_from(run_python, tmp_path):
    cache = str(tmp_path / "cache")
    first = run_python(JOB, ACTORFLOW_LOG="info", ACTORFLOW_CACHE=cache)
    assert "compiled in" in first.stderr
    second = run_python(JOB, ACTORFLOW_LOG="info", ACTORFLOW_CACHE=cache)
    assert f"comes from {cache}" in second.stderr


def test_threads_bounds_the_threads_of_the_blas(run_python):
    show = "\nfrom actors.kernels.library.openblas import num_threads\nprint(num_threads())\n"
    assert run_python(JOB + show, ACTORFLOW_THREADS="1").stdout.strip() == "1"


def test_a_bad_value_is_an_error_that_names_the_variable(run_python):
    done = run_python(JOB, check=False, ACTORFLOW_VERIFY="perhaps")
    assert done.returncode == 1
    assert "ACTORFLOW_VERIFY" in done.stderr


STALL = """
import logging
import threading
import numpy as np
import actorflow as af
from actorflow import nn

told, text = threading.Event(), []

class Listen(logging.Handler):
    def emit(self, record):
        text.append(record.getMessage())
        if "continues" in text[-1]:
            resumed.set()
        told.set()

logging.getLogger("actorflow").addHandler(Listen())
resumed = threading.Event()

@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)

class Blocking:
    def __init__(self, source):
        self.source, self.batches = source, 0
        self.spec, self.fingerprint = source.spec, source.fingerprint
        self.state, self.restore = source.state, source.restore

    def __next__(self):
        self.batches += 1
        if self.batches == 4:
            assert told.wait(60)
        if self.batches == 20:
            assert resumed.wait(60)
        return next(self.source)

x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
data = af.data.ArraySource({"x": x, "y": (x[:, 0] > 0).astype(np.int32)}, batch=16)
result = train.fit(nn.Linear(8, 2), Blocking(data), steps=30, progress=False)
print(result.last_step)
print("\\n".join(text))
"""


def test_stall_seconds_says_who_holds_a_run_up_and_when_it_goes_on(run_python, tmp_path):
    dump = tmp_path / "dump"
    done = run_python(STALL, ACTORFLOW_STALL_SECONDS="1", ACTORFLOW_DUMP=str(dump))
    steps, first, *rest = done.stdout.splitlines()
    assert steps == "30"
    assert first.startswith("no firing began or ended for ")
    assert "'data' has been in its source port (" in first
    assert f", now at {tmp_path / 'program.py'}:" in first
    assert "\nDONE step" in (dump / "stall.txt").read_text()
    assert any(line.startswith("the run continues after about ") for line in rest)


def test_0_stall_seconds_starts_no_watchdog(run_python):
    names = "\nimport threading\nprint([t.name for t in threading.enumerate()])\n"
    step = JOB.replace("progress=False)", "progress=False, on_step=look)").replace(
        "@af.job", "def look(step, metrics): print([t.name for t in __import__('threading')"
        ".enumerate()])\n\n@af.job", 1
    )  # fmt: skip
    assert "actorflow-watchdog" in run_python(step).stdout
    assert "actorflow-watchdog" not in run_python(step, ACTORFLOW_STALL_SECONDS="0").stdout
    assert "actorflow" not in run_python(JOB + names).stdout
