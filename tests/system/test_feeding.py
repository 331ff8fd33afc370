"""Whole jobs on a simulated device, fed and watched through pinned memory: the host's bits."""

import numpy as np
import pytest
from jobs import assert_same, rows_of_fit

import actorflow as af
from actorflow import nn


class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 5)

    def __call__(self, x):
        return self.down(af.gelu(af.dropout(self.up(x), 0.2), approximate="tanh"))


def data(seed=0):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(64, 8)).astype(np.float32), rng.integers(0, 5, 64).astype(np.int32)
    return af.data.ArraySource({"x": x, "y": y}, batch=8, seed=seed)


@af.job(train=False)
def evaluate(model, batch):
    return {"loss": af.cross_entropy(model(batch.x), batch.y)}


def job(device, **options):
    @af.job(optimizer=af.optim.AdamW(1e-2), seed=3, device=device, **options)
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    return train


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2, "metrics_every": 2}, {"offload": "optimizer", "streams": 2}],
    ids=str,
)
def test_a_run_and_the_one_that_goes_on_with_it_give_the_hosts_bits(options, tmp_path):
    seen = []
    for device in ("host", "sim"):
        rows, evaluations = [], ()
        for steps in (5, 9):
            part, result = rows_of_fit(
                job(device, **options), Net(), data(), steps, checkpoint=tmp_path / device,
                every=2, evaluation=af.Evaluation(evaluate, data(9), every=3, batches=2),
            )  # fmt: skip
            rows += part
            evaluations += result.evaluations
        seen.append((rows, evaluations, result.variables))
    assert seen[0][:2] == seen[1][:2]
    assert [step for step, _ in seen[1][0]] == [*range(1, 10)]
    assert_same(seen[0][2], seen[1][2])


def test_steps_of_batches_that_are_there_and_a_stream_of_outputs_give_the_hosts_bits():
    seen = []
    for device in ("host", "sim"):
        train, model, source = job(device), Net(), data()
        losses = [train.step(model, next(source))["loss"] for _ in range(4)]
        train.close(model)
        seen.append((losses, model.state()))
    assert seen[0][0] == seen[1][0]
    assert_same(seen[0][1], seen[1][1])


@pytest.mark.parametrize(
    "read",
    [
        lambda model, batch: {"x": batch.x, "all": model(batch.x), "again": model(batch.x)},
        lambda model, batch: {"weight": model.up.weight, "sum": model.up.weight.sum()},
        lambda model, batch: {"y": batch.y},
    ],
    ids=["a batch and one value twice", "no batch", "a batch alone"],
)
def test_what_is_handed_out_may_be_a_batch_a_parameter_or_there_already(read):
    seen = []
    for device in ("host", "sim"):
        outputs = af.job(read, train=False, device=device).stream(Net(), data(), steps=3)
        seen.append([{name: np.array(array) for name, array in o.items()} for o in outputs])
    for one, other in zip(*seen, strict=True):
        assert_same(one, other)
