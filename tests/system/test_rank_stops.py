"""A job of ranks is asked to end: the last step that all have finished is saved, soon."""

import os
import signal

import pytest
from launching import end_of, launcher

from actorflow.checkpoint.manager import CheckpointManager

pytestmark = [
    pytest.mark.usefixtures("native_toolchain"),
    pytest.mark.no_gpu("ranks meet in memory of the host"),
]

SCRIPT = """
import os, sys, threading
import numpy as np
import actorflow as af
from actorflow import nn

axes, blocked, rank = eval(sys.argv[1]), eval(sys.argv[2]), int(os.environ["RANK"])

class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 4)

    def __call__(self, x):
        with af.stage(0):
            h = af.relu(self.up(x))
        with af.stage(1):
            return self.down(h)

def tell(step, metrics):
    if step == 5:
        with open(os.environ["TELLS"], "w") as file:
            file.write(f"{os.getpid()}\\n")

class Data(af.data.ArraySource):
    given = 0

    def next_rows_into(self, *rows, **more):
        self.given += 1
        if self.given == 9 and rank in blocked:
            tell(5, None)
            threading.Event().wait()
        return super().next_rows_into(*rows, **more)

x = np.random.default_rng(0).normal(size=(96, 8)).astype(np.float32)
y = x[:, :4].argmax(1).astype(np.int32)
train = af.job(lambda m, b: af.cross_entropy(m(b.x), b.y), optimizer=af.optim.SGD(0.1),
               mesh=af.Mesh(**axes))
train.fit(Net(), Data({"x": x, "y": y}, batch=12, seed=3), steps=1_000_000, checkpoint="run",
          every=1_000_000, progress=False, on_step=None if blocked else tell)
"""


@pytest.fixture
def begun(tmp_path):
    """Return a function that starts a script and returns it with the processes that told theirs."""
    os.mkfifo(tmp_path / "tells")
    with launcher(tmp_path) as start, open(os.open(tmp_path / "tells", os.O_RDWR)) as tells:

        def begin(axes, blocked, count):
            process = start(SCRIPT, f"dict({axes})", str(blocked), ACTORFLOW_RANK_SECONDS="90")
            return process, [int(tells.readline()) for _ in range(count)]

        yield begin


@pytest.mark.thinned(4)
@pytest.mark.parametrize("axes", ["data=2", "stage=2"])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_to_every_process_saves_the_last_step(begun, tmp_path, name, is_last, axes):
    number = signal.Signals[name]
    process, ranks = begun(axes, [], 2)
    for pid in [*ranks, process.pid] if is_last else [process.pid, *ranks]:
        os.kill(pid, number)
    code, _, err = end_of(process)
    assert code == 128 + number, err
    assert CheckpointManager(tmp_path / "run").latest().manifest.step >= 5
