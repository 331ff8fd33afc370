"""Runs of the tests are written down and compared: what differs between seeds is found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import recorder
import same_bits

import actorflow as af
from actorflow import nn
from actorflow.run.training_run import Run

ROOT = Path(__file__).resolve().parents[1]
ROWS = {"x": np.ones((8, 2), np.float32)}
JOB = """
import numpy as np
import actorflow as af
from actorflow import nn

@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return model(batch.x).mean()

train.step(nn.Linear(2, 2), {"x": np.ones((4, 2), np.float32)})
"""


def result(name, step, digest):
    return {
        "test": name, "job": "train", "what": "step", "step": step, "hash": digest,
        "numbers": {"loss": step / 7}, "is_late": name != "on the host", "precision": "fp32",
    }  # fmt: skip


@pytest.fixture
def recorded(tmp_path):
    """Return a function that writes the results of a seed and returns the folder of all."""

    def write(folder, *results):
        (tmp_path / folder).mkdir()
        lines = "".join([json.dumps(result(*given)) + "\n" for given in results])
        (tmp_path / folder / "master.jsonl").write_text(lines)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("of_seed_1", "code", "said"),
    [
        ([("a", 1, "x"), ("a", 2, "y")], 0, "2 results, 0 not with every seed, 0 differ"),
        ([("a", 1, "x")], 0, "not with every seed: 1 of a"),
        ([("a", 1, "x"), ("a", 2, "z")], 1, "DIFFER: a train step 2"),
    ],
)
def test_other_bits_for_another_seed_are_found(
    recorded, monkeypatch, capsys, of_seed_1, code, said
):
    recorded("cuda-0", ("a", 1, "x"), ("a", 2, "y"))
    folder = recorded("cuda-1", *of_seed_1)
    monkeypatch.setattr(sys, "argv", ["same_bits.py", str(folder)])
    with pytest.raises(SystemExit) as ended:
        same_bits.main()
    assert ended.value.code == code
    assert said in capsys.readouterr().out


def test_tests_without_a_job_on_a_device_are_known(recorded):
    folder = recorded("cuda-0", ("on a device", 1, "x"), ("on the host", 1, "x"))
    assert recorder.tests_on_devices(folder / "cuda-0") == {"on a device"}


def test_all_that_a_job_computes_is_written_down(tmp_path, monkeypatch):
    monkeypatch.setenv(recorder.FILE, str(tmp_path / "own.jsonl"))
    recorder.install(Run, monkeypatch)

    @af.job(train=False)
    def score(model, batch):
        return model(batch.x).mean()

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return model(batch.x).mean()

    evaluation = af.Evaluation(score, af.data.ArraySource(ROWS, batch=4), every=2, batches=1)
    train.fit(
        nn.Linear(2, 2), af.data.ArraySource(ROWS, batch=4), steps=4, progress=False,
        evaluation=evaluation, checkpoint=tmp_path / "run",
    )  # fmt: skip
    seen = sorted([(what, step) for _, _, what, step in recorder.read(tmp_path)])
    steps = [("step", step) for step in (1, 2, 3, 4)]
    assert seen == [("evaluated", 2), ("evaluated", 4), ("left", 4), ("saved", 4), *steps]


def test_jobs_of_programs_that_a_test_starts_are_written_down(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(JOB)
    own = {recorder.FILE: str(tmp_path / "child.jsonl")}
    own["PYTHONPATH"] = f"{ROOT}{os.pathsep}{recorder.PATH}"
    subprocess.run([sys.executable, str(script)], env={**os.environ, **own}, check=True)
    assert {what for _, _, what, _ in recorder.read(tmp_path)} == {"step", "left"}
