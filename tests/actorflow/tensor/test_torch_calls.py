"""Calls as users of torch write them do what they say, or are told what to write."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
import actorflow.nn.functional as F  # noqa: N812  # as users of torch write it
from actorflow import nn
from compiler.contract.errors import CompileError

X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)

CLEAR = {
    "sum": (lambda x: x.sum(1, True), X.sum(1, keepdims=True)),
    "mean": (lambda x: af.mean(x, 0, True), X.mean(0, keepdims=True)),
    "max": (lambda x: x.max(1, True).values, X.max(1, keepdims=True)),
    "argmax": (lambda x: x.argmax(1, True).float(), X.argmax(1)[:, None]),
    "amax": (lambda x: af.amax(x, 1, True), X.max(1, keepdims=True)),
    "logsumexp": (lambda x: x.logsumexp(1, True), np.log(np.exp(X).sum(1, keepdims=True))),
    "unbiased": (lambda x: x.var(1, unbiased=False), X.var(1)),
    "unbiased by place": (lambda x: af.var(x, 1, False), X.var(1)),
    "both by place": (lambda x: x.std(1, True, True), X.std(1, ddof=1, keepdims=True)),
    "input": (lambda x: af.sum(input=x, dim=1), X.sum(1)),
    "dtype of a sum": (lambda x: x.sum(1, dtype="float64"), X.astype(np.float64).sum(1)),
    "no dtype": (lambda x: x.sum(1, dtype=None), X.sum(1)),
    "a module of torch's name": (lambda x: F.relu(x), np.maximum(X, 0)),
}


@pytest.mark.parametrize("case", CLEAR)
def test_what_is_clear_is_done(case, traced_outputs):
    function, expected = CLEAR[case]
    y = traced_outputs(function)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert y.dtype == (np.float64 if "dtype of" in case else np.float32)


@pytest.fixture
def traced_outputs():
    def outputs(function):
        class Model(nn.Module):
            def __call__(self, x):
                return function(x)

        job = af.job(lambda model, batch: {"y": model(batch.x)}, train=False)
        return job.step(Model(), {"x": X})["y"]

    return outputs


UNCLEAR = {
    "dropout": lambda x: af.dropout(x, 0.5, training=True),
    "dropout by place": lambda x: af.dropout(x, 0.5, True),
    "inplace": lambda x: af.relu(x, inplace=True),
    "out": lambda x: af.exp(x, out=x),
    "device": lambda x: af.zeros(2, device="cuda"),
    "requires_grad": lambda x: af.ones(2, requires_grad=True),
    "dtype": lambda x: af.relu(x, dtype="float64"),
    "a layer's dtype": lambda x: nn.Linear(2, 3, dtype="float64"),
    "a layer's device": lambda x: nn.Linear(2, 3, device="cuda"),
    "an inplace layer": lambda x: nn.ReLU(inplace=True),
    "an inplace dropout": lambda x: nn.Dropout(0.5, inplace=True),
    "a loss's size_average": lambda x: nn.MSELoss(size_average=True),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_what_is_not_clear_is_an_error_with_what_to_write(case, traced_outputs):
    with raises(CompileError):
        traced_outputs(UNCLEAR[case])


def test_a_layer_takes_its_bias_by_place():
    assert nn.Linear(4, 2, False).bias is None
    assert nn.Linear(4, 2, True).bias is not None


def test_what_is_no_habit_of_torch_is_pythons_to_refuse(traced_outputs):
    for wrong in (
        lambda x: x.sum(1, 3),
        lambda x: x.sum(1, True, True),
        lambda x: x.sum(1, True, keepdim=True),
        lambda x: x.var(1, unbiased=True, correction=1),
        lambda x: af.relu(x, colour="red"),
    ):
        with pytest.raises(TypeError):
            traced_outputs(wrong)


@pytest.mark.parametrize(
    "name",
    [
        "af.optim.lr_scheduler", "af.optim.StepLR", "af.optim.LambdaLR", "af.optim.Nothing",
        "af.data.DataLoader", "af.data.Nothing", "af.manual_seed", "af.save", "af.float32",
        "af.cuda", "af.Generator", "nn.Linear(1, 1).children", "nn.Linear(1, 1).modules",
        "nn.Linear(1, 1).apply", "nn.Linear(1, 1).double", "nn.Linear(1, 1).state_dict",
    ],
)  # fmt: skip
def test_names_of_torch_are_errors_with_what_to_write(name):
    with raises(AttributeError):
        eval(name, {"af": af, "nn": nn})


def test_a_tensor_for_a_parameter_is_told_to_be_an_array():
    with raises(CompileError):
        nn.Parameter(af.zeros(3, 4))
