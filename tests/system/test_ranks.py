"""Plans of one of several ranks, from jobs as users write them."""

import pytest
from jobs import GPT

import actorflow as af
from actors.race import check_races
from compiler.plan import ActorKind
from compiler.types import DType, TensorType

BATCH = {name: TensorType(DType.INT32, (8, 64)) for name in ("x", "y")}


@pytest.fixture(scope="module")
def plans():
    @af.job(optimizer=af.optim.AdamW(1e-3))
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    model = GPT(64, seq=64, width=64, layers=4, heads=4)
    return [train.compile(model, BATCH, num_ranks=ranks) for ranks in (1, 4)]


def test_a_rank_needs_few_bytes_more_than_one_that_is_alone(plans):
    """Gradients exist once, but wait for each other; what crosses chains lives as long as these."""
    alone, among = plans
    gradients = sum(
        [alone.views[v.view].type.size_bytes for v in alone.variables if v.role == "parameter"]
    )
    assert among.arenas[0].size_bytes <= 1.13 * alone.arenas[0].size_bytes
    reduced = [
        (launch.inputs, launch.outputs)
        for actor in among.actors
        if actor.kind is ActorKind.COMM
        for launch in actor.launches
    ]
    assert all(given == left for given, left in reduced)
    sizes = [among.views[given[0]].type.size_bytes for given, _ in reduced]
    assert sum(sizes) == gradients


def test_no_gradient_is_moved_into_its_bucket(plans):
    _, among = plans
    ops = {
        launch.op
        for actor in among.actors
        if actor.kind is ActorKind.COMPUTE
        for launch in actor.launches
    }
    assert not {"concat", "copy"} & ops
    check_races(among)
