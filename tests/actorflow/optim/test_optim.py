import math

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, TensorType

NUMBERS = (0.5, 1, np.float32(0.5), np.float64(0.5), np.int64(1))


def compiled(lr):
    @af.job(optimizer=af.optim.SGD(lr))
    def train(model, batch):
        return model(batch.x).mean()

    return train.compile(nn.Linear(2, 2), {"x": TensorType(DType.FLOAT32, (1, 2))})


def stepped(lr):
    """Return how far one step of SGD moves the bias of a mean of two outputs."""

    @af.job(optimizer=af.optim.SGD(lr))
    def train(model, batch):
        return model(batch.x).sum()

    model = nn.Linear(2, 1)
    model.load({"weight": np.zeros((1, 2), np.float32), "bias": np.zeros(1, np.float32)})
    train.step(model, {"x": np.ones((1, 2), np.float32)})
    train.close(model)
    return -float(model.bias.data[0])


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


def test_the_millionth_step_has_the_digits_of_the_first(traced, evaluate):
    for schedule, expected in (
        (af.optim.exponential(1.0, gamma=0.999999), 0.999999**999_999),
        (af.optim.linear(1.0, steps=1_000_000), 1e-6),
        (af.optim.cosine(1.0, steps=1_000_000), 0.5 + 0.5 * math.cos(math.pi * 0.999999)),
        (af.optim.step(1.0, every=3, gamma=0.99999), 0.99999**333_333),
        (af.optim.cosine_restarts(1.0, steps=1_000, mult=1), 0.5 + 0.5 * math.cos(math.pi * 0.999)),
        (af.optim.wsd(1.0, warmup=10, stable=10, decay=1_000_000), 20e-6 + 1e-6),
    ):
        (rate,) = values(schedule, traced, evaluate, [999_999])
        assert rate == pytest.approx(expected, rel=2e-7, abs=1e-12)


def test_a_schedule_of_the_users_own_is_traced_like_anything_else(traced, evaluate):
    got = values(lambda step: af.exp(step * -0.1), traced, evaluate, [0, 3])
    np.testing.assert_allclose(got, np.exp([0.0, -0.3]), rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: af.optim.SGD(0.1, nesterov=True),
        lambda: af.optim.SGD(0.1, momentum=1.0),
        lambda: af.optim.AdamW(betas=(1.5, 0.9)),
        lambda: af.optim.AdamW(betas=0.9),
        lambda: af.optim.AdamW(betas=(0.9,)),
        lambda: af.optim.AdamW(betas=("a", 0.9)),
        lambda: af.optim.AdamW(eps="a"),
        lambda: af.optim.AdamW(lr=None),
        lambda: af.optim.SGD("0.1"),
        lambda: af.optim.SGD(np.array([0.1])),
        lambda: af.optim.SGD(np.ones(2)),
        lambda: af.optim.SGD(0.1, momentum="a"),
        lambda: af.optim.SGD(0.1, weight_decay="a"),
        lambda: af.optim.SGD(0.1, dampening=1.0),
        lambda: af.optim.SGD(0.1, momentum=0.9, nesterov=1),
        lambda: af.optim.SGD(0.1, 0.9, 0.1, nesterov=True),
        lambda: af.optim.Adam(betas=(0.9, float("nan"))),
        lambda: af.optim.Adam(amsgrad=None),
        lambda: af.optim.Adagrad(lr_decay=-1),
        lambda: af.optim.Adagrad(initial_accumulator_value=-0.1),
        lambda: af.optim.RMSprop(alpha=1.5),
        lambda: af.optim.RMSprop(centered="a"),
        lambda: af.optim.Lion(betas=[0.9]),
        lambda: af.optim.step(0.1, every=0),
        lambda: af.optim.step(0.1, every=2, gamma=-1),
        lambda: af.optim.multi_step(0.1, milestones=3),
        lambda: af.optim.multi_step(0.1, milestones=[5, 5]),
        lambda: af.optim.exponential(0.1, gamma=None),
        lambda: af.optim.polynomial(0.1, steps=3, power=-1),
        lambda: af.optim.cosine_restarts(0.1, steps=3, mult=0),
        lambda: af.optim.one_cycle(0.1, steps=1),
        lambda: af.optim.one_cycle(0.1, steps=9, pct_start=1.0),
        lambda: af.optim.one_cycle(0.1, steps=9, div_factor=0),
        lambda: af.optim.wsd(0.1, warmup=1, stable=1, decay=0),
        lambda: af.optim.chain([0.1, 0.2], milestones=[]),
        lambda: af.optim.chain([0.1, "a"], milestones=[3]),
        lambda: af.optim.constant("a"),
        lambda: af.optim.linear(1.0, steps=0),
        lambda: af.optim.linear(1.0, steps=9, final=None),
        lambda: af.optim.cosine(1.0, steps="a"),
        lambda: af.optim.warmup(0.1, steps=-1),
        lambda: af.optim.warmup(np.ones(2), steps=1),
    ],
)
def test_impossible_settings_are_errors_with_the_users_line(make):
    with raises(CompileError):
        make()


