"""How computed weights begin and advance; `tests/oracle` holds their values against torch's."""

import copy

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn

X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
NORM, SPECTRAL = "parametrizations.weight.", "parametrizations.weight.0."


def loss(model, batch):
    return (model(batch.x) ** 2).mean()


def unit(vector):
    return vector / np.linalg.norm(vector)


def test_a_normed_layer_begins_as_it_was():
    drawn = nn.weight_norm(nn.Linear(4, 3))
    state = drawn.init(1).state()
    g, v = state[NORM + "original0"], state[NORM + "original1"]
    np.testing.assert_allclose(g[:, 0], np.linalg.norm(v, axis=1), rtol=1e-6)
    made = af.job(lambda m, b: m.weight, train=False).step(drawn, {"x": X})["output"]
    np.testing.assert_allclose(made, v, rtol=1e-6)
    plain = nn.Linear(4, 3).init(1)
    weight = plain.weight.data
    loaded = nn.weight_norm(plain, dim=None).state()
    np.testing.assert_array_equal(loaded[NORM + "original1"], weight)
    np.testing.assert_allclose(loaded[NORM + "original0"], np.linalg.norm(weight), rtol=1e-6)


@pytest.mark.parametrize("begin", [lambda model: None, lambda model: model.init(0)])
def test_a_training_begins_with_the_norms_that_a_read_would_have_made(begin):
    job = af.job(loss, optimizer=af.optim.SGD(0.0), seed=0)
    model = nn.Sequential(nn.weight_norm(nn.Linear(4, 3)))
    begin(model)
    job.step(model, {"x": X})
    state = model.state()
    g, v = [state[f"0.{NORM}original{i}"] for i in range(2)]
    np.testing.assert_allclose(g[:, 0], np.linalg.norm(v, axis=1), rtol=1e-6)


def test_copies_of_a_layer_have_norms_of_their_own():
    layer = nn.weight_norm(nn.Linear(4, 3))
    model = nn.ModuleList([layer, copy.deepcopy(layer)]).init(0)
    state = model.state()
    for i in range(2):
        g, v = [state[f"{i}.{NORM}original{n}"] for n in range(2)]
        np.testing.assert_allclose(g[:, 0], np.linalg.norm(v, axis=1), rtol=1e-6)
    assert not np.array_equal(state[f"0.{NORM}original1"], state[f"1.{NORM}original1"])


def test_singular_vectors_advance_in_training_alone():
    layer = nn.spectral_norm(nn.Linear(4, 3, bias=False), n_power_iterations=2).init(0)
    before = layer.state()
    weight, u, v = [before[NORM + "original"], before[SPECTRAL + "_u"], before[SPECTRAL + "_v"]]
    assert u @ weight @ v == pytest.approx(np.linalg.svd(weight)[1][0], rel=1e-2)
    evaluate = af.job(lambda m, b: m(b.x), train=False)
    made = evaluate.step(layer, {"x": X})["output"]
    np.testing.assert_allclose(made, X @ weight.T / (u @ weight @ v), rtol=1e-5)
    assert np.array_equal(layer.state()[SPECTRAL + "_u"], u)
    job = af.job(loss, optimizer=af.optim.SGD(0.0))
    first = job.step(layer, {"x": X})["loss"]
    for _ in range(2):
        u = unit(weight @ v)
        v = unit(weight.T @ u)
    state = layer.state()
    np.testing.assert_allclose(state[SPECTRAL + "_u"], u, rtol=1e-5)
    np.testing.assert_allclose(state[SPECTRAL + "_v"], v, rtol=1e-5)
    assert first == pytest.approx(np.square(X @ weight.T / (u @ weight @ v)).mean(), rel=1e-5)


def test_vectors_are_divided_by_their_norm_and_have_no_buffers():
    layer = nn.spectral_norm(nn.LayerNorm(4))
    layer.load({"bias": np.zeros(4, np.float32), NORM + "original": np.float32([3, 0, 4, 0])})
    made = af.job(lambda m, b: m.weight, train=False).step(layer, {"x": X})["output"]
    np.testing.assert_allclose(made, [0.6, 0, 0.8, 0], rtol=1e-6)
    assert [*layer.named_buffers()] == []


@pytest.mark.parametrize(
    "function",
    [
        lambda: nn.weight_norm(nn.Linear(2, 2), "kernel"),
        lambda: nn.weight_norm(nn.weight_norm(nn.Linear(2, 2))),
        lambda: nn.weight_norm(nn.Linear(2, 2), dim=2),
        lambda: nn.spectral_norm(nn.ReLU()),
        lambda: nn.spectral_norm(nn.Linear(2, 2), n_power_iterations=0),
        lambda: nn.weight_norm(nn.Linear(2, 2)).weight,
    ],
)
def test_what_cannot_be_computed_is_refused(function):
    with raises(af.CompileError):
        function()
