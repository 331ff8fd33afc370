"""What recurrent layers refuse, and that zeros between layers come in training alone."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError

X = np.zeros((4, 2, 3), np.float32)


def run(layer, *args, train=False, **kwargs):
    options = {"optimizer": af.optim.SGD(0.0)} if train else {"train": False}

    @af.job(seed=1, **options)
    def job(model, batch):
        output = model(batch.x, *args, **kwargs)[0]
        return {"loss": output.sum(), "output": output} if train else output

    try:
        found = job.step(layer, {"x": X + 1.0})
        return found["output"]
    finally:
        job.close(layer)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.RNN(3, 4, nonlinearity="gelu"),
        lambda: nn.LSTM(3, 4, proj_size=4),
        lambda: nn.GRU(3, 0),
        lambda: run(nn.GRU(5, 4)),
        lambda: run(nn.LSTM(3, 4), (np.zeros((1, 2, 4)), np.zeros((1, 2, 5)))),
        lambda: run(nn.RNN(3, 4), lengths=np.array([1, 2, 3])),
    ],
)
def test_what_came_and_what_was_expected_is_said(make):
    with raises(CompileError):
        make()


def test_a_sequence_ends_at_its_length_whatever_stands_after():
    output = run(nn.LSTM(3, 4), lengths=np.array([4, 1]))
    assert output[1:, 0].all()
    assert not output[1:, 1].any()


def test_zeros_come_between_layers_and_in_training_alone():
    layer = nn.GRU(3, 4, num_layers=2, dropout=0.9)
    plain = run(layer)
    np.testing.assert_array_equal(plain, run(layer))
    assert not np.allclose(plain, run(layer, train=True))
    first = nn.GRU(3, 4, dropout=0.9)
    np.testing.assert_array_equal(run(first), run(first, train=True))
