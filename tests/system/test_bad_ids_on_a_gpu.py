"""A bad id or label on a GPU ends a run as it does on the host: the same words, step and line.

The GPU is acted by the host, which is as late as a seed makes it. Nothing of such a step comes out.
"""

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actorflow.checkpoint.manager import CheckpointManager
from compiler.contract.types import DType, TensorType

NUM_IDS, NUM_CLASSES, BAD_STEP = 10, 8, 5
WHERE = {"host": {"device": "host"}, "cuda": {"device": "cuda", "gpu": "h200"}}


class Table(nn.Module):
    def __init__(self):
        self.rows = nn.Embedding(NUM_IDS, NUM_CLASSES)


class Batches:
    """Batches of ids and labels, of which the sixth is bad."""

    def __init__(self, **bad):
        self.at, self.bad = 0, bad

    def __next__(self):
        rng = np.random.default_rng(self.at)
        batch = {
            "ids": rng.integers(0, NUM_IDS, (2, 3)).astype(np.int32),
            "y": rng.integers(0, NUM_CLASSES, (2, 3)).astype(np.int32),
        }
        for name, value in self.bad.items() if self.at == BAD_STEP else ():
            batch[name][1, 1:] = value, 77
        self.at += 1
        return batch

    def spec(self):
        return {name: TensorType(DType.INT32, (2, 3)) for name in ("ids", "y")}

    def state(self):
        return {"at": self.at}

    def restore(self, state):
        self.at = state["at"]

    def fingerprint(self):
        return "batches"


def run(where, folder, bad):
    """Return the error of a run whose sixth step is bad, or None, and the losses by step."""

    @af.job(optimizer=af.optim.SGD(0.1), **WHERE[where])
    def train(model, batch):
        return af.cross_entropy(model.rows(batch.ids).flatten(0, 1), batch.y.flatten())

    losses, error = {}, None
    try:
        train.fit(
            Table(),
            Batches(**bad),
            steps=9,
            every=2,
            checkpoint=folder,
            on_step=lambda step, metrics: losses.update({step: metrics["loss"]}),
            progress=False,
        )
    except af.ActorFailed as raised:
        error = raised
    return error, losses


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The losses of a run on the host without a bad batch."""
    error, losses = run("host", tmp_path_factory.mktemp("straight"), {})
    assert error is None
    return losses


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bad", [{"ids": 31}, {"ids": -2}, {"y": 8}], ids=str)
def test_a_bad_index_is_told_as_on_the_host_and_its_step_never_comes_out(
    bad, seed, straight, tmp_path, monkeypatch
):
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")
    monkeypatch.setenv("ACTORFLOW_SIM_SEED", str(seed))
    host, _ = run("host", tmp_path / "host", bad)
    cuda, losses = run("cuda", tmp_path / "cuda", bad)
    assert type(cuda.__cause__) is type(host.__cause__) is IndexError
    assert str(cuda.__cause__) == str(host.__cause__)
    assert (cuda.firing, cuda.source) == (host.firing, host.source)
    assert cuda.firing == BAD_STEP
    assert "test_bad_ids_on_a_gpu.py:" in cuda.source
    assert {*losses} <= {*range(1, BAD_STEP + 1)}
    for step, loss in losses.items():
        np.testing.assert_allclose(loss, straight[step], rtol=1e-5)
    kept = CheckpointManager(tmp_path / "cuda").latest()
    assert kept is None or kept.manifest.step <= BAD_STEP
