"""Whatever order of passes their declarations allow gives plans that compute the same bits."""

from functools import partial

import numpy as np
import pytest
from changed_passes import change_passes
from graphs import WideFrom
from jobs import GPT, losses_of_fit

import actorflow as af
from actorflow import nn
from compiler.fusion import regions
from compiler.graph.target import CompileOptions
from compiler.pipeline import pipeline
from compiler.pipeline.rewrites import check_order

VOCAB, SEQ, BATCH, WIDTH, STEPS = 17, 12, 4, 16, 3
ASKED = [
    CompileOptions(
        "job", precision=low, skips_broken_steps=True, clip_norm=1.0, memory_budget=budget
    )
    for low in ("bf16", "fp16")
    for budget in (0, 1)
]
"""Options that want every pass, together."""

pytestmark = pytest.mark.host("the orders are those of passes without devices")


class Lookups(nn.Module):
    """Two large tables whose rows are joined: plain descent touches the rows of a batch only."""

    def __init__(self):
        self.left, self.right = nn.Embedding(500, 8), nn.Embedding(300, 8)
        self.up, self.down = nn.Linear(16, WIDTH), nn.Linear(WIDTH, VOCAB)

    def __call__(self, x):
        h = af.concat([self.left(x), self.right(x)], axis=-1)
        return self.down(af.gelu(self.up(h), approximate="tanh"))


TRANSFORMER = partial(GPT, VOCAB, SEQ, WIDTH, dropout=0.1)
JOBS = {
    "transformer": (TRANSFORMER, {"optimizer": af.optim.AdamW(1e-2)}),
    "in bfloat16": (TRANSFORMER, {"optimizer": af.optim.AdamW(1e-2), "precision": "bf16"}),
    "in float16": (TRANSFORMER, {"optimizer": af.optim.AdamW(1e-2), "precision": "fp16"}),
    "accumulating": (
        TRANSFORMER,
        {"optimizer": af.optim.AdamW(1e-2), "accumulate": 2, "clip_norm": 0.5},
    ),
    "lookups": (Lookups, {"optimizer": af.optim.SGD(1e-1)}),
}


def is_allowed(passes):
    try:
        for options in ASKED:
            check_order(passes, options, pipeline.LOWERING_NEEDS)
    except af.InternalError:
        return False
    return True


def swapped(passes, index):
    return (*passes[:index], passes[index + 1], passes[index], *passes[index + 2 :])


def moved(index, by):
    """The passes with one of them as far ahead, or behind, as the declarations allow."""
    passes, place = pipeline.PASSES, index
    while 0 <= place + by < len(passes):
        further = swapped(passes, min(place, place + by))
        if not is_allowed(further):
            break
        passes, place = further, place + by
    return passes


def allowed_orders():
    """All that one pass can reach by moving alone, the given order left out."""
    count = range(len(pipeline.PASSES))
    found = {tuple([s.name for s in moved(i, by)]): moved(i, by) for i in count for by in (1, -1)}
    found.pop(tuple([step.name for step in pipeline.PASSES]), None)
    return list(found.values())


def trained(kind, passes, monkeypatch):
    def small(graph, context):
        return regions.run(graph, WideFrom(0, 5))

    change_passes(monkeypatch, passes, chunk_wide=small)
    monkeypatch.setenv("ACTORFLOW_CACHE", "off")
    make, options = JOBS[kind]

    @af.job(**options)
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

    model = make()
    rng = np.random.default_rng(1)
    for _, parameter in model.named_parameters():
        parameter.load(rng.normal(0, 0.1, parameter.type.shape).astype(np.float32))
    data = af.data.Tokens(
        np.random.default_rng(3).integers(0, VOCAB, 2000).astype(np.uint8), seq=SEQ, batch=BATCH,
        seed=0,
    )  # fmt: skip
    losses = losses_of_fit(train, model, data, STEPS)
    return [float(loss).hex() for loss in losses], {
        n: a.tobytes() for n, a in model.state().items()
    }


def test_some_orders_are_allowed_beside_the_given_one():
    assert len(allowed_orders()) >= 3
    assert all(is_allowed(passes) for passes in allowed_orders())


@pytest.mark.thinned(4)
@pytest.mark.parametrize("kind", JOBS)
def test_every_order_that_the_declarations_allow_computes_the_same_bits(kind, monkeypatch):
    given = trained(kind, pipeline.PASSES, monkeypatch)
    for passes in allowed_orders():
        assert trained(kind, passes, monkeypatch) == given, [step.name for step in passes]
