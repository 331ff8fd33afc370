"""Random numbers follow from seed, step, call and element, and are distributed as they say."""

import math

import numpy as np
import pytest

import actorflow as af
from actorflow import nn

N = 40_000


def drawn(function, device=None, steps=1):
    """Return what each step of a job draws."""
    job = af.job(train=False, **(device or {}))(lambda model, batch: {"y": function(batch.x)})
    model = nn.Module()
    try:
        return [job.step(model, {"x": np.ones(3, np.float32)})["y"] for _ in range(steps)]
    finally:
        job.close(model)


def distance(numbers, distribution):
    """Return the statistic of Kolmogorov and Smirnov, times the root of the number of numbers."""
    ordered = np.sort(np.asarray(numbers, np.float64).reshape(-1))
    below = np.array([distribution(x) for x in ordered])
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return max((steps[1:] - below).max(), (below - steps[:-1]).max()) * math.sqrt(len(ordered))


def test_uniform_bits_are_those_of_numpys_philox_everywhere(device):
    (got,) = drawn(lambda x: af.stack([af.rand(50, 3), af.rand(50, 3)]), device)
    for number, own in enumerate(got, 1):
        bits = np.random.Philox(key=[0, number], counter=[0, 0, 0, 0])
        np.testing.assert_array_equal(own, np.random.Generator(bits).random((50, 3), np.float32))


def test_each_kind_of_number_is_distributed_as_it_says():
    def several(x):
        kinds = {"uniform": af.uniform(-1.0, 3.0, N), "normal": af.randn(N)}
        kinds["wide"] = af.normal(1.0, 2.0, N, dtype="float64").to("float32")
        kinds["integers"] = af.randint(-3, 4, N).to("float32")
        kinds["bernoulli"] = af.bernoulli(af.full((N,), 0.3))
        weights = x.reshape(1, 3) * np.array([[1, 0, 3]], np.float32)
        kinds["multinomial"] = weights.multinomial(N, True).reshape(N).to("float32")
        return af.stack(list(kinds.values()))

    (got,) = drawn(several)
    uniform, normal, wide, whole, zeros_and_ones, places = got
    assert distance(uniform, lambda x: (x + 1) / 4) < 1.95
    assert distance(normal, lambda x: math.erfc(-x / math.sqrt(2)) / 2) < 1.95
    assert distance(wide, lambda x: math.erfc(-(x - 1) / math.sqrt(8)) / 2) < 1.95
    assert {*whole} == {*range(-3, 4)}
    counts = np.bincount(whole.astype(int) + 3)
    assert ((counts - N / 7) ** 2 / (N / 7)).sum() < 22.5  # chi-squared, 6 degrees: 0.1 %
    assert {*zeros_and_ones} == {0.0, 1.0}
    assert abs(zeros_and_ones.mean() - 0.3) < 4 * math.sqrt(0.21 / N)
    assert {*places} == {0.0, 2.0}
    assert abs((places == 2).mean() - 0.75) < 4 * math.sqrt(0.1875 / N)


def test_normal_numbers_reach_into_the_tails():
    (got,) = drawn(lambda x: af.randn(2_000_000))
    for bound in (3.0, 4.0, 4.5):
        expected = got.size * math.erfc(bound / math.sqrt(2))
        assert abs((np.abs(got) > bound).sum() - expected) < 5 * math.sqrt(expected) + 1


def test_places_are_drawn_once_where_they_are_not_put_back():
    def orders(x):
        weights = x.reshape(1, 3).broadcast_to(4000, 3) * np.array([1, 2, 5], np.float32)
        return weights.multinomial(2)

    (got,) = drawn(orders)
    assert (got[:, 0] != got[:, 1]).all()
    for place, share in enumerate((0.125, 0.25, 0.625)):
        assert abs((got[:, 0] == place).mean() - share) < 4 * math.sqrt(share * (1 - share) / 4000)


def test_bad_arguments_are_told():
    for function, words in (
        (lambda x: af.randint(3, 3, 5), "randint needs up to"),
        (lambda x: af.rand(3, dtype="int32"), "float32 or float64"),
        (lambda x: x.multinomial(4), "up to its extent unless replacement=True"),
    ):
        with pytest.raises(af.CompileError, match=words):
            drawn(function)
    with pytest.raises(af.CompileError, match="outside of a job"):
        af.rand(3)


def test_steps_draw_other_numbers_and_gradients_flow_through_scales():
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        noise = af.randn(4, 3)
        return {"loss": af.square(model(batch.x) + noise).mean(), "noise": noise.sum()}

    model = nn.Linear(3, 3)
    data = {"x": np.ones((4, 3), np.float32)}
    try:
        made = [train.step(model, data) for _ in range(2)]
    finally:
        train.close(model)
    assert made[0]["noise"] != made[1]["noise"]
