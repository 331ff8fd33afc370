"""Normalisations and losses come to what a user comes to who writes them out of primitives.

Values agree to two units in the last place of the largest number of a result, gradients, which add
terms of both signs along a row, to five.
"""

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actorflow.nn.parameter import Parameter

ROWS, CLASSES = 12, 40
EPS = 1e-5


def centred(x, axes):
    return x - x.mean(axes, keepdims=True)


def normal(x, axes):
    d = centred(x, axes)
    return d / (af.square(d).mean(axes, keepdims=True) + EPS).sqrt()


def shifted(x):
    return x - x.amax(-1, keepdims=True)


def log_softmax(x):
    s = shifted(x)
    return s - s.exp().sum(-1, keepdims=True).log()


def picked(x, y):
    return x.gather(1, y.reshape(-1, 1)).reshape(-1)


def smoothed(x, y):
    logs = log_softmax(x)
    return (picked(logs, y) * -0.9 - logs.mean(-1) * 0.1).mean()


def weighted(x, y, w):
    own = af.embedding(y, w.reshape(-1, 1)).reshape(-1)
    return (picked(log_softmax(x), y) * -own).sum() / own.sum()


def groups(x):
    return normal(x.reshape(ROWS, 4, -1), (2,)).reshape(x.shape)


def unit(x):
    return x / af.square(x).sum(-1, keepdims=True).sqrt()


W = np.linspace(0.5, 2, CLASSES, dtype=np.float32)
NORMS = {
    "layer_norm": (lambda x: af.layer_norm(x, (CLASSES,)), lambda x: normal(x, (-1,))),
    "rms_norm": (
        lambda x: af.rms_norm(x, (CLASSES,), eps=EPS),
        lambda x: x / (af.square(x).mean(-1, keepdims=True) + EPS).sqrt(),
    ),
    "group_norm": (lambda x: af.group_norm(x, 4), groups),
    "instance_norm": (
        lambda x: af.instance_norm(x.reshape(ROWS, 4, -1)),
        lambda x: normal(x.reshape(ROWS, 4, -1), (2,)),
    ),
    "softmax": (af.softmax, lambda x: shifted(x).exp() / shifted(x).exp().sum(-1, keepdims=True)),
    "log_softmax": (af.log_softmax, log_softmax),
    "normalize": (af.normalize, unit),
    "var": (lambda x: x.var(-1), lambda x: af.square(centred(x, -1)).sum(-1) / (CLASSES - 1)),
    "std": (
        lambda x: x.std(-1),
        lambda x: (af.square(centred(x, -1)).sum(-1) / (CLASSES - 1)).sqrt(),
    ),
}
LOSSES = {
    "cross_entropy": (
        lambda x, y: af.cross_entropy(x, y),
        lambda x, y: -picked(log_softmax(x), y).mean(),
    ),
    "cross_entropy of each": (
        lambda x, y: af.cross_entropy(x, y, reduction="none"),
        lambda x, y: -picked(log_softmax(x), y),
    ),
    "cross_entropy, smoothed": (
        lambda x, y: af.cross_entropy(x, y, label_smoothing=0.1),
        smoothed,
    ),
    "cross_entropy, weighted": (
        lambda x, y: af.cross_entropy(x, y, weight=W),
        lambda x, y: weighted(x, y, W + x.sum() * 0),
    ),
    "nll_loss": (
        lambda x, y: af.nll_loss(af.log_softmax(x), y),
        lambda x, y: -picked(log_softmax(x), y).mean(),
    ),
    "mse_loss": (
        lambda x, y: af.mse_loss(x, x * 0 + 0.25),
        lambda x, y: af.square(x - 0.25).mean(),
    ),
    "l1_loss": (lambda x, y: af.l1_loss(x, x * 0 + 0.25), lambda x, y: af.abs(x - 0.25).mean()),
    "huber_loss": (
        lambda x, y: af.huber_loss(x, x * 0),
        lambda x, y: af.where(af.abs(x) < 1, af.square(x) * 0.5, af.abs(x) - 0.5).mean(),
    ),
    "binary_cross_entropy_with_logits": (
        lambda x, y: af.binary_cross_entropy_with_logits(x, x * 0 + 0.25),
        lambda x, y: (af.relu(x) - x * 0.25 + (-af.abs(x)).exp().log1p()).mean(),
    ),
    "kl_div": (
        lambda x, y: af.kl_div(af.log_softmax(x), x * 0 + 0.125),
        lambda x, y: (0.125 * (float(np.log(0.125)) - log_softmax(x))).mean(),
    ),
}


class Held(nn.Module):
    """Numbers whose gradients are asked for."""

    def __init__(self):
        self.x = Parameter((ROWS, CLASSES), (("kind", "zeros"),))


def both(ways, x, y=None):
    """Return values and gradients of two functions, each in a job of its own."""
    made = []
    for way in ways:
        model, rng = Held(), np.random.default_rng(7)

        @af.job(train=False)
        def job(model, batch, way=way, rng=rng):
            value = way(model.x, batch.y) if y is not None else way(model.x)
            seed = rng.normal(size=value.shape).astype(np.float32) + batch.x.sum() * 0
            return {"value": value, "grad": af.grad((value * seed).sum(), model.x)}

        model.load({"x": x})
        labels = np.zeros(1, np.int64) if y is None else y
        out = job.step(model, {"x": np.zeros(len(labels), np.float32), "y": labels})
        made.append({name: np.asarray(array, np.float64) for name, array in out.items()})
    return made


def check(ours, written):
    for name, places in (("value", 2), ("grad", 5)):
        last = np.spacing(np.float32(np.abs(written[name]).max()))
        apart = np.abs(ours[name] - written[name]).max() / last
        assert apart <= places, f"{name}: {apart:.1f} units in the last place"


def drawn(kind):
    x = np.random.default_rng(3).normal(size=(ROWS, CLASSES)).astype(np.float32)
    return {"plain": x, "far off": x + 1000, "large": x * 1e6}[kind]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", ["plain", "large"])  # far off a mean in float32 is not exact
@pytest.mark.parametrize("name", NORMS)
def test_a_normalisation_is_what_primitives_come_to(name, kind):
    check(*both(NORMS[name], drawn(kind)))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", ["plain", "far off", "large"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_what_primitives_come_to(name, kind):
    y = np.random.default_rng(4).integers(0, CLASSES, ROWS)
    check(*both(LOSSES[name], drawn(kind), y))
