"""Byte budgets on many ranks: each keeps within, and computes the bits that it computes without."""

from dataclasses import replace

import numpy as np
import pytest
from lowered_ranks import graphs_of, laid_out, plan_of
from rank_jobs import fixed_words, step_graph
from rank_trainings import Training, on_ranks

import actorflow as af
from actorflow import nn
from actorflow.data import ArraySource, Tokens
from compiler.contract.errors import BudgetError
from compiler.contract.placement import SHARED, Mesh
from compiler.contract.plan_tables import ActorKind
from compiler.contract.rank_plans import RankPlans
from compiler.contract.types import DType, Phase, TensorType
from compiler.ops.primitives.body import hash_graph
from compiler.verify.cross_rank import verify_ranks

pytestmark = pytest.mark.usefixtures("native_toolchain")
SGD = af.optim.SGD(0.1, momentum=0.9)


class Tall(nn.Module):
    """Wide layers one after the other, in two stages."""

    def __init__(self):
        self.emb, self.out = nn.Embedding(37, 32), nn.Linear(32, 37)
        self.layers = [nn.Linear(32, 32) for _ in range(6)]
        self.norms = [nn.LayerNorm(32) for _ in range(6)]

    def __call__(self, x):
        h = self.emb(x)
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            with af.stage(number // 3):
                h = h + af.gelu(layer(norm(h)))
        return self.out(h)


class Shared(nn.Module):
    """Layers in columns and rows, so that ranks meet in the middle of the forward pass."""

    def __init__(self):
        self.emb, self.out = nn.Embedding(37, 32), nn.Linear(32, 37)
        word = {"model": af.split(0)}
        self.layers = [nn.MLP(32, sbp=word) for _ in range(4)]

    def __call__(self, x):
        h = self.emb(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.out(h)


def rows():
    """Batches of 12 rows of tokens."""
    return Tokens(np.arange(3000) % 37, seq=32, batch=12, seed=2)


def size(plan):
    """Return what is in the host's memory, and what ranks share of it."""
    return sum(a.size_bytes for a in plan.arenas if a.place in (a.device.place, SHARED))


def meetings(plan):
    actors = [actor for actor in plan.actors if actor.kind is ActorKind.COMM]
    return [(x.op, dict(x.attrs)["order"]) for actor in actors for x in actor.launches]


def runs_again(plan):
    return sum(x.phase is Phase.RECOMPUTE for actor in plan.actors for x in actor.launches)


CASES = {
    "data": (Tall, {"data": 3}, {}),
    "two streams": (Tall, {"data": 2}, {"streams": 2}),
    "model": (Shared, {"data": 2, "model": 2}, {}),
    "zero": (Tall, {"data": 2}, {"zero": True}),
    "zero, bfloat16": (Tall, {"data": 2}, {"zero": True, "precision": "bf16"}),
    "stages": (Tall, {"stage": 2}, {"accumulate": 2}),
    "stages of rows": (Tall, {"data": 2, "stage": 2}, {}),
}


def smallest_budget(training, mesh):
    """Return the largest of the budgets that ranks name, and the rank that names it."""
    named = []
    job = training(1000).job(mesh)
    for rank in range(mesh.num_ranks):
        with pytest.raises(BudgetError, match="smallest budget found feasible is") as raised:
            job.compile(training(1000).model(), rows(), rank=rank)
        named.append((raised.value.smallest_bytes, rank))
    return max(named)


@pytest.mark.thinned(8)
@pytest.mark.parametrize("name", CASES)
def test_ranks_within_the_smallest_budget_come_to_the_same_bits_and_less_is_refused(name):
    model, axes, options = CASES[name]
    mesh = af.Mesh(**axes)

    def training(budget):
        return Training(model, rows, {**options, "memory_budget": budget}, SGD)

    free = Training(model, rows, options, SGD).run(mesh, steps=2)
    smallest, named_by = smallest_budget(training, mesh)
    assert smallest < 0.99 * max(size(own.plan) for own in free)
    with pytest.raises(BudgetError):
        training(smallest - 1).job(mesh).compile(model(), rows(), rank=named_by)
    tight = training(smallest).run(mesh, steps=2)
    assert any(runs_again(own.plan) for own in tight)
    for own, other in zip(tight, free, strict=True):
        assert size(own.plan) <= smallest
        assert meetings(own.plan) == meetings(other.plan)
        assert own.losses == other.losses
        for key, array in other.result.variables.items():
            assert own.result.variables[key].tobytes() == array.tobytes(), key


def test_ranks_that_choose_otherwise_what_to_run_again_meet_in_the_same_order():
    @af.job(optimizer=SGD)
    def train(model, batch):
        return af.cross_entropy(model(batch.x).reshape(-1, 37), batch.y.reshape(-1))

    spec = {key: TensorType(DType.INT64, (12, 32)) for key in ("x", "y")}
    graph = step_graph(train, Tall(), spec)
    layouts = laid_out(graph, Mesh(("data", "zero"), (2, 2)), fixed_words)
    graphs = graphs_of(graph, layouts)
    print_ = hash_graph(graph)
    size_bytes = size(plan_of(graphs[0], layouts.mesh, print_))
    asked = [{}, {"recompute": "blocks"}]
    asked += [{"memory_budget": int(size_bytes * share)} for share in (0.93, 0.8)]
    own = [
        plan_of(local, layouts.mesh, print_, **budget)
        for local, budget in zip(graphs, asked, strict=True)
    ]
    again = [runs_again(plan) for plan in own]
    assert len({*again}) > 2
    assert again[0] == 0
    # As if one budget had led to these: each rank believes its own kernels' durations.
    alike = [replace(plan, options=own[0].options) for plan in own]
    verify_ranks(RankPlans(layouts.mesh, tuple(alike), (0, 1, 2, 3)))


class TwoLosses(nn.Module):
    """Its last stage has two losses, and gradients of either for other layers."""

    def __init__(self):
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 5)

    def __call__(self, x):
        with af.stage(0):
            h = self.first(x)
        with af.stage(1):
            return self.last(af.tanh(h)).mean(1)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_blocks_run_again_between_what_a_stage_sends(accumulate):
    """Both losses go down with the gradient, which is made of what runs again after them."""

    def score(model, batch):
        made, wanted = model(batch.x), batch.y
        hit = af.binary_cross_entropy_with_logits(made, (wanted > 0).to("float32"))
        return {"loss": hit, "other": af.mse_loss(made, wanted)}

    def data():
        rng = np.random.default_rng(0)
        x, y = [rng.standard_normal(shape).astype(np.float32) for shape in ((32, 4, 3), (32, 5))]
        return ArraySource({"x": x, "y": y}, batch=4, seed=1)

    optimizer = [
        af.optim.on(["*", "!last.*"], af.optim.SGD(0.3)),
        af.optim.on("last.*", SGD, loss="other"),
    ]

    def trained(mesh, **options):
        job = af.job(optimizer=optimizer, mesh=mesh, accumulate=accumulate, **options)(score)

        def one(group):
            found, plan = [], job.compile(TwoLosses(), data(), rank=group.rank)
            af.Runner(plan, group=group).fit(
                data(), steps=3, progress=False,
                on_step=lambda step, outputs: found.append([outputs["loss"], outputs["other"]]),
            )  # fmt: skip
            return plan, found

        return on_ranks(mesh, one)

    ((_, alone),) = trained(None)
    ranks = trained(af.Mesh(stage=2), recompute="blocks")
    assert runs_again(ranks[1][0])
    for _, own in ranks:
        np.testing.assert_allclose(own, alone, rtol=1e-5)


def deep_memory(zero=False, **options):
    """Return the bytes of a rank's plan of layers in a row."""
    spec = {"x": TensorType(DType.FLOAT32, (8, 64, 64))}

    def squares(model, batch):
        return {"loss": (model(batch.x) ** 2).mean()}

    job = af.job(optimizer=SGD, mesh=af.Mesh(data=2), zero=zero, **options)(squares)
    blocks = [nn.TransformerBlock(64, heads=2) for _ in range(6)]
    plan = job.compile(nn.Sequential(*blocks), spec, rank=0)
    return sum([memory.peak_bytes for memory in plan.memory])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("zero", [False, True])
def test_several_batches_take_a_rank_as_many_bytes_as_one_and_the_sums(zero):
    blocks = nn.Sequential(*[nn.TransformerBlock(64, heads=2) for _ in range(6)])
    sums = 4 * sum([int(np.prod(p.shape)) for _, p in blocks.named_parameters()])
    assert deep_memory(zero, accumulate=4) <= 1.1 * (deep_memory(zero) + sums)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("zero", [False, True])
def test_blocks_run_again_where_state_is_in_parts_too(zero, every):
    saved = deep_memory(zero, accumulate=every)
    assert deep_memory(zero, accumulate=every, recompute="blocks") < 0.75 * saved
