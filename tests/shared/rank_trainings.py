"""Whole trainings on many ranks, each a thread of this process, to compare with one rank's."""

from dataclasses import dataclass, field

import numpy as np
from rank_threads import RankThreads

import actorflow as af
from actorflow import nn
from actorflow.data import ArraySource
from actorflow.distributed.process_group import SINGLE_PROCESS, ProcessGroup

STEPS = 4


class Net(nn.Module):
    """Statistics of the batch, a pool, masks, classes."""

    def __init__(self, drop=0.0):
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.pool, self.up, self.out = nn.MaxPool2d(2), nn.Linear(64, 16), nn.Linear(16, 5)
        self.drop = drop

    def __call__(self, x):
        h = af.flatten(self.pool(af.relu(self.norm(self.conv(x)))), 1)
        h = af.dropout(h, self.drop) if self.drop else h
        return self.out(af.relu(self.up(h)))


class Staged(nn.Module):
    """A layer on each of some stages, but for one that has nothing to train.

    What it has is frozen; a layer between the first and the last stage is absent instead.
    """

    def __init__(self, num_stages=3, without=None):
        self.first, self.last = nn.Linear(128, 8), nn.Linear(8, 5)
        self.layers = [nn.Linear(8, 8) for _ in range(num_stages)]
        if without is not None and 0 < without < num_stages - 1:
            self.layers[without] = nn.Identity()
        named = dict(self.named_parameters())
        on_it = {0: "first.", num_stages - 1: "last."}.get(without, f"layers.{without}.")
        for name in [n for n in named if n.startswith((on_it, f"layers.{without}."))]:
            named[name].freeze()

    def states(self, x):
        h, outputs = af.flatten(x, 1), []
        for number, layer in enumerate(self.layers):
            with af.stage(number):
                h = af.tanh(layer(self.first(h) if not number else h))
                outputs.append(self.last(h) if number == len(self.layers) - 1 else h)
        return outputs

    def __call__(self, x):
        return self.states(x)[-1]


class Split(nn.Module):
    """Two layers of which ranks along "model" have rows and columns."""

    def __init__(self):
        self.up = nn.Linear(128, 16, sbp={"model": af.split(0)})
        self.out = nn.Linear(16, 5, sbp={"model": af.split(1)})

    def __call__(self, x):
        return self.out(af.relu(self.up(af.flatten(x, 1))))


def images(batch=8, seed=1):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 2, 8, 8)).astype(np.float32)
    return ArraySource({"x": x, "y": rng.integers(0, 5, 64)}, batch=batch, seed=seed)


def loss(model, batch):
    return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())


def loss_by_weight(model, batch):
    """Leave out two of five classes, so that batches and ranks count differently."""
    losses = af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten(), reduction="none")
    return {"loss": af.weighted_mean(losses, batch.y.flatten() < 3)}


def loss_and_states(model, batch):
    """Return numbers of each stage beside the loss."""
    states = model.states(batch.x)
    numbers = {f"mean{i}": h.mean() for i, h in enumerate(states)}
    numbers |= {f"most{i}": af.amax(h, (0, 1)) for i, h in enumerate(states)}
    return {"loss": af.cross_entropy(states[-1], batch.y), **numbers}


@dataclass(frozen=True)
class Training:
    """A job, its model and data; `run` trains it on a mesh, or on one rank."""

    model: object = Net
    data: object = images
    options: dict = field(default_factory=dict)
    optimizer: object = field(default_factory=lambda: af.optim.SGD(0.1, momentum=0.9))
    near: float = 1e-5
    fn: object = loss

    def job(self, mesh):
        # One rank alone has no other to share its state with.
        options = {n: v for n, v in self.options.items() if n != "zero" or mesh is not None}
        return af.job(optimizer=self.optimizer, mesh=mesh, **options)(self.fn)

    def run(self, mesh, steps=STEPS, evaluation=lambda: None, compiled=None, **fit):
        """Train; every rank has sources of its own, as every process would."""
        job = self.job(mesh)

        def one(group):
            options = {**(compiled or {}), "evaluation": (valid := evaluation())}
            plan = job.compile(self.model(), self.data(), rank=group.rank, **options)
            metrics = []
            result = af.Runner(plan, group=group).fit(
                self.data(), steps=steps, progress=False, evaluation=valid,
                on_step=lambda step, outputs: metrics.append(dict(outputs)), **fit,
            )  # fmt: skip
            return Done(plan, [outputs["loss"] for outputs in metrics], result, metrics)

        return on_ranks(mesh, one, are_members="checkpoint" in fit)


@dataclass(frozen=True)
class Done:
    plan: object
    losses: list
    result: object
    told: list


def on_ranks(mesh, do, *, are_members=False):
    """Return what do(among) returns, by rank; runs of `members` agree on steps, as launched ones.

    Checkpoints take that; without it ranks are in step by their collectives alone.
    """
    if mesh is None:
        return [do(SINGLE_PROCESS)]
    ranks = RankThreads(int(np.prod(mesh.shape)))
    members = ranks.members() if are_members else [None] * ranks.count
    return ranks.run(lambda rank: do(ProcessGroup(rank, ranks.gather(rank), members[rank])))


def assert_trained(ranks, alone, near=1e-5):
    """Compare losses and variables with one rank's; on ranks they are equal to the bit."""
    for rank in ranks:
        np.testing.assert_allclose(rank.losses, alone.losses, rtol=near)
        assert rank.losses == ranks[0].losses
        variables = rank.result.variables
        assert variables.keys() == alone.result.variables.keys()
        for name, array in variables.items():
            assert array.tobytes() == ranks[0].result.variables[name].tobytes(), name
            np.testing.assert_allclose(array, alone.result.variables[name], rtol=near, atol=near)
