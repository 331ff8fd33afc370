"""A run directory that others may write: what they put there is neither followed nor awaited."""

import os

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow.checkpoint.errors import CheckpointError
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.run.broken_steps import NonFiniteLoss
from actorflow.run.report import read_metrics
from actorflow.run.status import read_status

TRAPS = {
    "pipe": lambda path, victim: os.mkfifo(path),
    "link": lambda path, victim: path.symlink_to(victim),
    "link to nothing": lambda path, victim: path.symlink_to(victim.with_name("new")),
    "link to a device": lambda path, victim: path.symlink_to("/dev/zero"),
    "second name": lambda path, victim: os.link(victim, path),
}
REPLACED = ["status.json", "status.json.partial", "non_finite.json", "non_finite.json.partial"]


@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


@pytest.fixture
def victim(tmp_path):
    victim = tmp_path / "elsewhere" / "victim"
    victim.parent.mkdir()
    victim.write_text("precious\n" * 50)
    yield victim
    assert victim.read_text() == "precious\n" * 50
    assert os.listdir(victim.parent) == ["victim"]


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    return run


def is_trained(run):
    return CheckpointManager(run).latest().manifest.step == 4


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", REPLACED)
def test_a_trap_at_a_file_that_is_replaced_is_replaced(
    run, victim, mlp, classification, name, trap
):
    TRAPS[trap](run / name, victim)
    train.fit(mlp(), classification(), steps=4, checkpoint=run, progress=False)
    assert is_trained(run)
    assert read_status(run).step == 4
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")][-1] == 4


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_at_the_metrics_is_named_and_the_run_goes_on(
    run, victim, mlp, classification, trap, capsys
):
    TRAPS[trap](run / "metrics.jsonl", victim)
    train.fit(mlp(), classification(), steps=4, checkpoint=run)
    assert is_trained(run)
    why = {"pipe": "not a regular file", "second name": "2 names"}.get(trap, "a symbolic link")
    out = capsys.readouterr().out
    assert f"warning: {run}/metrics.jsonl cannot be written" in out
    assert why in out


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_at_the_lock_is_refused_before_anything_is_written(
    run, victim, mlp, classification, trap
):
    TRAPS[trap](run / ".lock", victim)
    with raises(CheckpointError):
        train.fit(mlp(), classification(), steps=4, checkpoint=run, progress=False)
    assert os.listdir(run) == [".lock"]


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_at_the_note_of_a_broken_step_is_replaced(run, victim, mlp, trap):
    TRAPS[trap](run / "non_finite.json", victim)
    broken = af.data.ArraySource(
        {"x": np.full((16, 8), np.nan, np.float32), "y": np.zeros(16, np.int32)}, batch=16
    )
    for _ in range(2):
        with raises(NonFiniteLoss):
            train.fit(mlp(), broken, steps=4, checkpoint=run, progress=False)


@pytest.mark.parametrize("trap", ["pipe", "link", "link to a device"])
@pytest.mark.parametrize("name", ["manifest.json", "model-00001.safetensors"])
def test_a_trap_in_a_checkpoint_is_damage(run, victim, mlp, classification, name, trap):
    train.fit(mlp(), classification(), steps=4, checkpoint=run, progress=False)
    file = run / "step-0000000004" / name
    file.unlink()
    TRAPS[trap](file, victim)
    with raises(af.CheckpointError):
        train.fit(mlp(), classification(), steps=6, checkpoint=run, progress=False)
