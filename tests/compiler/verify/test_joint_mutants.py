"""Plans of a job on a mesh, one rank's changed: each change is refused before the first step."""

from dataclasses import replace
from functools import partial
from random import Random

import pytest
from jobs import GPT
from lowered_ranks import graphs_of, laid_out, plan_of
from plans import with_register
from rank_jobs import fixed_words, step_graph

import actorflow as af
from compiler.contract.errors import ActorflowError
from compiler.contract.placement import Mesh
from compiler.contract.plan_tables import ActorKind, RegisterKind
from compiler.contract.rank_plans import RankPlans
from compiler.contract.sbp import BROADCAST, Split
from compiler.contract.types import DType, TensorType, contiguous_strides
from compiler.verify.cross_rank import verify_ranks
from compiler.verify.verify import verify_plan

MESH = Mesh(("data", "model"), (2, 2))
SPEC = {name: TensorType(DType.INT64, (4, 4)) for name in ("x", "y")}


@af.job(optimizer=af.optim.AdamW(1e-2), accumulate=2)
def train(model, batch):
    return af.cross_entropy(model(batch.x).reshape(-1, 12), batch.y.reshape(-1))


def split_weights(name):
    if ".qkv." in name or ".up." in name or name.startswith("head"):
        return Split(0)
    return Split(1) if name.endswith((".proj.weight", ".down.weight")) else BROADCAST


@pytest.fixture(scope="module")
def ranks():
    """The plans of four ranks, each its own, so that one of them can be changed."""
    graph = step_graph(train, GPT(12, seq=4, width=8), SPEC)
    layouts = laid_out(graph, MESH, lambda g, axis: fixed_words(g, axis, split_weights))
    plans = [plan_of(local, MESH, accumulate=2) for local in graphs_of(graph, layouts)]
    plans = [replace(plan, graph_hash="of the whole") for plan in plans]
    return RankPlans(MESH, tuple(plans), tuple(range(4)))


def comm_actors(plan):
    return [a for a in plan.actors if a.kind is ActorKind.COMM]


def with_launches(plan, launches):
    actors = [replace(a, launches=launches.get(a.id, a.launches)) for a in plan.actors]
    return replace(plan, actors=tuple(actors))


def swapped(plan, rng):
    """Two collectives are done in each other's place."""
    one, other = rng.sample(comm_actors(plan), 2)
    return with_launches(plan, {one.id: other.launches, other.id: one.launches})


def changed_launch(plan, rng, change):
    actor = rng.choice(comm_actors(plan))
    launches = list(actor.launches)
    index = rng.randrange(len(launches))
    launches[index] = change(launches[index])
    return with_launches(plan, {actor.id: tuple(launches)})


def with_attrs(plan, rng, **attrs):
    def change(launch):
        return replace(launch, attrs=tuple(sorted({**dict(launch.attrs), **attrs}.items())))

    return changed_launch(plan, rng, change)


def reducing_otherwise(plan, rng):
    actor = rng.choice([a for a in comm_actors(plan) if "by" in dict(a.launches[0].attrs)])
    launches = list(actor.launches)
    index = rng.choice([i for i, own in enumerate(launches) if "by" in dict(own.attrs)])
    attrs = {**dict(launches[index].attrs), "by": "min"}
    launches[index] = replace(launches[index], attrs=tuple(sorted(attrs.items())))
    return with_launches(plan, {actor.id: tuple(launches)})


def in_another_group(plan, rng):
    groups = [dict(launch.attrs)["group"] for a in comm_actors(plan) for launch in a.launches]
    assert set(groups) == {"data", "model"}
    actor = rng.choice(comm_actors(plan))
    other = {"data": "model", "model": "data"}
    launches = [
        replace(
            own, attrs=tuple({**dict(own.attrs), "group": other[dict(own.attrs)["group"]]}.items())
        )
        for own in actor.launches
    ]
    return with_launches(plan, {actor.id: tuple(launches)})


def of_another_size(plan, rng):
    """A bucket has one element more, or less."""
    views = list(plan.views)

    def change(launch):
        for view in (*launch.inputs, *launch.outputs):
            type_ = views[view].type
            shape = ((type_.shape or (1,))[0] + rng.choice([1, 2]), *type_.shape[1:])
            own = TensorType(type_.dtype, shape)
            strides = contiguous_strides(shape, type_.dtype.itemsize)
            views.append(replace(views[view], type=own, strides_bytes=strides))
        first, count = len(plan.views), len(launch.inputs)
        ends = tuple(range(first, len(views)))
        return replace(launch, inputs=ends[:count], outputs=ends[count:])

    return replace(changed_launch(plan, rng, change), views=tuple(views))


def left_out(plan, rng):
    """An actor of collectives computes instead."""
    actor = rng.choice(comm_actors(plan))
    actors = [replace(a, kind=ActorKind.COMPUTE) if a is actor else a for a in plan.actors]
    return replace(plan, actors=tuple(actors))


MUTANTS = {
    "swapped": swapped,
    "another group": in_another_group,
    "another size": of_another_size,
    "left out": left_out,
    "another reduction": reducing_otherwise,
    "another order": lambda plan, rng: with_attrs(plan, rng, order=10_000),
    "more ranks": lambda plan, rng: with_attrs(plan, rng, num_ranks=4),
}


def test_the_plans_themselves_fit_together(ranks):
    report = verify_ranks(ranks)
    assert report.num_ranks == 4
    assert {m.group for own in ranks.meetings for m in own} == {"data", "model"}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("seed", range(12))
def test_a_changed_rank_is_refused_by_name(ranks, name, seed):
    rng = Random(f"{name} {seed}")
    rank = rng.randrange(4)
    plans = list(ranks.plans)
    plans[rank] = MUTANTS[name](plans[rank], rng)
    with pytest.raises(ActorflowError) as caught:
        verify_ranks(RankPlans(MESH, tuple(plans), ranks.class_of))
    assert " #" in str(caught.value)  # of an op, with its place in the order
    assert "(test_" in str(caught.value) or ".py:" in str(caught.value)  # and its line


def verdict(verify):
    try:
        verify()
    except ActorflowError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rank", range(4))
def test_a_dropped_slot_is_refused_or_was_not_needed(ranks, rank):
    """A rank with a slot less waits for ever, alone and with others, or fits as it did."""
    num_refused = 0
    plan = ranks.plans[rank]
    for register in plan.registers:
        is_edge = register.kind in (RegisterKind.DATA, RegisterKind.CONTROL)
        if not is_edge or register.num_slots < 2:
            continue
        slots = register.num_slots - 1
        changes = {"num_slots": slots, "offsets_bytes": register.offsets_bytes[:slots]}
        other = with_register(plan, register.name, **changes)
        plans = tuple([other if r == rank else own for r, own in enumerate(ranks.plans)])
        alone = verdict(partial(verify_plan, other))
        together = verdict(partial(verify_ranks, RankPlans(MESH, plans, ranks.class_of)))
        assert bool(together) == ("deadlocks" in alone)
        assert not together or f"{register.name!r} on rank {rank}" in together
        num_refused += bool(together)
    assert num_refused
