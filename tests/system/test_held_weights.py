"""Weights that a job only reads, which convolutions keep as the library likes them."""

from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.compile.prove import prove
from actors.kernels.library import onednn
from compiler.contract.errors import PlanFormatError

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(not onednn.is_available(), reason="oneDNN is not installed"),
]

EXTENT = 17


class Net(nn.Module):
    def __init__(self):
        self.first = nn.Conv2d(5, 64, 3, stride=2, padding=1)
        self.second = nn.Conv2d(64, 80, (1, 3), padding=(0, 2), dilation=(1, 2), bias=False)
        self.norm = nn.BatchNorm2d(80)

    def __call__(self, x):
        return self.norm(self.second(af.relu(self.first(x))))


@af.job(optimizer=af.optim.SGD(0.05))
def train(model, batch):
    return (model(batch.x) ** 2).mean()


@af.job(train=False)
def predict(model, batch):
    return model(batch.x)


def pictures(count, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((count, 5, EXTENT, EXTENT)).astype(np.float32)}


def spec(count):
    return {"x": af.TensorType(af.DType.FLOAT32, pictures(count)["x"].shape)}


def begun():
    """Return a model that has begun to be trained: it has statistics of its own."""
    model = Net()
    train.step(model, pictures(4, 9))
    return model


def convolved(x, weight, stride, padding, dilation):
    """Return a convolution in float64, window by window."""
    high, wide = weight.shape[2:]
    x = np.pad(x, ((0, 0), (0, 0), *[(p, p) for p in padding]))
    rows = range(0, x.shape[2] - (high - 1) * dilation[0], stride)
    columns = range(0, x.shape[3] - (wide - 1) * dilation[1], stride)
    y = np.empty((len(x), len(weight), len(rows), len(columns)))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            ends = row + (high - 1) * dilation[0] + 1, column + (wide - 1) * dilation[1] + 1
            seen = x[:, :, row : ends[0] : dilation[0], column : ends[1] : dilation[1]]
            y[:, :, i, j] = np.einsum("nckl,ockl->no", seen, weight)
    return y


def expected(state, x):
    v = {name: array.astype(np.float64) for name, array in state.items()}

    def along(name):
        return v[name][:, None, None]

    h = convolved(x.astype(np.float64), v["first.weight"], 2, (1, 1), (1, 1)) + along("first.bias")
    h = convolved(np.maximum(h, 0), v["second.weight"], 1, (0, 2), (1, 2))
    scale = along("norm.weight") / np.sqrt(along("norm.running_var") + 1e-5)
    return (h - along("norm.running_mean")) * scale + along("norm.bias")


def check(model, batch, out):
    right = expected(model.state(), batch["x"])
    np.testing.assert_allclose(next(iter(out.values())), right, rtol=1e-4, atol=1e-4)


def kept(plan):
    return [v for v in plan.variables if v.role == "packed"]


def test_the_plan_of_a_job_that_only_reads_its_weights_names_what_is_kept_of_them():
    plan = predict.compile(Net(), spec(1))
    held = kept(plan)
    assert [dict(v.init)["of"] for v in held] == ["first.weight", "second.weight"]
    least = sum([plan.views[v.view].type.size_bytes for v in held])
    assert plan.memory[0].other_variable_bytes >= least > 4 * (64 * 5 * 9 + 80 * 64 * 3)
    assert not {v.name for v in held} & {v.name for v in plan.state}


@pytest.mark.parametrize("count", [1, 3, 16])
def test_every_step_has_the_values_of_a_convolution_in_float64(count):
    model = begun()
    for seed in range(3):
        batch = pictures(count, seed)
        check(model, batch, predict.step(model, batch))


def test_what_another_job_trains_is_kept_anew():
    model, batch = begun(), pictures(1)
    before = next(iter(predict.step(model, batch).values()))
    for seed in range(2):
        train.step(model, pictures(4, seed))
        out = predict.step(model, batch)
        check(model, batch, out)
    assert np.abs(next(iter(out.values())) - before).max() > 1e-3


def test_what_is_loaded_into_the_model_is_kept_anew():
    model, other, batch = begun(), begun(), pictures(1)
    predict.step(model, batch)
    rng = np.random.default_rng(5)
    drawn = {n: a + rng.random(a.shape).astype(a.dtype) for n, a in other.state().items()}
    model.load(drawn)
    check(model, batch, predict.step(model, batch))


def test_what_is_kept_in_bfloat16_follows_the_model_too():
    """A convolution that packs bfloat16 packs what was rounded of the weights, not the weights."""
    low = af.job(train=False, precision="bf16")(lambda model, batch: model(batch.x))
    model, batch = begun(), pictures(2)

    def anew():
        other = begun()
        other.load(model.state())
        return next(iter(low.step(other, batch).values()))

    seen = [next(iter(low.step(model, batch).values()))]
    for seed in range(2):
        train.step(model, pictures(4, seed))
        seen.append(next(iter(low.step(model, batch).values())))
        np.testing.assert_array_equal(seen[-1], anew())
        exact = expected(model.state(), batch["x"])
        assert np.abs(seen[-1] - exact).max() < 0.02 * np.abs(exact).max()
    assert np.abs(seen[-1] - seen[0]).max() > 1e-2
    of = [dict(v.init)["of"] for v in kept(low.compile(begun(), spec(2)))]
    if of:  # this processor has a form for bfloat16
        assert of == ["bfloat16/first.weight", "bfloat16/second.weight"]


def test_an_evaluation_between_steps_reads_the_weights_as_they_are_trained(tmp_path):
    @af.job(train=False)
    def evaluate(model, batch):
        return (model(batch.x) ** 2).mean()

    found, states = [], []
    x = pictures(4)
    data = af.data.ArraySource(x, batch=2)
    model = Net()

    def see(step, means):
        found.append(next(iter(means.values())))
        states.append(model.state())

    valid = af.Evaluation(evaluate, af.data.ArraySource(x, batch=1), 1, 4, on_result=see)
    train.fit(model, data, steps=3, evaluation=valid, progress=False)
    right = np.mean(expected(model.state(), x["x"]) ** 2)
    assert found[-1] == pytest.approx(right, rel=1e-4)
    assert len(set(found)) == 3


def test_a_job_that_trains_or_counts_bytes_keeps_nothing():
    small = af.job(train=False, memory_budget="1GiB")(lambda model, batch: model(batch.x))
    assert kept(train.compile(Net(), spec(2))) == []
    assert kept(small.compile(Net(), spec(2))) == []


def test_a_plan_in_which_a_launch_keeps_another_variable_is_refused():
    plan = predict.compile(Net(), spec(1))
    prove(plan)
    for wrong in ("norm.weight", "second.weight", "nothing"):
        first = replace(kept(plan)[0], init=(("kind", "packed"), ("of", wrong)))
        variables = [first if v.name == first.name else v for v in plan.variables]
        with raises(PlanFormatError):
            prove(replace(plan, variables=tuple(variables)))
