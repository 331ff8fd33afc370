"""Averages of weights: torch's AveragedModel, as state of the plan."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, TensorType

RATE, DECAY = 0.1, 0.9


def batches(count, seed=0):
    random = np.random.default_rng(seed)
    return [{"x": random.normal(size=(4, 3)).astype(np.float32)} for _ in range(count)]


def model():
    made = nn.Linear(3, 2)
    made.load({"weight": np.full((2, 3), 0.5, np.float32), "bias": np.zeros(2, np.float32)})
    return made


def loss(model, batch):
    return (model(batch.x) ** 2).mean()


def by_hand(weights, decays):
    """Return the average of weights after each step: a copy first, then what lerp makes of it."""
    average = weights[0].astype(np.float64)
    for now, decay in zip(weights[1:], decays, strict=True):
        average = average + (now - average) * (1.0 - decay)
    return average


def stepped(job, trained, given):
    seen = []
    for batch in given:
        job.step(trained, batch)
        seen.append(trained.weight.data)
    return seen


@pytest.mark.parametrize(
    ("ema", "decays"),
    [
        (DECAY, [DECAY] * 4),
        (af.optim.EMA(0.0), [0.0] * 4),
        (
            af.optim.EMA(0.7, warmup=2 / 3),
            [min(0.7, 1 - (1 + n) ** (-2 / 3)) for n in (1, 2, 3, 4)],
        ),
    ],
)
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}, {"device": "sim"}], ids=str)
def test_averages_follow_the_weights_after_each_step(ema, decays, options):
    job = af.job(loss, optimizer=af.optim.AdamW(RATE), ema=ema, **options)
    trained = model()
    seen = stepped(job, trained, batches(5))
    averages = job.averages(trained)
    assert {*averages} == {"weight", "bias"}
    np.testing.assert_allclose(averages["weight"], by_hand(seen, decays), rtol=2e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_averages_are_of_the_weights_in_full_precision(precision):
    job = af.job(loss, optimizer=af.optim.SGD(RATE), ema=DECAY, precision=precision)
    trained = model()
    seen = stepped(job, trained, batches(3))
    np.testing.assert_allclose(
        job.averages(trained)["weight"], by_hand(seen, [DECAY] * 2), rtol=2e-6
    )


def test_steps_of_several_batches_average_once():
    job = af.job(loss, optimizer=af.optim.SGD(RATE), ema=DECAY, accumulate=2)
    trained, given = model(), batches(6)
    seen = stepped(job, trained, [given[i : i + 2] for i in (0, 2, 4)])
    np.testing.assert_allclose(
        job.averages(trained)["weight"], by_hand(seen, [DECAY] * 2), rtol=2e-6
    )


def test_what_is_not_trained_has_no_average():
    job = af.job(loss, optimizer=af.optim.SGD(RATE), ema=DECAY, trainable="weight")
    trained = model()
    job.step(trained, *batches(1))
    assert [*job.averages(trained)] == ["weight"]


def source(given):
    return af.data.from_iterable(
        lambda: iter(given * 9), {"x": TensorType(DType.FLOAT32, (4, 3))}, fingerprint="given"
    )


def test_a_broken_step_leaves_averages_and_their_count():
    broken = batches(4)
    broken[0]["x"][:] = np.nan
    broken[2]["x"][:] = np.nan
    whole = [broken[1], broken[3]]
    job = af.job(loss, optimizer=af.optim.SGD(RATE), ema=DECAY)
    got = job.fit(model(), source(broken), steps=4, on_nan="skip")
    want = job.fit(model(), source(whole), steps=2)
    np.testing.assert_array_equal(got.averages["weight"], want.averages["weight"])


def test_an_evaluation_reads_the_averages_and_a_resumed_run_goes_on_with_them(tmp_path):
    job = af.job(loss, optimizer=af.optim.AdamW(RATE), ema=DECAY)
    valid = af.job(loss, train=False)
    given = batches(3)
    watched = af.Evaluation(valid, source(given), every=3, batches=1, ema=True)
    got = job.fit(model(), source(given), steps=6, evaluation=watched)
    halves = {"checkpoint": tmp_path / "run", "every": 3}
    first = job.fit(model(), source(given), steps=3, **halves)
    last = job.fit(model(), source(given), steps=6, **halves)
    np.testing.assert_array_equal(got.averages["weight"], last.averages["weight"])
    for averages, (_, means) in zip((first.averages, last.averages), got.evaluations, strict=True):
        averaged = model()
        averaged.load(averages)
        want = valid.step(averaged, given[0])
        assert means["output"] == pytest.approx(float(want["output"]), rel=1e-6)


def test_what_cannot_be_is_an_error_with_the_users_line():
    train, valid = af.job(loss, optimizer=af.optim.SGD(RATE)), af.job(loss, train=False)
    watched = af.Evaluation(valid, source(batches(1)), every=1, batches=1, ema=True)
    with raises(CompileError):
        train.fit(model(), source(batches(1)), steps=1, evaluation=watched)
    with raises(CompileError):
        af.job(loss, optimizer=af.optim.SGD(RATE), ema=1.0)
    with raises(CompileError):
        af.job(loss, train=False, ema=0.9)
    with raises(CompileError):
        af.optim.EMA(warmup=-1.0)
