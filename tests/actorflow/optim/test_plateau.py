"""A rate that the host lowers while a job trains; `tests/oracle` holds its rule to torch's."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn

X = np.ones((32, 2), np.float32)


class Net(nn.Module):
    def __init__(self):
        self.w = nn.Parameter((2,), "zeros")
        self.plateau = nn.Buffer((4,), dtype="float64")


def trained_by(model, **options):
    """Return a job that adds its rate to each weight, and the schedule."""
    plateau = af.optim.ReduceLROnPlateau(model.plateau, 0.5, factor=0.5, patience=0, **options)

    @af.job(optimizer=af.optim.SGD(plateau))
    def train(model, batch):
        return -(model.w * batch.x).sum(1).mean()

    return train, plateau


def test_a_step_has_the_rate_that_the_metrics_before_it_give():
    model = Net().init(0)
    train, plateau = trained_by(model, min_lr=0.2)
    for metric, rate in ((1.0, 0.5), (2.0, 0.25), (2.0, 0.2), (2.0, 0.2)):
        before = model.w.data[0]
        assert plateau.step(metric) == plateau.rate == rate
        train.step(model, {"x": X})
        np.testing.assert_allclose(model.w.data - before, rate, rtol=1e-6)


def test_an_evaluation_lowers_the_rate_of_a_fit_and_a_resumed_run_goes_on_with_it(tmp_path):
    data = af.data.ArraySource({"x": X}, batch=4)

    @af.job(train=False)
    def measure(model, batch):
        return {"metric": batch.x.sum()}

    def run(steps):
        model = Net()
        train, plateau = trained_by(model)
        rates = []
        evaluation = af.Evaluation(
            measure,
            af.data.ArraySource({"x": X}, batch=4),
            every=2,
            batches=1,
            on_result=lambda step, made: rates.append(plateau.step(made["metric"])),
        )
        options = {"checkpoint": tmp_path / "run", "every": 2, "progress": False}
        train.fit(model, data, steps=steps, evaluation=evaluation, **options)
        return rates, model.plateau.data

    rates, _ = run(6)
    assert rates == [0.5, 0.25, 0.125]
    rates, state = run(8)
    assert rates[-1] in (0.125, 0.0625)
    assert state[0] < 0.25


@pytest.mark.parametrize(
    "function",
    [
        lambda: af.optim.ReduceLROnPlateau(nn.Buffer((4,)), 0.1),
        lambda: af.optim.ReduceLROnPlateau(0.1, 0.1),
        lambda: af.optim.ReduceLROnPlateau(Net().plateau, 0.1, mode="least"),
        lambda: af.optim.ReduceLROnPlateau(Net().plateau, 0.1, factor=1.0),
        lambda: af.optim.ReduceLROnPlateau(Net().plateau, -0.1),
    ],
)
def test_what_is_no_plateau_is_refused(function):
    with raises(af.CompileError):
        function()