def test_a_schedule_that_returns_no_scalar_is_an_error():
    with raises(CompileError):
        compiled(lambda step: step.reshape(1))


@pytest.mark.parametrize("number", NUMBERS)
def test_a_learning_rate_is_any_number_or_a_schedule_that_returns_one(number):
    rates = [number, lambda step: number, af.optim.constant(number)]
    rates += [af.optim.warmup(number, steps=0), af.optim.warmup(lambda step: number, steps=1)]
    rates += [af.optim.linear(number, steps=np.int64(9)), af.optim.cosine(number, steps=9)]
    assert [stepped(rate) for rate in rates] == pytest.approx([float(number)] * len(rates))


@pytest.mark.parametrize("given", [None, "0.1", np.array(0.1), np.ones(2), [0.1], 1j])
def test_a_schedule_that_returns_something_else_is_named_with_its_line(given):
    def schedule(step):
        return given

    for lr in (schedule, af.optim.warmup(schedule, steps=3)):
        with raises(CompileError):
            compiled(lr)


def test_a_rate_too_large_for_float32_is_an_error():
    with raises(CompileError):
        compiled(lambda step: 1e300)


ZEROS = (("kind", "zeros"),)


class Line(nn.Module):
    """y = w x + b, with parameters of the given dtypes."""

    def __init__(self, *dtypes):
        self.w = nn.Parameter((3,), ZEROS, DType(dtypes[0]))
        self.b = nn.Parameter((3,), ZEROS, DType(dtypes[-1]))

    def __call__(self, x):
        return self.w * x + self.b.to(x.dtype)


def trained(optimizer, steps, *dtypes):
    """Return w and b after steps whose gradient is always 1, from 0."""

    @af.job(optimizer=optimizer)
    def train(model, batch):
        return model(batch.x).sum()

    model = Line(*dtypes)
    for _ in range(steps):
        train.step(model, {"x": np.ones(3, dtypes[0])})
    train.close(model)
    return model.w.data[0], model.b.data[0]


RATES = {
    "number": (0.1, lambda t: 0.1),
    "linear": (af.optim.linear(0.3, steps=7), lambda t: 0.3 * (1 - t / 7)),
    "cosine": (af.optim.cosine(0.3, steps=7), lambda t: 0.15 * (1 + math.cos(math.pi * t / 7))),
    "warmup": (af.optim.warmup(0.1, steps=3), lambda t: 0.1 * min((t + 1) / 3, 1)),
}


@pytest.mark.parametrize("path", ["numpy", "native"])
@pytest.mark.parametrize("name", RATES)
def test_the_learning_rate_of_float64_parameters_has_the_digits_of_float64(name, path, request):
    if path == "native":
        request.getfixturevalue("native")
    lr, rate = RATES[name]
    moved = -math.fsum(rate(t) for t in range(5))
    w, b = trained(af.optim.SGD(lr), 5, "float64")
    assert [w, b] == pytest.approx([moved] * 2, rel=1e-14)
    # With a gradient that is always 1 the corrected moments are 1 at every step.
    w, b = trained(af.optim.AdamW(lr, eps=1e-3, weight_decay=0.0), 5, "float64")
    assert [w, b] == pytest.approx([moved / 1.001] * 2, rel=1e-12)


def test_parameters_of_two_dtypes_have_a_rate_each_and_a_schedule_may_stay_in_float32():
    w, b = trained(af.optim.SGD(af.optim.cosine(0.3, steps=7)), 5, "float64", "float32")
    want = -math.fsum(RATES["cosine"][1](t) for t in range(5))
    assert w == pytest.approx(want, rel=1e-14)
    assert b == pytest.approx(want, rel=1e-6)
    w, _ = trained(af.optim.SGD(lambda step: step.to("float32") * 0.0 + 0.1), 1, "float64")
    assert w == -float(np.float32(0.1))


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "make",
    [
        af.optim.SGD,
        af.optim.AdamW,
        af.optim.constant,
        lambda x: af.optim.cosine(x, steps=3),
        lambda x: af.optim.linear(0.1, steps=3, final=x),
        lambda x: af.optim.warmup(x, steps=3),
        lambda x: af.optim.SGD(0.1, weight_decay=x),
        lambda x: af.optim.AdamW(0.1, eps=x),
    ],
)
def test_a_number_that_would_climb_or_end_in_nan_is_refused_with_the_line(make, number):
    with raises(CompileError):
        make(number)
