"""Ranks whose kernels are priced otherwise plan otherwise, and train to the same bits.

Here a few seeds; ACTORFLOW_PRICE_SEEDS=0:100 takes others.
"""

import os
import random
from dataclasses import replace

import numpy as np
import pytest
from rank_trainings import on_ranks

import actorflow as af
from actorflow import nn
from actorflow.compile.targets import HostTarget
from actorflow.data import Tokens

pytestmark = [
    pytest.mark.no_gpu("ranks meet in memory of the host"),
    pytest.mark.usefixtures("native_toolchain"),
]

SEEDS = range(*[int(n) for n in os.environ.get("ACTORFLOW_PRICE_SEEDS", "0:3").split(":")])
FACTOR = 30.0
"""Prices are this many times too high, or too low, at most."""


class Net(nn.Module):
    """Tokens to logits: two blocks side by side, so that streams and orders have a choice."""

    def __init__(self):
        self.table = nn.Embedding(32, 16)
        self.one = nn.TransformerBlock(16, heads=2, causal=True)
        self.other = nn.MLP(16)
        self.last, self.head = nn.Linear(16, 16), nn.Linear(16, 32)

    def __call__(self, x):
        with af.stage(0):
            h = self.table(x)
            h = self.one(h) + self.other(h)
        with af.stage(1):
            return self.head(af.gelu(self.last(h)))


def data():
    return Tokens(np.arange(500) ** 2 % 31, seq=16, batch=4, seed=1)


def loss(model, batch):
    return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())


def trained(axes, options, prices):
    """Return the plans of all ranks, each by its prices, and what they come to."""
    mesh, plans = af.Mesh(**axes), []
    for rank in range(int(np.prod(mesh.shape))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostTarget, "query", prices(rank))
            job = af.job(optimizer=af.optim.Adam(1e-3), mesh=mesh, streams=2, **options)(loss)
            plans.append(job.compile(Net(), data(), rank=rank))

    def run(group):
        losses = []
        result = af.Runner(plans[group.rank], group=group).fit(
            data(), steps=3, progress=False,
            on_step=lambda step, outputs: losses.append(float(outputs["loss"]).hex()),
        )  # fmt: skip
        return losses, {name: a.tobytes() for name, a in sorted(result.variables.items())}

    return plans, on_ranks(mesh, run)


really = HostTarget.query


def priced(seed):
    """Return prices of ranks: each thinks something else of a kernel, always the same."""

    def of(rank):
        def query(self, call):
            info = really(self, call)
            factor = FACTOR ** random.Random(f"{seed} {rank} {call}").uniform(-1, 1)
            return replace(info, duration_ns=info.duration_ns * factor)

        return query

    return of


def order(plan):
    """Return what each stream of a plan does, in order."""
    return [(actor.stream, [x.op for x in actor.launches]) for actor in plan.actors]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"data": 2}, {}),
        ({"data": 2}, {"accumulate": 2, "zero": True}),
        ({"stage": 2}, {"accumulate": 4}),
        ({"model": 2}, {}),
    ],
    ids=str,
)
def test_prices_of_ranks_change_plans_and_no_bit(monkeypatch, many_buckets, axes, options):
    monkeypatch.setenv("ACTORFLOW_CACHE", "off")
    plans, wanted = trained(axes, options, lambda rank: really)
    assert wanted[0][0] == wanted[1][0]
    differ = 0
    for seed in SEEDS:
        own, found = trained(axes, options, priced(seed))
        assert found == wanted, seed
        differ += [*map(order, own)] != [*map(order, plans)]
    assert differ or "stage" in axes  # of which each is one chain or two
