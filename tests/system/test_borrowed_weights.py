"""Plans that change no parameter read the model's own arrays, and hold no second copy of them."""

from pathlib import Path

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actorflow.run.runner import Runner

WIDTH = 3_000
"""Of a layer whose weight takes 36 MB."""


class Net(nn.Module):
    def __init__(self, width=16):
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 4)

    def __call__(self, x):
        return self.down(af.tanh(self.up(x)))


@af.job(train=False)
def scores(model, batch):
    return {"y": model(batch.x)}


@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return (model(batch.x) ** 2).mean()


def rows(count, seed=0):
    return {"x": np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)}


def fresh(model, batch):
    """Return what a plan of its own, opened now on a copy of the model, makes of a batch."""
    other = Net()
    other.load(model.state())
    with scores.predictor(other, batch) as predict:
        return predict(batch)["y"]


@pytest.fixture
def model():
    return Net().init(0)


@pytest.fixture
def plan(model):
    return scores.compile(
        model, {n: af.TensorType(af.DType.FLOAT32, a.shape) for n, a in rows(3).items()}
    )


def test_a_runner_reads_given_arrays_where_they_lie(model, plan):
    values = model.state()
    runner = Runner(plan, values=values)
    runner.borrows = True
    first = runner.step(rows(3))["y"]
    assert all([runner.variables()[name] is array for name, array in values.items()])
    runner.close()
    assert all([runner.variables()[name] is array for name, array in values.items()])
    owner = Runner(plan, values=values)
    np.testing.assert_array_equal(owner.step(rows(3))["y"], first)
    assert not any([owner.variables()[name] is array for name, array in values.items()])
    owner.close()


def test_arrays_that_others_may_write_into_are_copied(model, plan):
    values = {name: np.array(array) for name, array in model.state().items()}
    runner = Runner(plan, values=values)
    runner.borrows = True
    before = runner.step(rows(3))["y"]
    values["up.weight"][:] = 0
    np.testing.assert_array_equal(runner.step(rows(3))["y"], before)
    runner.close()


def test_new_values_between_calls_count_and_leave_the_old_arrays_alone(model):
    batch = rows(3)
    with scores.predictor(model, batch) as predict:
        predict(batch)
        for seed in (1, 2):
            old = model.state()
            kept = {name: array.copy() for name, array in old.items()}
            model.load(
                {"up.weight": np.random.default_rng(seed).random((16, 8), np.float32)}, strict=False
            )
            np.testing.assert_array_equal(predict(batch)["y"], fresh(model, batch))
            assert all([np.array_equal(old[name], kept[name]) for name in old])


def test_plans_for_several_batches_read_the_same_arrays(model):
    for count in (3, 5, 3):
        batch = rows(count, count)
        np.testing.assert_array_equal(scores.step(model, batch)["y"], fresh(model, batch))
    model.up.bias.data = np.ones(16, np.float32)
    for count in (5, 3):
        batch = rows(count, count)
        np.testing.assert_array_equal(scores.step(model, batch)["y"], fresh(model, batch))
    scores.close(model)


def test_a_training_in_turn_with_an_inference_changes_what_that_computes(model):
    batch = rows(3)
    for _ in range(3):
        np.testing.assert_array_equal(scores.step(model, batch)["y"], fresh(model, batch))
        train.step(model, batch)
    scores.close(model)
    train.close(model)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system tells no memory")
def test_an_open_predictor_takes_less_than_its_weights():
    class Wide(nn.Module):
        def __init__(self):
            self.layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model, batch = Wide().init(0), {"x": np.ones((1, WIDTH), np.float32)}
    weights = sum([array.nbytes for array in model.state().values()])
    before = resident_bytes()
    with scores.predictor(model, batch) as predict:
        predict(batch)
        assert resident_bytes() - before < weights / 2


def resident_bytes():
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) * 1024
