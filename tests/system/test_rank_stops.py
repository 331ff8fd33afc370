"""A job of ranks is asked to end: the last step that all have finished is saved, soon."""

import os
import signal

import pytest
from launching import STAGED, end_of, launcher

from actorflow.checkpoint.manager import CheckpointManager

pytestmark = [
    pytest.mark.usefixtures("native_toolchain"),
    pytest.mark.no_gpu("ranks meet in memory of the host"),
]

SCRIPT = f"""
import os, sys
{STAGED}
def tell(step, metrics):
    if step == 5:
        with open(os.environ["TELLS"], "w") as file:
            print(os.getpid(), file=file)

train = af.job(loss, optimizer=af.optim.SGD(0.1), mesh=af.Mesh(**eval(sys.argv[1])))
train.fit(Net(), af.data.ArraySource(arrays, batch=12, seed=3), steps=1_000_000, checkpoint="run",
          every=1_000_000, progress=False, on_step=tell)
"""


@pytest.fixture
def begun(tmp_path):
    """Return a function that starts a script and returns it with the processes that told theirs."""
    os.mkfifo(tmp_path / "tells")
    with launcher(tmp_path) as start, open(os.open(tmp_path / "tells", os.O_RDWR)) as tells:

        def begin(axes):
            process = start(SCRIPT, f"dict({axes})", ACTORFLOW_RANK_SECONDS="90")
            return process, [int(tells.readline()) for _ in range(2)]

        yield begin


@pytest.mark.thinned(4)
@pytest.mark.parametrize("axes", ["data=2", "stage=2"])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_to_every_process_saves_the_last_step(begun, tmp_path, name, is_last, axes):
    number = signal.Signals[name]
    process, ranks = begun(axes)
    for pid in [*ranks, process.pid] if is_last else [process.pid, *ranks]:
        os.kill(pid, number)
    code, _, err = end_of(process)
    assert code == 128 + number, err
    assert CheckpointManager(tmp_path / "run").latest().manifest.step >= 5
