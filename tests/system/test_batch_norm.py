"""Layers of batch normalisation over 20 steps: statistics against numpy in float64, and torch."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn

STEPS, CHANNELS = 20, 3
SHAPES = {
    "1d": (8, CHANNELS),
    "1d long": (4, CHANNELS, 5),
    "2d": (4, CHANNELS, 3, 5),
    "3d": (2, CHANNELS, 3, 2, 2),
}
LAYERS = {
    "1d": nn.BatchNorm1d,
    "1d long": nn.BatchNorm1d,
    "2d": nn.BatchNorm2d,
    "3d": nn.BatchNorm3d,
}
KINDS = list(SHAPES)


class Net(nn.Module):
    def __init__(self, kind, **options):
        self.scale = nn.Parameter((), (("kind", "ones"),))
        self.norm = LAYERS[kind](CHANNELS, **options)

    def __call__(self, x):
        return self.norm(x * self.scale)


def job(lr=0.0, **options):
    @af.job(optimizer=af.optim.SGD(lr), **options)
    def train(model, batch):
        return (model(batch.x) * batch.y).mean()

    return train


@af.job(train=False)
def predict(model, batch):
    return model(batch.x)


def batches(kind):
    rng = np.random.default_rng(3)
    shape = SHAPES[kind]
    return [
        {
            "x": (rng.standard_normal(shape) * 2 + 1).astype(np.float32),
            "y": rng.standard_normal(shape).astype(np.float32),
        }
        for _ in range(STEPS)
    ]


def statistics(rows, momentum):
    """Return the running mean and variance after batches, in float64."""
    mean, var = np.zeros(CHANNELS), np.ones(CHANNELS)
    for number, row in enumerate(rows, 1):
        share = 1 / number if momentum is None else momentum
        values = np.moveaxis(row["x"].astype(np.float64), 1, 0).reshape(CHANNELS, -1)
        mean = (1 - share) * mean + share * values.mean(1)
        var = (1 - share) * var + share * values.var(1, ddof=1)
    return mean, var


def steps(train, model, rows):
    every = train.options.accumulate
    for first in range(0, len(rows), every):
        group = rows[first : first + every]
        train.step(model, group if every > 1 else group[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("every", [1, 4])
def test_running_statistics_follow_every_batch(kind, momentum, every):
    model, rows = Net(kind, momentum=momentum), batches(kind)
    steps(job(accumulate=every), model, rows)
    mean, var = statistics(rows, momentum)
    np.testing.assert_allclose(model.norm.running_mean.data, mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.norm.running_var.data, var, rtol=1e-5)
    assert model.norm.num_batches_tracked.data == STEPS


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_does_not_train_normalises_by_the_running_statistics(kind):
    model, rows = Net(kind), batches(kind)
    steps(job(), model, rows)
    mean, var = [s.reshape(-1, *[1] * (rows[0]["x"].ndim - 2)) for s in statistics(rows, 0.1)]
    before = model.state()
    found = predict.step(model, rows[0])["output"]
    expected = (rows[0]["x"] - mean) / np.sqrt(var + 1e-5)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)
    for name, array in model.state().items():
        assert array.tobytes() == before[name].tobytes(), name


def test_frozen_statistics_are_read_in_training_and_stay():
    model, rows = Net("2d", track=False), batches("2d")
    model.norm.running_mean.data = np.full(CHANNELS, 0.5, np.float32)
    loss = job().step(model, rows[0])["loss"]
    expected = (rows[0]["x"] - 0.5) / np.sqrt(1 + 1e-5)
    assert loss == pytest.approx(float((expected * rows[0]["y"]).mean()), rel=1e-4)
    assert model.norm.num_batches_tracked.data == 0
    model.norm.track = True
    job().step(model, rows[0])
    assert model.norm.num_batches_tracked.data == 1


def test_without_running_statistics_every_batch_is_normalised_by_its_own():
    model, rows = Net("2d", track_running_stats=False, affine=False), batches("2d")
    assert list(model.cells()) == ["scale"]
    steps(job(0.1), model, rows[:2])
    found = predict.step(model, rows[0])["output"]
    np.testing.assert_allclose(found.mean((0, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(found.std((0, 2, 3)), 1, rtol=1e-4)


OPTIONS = [{}, {"recompute": "blocks"}, {"streams": 2}, {"device": "sim"}, {"precision": "bf16"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_is_that_of_torch(options):
    torch = pytest.importorskip("torch", reason="torch is an optional oracle")
    model, rows = Net("2d"), batches("2d")
    theirs = torch.nn.BatchNorm2d(CHANNELS)
    scale = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([scale, *theirs.parameters()], 0.5)
    train = job(0.5, **options)
    for row in rows:
        loss = (theirs(torch.from_numpy(row["x"]) * scale) * torch.from_numpy(row["y"])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert train.step(model, row)["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    for name, tensor in theirs.state_dict().items():
        ours = model.state()[f"norm.{name}"]
        np.testing.assert_allclose(ours, tensor.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.BatchNorm2d(3), (4, 3)),
        (lambda: nn.BatchNorm1d(3), (4, 3, 2, 2)),
        (lambda: nn.BatchNorm1d(3), (4, 5)),
        (lambda: nn.BatchNorm1d(3), (1, 3)),
        (lambda: nn.BatchNorm1d(0), (4, 3)),
        (lambda: nn.InstanceNorm2d(10**30), (4, 3)),
        (lambda: nn.BatchNorm1d("3"), (4, 3)),
        (lambda: nn.BatchNorm1d(3, momentum="a"), (4, 3)),
    ],
)
def test_what_does_not_fit_is_refused_with_its_line(make, shape):
    class Model(nn.Module):
        def __init__(self):
            self.norm = make()

        def __call__(self, x):
            return self.norm(x).sum()

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return model(batch.x)

    with raises(af.CompileError):
        train.step(Model(), {"x": np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    "call",
    [
        lambda x, v: af.batch_norm(x),
        lambda x, v: af.batch_norm(x, v, v, training=True),
        lambda x, v: af.batch_norm(v),
    ],
)
def test_a_function_of_wrong_arguments_says_so(call):
    @af.job(train=False)
    def compute(model, batch):
        return call(batch.x, batch.x[0])

    with raises(af.CompileError):
        compute.step(nn.Linear(1, 1), {"x": np.zeros((4, 3), np.float32)})
