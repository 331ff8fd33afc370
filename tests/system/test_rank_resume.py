"""Launched ranks that have parts: killed at any moment, they go on bit for bit."""

import json
import os
import random
import re
import signal
import time

import pytest
from launching import end_of, launcher

pytestmark = pytest.mark.no_gpu("ranks of one host meet in its memory")

SCRIPT = """
import hashlib, json, os, signal, sys
import numpy as np
import actorflow as af
from actorflow import nn
from actorflow.checkpoint.manager import CheckpointManager

rank, options, asked = int(os.environ["RANK"]), eval(sys.argv[1]), eval(sys.argv[2])

class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 10)

    def __call__(self, x):
        with af.stage(0):
            h = af.dropout(af.relu(self.up(x)), 0.1)
        with af.stage(1):
            return self.down(h)

@af.job(optimizer=af.optim.AdamW(1e-3), seed=3, **options)
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)

write = CheckpointManager.write

def write_in_part(self, step, attempt, groups, parts):
    if step < asked["dies"]:
        return write(self, step, attempt, groups, parts)
    write(self, step, attempt, dict(list(groups.items())[:1]), parts)
    os.kill(os.getpid(), signal.SIGKILL)

if rank and "dies" in asked:
    CheckpointManager.write = write_in_part

log = open(f"{asked['folder']}.log", "a", buffering=1) if rank == 0 else None

def on_step(step, metrics):
    if log is not None:
        log.write(f"{step} {float(metrics['loss']).hex()}\\n")

x = np.random.default_rng(0).normal(size=(512, 16)).astype(np.float32)
data = af.data.ArraySource({"x": x, "y": x[:, :10].argmax(1).astype(np.int64)}, batch=32, seed=2)
model = Net()
folder = asked["folder"] + (str(rank) if "apart" in asked else "")
result = train.fit(model, data, steps=asked["steps"], progress=False, checkpoint=folder,
                   every=asked.get("every", 5), on_step=on_step)
state = {n: hashlib.sha256(a.tobytes()).hexdigest() for n, a in sorted(model.state().items())}
with open(f"{asked['folder']}{rank}.json", "w") as file:
    json.dump({"first": result.first_step, "last": result.last_step, "state": state}, file)
"""


@pytest.fixture
def start(tmp_path, monkeypatch, native_toolchain):
    monkeypatch.chdir(tmp_path)
    with launcher(tmp_path) as begin:
        yield lambda options, n=2, **asked: begin(SCRIPT, f"dict({options})", repr(asked), n=n)


def finish(process):
    code, out, err = end_of(process)
    assert code == 0, f"{out}\n{err}"


def told(folder, ranks=2):
    """Return what the ranks told of the end, which is the same on all."""
    own = []
    for rank in range(ranks):
        with open(f"{folder}{rank}.json") as file:
            own.append(json.load(file))
    assert own.count(own[0]) == ranks, "every rank has the whole model"
    assert len(own[0]["state"]) == 4
    return own[0]


def hashes(folder):
    newest = max(folder.glob("step-*"))
    manifest = json.loads((newest / "manifest.json").read_text().splitlines()[0])
    return manifest["step"], sorted(
        (p["tensor"], p["offset"], p["xxh3_128"]) for p in manifest["pieces"]
    )


def losses(log):
    """Return {step: loss}; a row that a kill cut in two is left out, every repeat must agree."""
    rows = {}
    for line in log.read_text().split("\n"):
        step, _, loss = line.partition(" ")
        if loss.rstrip("0123456789").endswith("p-") or loss.rstrip("0123456789").endswith("p+"):
            assert rows.setdefault(int(step), loss) == loss, f"step {step} differs"
    return rows


def newest_step(run):
    return max([0, *(int(p.name[5:]) for p in run.glob("step-*"))])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("options", ["mesh=af.Mesh(data=2), zero=True", "mesh=af.Mesh(stage=2)"])
