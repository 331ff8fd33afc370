"""Every layer of nn, eagerly and as a plan without fusion: outputs and gradients, the same bits."""

from functools import partial

import numpy as np
import pytest
from changed_passes import plan_without_fusion

import actorflow as af
from actorflow import nn

pytestmark = pytest.mark.host("eager mode computes on the host")

RNG = np.random.default_rng(3)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def ids(below, *shape):
    return RNG.integers(0, below, shape)


X1, X2, X3 = floats(2, 4, 12), floats(2, 4, 8, 8), floats(1, 4, 4, 4, 4)
ROWS, SEQUENCE = floats(3, 6), floats(5, 2, 8)
SHARES = (RNG.random((3, 6)) * 0.8 + 0.1).astype(np.float32)
SIGNS = np.where(floats(3, 6) > 0, 1, -1).astype(np.float32)
KIND = {1: X1, 2: X2, 3: X3}


def of_ranks(name, *arguments, **named):
    return {
        f"{name}{r}d": (lambda f=name, r=r: getattr(nn, f"{f}{r}d")(*arguments, **named), KIND[r])
        for r in KIND
    }


ELEMENTS = (
    "ReLU", "ReLU6", "LeakyReLU", "PReLU", "SiLU", "Mish", "Sigmoid", "Tanh", "Tanhshrink",
    "Softplus", "Softsign", "Softshrink", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh",
    "LogSigmoid", "ELU", "CELU", "SELU", "GELU", "Identity", "Dropout", "AlphaDropout", "Flatten",
    "GLU",
)  # fmt: skip

LAYERS = {
    **{name: (getattr(nn, name), ROWS) for name in ELEMENTS if hasattr(nn, name)},
    **{
        kind.__name__: (partial(kind, -1), ROWS)
        for kind in (nn.Softmax, nn.LogSoftmax, nn.Softmin)
    },
    **of_ranks("Conv", 4, 3, 3, padding=1), **of_ranks("ConvTranspose", 4, 3, 3, stride=2),
    **of_ranks("MaxPool", 2), **of_ranks("AvgPool", 2),
    **of_ranks("AdaptiveAvgPool", 2), **of_ranks("AdaptiveMaxPool", 2),
    **of_ranks("BatchNorm", 4), **of_ranks("InstanceNorm", 4, affine=True), **of_ranks("Dropout"),
    **of_ranks("ConstantPad", 1, 2.0),
    **of_ranks("ZeroPad", 1), **of_ranks("ReflectionPad", 1),
    **of_ranks("ReplicationPad", 1), **of_ranks("CircularPad", 1),
    "CosineSimilarity": (nn.CosineSimilarity, ROWS, floats(3, 6)),
    "PairwiseDistance": (nn.PairwiseDistance, ROWS, floats(3, 6)),
    "weight_norm": (lambda: nn.weight_norm(nn.Linear(6, 5)), ROWS),
    "spectral_norm": (lambda: nn.spectral_norm(nn.Linear(6, 5)), ROWS),
    "Transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16), SEQUENCE, SEQUENCE),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), X2),
    "LayerNorm": (lambda: nn.LayerNorm(6), ROWS),
    "RMSNorm": (lambda: nn.RMSNorm(6), ROWS),
    "Linear": (lambda: nn.Linear(6, 5), ROWS),
    "Bilinear": (lambda: nn.Bilinear(6, 6, 4), ROWS, floats(3, 6)),
    "Embedding": (lambda: nn.Embedding(9, 5), ids(9, 3, 4)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(9, 5), ids(9, 3, 4)),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), X2),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), X2),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), X2),
    "Fold": (lambda: nn.Fold((4, 4), 2, stride=2), floats(2, 8, 4)),
    "Unfold": (lambda: nn.Unfold(3), X2),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 2)), X2),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), X2),
    "Threshold": (lambda: nn.Threshold(0.1, 2.0), ROWS),
    "Sequential": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), ROWS),
    "RNN": (lambda: nn.RNN(8, 5), SEQUENCE),
    "GRU": (lambda: nn.GRU(8, 5, num_layers=2), SEQUENCE),
    "LSTM": (lambda: nn.LSTM(8, 5, bidirectional=True), SEQUENCE),
    **{
        kind.__name__: (partial(kind, 6, 4), ROWS)
        for kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
    },
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2), SEQUENCE, SEQUENCE, SEQUENCE),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16), SEQUENCE),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(8, 2, 16), SEQUENCE, SEQUENCE),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2),
        SEQUENCE,
    ),
    "TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 1),
        SEQUENCE,
        SEQUENCE,
    ),
    "MLP": (lambda: nn.MLP(8), SEQUENCE),
    "SwiGLU": (lambda: nn.SwiGLU(8, 12), SEQUENCE),
    "Attention": (lambda: nn.Attention(8, heads=2), SEQUENCE),
    "TransformerBlock": (lambda: nn.TransformerBlock(8, heads=2), SEQUENCE),
    "CTCLoss": (
        nn.CTCLoss, floats(7, 2, 5), ids(4, 2, 3) + 1, np.array([7, 6]), np.array([3, 2])
    ),
    "L1Loss": (nn.L1Loss, ROWS, SHARES), "MSELoss": (nn.MSELoss, ROWS, SHARES),
    "SmoothL1Loss": (nn.SmoothL1Loss, ROWS, SHARES), "HuberLoss": (nn.HuberLoss, ROWS, SHARES),
    "BCELoss": (nn.BCELoss, SHARES, SHARES),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss, ROWS, SHARES),
    "CrossEntropyLoss": (nn.CrossEntropyLoss, ROWS, ids(6, 3)),
    "NLLLoss": (nn.NLLLoss, ROWS, ids(6, 3)),
    "KLDivLoss": (nn.KLDivLoss, ROWS, SHARES), "PoissonNLLLoss": (nn.PoissonNLLLoss, ROWS, SHARES),
    "GaussianNLLLoss": (nn.GaussianNLLLoss, ROWS, floats(3, 6), SHARES),
    "SoftMarginLoss": (nn.SoftMarginLoss, ROWS, SIGNS),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss, ROWS, SIGNS),
    "MarginRankingLoss": (nn.MarginRankingLoss, ROWS, floats(3, 6), SIGNS),
    "CosineEmbeddingLoss": (nn.CosineEmbeddingLoss, ROWS, floats(3, 6), SIGNS[:, 0]),
    "TripletMarginLoss": (nn.TripletMarginLoss, ROWS, floats(3, 6), floats(3, 6)),
}  # fmt: skip


