"""What the environment variables promise."""

import json

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
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"compute", "data", "metrics"} <= {
        n for n in names if n in ("compute", "data", "metrics")
    }


def test_dump_writes_the_graph_after_each_pass(run_python, tmp_path):
    run_python(JOB, ACTORFLOW_DUMP=str(tmp_path / "dump"))
    names = sorted(p.name for p in (tmp_path / "dump").iterdir())
    assert names == ["00-autodiff.txt", "01-simplify.txt", "02-outputs.txt", "03-order.txt"]
    assert "cross_entropy" in (tmp_path / "dump" / names[-1]).read_text()


def test_log_info_says_where_the_plan_came_from(run_python, tmp_path):
    cache = str(tmp_path / "cache")
    first = run_python(JOB, ACTORFLOW_LOG="info", ACTORFLOW_CACHE=cache)
    assert "compiled in" in first.stderr
    second = run_python(JOB, ACTORFLOW_LOG="info", ACTORFLOW_CACHE=cache)
    assert f"comes from {cache}" in second.stderr


def test_threads_bounds_the_threads_of_the_blas(run_python):
    show = "\nfrom actorflow.blas import loaded_blas\nprint(loaded_blas().num_threads)\n"
    assert run_python(JOB + show, ACTORFLOW_THREADS="1").stdout.strip() == "1"


def test_a_bad_value_is_an_error_that_names_the_variable(run_python):
    done = run_python(JOB, check=False, ACTORFLOW_VERIFY="perhaps")
    assert done.returncode == 1
    assert "ACTORFLOW_VERIFY" in done.stderr