def test_kills_at_any_moment_change_nothing(start, tmp_path, options):
    steps = 600
    finish(start(options, folder="straight", steps=steps))
    run, log, rng = tmp_path / "killed", tmp_path / "killed.log", random.Random(5)
    for number in range(2):
        process = start(options, folder="killed", steps=steps, every=1)
        begun, more = len(log.read_text()) if log.exists() else 0, rng.randint(1, 3000)
        while process.poll() is None:
            if log.exists() and len(log.read_text()) > begun + more:
                break
            if number % 2 and log.exists() and any(run.glob(".tmp-*")):
                break
            time.sleep(0.001)  # watches other processes, whose progress is all that matters here
        acknowledged = newest_step(run)
        process.send_signal(signal.SIGKILL)  # and the system ends its ranks
        assert end_of(process)[0] == -signal.SIGKILL, "the run ended before it was killed"
        assert newest_step(run) >= acknowledged
    assert newest_step(run) < steps
    finish(start(options, folder="killed", steps=steps))
    assert hashes(run) == hashes(tmp_path / "straight")
    assert losses(log) == losses(tmp_path / "straight.log")
    assert told("killed")["state"] == told("straight")["state"]


def test_a_rank_that_dies_while_it_writes_its_pieces_leaves_the_older_checkpoint(start, tmp_path):
    options = "mesh=af.Mesh(data=2), zero=True"
    code, _, err = end_of(start(options, folder="run", steps=40, dies=12))
    assert code == 128 + signal.SIGKILL
    assert err.count("rank 1 was ended by SIGKILL") == 1
    assert "Traceback" not in err
    assert newest_step(tmp_path / "run") == 10
    finish(start(options, folder="run", steps=40))
    assert told("run")["first"] == 10
    assert max(losses(tmp_path / "run.log")) == 40, "and what came again is what was"


def test_run_directories_that_differ_are_an_error_before_the_first_step(start, tmp_path):
    options = "mesh=af.Mesh(data=2), zero=True"
    code, _, err = end_of(start(options, folder="run", steps=40, apart=True))
    assert code == 1
    assert err.count("rank 1 has another run directory than rank 0") == 1
    assert f"{tmp_path}/run1 there, {tmp_path}/run0 here" in err
    assert not losses(tmp_path / "run.log")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("options", ["data=2, stage=2", "data=2"])
def test_by_time_all_ranks_save_what_is_after_one_step(start, tmp_path, options):
    """The first one is due at once, so that an early kill is no fresh start."""
    n = 4 if "stage" in options else 2
    options = f"mesh=af.Mesh({options}), zero=True"
    finish(start(options, n, folder="run", steps=60, every="1h"))
    early, last = sorted([int(p.name[5:]) for p in (tmp_path / "run").glob("step-*")])
    assert 0 < early < 30
    assert last == 60
    assert told("run", n)["last"] == 60


def test_a_stop_is_saved_after_the_step_that_all_end_with(start, tmp_path):
    process = start("mesh=af.Mesh(data=2), zero=True", folder="run", steps=10**6, every="1h")
    log = tmp_path / "run.log"
    while process.poll() is None and (not log.exists() or log.read_text().count("\n") < 20):
        time.sleep(0.005)  # waits for progress of another process, bounded by the test's timeout
    os.kill(process.pid, signal.SIGTERM)
    end_of(process)
    assert newest_step(tmp_path / "run") == max(losses(log))


ALONE = """
import os, signal
import numpy as np
import actorflow as af
from actorflow import nn

@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return af.mse_loss(model(batch.x), batch.x)

def on_step(step, metrics):
    if os.environ["ACTORFLOW_EPOCH"] == "1" and step == 6:
        os.kill(os.getpid(), signal.SIGKILL)

x = np.ones((8, 4), np.float32)
train.fit(nn.Linear(4, 4), af.data.ArraySource({"x": x}, batch=4), steps=8,
          checkpoint="run", every=1, on_step=on_step)
"""


def test_a_single_rank_that_is_launched_has_epochs_too(tmp_path, native_toolchain):
    with launcher(tmp_path) as begin:
        code, out, err = end_of(begin(ALONE, n=1, restarts=1))
    assert code == 0, f"{out}\n{err}"
    # The rank may be killed while the newest state is on its way to the disk.
    assert re.search(r"resumed from the checkpoint of step [1-6] in epoch 2", out + err)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["epoch"] == 2