def first_tensor(made):
    """Return the one output that a gradient is taken of."""
    while isinstance(made, (tuple, list)):
        made = made[0]
    return made


def compute(model, batch):
    inputs = [batch[f"x{i}"] for i in range(model.count)]
    made = first_tensor(model.layer(*inputs))
    weight = af.cos(af.arange(made.type.num_elements, dtype="float32")).reshape(made.shape)
    loss = (made * weight).sum()
    wanted = {f"d{i}": x for i, x in enumerate(inputs) if x.dtype.is_float}
    wanted |= dict(model.layer.named_parameters())
    slopes = af.grad(loss, wanted, allow_unused=True) if wanted else {}
    slopes = {name: slope for name, slope in slopes.items() if slope is not None}
    return {"y": made, "loss": loss, **slopes}


class Holder(nn.Module):
    def __init__(self, make, count):
        self.layer, self.count = make(), count


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_bits_of_the_plan_without_fusion(name, monkeypatch):
    plan_without_fusion(monkeypatch)
    make, *arrays = LAYERS[name]
    batch = {f"x{i}": array for i, array in enumerate(arrays)}
    one, other = [Holder(make, len(arrays)) for _ in range(2)]
    sgd = af.optim.SGD(0.0)
    is_trained = bool(dict(one.named_parameters()))
    job = af.job(compute, optimizer=sgd) if is_trained else af.job(compute, train=False)
    planned = job.step(one, batch)
    eager = af.eager(compute, train=is_trained)(other, batch)
    assert list(eager) == list(planned)
    for key in eager:
        value = eager[key].numpy()
        expected = np.asarray(planned[key], value.dtype)
        np.testing.assert_array_equal(value.view(np.uint32), expected.view(np.uint32), key)
    for path, array in one.state().items():
        np.testing.assert_array_equal(other.state()[path], array, path)


KINDS = ("List", "Dict")
"""Layers that have no call of their own."""


def test_every_layer_is_tried():
    kinds = {n for n in dir(nn) if isinstance(getattr(nn, n), type)}
    layers = {n for n in kinds if issubclass(getattr(nn, n), nn.Module)}
    others = {"Module", *[f"{of}{kind}" for of in ("Module", "Parameter") for kind in KINDS]}
    assert layers - set(LAYERS) == others
