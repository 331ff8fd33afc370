"""What modules return, captured and replaced from outside of a model."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError

X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
BATCH = {"x": X}


class Block(nn.Module):
    def __init__(self):
        self.attn, self.mlp = nn.Linear(6, 6), nn.Linear(6, 6)

    def __call__(self, x):
        x = x + af.tanh(self.attn(x))
        return x + af.tanh(self.mlp(x))


class Net(nn.Module):
    def __init__(self):
        self.blocks = [Block() for _ in range(3)]
        self.head, self.unused = nn.Linear(6, 2), nn.Linear(6, 2)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@af.job(train=False)
def evaluate(model, batch):
    return model(batch.x)


@pytest.fixture
def model():
    made = Net()
    evaluate.step(made, BATCH)  # from here on it has values
    evaluate.close(made)
    return made


def by_numpy(state, ablated=()):
    """Return what each module of the model returns, by path."""
    outputs, x = {}, X.astype(np.float64)

    def linear(path, x):
        y = x @ state[f"{path}.weight"].T.astype(np.float64) + state[f"{path}.bias"]
        outputs[path] = y * 0 if path in ablated else y
        return outputs[path]

    for i in range(3):
        for name in ("attn", "mlp"):
            x = x + np.tanh(linear(f"blocks.{i}.{name}", x))
        outputs[f"blocks.{i}"] = x
    linear("head", x)
    return outputs


def assert_close(outputs, expected, paths):
    assert list(outputs) == paths
    for path in paths:
        np.testing.assert_allclose(outputs[path], expected[path], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("patterns", "paths"),
    [
        ("blocks.*.attn", ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]),
        (["blocks.1*", "head", "!*.mlp"], ["blocks.1.attn", "blocks.1", "head"]),
    ],
)
def test_modules_give_what_they_return_by_their_paths_in_the_order_of_calls(model, patterns, paths):
    before = model.state()
    outputs = af.capture(evaluate, patterns).step(model, BATCH)
    assert_close(outputs, by_numpy(before), paths)
    assert all(model.state()[name] is array for name, array in before.items())


def test_a_training_job_is_captured_without_training(model):
    train = af.job(lambda m, b: (m(b.x) ** 2.0).mean(), optimizer=af.optim.SGD(0.1), accumulate=2)
    before = model.state()
    outputs = af.capture(train, "head").step(model, BATCH)
    assert_close(outputs, by_numpy(before), ["head"])
    np.testing.assert_array_equal(model.state()["head.weight"], before["head.weight"])


def test_a_module_that_is_called_again_has_a_number_and_several_results_have_places():
    class Pair(nn.Module):
        def __call__(self, x):
            return x + 1.0, {"twice": x * 2.0}

    class Root(nn.Module):
        def __init__(self):
            self.pair = Pair()

        def __call__(self, x):
            once = self.pair(x)[0]
            return self.pair(once)[1]["twice"]

    outputs = af.capture(evaluate, "pair").step(Root(), BATCH)
    assert list(outputs) == ["pair[0]", "pair[1]['twice']", "pair#2[0]", "pair#2[1]['twice']"]
    np.testing.assert_allclose(outputs["pair#2[0]"], X + 2.0)


def test_a_module_whose_class_calls_that_of_its_parent_returns_once():
    class Twice(nn.Linear):
        def __call__(self, x):
            return super().__call__(x) * 2.0

    class Root(nn.Module):
        def __init__(self):
            self.layer = Twice(6, 2)

        def __call__(self, x):
            return self.layer(x) + 1.0

    root = Root()
    outputs = af.capture(evaluate, "*").step(root, BATCH)
    whole = evaluate.step(root, BATCH)["output"]
    assert list(outputs) == ["layer"]
    np.testing.assert_allclose(outputs["layer"] + 1.0, whole, rtol=1e-6)


def test_a_patch_replaces_results_in_a_region_of_a_job(model):
    @af.job(train=False)
    def compared(model, batch):
        with af.patch("blocks.1.*", lambda y: y * 0.0):
            ablated = model(batch.x)
        return {"whole": model(batch.x), "ablated": ablated}

    outputs = compared.step(model, BATCH)
    for name, ablated in (("whole", ()), ("ablated", ("blocks.1.attn", "blocks.1.mlp"))):
        expected = by_numpy(model.state(), ablated)["head"]
        np.testing.assert_allclose(outputs[name], expected, rtol=1e-5, atol=1e-5)


def test_a_patched_job_is_another_job_on_the_same_model(model):
    ablated = af.patch("blocks.0.attn", lambda y: af.zeros(y.shape))(evaluate)
    expected = by_numpy(model.state(), ("blocks.0.attn",))
    np.testing.assert_allclose(ablated.step(model, BATCH)["output"], expected["head"], rtol=1e-4)
    outputs = af.capture(ablated, "blocks.2").step(model, BATCH)
    np.testing.assert_allclose(outputs["blocks.2"], expected["blocks.2"], rtol=1e-5)


def test_a_patch_by_other_numbers_traces_its_job_again(model):
    factor = 1.0
    scaled = af.patch("head", lambda y: y * factor)(evaluate)
    whole = scaled.step(model, BATCH)["output"]
    factor = 3.0
    np.testing.assert_allclose(scaled.step(model, BATCH)["output"], whole * 3.0, rtol=1e-6)


def test_a_training_goes_through_a_patch(model):
    @af.job(optimizer=af.optim.SGD(0.1), trainable=["head.*"])
    def train(model, batch):
        with af.patch("blocks.*.attn", lambda y: y + 0.1):
            return (model(batch.x) ** 2.0).mean()

    before = model.state()["head.weight"]
    train.step(model, BATCH)
    assert np.abs(model.state()["head.weight"] - before).max() > 0


MISUSES = {
    "capture of no module": lambda m: af.capture(evaluate, "blocks.*.atn").step(m, BATCH),
    "capture of one that is not called": lambda m: af.capture(evaluate, ["head", "unused"]).step(
        m, BATCH
    ),
    "capture of no job": lambda m: af.capture(evaluate.function, "head"),
    "capture of no pattern": lambda m: af.capture(evaluate, 3),
    "patch of no module": lambda m: af.patch("blok.1", lambda y: y)(evaluate).step(m, BATCH),
    "patch of one that is not called": lambda m: af.patch("unused", lambda y: y)(evaluate).step(
        m, BATCH
    ),
    "patch by no function": lambda m: af.patch("head", 0.0),
    "patch by another form": lambda m: af.patch("head", lambda y: (y, y))(evaluate).step(m, BATCH),
    "patch by another type": lambda m: af.patch("head", lambda y: y[:, :1])(evaluate).step(
        m, BATCH
    ),
    "patch outside of a job": lambda m: af.patch("head", lambda y: y).__enter__(),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuses_are_errors(model, misuse):
    with raises(CompileError):
        MISUSES[misuse](model)


def test_what_a_loop_calls_cannot_be_captured_and_can_be_patched():
    class Cell(nn.Module):
        def __call__(self, x):
            return x + 1.0

    class Loop(nn.Module):
        def __init__(self):
            self.cell = Cell()

        def __call__(self, x):
            return af.scan(lambda carry, row: (self.cell(carry), None), x[0], x)[0]

    with raises(CompileError):
        af.capture(evaluate, "cell").step(Loop(), BATCH)
    ablated = af.patch("cell", lambda y: y - 1.0)(evaluate)
    np.testing.assert_allclose(ablated.step(Loop(), BATCH)["output"], X[0], rtol=1e-5)
