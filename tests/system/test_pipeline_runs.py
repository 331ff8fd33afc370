"""Jobs that train on a pipeline: killed at any moment, they go on with the sample that is next."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import end_of, launcher

pytestmark = pytest.mark.no_gpu("what is tested is the data, on the host in any case")

SCRIPT = """
import os, sys
import numpy as np
import actorflow as af
from actorflow import nn
import sample_functions as functions

options = dict(word.split("=") for word in sys.argv[1:])

def main():
    mesh = {"mesh": af.Mesh(data=2)} if "RANK" in os.environ else {}

    @af.job(optimizer=af.optim.SGD(0.01), seed=1, **mesh)
    def train(model, batch):
        return af.mse_loss(model(batch.r.to("float32")), batch.r.to("float32"))

    data = af.data.from_arrays({"n": np.arange(64)}).shuffle(3).map(functions.noisy)
    if options["keeps"] == "some":
        data = data.filter(functions.is_kept)
    data = data.repeat().batch(8).workers(int(options["workers"]))
    log = open("log", "a", buffering=1) if os.environ.get("RANK", "0") == "0" else None

    def on_step(step, metrics):
        if log is not None:
            log.write(f"{step} {float(metrics['loss']).hex()}\\n")

    train.fit(nn.Linear(3, 3), data, steps=int(options["steps"]), progress=False,
              checkpoint=options["folder"], every=2, on_step=on_step)

if __name__ == "__main__":
    main()
"""


def losses(log):
    """Return {step: loss}; every repeat must agree. A line that a kill cut in two is left out."""
    rows = {}
    for line in log.read_text().splitlines():
        step, _, loss = line.partition(" ")
        if len(line) > 20 and "p" in loss[-4:]:
            assert rows.setdefault(int(step), loss) == loss, f"step {step} differs"
    return rows


@pytest.mark.parametrize("keeps", ["all", "some"])
def test_a_run_that_is_killed_goes_on_with_any_number_of_workers(tmp_path, native_toolchain, keeps):
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def start(**options):
        words = [
            f"{name}={value}" for name, value in {"keeps": keeps, "steps": 60, **options}.items()
        ]
        return subprocess.Popen([sys.executable, "train.py", *words], cwd=tmp_path, env=environ)

    log, rng = tmp_path / "log", random.Random(keeps)
    assert start(folder="straight", workers=0).wait() == 0
    expected = losses(log)
    log.unlink()
    for workers in (1, 2):
        run = start(folder="killed", workers=workers)
        begun, more = len(log.read_text()) if log.exists() else 0, rng.randint(1, 700)
        while run.poll() is None and (not log.exists() or len(log.read_text()) < begun + more):
            time.sleep(0.001)  # watches another process, whose progress is all that matters here
        run.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL, "the run ended before it was killed"
    assert start(folder="killed", workers=2).wait() == 0
    assert losses(log) == expected
    assert len(expected) == 60


@pytest.mark.parametrize("keeps", ["all", "some"])
def test_two_ranks_train_on_the_batches_of_one(tmp_path, native_toolchain, keeps):
    options = ["steps=6", f"keeps={keeps}", "folder=run"]
    with launcher(tmp_path) as begin:
        code, out, err = end_of(
            begin(SCRIPT, *options, "workers=1", PYTHONPATH=os.pathsep.join(sys.path))
        )
    assert code == 0, f"{out}\n{err}"
    log = tmp_path / "log"
    ranks = losses(log)
    log.unlink()
    (tmp_path / "run").rename(tmp_path / "of_ranks")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "train.py", *options, "workers=0"]
    assert subprocess.run(command, cwd=tmp_path, env=environ, check=False).returncode == 0
    alone = losses(log)
    assert alone.keys() == ranks.keys() == set(range(1, 7))
    for step, loss in alone.items():
        assert float.fromhex(ranks[step]) == pytest.approx(float.fromhex(loss), rel=1e-5)


def test_a_script_without_a_guard_is_told_of_it(tmp_path, native_toolchain):
    (tmp_path / "train.py").write_text(
        SCRIPT.replace('if __name__ == "__main__":\n    main()', "main()")
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "train.py", "steps=3", "keeps=all", "workers=1", "folder=run"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert 'what starts a run has to stand under if __name__ == "__main__":' in done.stderr
    assert "train.py:" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_kill_repeats_a_sample_or_leaves_one_out(ranks):
    """The script says at which step another sample was read than the source has there."""
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "soak_data.py"
    words = ["--kills", "6", "--ranks", str(ranks), "--sources", "arrays,filtered,bucket,pack"]
    done = subprocess.run(
        [sys.executable, script, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ranks} ranks, 0 differ" in done.stdout
