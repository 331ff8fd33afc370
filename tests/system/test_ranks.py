"""Plans of one of several ranks, from jobs as users write them."""

import numpy as np
import pytest
from jobs import GPT
from rank_threads import RankThreads

import actorflow as af
from actorflow.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from actors.race.race import check_races
from compiler.contract.placement import SHARED
from compiler.contract.plan_tables import ActorKind
from compiler.contract.types import DType, TensorType

RANKS, STEPS = 2, 6


def least_bytes(link, num_ranks):
    """No bucket is too small."""
    return 0.0


@pytest.fixture(scope="module")
def plans():
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

    def compiled(rows, mesh):
        job = af.job(optimizer=af.optim.AdamW(1e-3), mesh=mesh)(train)
        spec = {name: TensorType(DType.INT32, (rows, 64)) for name in ("x", "y")}
        return job.compile(GPT(64, seq=64, width=64, layers=4, heads=4), spec)

    return compiled(8, None), compiled(4 * 8, af.Mesh(data=4))


def test_a_rank_needs_few_bytes_more_than_one_that_is_alone(plans):
    """Gradients exist once, but wait for each other; what crosses chains lives as long as these.

    And what ranks share lies apart from all else, whose bytes it cannot use again.
    """
    alone, among = plans
    gradients = sum(
        [alone.views[v.view].type.size_bytes for v in alone.variables if v.role == "parameter"]
    )
    sizes = [sum([arena.size_bytes for arena in plan.arenas]) for plan in plans]
    assert sizes[1] <= 1.3 * sizes[0]
    assert among.arenas[1].place == SHARED
    assert gradients <= among.arenas[1].size_bytes <= 1.01 * gradients
    reduced = [
        (launch.inputs, launch.outputs)
        for actor in among.actors
        if actor.kind is ActorKind.COMM
        for launch in actor.launches
        if among.views[launch.inputs[0]].type.rank  # not the loss
    ]
    assert all(given == left for given, left in reduced)
    sizes = [among.views[given[0]].type.size_bytes for given, _ in reduced]
    assert sum(sizes) == gradients


@pytest.mark.one_device("counts launches")
def test_next_to_no_gradient_is_moved_into_its_bucket(plans):
    """But for a bias that fusion has made beside what an earlier bucket needs."""
    _, among = plans
    launches = [
        launch
        for actor in among.actors
        if actor.kind is ActorKind.COMPUTE
        for launch in actor.launches
    ]
    assert "concat" not in {launch.op for launch in launches}
    moved = [among.views[x.outputs[0]].type for x in launches if x.op == "copy"]
    assert sum([type_.size_bytes for type_ in moved]) <= 2 * 4 * 256
    check_races(among)


def trained(plan, batches, group=SINGLE_PROCESS):
    """Return the losses and the parameters of a run over some batches."""
    runner = af.Runner(plan, group=group)
    losses = [float(runner.step(batch)["loss"]) for batch in batches]
    state = {name: np.array(array) for name, array in runner.variables().items()}
    runner.close()
    return losses, state


@pytest.mark.no_gpu("the collective here is a kernel of the host")
@pytest.mark.parametrize("options", [{}, {"streams": 2}], ids=str)
def test_ranks_train_alike_and_as_one_with_all_batches(many_buckets, native_toolchain, options):
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

    def job(mesh):
        return af.job(optimizer=af.optim.SGD(0.1), mesh=mesh, **options)(train)

    spec = {name: TensorType(DType.INT32, (4 * RANKS, 16)) for name in ("x", "y")}

    model, rng = GPT(32, seq=16, width=16, layers=2, heads=2), np.random.default_rng(0)
    batches = [
        {name: rng.integers(0, 32, (4 * RANKS, 16)).astype(np.int32) for name in ("x", "y")}
        for _ in range(STEPS)
    ]
    alone = trained(job(None).compile(model, spec), batches)
    plans = [job(af.Mesh(data=RANKS)).compile(model, spec, rank=rank) for rank in range(RANKS)]
    assert plans[0] == plans[1], "ranks with as many rows have one plan"

    def run(rank):
        return trained(plans[rank], batches, ProcessGroup(rank, ranks.gather(rank)))

    ranks = RankThreads(RANKS)
    found = ranks.run(run)
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][0], alone[0], rtol=1e-5)
    for name, array in alone[1].items():
        np.testing.assert_array_equal(found[0][1][name], found[1][1][name])
        np.testing.assert_allclose(found[0][1][name], array, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"accumulate": 3}, {}),
        ({"streams": 2, "accumulate": 2}, {"on_nan": "skip", "every": 4}),
        ({"precision": "bf16"}, {"on_nan": "skip"}),
        ({"precision": "fp16", "accumulate": 2}, {}),
        ({"device": "sim", "memory_budget": "2500KiB"}, {}),
    ],
    ids=str,
)
def test_all_that_a_job_may_ask_for_keeps_the_order_of_collectives(many_buckets, options, asked):
    @af.job(optimizer=af.optim.AdamW(1e-3), mesh=af.Mesh(data=4), **options)
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

    spec = {name: TensorType(DType.INT32, (32, 32)) for name in ("x", "y")}
    model = GPT(32, seq=32, width=32, layers=2, heads=2)
    plan = train.compile(model, spec, **asked)
    comm = [actor for actor in plan.actors if actor.kind is ActorKind.COMM]
    orders = [dict(launch.attrs)["order"] for actor in comm for launch in actor.launches]
    assert orders == sorted({*orders})
    assert len(orders) > 4
    check_races(plan)
