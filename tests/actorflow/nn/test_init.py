"""torch's initialisers: what a first run draws has the statistics that torch's have."""

import math

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.tensor.initial_values import initial_value
from compiler.contract.errors import CompileError
from compiler.contract.types import DType

init = nn.init
SHAPE = (300, 40, 3, 2)
FAN_IN, FAN_OUT = 240, 1800


def drawn(function, *args, shape=SHAPE, **kwargs):
    parameter = nn.Parameter(shape, (("kind", "zeros"),))
    assert function(parameter, *args, **kwargs) is parameter
    return initial_value("w", parameter.type, parameter.init, 0)


@pytest.mark.parametrize(
    ("function", "kwargs", "std"),
    [
        (init.xavier_uniform_, {}, math.sqrt(2 / (FAN_IN + FAN_OUT))),
        (init.xavier_normal_, {"gain": 2.0}, 2 * math.sqrt(2 / (FAN_IN + FAN_OUT))),
        (init.kaiming_uniform_, {"a": math.sqrt(5)}, math.sqrt(1 / (3 * FAN_IN))),
        (init.kaiming_normal_, {"nonlinearity": "relu"}, math.sqrt(2 / FAN_IN)),
        (
            init.kaiming_normal_,
            {"mode": "fan_out", "nonlinearity": "tanh"},
            5 / 3 / math.sqrt(FAN_OUT),
        ),
        (init.normal_, {"std": 0.02}, 0.02),
        (init.uniform_, {"a": -0.5, "b": 0.5}, 1 / math.sqrt(12)),
        (init.trunc_normal_, {"std": 0.02}, 0.02),  # two units are a hundred deviations
        (init.trunc_normal_, {}, 0.8796),  # of a normal cut at two deviations
    ],
)
def test_deviations_are_torchs(function, kwargs, std):
    values = drawn(function, **kwargs)
    assert values.std() == pytest.approx(std, rel=0.01)
    assert abs(values.mean()) < 0.02 * std
    if "uniform" in function.__name__:
        assert np.abs(values).max() == pytest.approx(math.sqrt(3.0) * std, rel=1e-3)


def test_means_ends_and_tails_are_kept():
    assert drawn(init.uniform_, 2.0, 3.0).min() >= 2.0
    assert drawn(init.normal_, 5.0, 0.1).mean() == pytest.approx(5.0, abs=1e-2)
    tail = drawn(init.trunc_normal_, 0.0, 1.0, 3.0, 4.0)
    assert (tail.min() >= 3.0, tail.max() <= 4.0) == (True, True)
    assert tail.mean() == pytest.approx(3.2604, abs=2e-3)  # (pdf(3) - pdf(4)) / (cdf(4) - cdf(3))


@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 2, 3), (3, 4, 2), (6, 6)])
def test_orthogonal_rows_or_columns_are(shape):
    matrix = drawn(init.orthogonal_, gain=2.0, shape=shape).reshape(shape[0], -1).astype(float)
    small = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    np.testing.assert_allclose(small, 4 * np.eye(len(small)), atol=1e-5)


def test_constants_units_and_dirac():
    np.testing.assert_array_equal(drawn(init.constant_, 0.3, shape=(2,)), np.float32([0.3, 0.3]))
    np.testing.assert_array_equal(drawn(init.ones_, shape=(2,)), [1, 1])
    np.testing.assert_array_equal(drawn(init.zeros_, shape=(2,)), [0, 0])
    np.testing.assert_array_equal(drawn(init.eye_, shape=(2, 3)), np.eye(2, 3))
    weight = drawn(init.dirac_, 2, shape=(4, 2, 3))
    x = np.random.default_rng(0).normal(size=(1, 4, 6)).astype(np.float32)
    job = af.job(lambda model, b: af.conv1d(b.x, b.w, padding=1, groups=2), train=False)
    np.testing.assert_array_equal(job.step(nn.Module(), {"x": x, "w": weight})["output"], x)


def test_gains_are_torchs():
    gains = [
        init.calculate_gain(n) for n in ("linear", "conv2d", "sigmoid", "tanh", "relu", "selu")
    ]
    assert gains == pytest.approx([1, 1, 1, 5 / 3, math.sqrt(2), 0.75])
    assert init.calculate_gain("leaky_relu", 0.2) == pytest.approx(math.sqrt(2 / 1.04))


def test_a_layer_begins_as_its_model_says():
    class Net(nn.Module):
        def __init__(self):
            self.proj = nn.Linear(4, 4)
            init.eye_(self.proj.weight)
            init.constant_(self.proj.bias, -1.0)

        def __call__(self, x):
            return self.proj(x)

    x = np.float32([[1, 2, 3, 4]])
    made = af.job(lambda model, b: model(b.x), train=False).step(Net(), {"x": x})
    np.testing.assert_array_equal(made["output"], x - 1)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda w: init.kaiming_normal_(w, mode="fan"), (3, 3)),
        (lambda w: init.kaiming_normal_(w, nonlinearity="gelu"), (3, 3)),
        (lambda w: init.normal_(w, std=-1.0), (3,)),
        (lambda w: init.uniform_(w, 1.0, 0.0), (3,)),
        (lambda w: init.trunc_normal_(w, a=1.0, b=0.0), (3,)),
        (lambda w: init.eye_(w), (3,)),
        (lambda w: init.dirac_(w), (3,)),
        (lambda w: init.xavier_normal_(w), (3,)),
        (lambda w: init.orthogonal_(w), (3,)),
        (lambda w: init.zeros_(nn.Buffer((3,))), (3,)),
        (lambda w: (w.load(np.zeros(3, np.float32)), init.zeros_(w)), (3,)),
    ],
)
def test_what_cannot_be_is_an_error_with_the_users_line(make, shape):
    parameter = nn.Parameter(shape, (("kind", "zeros"),), DType.FLOAT32)
    with raises(CompileError):
        make(parameter)
