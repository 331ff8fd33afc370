import math

import numpy as np
import pytest

import actorflow as af
from compiler.errors import CompileError


def values(schedule, traced, evaluate, steps):
    graph = traced(schedule, s=())
    return [float(evaluate(graph, s=np.float32(s))) for s in steps]


def test_schedules_are_the_formulas_they_are_named_for(traced, evaluate):
    steps = [0, 1, 5, 10, 20]
    linear = values(af.optim.linear(1.0, steps=10, final=0.2), traced, evaluate, steps)
    np.testing.assert_allclose(linear, [1.0, 0.92, 0.6, 0.2, 0.2], rtol=1e-6)
    cosine = values(af.optim.cosine(2.0, steps=10), traced, evaluate, steps)
    expected = [1 + math.cos(math.pi * min(s, 10) / 10) for s in steps]
    np.testing.assert_allclose(cosine, expected, rtol=1e-5, atol=1e-6)
    warm = values(af.optim.warmup(0.5, steps=4), traced, evaluate, [0, 1, 3, 9])
    np.testing.assert_allclose(warm, [0.125, 0.25, 0.5, 0.5], rtol=1e-6)
    assert values(af.optim.constant(0.3), traced, evaluate, [0, 9]) == pytest.approx([0.3, 0.3])


def test_a_schedule_of_the_users_own_is_traced_like_anything_else(traced, evaluate):
    got = values(lambda step: af.exp(step * -0.1), traced, evaluate, [0, 3])
    np.testing.assert_allclose(got, np.exp([0.0, -0.3]), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: af.optim.SGD(0.1, nesterov=True), "nesterov=True needs momentum"),
        (lambda: af.optim.SGD(0.1, momentum=1.0), r"momentum must be in \[0.0, 1.0\)"),
        (lambda: af.optim.AdamW(betas=(1.5, 0.9)), "beta1 must be in"),
    ],
)
def test_impossible_settings_are_errors(make, words):
    with pytest.raises(CompileError, match=words):
        make()


def test_a_schedule_that_returns_no_scalar_is_an_error():
    @af.job(optimizer=af.optim.SGD(lambda step: step.reshape(1)))
    def train(model, batch):
        return model(batch.x).mean()

    from actorflow import nn
    from compiler.types import DType, TensorType

    with pytest.raises(CompileError, match="must return a float32 scalar"):
        train.compile(nn.Linear(2, 2), {"x": TensorType(DType.FLOAT32, (1, 2))})
