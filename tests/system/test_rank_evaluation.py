"""Evaluations between the steps of a training on many ranks, against one rank that does all."""

import numpy as np
import pytest
from rank_trainings import Net, Split, Training, images, loss

import actorflow as af
from actorflow import nn

pytestmark = [
    pytest.mark.usefixtures("native_toolchain"),
    pytest.mark.no_gpu("ranks meet in memory of the host"),
]


class Staged(Net):
    """Its convolution is on the first stage, its layers on the last."""

    def __call__(self, x):
        with af.stage(0):
            h = af.flatten(self.pool(af.relu(self.norm(self.conv(x)))), 1)
        with af.stage(1):
            return self.out(af.relu(self.up(h)))


class StagedSplit(Split):
    """Its two layers are in parts, each on a stage of its own."""

    def __call__(self, x):
        with af.stage(0):
            h = af.relu(self.up(af.flatten(x, 1)))
        with af.stage(1):
            return self.out(h)


class StagedRows(nn.Module):
    """Each stage moves rows between ranks, the first one otherwise than the last one."""

    def __init__(self):
        self.up, self.out = nn.Linear(128, 16), nn.Linear(16, 5)

    def __call__(self, x):
        with af.stage(0):
            h = self.up(af.flatten(x, 1))
            h = h + 0.2 * af.index_select(h, 0, af.randperm(h.shape[0]))
        with af.stage(1):
            return self.out(h + af.sort(h, 0).values)


AVERAGES = Training(options={"ema": 0.9, "zero": True})
CASES = {
    "rows": (Training(), {"data": 2}, {}),
    "uneven rows": (Training(data=lambda: images(9)), {"data": 2}, {"batch": 7}),
    "two axes": (Training(), {"data": 2, "model": 2}, {}),
    "layers in parts": (Training(Split), {"model": 2}, {}),
    "averages in parts": (AVERAGES, {"data": 2}, {"ema": True}),
    "stages": (Training(Staged), {"stage": 2}, {}),
    "stages, several batches": (Training(Staged, options={"accumulate": 3}), {"stage": 2}, {}),
    "stages of two ranks": (Training(Staged, options={"zero": True}), {"stage": 2, "data": 2}, {}),
    "stages, layers in parts": (Training(StagedSplit), {"model": 2, "stage": 2}, {}),
    "stages, layers in parts of parts": (
        Training(StagedSplit, options={"zero": True}), {"data": 2, "model": 2, "stage": 2}, {},
    ),
    "stages, averages in parts": (
        Training(StagedSplit, options={"ema": 0.9}), {"model": 2, "stage": 2}, {"ema": True},
    ),
    "stages, rows moved": (Training(StagedRows), {"data": 2, "stage": 2}, {}),
    "stages, averages": (Training(Staged, options={"ema": 0.9}), {"stage": 2}, {"ema": True}),
    "stages, recomputed": (
        Training(Staged, options={"recompute": "blocks", "accumulate": 2}), {"stage": 2}, {},
    ),
}  # fmt: skip


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", CASES)
def test_ranks_evaluate_together(name):
    training, axes, asked = CASES[name]
    batch = asked.get("batch", 4)

    @af.job(train=False)
    def evaluate(model, batch):
        return {"loss": loss(model, batch)}

    def valid():
        data = images(batch, seed=9)
        return af.Evaluation(evaluate, data, every=2, batches=3, ema="ema" in asked)

    (alone,) = training.run(None, evaluation=valid)
    wanted = [(step, means["loss"]) for step, means in alone.result.evaluations]
    assert [step for step, _ in wanted] == [2, 4]
    for own in training.run(af.Mesh(**axes), evaluation=valid):
        found = [(step, means["loss"]) for step, means in own.result.evaluations]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
