"""L-BFGS where a line search is needed, and what it refuses; `tests/oracle` holds it to torch's."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn


class Valley(nn.Module):
    """Rosenbrock's function of two parameters, of other shapes, and one that is frozen."""

    def __init__(self):
        self.a = nn.Parameter(np.float64([[-1.2]]))
        self.b = nn.Parameter(np.float64([1.0]))
        self.rest = nn.Parameter(np.float64([3.0])).freeze()


def loss_of(model):
    a, b = model.a.sum(), model.b.sum()
    return (1.0 - a) ** 2 + 100.0 * (b - a * a) ** 2 + 0.0 * model.rest.sum()


@af.job(train=False)
def evaluate(model, batch):
    loss = loss_of(model) * batch.one
    return {"loss": loss, **af.grad(loss, model)}


BATCH = {"one": np.float64(1.0)}


def test_a_line_search_goes_through_a_bent_valley():
    model, count = Valley(), 0

    def closure():
        nonlocal count
        count += 1
        return evaluate.step(model, BATCH)

    minimiser = af.optim.LBFGS(
        model, line_search_fn="strong_wolfe", max_iter=10, tolerance_change=0.0
    )
    losses = [minimiser.step(closure) for _ in range(6)]
    assert losses[0] == pytest.approx(24.2)
    np.testing.assert_array_less(np.diff(losses), 1e-12)
    np.testing.assert_allclose([model.a.data.item(), model.b.data.item()], 1.0, atol=1e-6)
    assert model.rest.data == 3.0
    assert count < 120


def test_at_the_minimum_nothing_moves_and_one_evaluation_is_enough():
    model, calls = Valley(), []
    model.load({"a": np.float64([[1.0]]), "b": np.float64([1.0]), "rest": np.float64([0.0])})
    minimiser = af.optim.LBFGS(model)
    assert minimiser.step(lambda: calls.append(0) or evaluate.step(model, BATCH)) == 0.0
    assert len(calls) == 1
    assert model.b.data == 1.0


def test_an_evaluation_that_is_no_number_is_no_step_of_a_line_search():
    model = Valley()

    def closure():
        made = dict(evaluate.step(model, BATCH))
        if abs(float(model.a.data.item())) > 1.3:
            made["loss"] = np.float64("nan")
        return made

    minimiser = af.optim.LBFGS(model, lr=100.0, line_search_fn="strong_wolfe", max_iter=30)
    assert np.isfinite([minimiser.step(closure) for _ in range(5)]).all()
    assert float(evaluate.step(model, BATCH)["loss"]) < 1e-6


@pytest.mark.parametrize(
    "function",
    [
        lambda m: af.optim.LBFGS(m, line_search_fn="armijo"),
        lambda m: af.optim.LBFGS(m, history_size=0),
        lambda m: af.optim.LBFGS(m, lr=-1.0),
        lambda m: af.optim.LBFGS(m).step(lambda: {"loss": 1.0}),
        lambda m: af.optim.LBFGS(m).step(lambda: 1.0),
    ],
)
def test_what_is_no_problem_is_refused(function):
    with raises(af.CompileError):
        function(Valley())
