"""A job that goes on with as many hosts as are left: processes of this machine; tensors by MPI."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import end_of, host_launcher

SCRIPT = """
import os, signal, sys
import numpy as np
import actorflow as af
from actorflow import nn

rank, epoch = (int(os.environ.get(name, "0")) for name in ("RANK", "ACTORFLOW_EPOCH"))
extent = int(os.environ.get("EXTENT", "-1"))

class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 10)

    def __call__(self, x):
        return self.down(af.relu(self.up(x)))

@af.job(optimizer=af.optim.AdamW(1e-3), seed=3, mesh=af.Mesh(data=extent))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)

log = open(sys.argv[1] + ".log", "a", buffering=1) if rank == 0 else None

def on_step(step, metrics):
    if log is not None:
        log.write(f"{step} {float(metrics['loss'])}\\n")
    if step == 12 and (rank, epoch) == (1, 1):
        os.kill(os.getppid(), signal.SIGKILL)  # its host is lost

# An odd number of rows: the first of two ranks has one more.
x = np.random.default_rng(0).normal(size=(310, 16)).astype(np.float32)
data = af.data.ArraySource({"x": x, "y": x[:, :10].argmax(1).astype(np.int64)}, batch=31, seed=2)
train.fit(Net(), data, steps=20, progress=False, checkpoint=sys.argv[1], every=5, on_step=on_step)
"""

pytestmark = [
    pytest.mark.no_gpu("tensors of the host go by shared memory and MPI"),
    pytest.mark.extra("mpi"),
    pytest.mark.slow,
]


@pytest.fixture
def hosts(tmp_path):
    with host_launcher(tmp_path) as start:
        yield start


def losses(run):
    """Return the loss of each step, the last that was told of it."""
    rows = [line.split() for line in Path(f"{run}.log").read_text().splitlines()]
    return {int(step): float(loss) for step, loss in rows}


def started(hosts, run, **environ):
    """Start two hosts of a job of which one is enough; return both, host 0 first."""
    options = {"--hosts": "1:2", "--host-grace": 10, "--restarts": 2}.items()
    second = hosts(1, SCRIPT, str(run), options=options, **environ)
    return hosts(0, SCRIPT, str(run), options=options, **environ), second


def test_a_job_of_two_hosts_goes_on_with_one_and_the_same_batches(hosts, tmp_path):
    first, second = started(hosts, tmp_path / "run", ACTORFLOW_THREADS="1")
    code, _, err = end_of(first)
    assert code == 0, err
    assert ") is lost: its host was lost: its agent has ended\n" in err
    assert (
        "1 rank with 1 thread each from here on, 2 ranks with 1 thread each before: batches" in err
    )
    assert end_of(second)[0] < 0
    alone = tmp_path / "alone"
    environ = {**os.environ, "ACTORFLOW_THREADS": "1"}
    subprocess.run([sys.executable, tmp_path / "script.py", alone], check=True, env=environ)
    expected, found = losses(alone), losses(tmp_path / "run")
    assert list(found) == list(expected) == [*range(1, 21)]
    np.testing.assert_allclose([*found.values()], [*expected.values()], rtol=1e-5)


def test_a_mesh_of_a_fixed_size_ends_a_job_that_has_fewer_hosts_with_the_mend(hosts, tmp_path):
    first, _ = started(hosts, tmp_path / "run", EXTENT="2")
    code, _, err = end_of(first)
    assert code == 1
    assert "job 'train' is for 2 ranks (data=2), and 1 run it; " in err
    assert "no restart: every start would meet this error; the ranks were started 2 times" in err
