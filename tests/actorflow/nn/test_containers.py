"""Containers of modules, losses as layers, and parameters of two names."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn


def out(model, function, **batch):
    job = af.job(train=False)(lambda model, batch: {"y": function(model, batch)})
    return job.step(model, batch)["y"]


def test_containers_name_parameters_as_torch_does_and_run_in_order():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Flatten(), nn.Identity())
    assert [path for path, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    x = np.ones((2, 3, 4), np.float32)
    rng = np.random.default_rng(0)
    state = {
        path: rng.normal(size=p.shape).astype(np.float32) for path, p in model.named_parameters()
    }
    model.load(state)
    y = out(model, lambda m, b: m(b.x), x=x)
    expected = np.maximum(x @ state["0.weight"].T + state["0.bias"], 0).reshape(2, 18)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert len(model[:2]) == 2
    assert isinstance(model[-1], nn.Identity)


def test_lists_and_dicts_of_modules_are_parts_of_the_model():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(2, 2)]).append(nn.Linear(2, 3, bias=False))
    model.heads = nn.ModuleDict({"left": nn.Linear(3, 1)})
    assert [*model.heads] == ["left"]
    assert [path for path, _ in model.named_parameters()] == [
        *("blocks.0.weight", "blocks.0.bias", "blocks.1.weight"),
        *("heads.left.weight", "heads.left.bias"),
    ]
    with raises(af.CompileError):
        model.blocks.append(lambda x: x)


def test_a_list_or_dict_that_is_made_with_its_type_holds_its_items_alone():
    layers = nn.ModuleList[nn.Linear]([nn.Linear(1, 1)])
    assert len(layers) == len(nn.ModuleDict[nn.Linear]({"a": layers[0]})) == 1
    assert [path for path, _ in layers.named_parameters()] == ["0.weight", "0.bias"]


def test_a_parameter_of_two_names_is_one_and_gets_both_gradients():
    model = nn.Module()
    model.emb, model.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    model.head.weight = model.emb.weight
    assert [path for path, _ in model.named_parameters()] == ["emb.weight"]

    @af.job(optimizer=af.optim.SGD(1.0))
    def train(model, batch):
        return (model.head(model.emb(batch.x)) * batch.c).sum()

    x, c = np.array([1, 3], np.int64), np.ones((2, 5), np.float32)
    model.emb.weight.data = w = np.arange(15, dtype=np.float32).reshape(5, 3)
    train.step(model, {"x": x, "c": c})
    expected = np.tile(w[x].sum(0), (5, 1))
    np.add.at(expected, x, np.tile(w.sum(0), (2, 1)))
    np.testing.assert_allclose(model.emb.weight.data, w - expected, rtol=1e-5)


def test_losses_hold_options_and_refuse_unknown_ones():
    loss = nn.CrossEntropyLoss(ignore_index=-1, reduction="sum")
    x, y = np.zeros((3, 4), np.float32), np.array([0, -1, 2])
    got = out(nn.Module(), lambda m, b: loss(b.x, b.y), x=x, y=y)
    assert got == pytest.approx(2 * np.log(4.0))
    with raises(af.CompileError):
        nn.MSELoss(margin=1.0)


def test_lists_and_dicts_of_parameters_are_parts_of_the_model():
    model, scale = nn.Module(), nn.Parameter((2,), "ones")
    model.rows = nn.ParameterList([np.ones(2, np.float32), scale]).append(nn.Parameter((1, 2)))
    model.named = nn.ParameterDict({"again": scale, "b": np.zeros(1, np.float32)})
    paths = [path for path, _ in model.named_parameters()]
    assert paths == ["rows.0", "rows.1", "rows.2", "named.b"]
    assert model.named["again"] is model.rows[1]
    assert [name for name, _ in model.named.items()] == ["again", "b"]
    assert [p.shape for p in model.rows[:2]] == [(2,), (2,)]
    y = out(model, lambda m, b: sum([row * b.x for row in m.rows]), x=np.float32([3, 4]))
    np.testing.assert_array_equal(y, [[6, 8]])


@pytest.mark.parametrize(
    "function",
    [
        lambda: nn.ParameterList([nn.Linear(1, 1)]),
        lambda: nn.ParameterList(3),
        lambda: nn.ParameterDict([1.0]),
        lambda: nn.ParameterDict({"a": "text"}),
        lambda: nn.ParameterDict({1: np.ones(1, np.float32)}),
    ],
)
def test_what_is_no_parameter_is_refused(function):
    with raises(af.CompileError):
        function()
