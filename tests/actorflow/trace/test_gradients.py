"""Gradients as tensors of a job, against formulas."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, TensorType

X = np.random.default_rng(0).normal(size=(3, 4))


def f64(*shape):
    return TensorType(DType.FLOAT64, shape)


def test_a_gradient_has_the_form_of_what_it_is_taken_by(traced, evaluate):
    def slope(x):
        return af.grad((x * x * x).sum(), x)

    np.testing.assert_allclose(evaluate(traced(slope, x=f64(3, 4)), x=X), 3 * X**2)

    def of_two(x):
        one, other = af.grad((x.sin() * x).sum(), [x, x])
        return one + other

    graph = traced(of_two, x=f64(3, 4))
    np.testing.assert_allclose(evaluate(graph, x=X), 2 * (np.cos(X) * X + np.sin(X)))

    def by_name(x):
        return af.grad(x.square().sum(), {"x": x})["x"]

    np.testing.assert_allclose(evaluate(traced(by_name, x=f64(3, 4)), x=X), 2 * X)


def test_gradients_are_differentiated_again(traced, evaluate):
    def third(x):
        y = (x**5.0).sum()
        for _ in range(3):
            y = af.grad(y, x).sum()
        return af.grad(y, x)

    x = np.abs(X) + 0.5
    np.testing.assert_allclose(evaluate(traced(third, x=f64(3, 4)), x=x), 120 * x, rtol=1e-12)


def test_what_flows_into_outputs_can_be_said(traced, evaluate):
    def weighted(x, g):
        return af.grad([x.square(), x.sum()], x, [g, None])

    g = np.random.default_rng(1).normal(size=(3, 4))
    graph = traced(weighted, x=f64(3, 4), g=f64(3, 4))
    np.testing.assert_allclose(evaluate(graph, x=X, g=g), 2 * X * g + 1)


def test_one_output_that_comes_twice_counts_twice(traced, evaluate):
    def twice(x):
        y = x.square().sum()
        return af.grad([y, y], x)

    np.testing.assert_allclose(evaluate(traced(twice, x=f64(3, 4)), x=X), 4 * X)


def test_a_value_in_between_has_a_gradient(traced, evaluate):
    def between(x):
        middle = x * 3.0
        return af.grad(middle.square().sum(), middle)

    np.testing.assert_allclose(evaluate(traced(between, x=f64(3, 4)), x=X), 6 * X)


def test_an_input_that_nothing_depends_on_is_an_error_or_none(traced):
    def unused(x, y):
        assert af.grad(x.sum(), [x, y], allow_unused=True)[1] is None
        return af.grad(x.sum(), [x, y])[0]

    with raises(CompileError):
        traced(unused, x=(2,), y=(2,))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: af.grad(x, x),
        lambda x: af.grad(x.sum(), 3),
        lambda x: af.grad([], x),
        lambda x: af.grad(x.sum(), [x, "x"]),
        lambda x: af.grad(x.sum().to("int32"), x),
        lambda x: af.grad(x, x, [x, x]),
        lambda x: af.grad(x, x, x[:1]),
        lambda x: af.grad(x.detach().sum(), x),
    ],
)
def test_wrong_arguments_are_named_with_the_users_line(wrong, traced):
    with raises(CompileError):
        traced(wrong, x=(2,))


def test_outside_of_a_job_there_is_nothing_to_differentiate():
    with raises(CompileError):
        af.grad(None, None)


class Critic(nn.Module):
    def __init__(self):
        self.hidden, self.out = nn.Linear(4, 6), nn.Linear(6, 1, bias=False)

    def __call__(self, x):
        return self.out(af.tanh(self.hidden(x)))


def begun(model):
    """Give a model values of its own; return them in float64."""
    rng = np.random.default_rng(4)
    own = {n: rng.normal(size=p.shape).astype(np.float32) for n, p in model.named_parameters()}
    model.load(own)
    return {name: array.astype(np.float64) for name, array in own.items()}


def test_a_gradient_penalty_trains_as_its_formula_says():
    """Gulrajani et al. (2017): the critic's slope by its input is pulled to 1."""

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(critic, batch):
        slope = af.grad(critic(batch.x).sum(), batch.x)
        norms = (slope.square().sum(1) + 1e-12).sqrt()
        return (norms - 1.0).square().mean()

    def penalty(state):
        hidden = np.tanh(x @ state["hidden.weight"].T + state["hidden.bias"])
        slope = ((1 - hidden**2) * state["out.weight"]) @ state["hidden.weight"]
        return np.mean((np.sqrt((slope**2).sum(1) + 1e-12) - 1) ** 2)

    x = np.random.default_rng(2).normal(size=(5, 4))
    critic = Critic()

    before = begun(critic)
    loss = train.step(critic, {"x": x.astype(np.float32)})["loss"]
    train.close(critic)
    assert loss == pytest.approx(penalty(before), rel=1e-5)
    for name, array in critic.state().items():
        for place in np.ndindex(array.shape):
            sides = []
            for step in (1e-5, -1e-5):
                moved = before | {name: before[name].copy()}
                moved[name][place] += step
                sides.append(penalty(moved))
            slope = (sides[0] - sides[1]) / 2e-5
            assert array[place] == pytest.approx(before[name][place] - 0.1 * slope, abs=2e-5)


def test_the_gradients_of_a_model_are_its_update():
    @af.job(optimizer=af.optim.SGD(1.0))
    def train(model, batch):
        loss = model(batch.x).square().mean()
        grads = af.grad(loss, model)
        assert [*grads] == [name for name, _ in model.named_parameters()]
        squares = [g.square().sum() for g in grads.values()]
        return {"loss": loss, "norm": (squares[0] + squares[1] + squares[2]).sqrt()}

    critic, x = Critic(), np.random.default_rng(3).normal(size=(5, 4)).astype(np.float32)
    before = begun(critic)
    norm = train.step(critic, {"x": x})["norm"]
    train.close(critic)
    change = [before[name] - after for name, after in critic.state().items()]
    assert norm == pytest.approx(
        np.sqrt(sum([(c.astype(float) ** 2).sum() for c in change])), rel=1e-5
    )
