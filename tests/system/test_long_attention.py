"""Masked attention and dropout of weights through whole jobs: memory, numbers and errors."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError


class Attending(nn.Module):
    """Attention of 4 heads of queries to 2 of keys, of which some are padding."""

    def __init__(self, width=16, dropout=0.0):
        self.q, self.k, self.v = [nn.Linear(width, size) for size in (width, 8, 8)]
        self.dropout = dropout

    def __call__(self, x, seen):
        b, t, _ = x.shape
        q, k, v = [
            project(x).reshape(b, t, -1, 4).permute(0, 2, 1, 3)
            for project in (self.q, self.k, self.v)
        ]
        return af.scaled_dot_product_attention(
            q, k, v, seen.reshape(b, 1, 1, t), self.dropout, enable_gqa=True
        )


def batch(length):
    rng = np.random.default_rng(length)
    x = rng.standard_normal((2, length, 16)).astype(np.float32)
    return {"x": x, "seen": np.arange(length) < np.array([[length], [length // 2]])}


def types_of(data):
    return {key: af.TensorType(af.DType(x.dtype.name), x.shape) for key, x in data.items()}


def peak_bytes(length, dropout):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, data):
        return (model(data.x, data.seen) ** 2).mean()

    model = Attending(dropout=dropout)
    try:
        return train.compile(model, types_of(batch(length))).memory[0].peak_bytes
    finally:
        train.close(model)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_memory_of_masked_attention_grows_with_the_length_not_with_its_square(dropout):
    short, long = [peak_bytes(length, dropout) for length in (1024, 4096)]
    assert long < 4.5 * short
    assert long < 2 * 4 * 4096 * 4096  # less than the scores of two heads


def test_dropped_weights_are_those_of_the_stream_of_the_seed():
    """Keys of one length and values of ones by place show the weights themselves."""

    class Model(nn.Module):
        def __init__(self):
            self.scale = nn.Parameter((1,), (("kind", "ones"),))

        def __call__(self, x):
            values = af.eye(6).broadcast_to(2, 6, 6)
            return af.scaled_dot_product_attention(x * self.scale, x, values, dropout_p=0.4)

    @af.job(optimizer=af.optim.SGD(0.0))
    def train(model, data):
        weights = model(data.x)
        return {"loss": weights.sum(), "weights": weights}

    model = Model()
    data = {"x": np.zeros((2, 6, 4), np.float32)}
    try:
        first, second = [train.step(model, data)["weights"] for _ in range(2)]
    finally:
        train.close(model)
    for weights in (first, second):
        kept = weights > 0
        np.testing.assert_allclose(weights[kept], 1 / (6 * 0.6), rtol=1e-5)
        assert 0.3 < kept.mean() < 0.9
    assert (first != second).any()


WRONG = {
    "heads that do not divide": lambda: nn.MultiheadAttention(6, 4),
    "a bias of keys": lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
    "an activation": lambda: nn.TransformerEncoderLayer(4, 2, activation="tanh"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_layer_that_cannot_be_says_so(name):
    make = WRONG[name]
    with raises(CompileError):
        make()


@pytest.mark.parametrize(
    "mask", [{"attn_mask": np.zeros((3, 5), bool)}, {"key_padding_mask": np.zeros((4, 2), bool)}]
)
def test_a_mask_of_another_shape_is_an_error_that_says_which(mask):
    layer = nn.MultiheadAttention(4, 2, batch_first=True)

    @af.job(train=False)
    def run(model, data):
        return {"y": model(data.q, data.k, data.k, **mask)[0]}

    data = {"q": np.zeros((2, 3, 4), np.float32), "k": np.zeros((2, 4, 4), np.float32)}
    with raises(CompileError):
        run.compile(layer, types_of(data))


@pytest.mark.parametrize(
    ("dtype", "mask"),
    [
        ("float32", np.ones((3, 3), np.int64)),
        ("float32", np.ones((3, 4), bool)),
        ("float32", np.ones((2, 1, 3, 3), bool)),
        ("int64", np.ones((3, 3), bool)),
    ],
)
def test_a_mask_that_does_not_fit_scores_is_an_error(dtype, mask):
    @af.job(train=False)
    def run(model, data):
        return {"y": af.scaled_dot_product_attention(data.x, data.x, data.x, mask)}

    with raises(CompileError):
        run.compile(nn.Module(), {"x": af.TensorType(af.DType(dtype), (2, 3, 4))})


def test_a_stack_starts_each_layer_with_numbers_of_its_own():
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2)

    @af.job(optimizer=af.optim.SGD(0.0))
    def run(model, data):
        return model(data.x, is_causal=True).square().sum()

    try:
        run.step(stack, {"x": np.ones((3, 2, 4), np.float32)})
    finally:
        run.close(stack)
    first, second = [layer.linear1.weight.data for layer in stack.layers]
    assert (first != second).any()
    assert stack.state().keys() >= {"layers.0.self_attn.in_proj_weight", "layers.1.norm2.bias"}
