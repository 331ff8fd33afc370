"""Training steps, eagerly and by the plan without fusion: the same bits, and one state."""

import numpy as np
import pytest
from changed_passes import plan_without_fusion

import actorflow as af
from actorflow import nn

pytestmark = pytest.mark.host("eager mode computes on the host")

RNG = np.random.default_rng(0)
BATCHES = [
    {
        "x": RNG.standard_normal((6, 4)).astype(np.float32),
        "y": RNG.integers(0, 3, 6),
    }
    for _ in range(4)
]

OPTIMIZERS = {
    "sgd": lambda: af.optim.SGD(0.1),
    "momentum": lambda: af.optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "damped": lambda: af.optim.SGD(0.1, momentum=0.9, dampening=0.1),
    "adam": lambda: af.optim.Adam(0.01),
    "adamw": lambda: af.optim.AdamW(af.optim.cosine(0.01, steps=10)),
    "rmsprop": lambda: af.optim.RMSprop(0.01),
    "adagrad": lambda: af.optim.Adagrad(0.01),
    "lion": lambda: af.optim.Lion(0.01),
    "lamb": lambda: af.optim.LAMB(0.01),
    "adafactor": lambda: af.optim.Adafactor(0.01),
    "muon": lambda: af.optim.Muon(0.01),
}


class Net(nn.Module):
    def __init__(self):
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.table, self.last = nn.Embedding(3, 8), nn.Linear(8, 3)

    def __call__(self, x, ids):
        h = af.gelu(self.norm(self.first(x))) + self.table(ids)
        return self.last(af.dropout(h, 0.3))


def loss_of(model, batch):
    return {"loss": af.cross_entropy(model(batch.x, batch.y), batch.y)}


def trained(steps, **options):
    """Return outputs and final state of steps, each by one of the two ways."""
    job, model = af.job(loss_of, **options), Net()
    metrics = []
    for batch, way in zip(BATCHES, steps, strict=False):
        call = job.eager_step if way == "e" else job.step
        metrics.append(call(model, batch))
    left = job._open.get(model).close()
    return metrics, model.state(), left, job.averages(model)


def same(one, other):
    assert list(one[0]) == list(other[0])
    assert one[0] == other[0]
    for mine, its in ((one[1], other[1]), (one[2], other[2])):
        for name in mine.keys() & its.keys():
            np.testing.assert_array_equal(mine[name], its[name], name)


def options_of(name):
    only = {"trainable": ["first.weight", "last.weight"]} if name == "muon" else {}
    return {"optimizer": OPTIMIZERS[name](), **only}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_has_the_bits_of_the_plan_without_fusion(name, monkeypatch):
    plan_without_fusion(monkeypatch)
    planned = trained("ppp", **options_of(name))
    same(trained("eee", **options_of(name)), planned)


@pytest.mark.parametrize("ways", ["epep", "peep"])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1, "clip_value": 0.05, "ema": 0.9}])
def test_a_step_goes_on_where_the_other_kind_stopped(ways, options, monkeypatch):
    plan_without_fusion(monkeypatch)
    options |= options_of("adamw")
    same(trained(ways, **options), trained("pppp", **options))
