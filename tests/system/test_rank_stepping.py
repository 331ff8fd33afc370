"""Jobs that are stepped on several ranks: in turn, until the script ends, or dropped."""

import json

import pytest
from launching import end_of, launcher

pytestmark = pytest.mark.no_gpu("ranks of one host meet in its memory")

HEAD = """
import gc, json, os, sys
import numpy as np
import actorflow as af
from actorflow import nn

rank, mesh = int(os.environ.get("RANK", 0)), None
if "RANK" in os.environ:
    mesh = af.Mesh(**eval(sys.argv[1]))

def tell(what):
    with open(f"told{os.environ.get('RANK', '')}.json", "w") as file:
        json.dump(what, file)

def weighed(model, batch):
    return (model(batch.x) ** 2).mean()

x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
train = af.job(weighed, optimizer=af.optim.SGD(0.1), mesh=mesh)
"""

IN_TURN = """
other = af.job(weighed, optimizer=af.optim.SGD(0.05), mesh=mesh)
score = af.job(weighed, train=False, mesh=mesh)
model, second, losses = nn.Linear(4, 4), nn.Linear(4, 4), []
for _ in range(20):
    losses.append(float(train.step(model, {"x": x})["loss"]))
    losses.append(float(score.step(model, {"x": x})["output"]))
    losses.append(float(other.step(second, {"x": x})["loss"]))
tell(losses)
"""

DROPPED = """
def forgotten():
    model = nn.Linear(4, 4, sbp=sbp)
    train.step(model, {"x": x})
    around = [model]
    around.append(around)  # a circle, which only the collector finds

sbp = eval(sys.argv[2])
forgotten()
if rank == 0:  # the others come to that later
    gc.collect()
model, losses = nn.Linear(4, 4, sbp=sbp), []
for _ in range(6):
    losses.append(float(train.step(model, {"x": x})["loss"]))
tell(losses)
"""


IN_A_THREAD = """
import threading

def trained():
    model, data = nn.Linear(4, 4), af.data.ArraySource({"x": x}, batch=8)
    tell(train.fit(model, data, steps=30, progress=False).last_step)

threading.Thread(target=trained).start()
"""


@pytest.fixture
def run(tmp_path, monkeypatch, native_toolchain):
    """Return a function that runs a script on ranks and on one; it returns what all told."""
    monkeypatch.chdir(tmp_path)

    def started(script, *arguments):
        with launcher(tmp_path) as begin:
            code, _, err = end_of(begin(HEAD + script, *arguments, ACTORFLOW_RANK_SECONDS="60"))
        assert (code, err.count("Traceback"), err.count("actorflow launch:")) == (0, 0, 0), err
        return [json.loads((tmp_path / f"told{rank}.json").read_text()) for rank in (0, 1)]

    return started


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Return a function that returns what a script tells that one process runs."""
    monkeypatch.chdir(tmp_path)

    def told(script):
        exec(compile(HEAD + script, "script.py", "exec"), {"__name__": "script"})
        return json.loads((tmp_path / "told.json").read_text())

    return told


@pytest.mark.parametrize("axes", ["dict(data=2)", "dict(model=2)"])
def test_several_jobs_are_stepped_in_turn_until_the_script_ends(run, alone, axes):
    """None of them is closed: a script that ends between two steps is no failure."""
    ranks = run(IN_TURN, axes)
    assert ranks[0] == ranks[1]
    assert ranks[0] == pytest.approx(alone(IN_TURN), rel=1e-5)


@pytest.mark.parametrize("sbp", ["None", '{"model": af.split(0)}'])
def test_a_model_that_the_collector_finds_at_different_times_ends_nothing(run, sbp):
    ranks = run(DROPPED, "dict(model=2)", sbp)
    assert ranks[0] == ranks[1]
    assert ranks[0][-1] < ranks[0][0]


def test_a_script_has_ended_when_its_threads_have(run):
    assert run(IN_A_THREAD, "dict(data=2)") == [30, 30]
