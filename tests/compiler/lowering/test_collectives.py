"""Buckets of gradients: what is in them, in which order they go, and what that follows from."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import tiers
from error_texts import raises
from graphs import descend, made_up, variable
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_graphs import run_ranks

from actors.race.race import RaceError, check_races
from compiler.contract.placement import SINGLE_RANK, Mesh, MeshLink, joined
from compiler.contract.plan_tables import ActorKind
from compiler.contract.sbp import shard_range
from compiler.graph.graph import GraphBuilder
from compiler.graph.target import CompileOptions
from compiler.lowering import buckets
from compiler.ops.families.arithmetic import ADD, EXP, MUL, NEG
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.slicing import CONCAT
from compiler.ops.primitives.sources import INPUT, VARIABLE
from compiler.ops.primitives.transfer import ALL_REDUCE
from compiler.passes import autodiff, simplify
from compiler.pipeline.pipeline import compile_graph
from compiler.pipeline.rewrites import check
from compiler.sbp import distribute
from compiler.sbp.collective_schedule import MAX_LATE
from compiler.sbp.distribute import distribute as sbp_distribute
from compiler.storage import order
from compiler.verify.verify import verify_plan

RANKS, ROWS = 4, 256


def among(count, latency_ns=0.0):
    """Return ranks with different rows of a batch."""
    return joined(Mesh(("data",), (count,)), MeshLink(12.5, latency_ns))


NEAR = among(RANKS)
"""Ranks so near each other that no bucket is too small."""


def layers(shapes, rng=None):
    """A training graph: the loss is the sum of products of inputs and weights of some shapes."""
    b = GraphBuilder()
    weights, terms = [], []
    for i, shape in enumerate(shapes):
        weights.append(variable(b, f"w{i}", shape))
        x = b.emit_one(INPUT, name=f"x{i}", dtype="float32", shape=(ROWS, *shape))
        made = b.emit_one(MUL, x, weights[-1])
        op = NEG if rng is None else rng.choice((NEG, EXP))
        terms.append(
            b.emit_one(SUM, b.emit_one(op, made), axes=tuple(range(1 + len(shape))), keepdims=False)
        )
    loss = terms[0]
    for term in terms[1:]:
        loss = b.emit_one(ADD, loss, term)
    descend(b, loss, weights)
    return b.freeze()


def met(graph, ranks, apart=None):
    """Return the graph of one of some ranks, whose buckets are perhaps cut for other links."""
    graph = simplify.simplify_graph(autodiff.differentiate(graph))
    layouts = distribute.assign_sbp(graph, ranks)
    if apart is not None:
        layouts = replace(layouts, wires=apart.links)
    graph = check(sbp_distribute(graph, layouts, ranks.rank), "distribute")
    return check(buckets.run(order.run(graph)), "buckets")


def reduced(graph):
    """Return the all-reduces of gradients with their rows' numbers of elements, in order."""
    nodes = [n for n in graph.nodes if n.op is ALL_REDUCE and graph.types[n.outputs[0]].rank]
    nodes.sort(key=lambda node: node.attrs.int_("order"))
    return [(node.attrs, graph.types[node.inputs[0]].num_elements) for node in nodes]


SHAPES = [(16, 16), (3,), (64, 16), (5, 5), (16,), (32, 32)]


def test_one_rank_alone_meets_no_one():
    graph = simplify.simplify_graph(autodiff.differentiate(layers(SHAPES)))
    assert distribute.run(graph, SINGLE_RANK) is graph


def test_all_gradients_meet_once_and_updates_read_their_means():
    graph = met(layers(SHAPES), NEAR)
    found = reduced(graph)
    assert sum(size for _, size in found) == sum(int(np.prod(shape)) for shape in SHAPES)
    orders = [attrs.int_("order") for attrs, _ in found]
    assert len({*orders}) == len(orders)
    assert {(attrs.str_("group"), attrs.int_("num_ranks")) for attrs, _ in found} == {("data", 4)}


@given(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=30))
@settings(max_examples=tiers.examples(30), deadline=None)
def test_there_are_no_more_than_nine_buckets(shapes):
    found = reduced(met(layers(shapes), NEAR))
    assert 1 <= len(found) <= MAX_LATE + 1


@pytest.mark.parametrize(
    ("latency_ns", "least"), [(0.0, 0), (1.0, 4 * 12.5), (5.0, 250), (1e9, 1e12)]
)
def test_a_bucket_is_no_smaller_than_what_moves_in_the_time_of_its_messages(latency_ns, least):
    found = reduced(met(layers(SHAPES * 4), NEAR, among(4, latency_ns)))
    assert all(size * 4 >= least for _, size in found[:-1])
    assert (len(found) == 1) == (least > 4 * sum(size for _, size in found) / 2)


def test_a_bucket_holds_what_is_made_one_after_the_other():
    graph = met(layers([(16, 16)] * 16), NEAR)
    made_by = graph.producers()
    parts = []
    for node in graph.nodes:
        if node.op is CONCAT:
            parts.append([made_by[graph.nodes[made_by[v]].inputs[0]] for v in node.inputs])
    assert 2 <= min(map(len, parts)) <= max(map(len, parts)) <= 3
    made = [place for own in parts for place in own]
    assert made == sorted(made)


def test_what_would_leave_others_unaligned_stands_last_in_its_bucket():
    graph = met(layers([(3,), (16, 16), (5, 5), (16,)]), among(2))
    row = next(node for node in graph.nodes if node.op is CONCAT)
    sizes = [graph.types[v].size_bytes % buckets.ROW_BYTES for v in row.inputs]
    assert sizes == sorted(sizes, key=bool)
    assert 0 in sizes


@given(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=9), st.integers(0, 99))
@settings(max_examples=tiers.examples(25), deadline=None)
def test_ranks_train_as_one_does(shapes, seed):
    graph = simplify.simplify_graph(autodiff.differentiate(layers(shapes)))
    rng = np.random.default_rng(seed)
    whole = {
        node.attrs["name"]: rng.normal(size=node.attrs["shape"]).astype(np.float32)
        for node in graph.nodes
        if node.op in (INPUT, VARIABLE)
    }
    one = written(graph, run_ranks([graph], [fed(graph, whole)], Mesh(("data",), (1,)))[0])
    graphs = [met(layers(shapes), replace(among(2), rank=rank)) for rank in range(2)]
    feeds = [fed(own, whole, shard_range(ROWS, 2, rank)) for rank, own in enumerate(graphs)]
    runs = run_ranks(graphs, feeds, Mesh(("data",), (2,)))
    first, second = [written(g, v) for g, v in zip(graphs, runs, strict=True)]
    for name, array in one.items():
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], array, rtol=1e-4, atol=1e-4)


def fed(graph, whole, rows=None):
    """Return the numbers of a graph's sources; of inputs those of some rows."""
    found = {}
    for node in graph.nodes:
        if node.op in (INPUT, VARIABLE):
            name = node.attrs["name"]
            array = whole[name] if name in whole else np.arange(ROWS, dtype=node.attrs["dtype"])
            is_cut = (node.op is INPUT or name not in whole) and rows is not None
            found[node.outputs[0]] = array[rows.start : rows.stop] if is_cut else array
    return found


def written(graph, values):
    """Return what a graph writes to its variables, by name."""
    names = {n.outputs[0]: n.attrs["name"] for n in graph.nodes if n.op is VARIABLE}
    return {names[w.variable]: values[w.value] for w in graph.writes}


def squares(rng, depth=5):
    """A training graph of square layers of two widths."""
    b = GraphBuilder()
    ends, weights = [], []
    for name in ("a", "b"):
        value = b.emit_one(INPUT, name=name, dtype="float32", shape=(ROWS, 8))
        for i in range(depth):
            weights.append(variable(b, f"{name}{i}", (8, 8)))
            value = b.emit_one(rng.choice((NEG, EXP)), b.emit_one(MATMUL, value, weights[-1]))
        ends.append(value)
    descend(b, b.emit_one(SUM, b.emit_one(MUL, *ends), axes=(0, 1), keepdims=False), weights)
    return b.freeze()


def priced(seed):
    """Kernels whose times no two seeds agree on."""
    rng = Random(seed)
    hardware = made_up("priced", ("mul", "exp"), lambda call: rng.choice((1e2, 1e4, 5e4, 1e5)))
    return replace(hardware, ranks=NEAR)


def meetings(plan):
    """Return what a rank does with other ranks: attributes, bytes and members, in order.

    The members of a bucket are the variables whose updates read a part of it, with its offset.
    """
    members = {}
    for actor in plan.actors:
        for launch in actor.launches:
            if launch.op == "sgd_update":
                part = plan.parts[-1 - launch.reads[1]] if launch.reads[1] < 0 else None
                version = launch.reads[1] if part is None else part.version
                variable = plan.views[launch.inputs[0]].register
                place = 0 if part is None else part.offset_bytes
                members.setdefault(version, []).append((plan.registers[variable].name, place))
    return [
        (launch.attrs, plan.views[launch.inputs[0]].type, sorted(members[launch.writes[0]]))
        for actor in plan.actors
        if actor.kind is ActorKind.COMM
        for launch in actor.launches
        if launch.writes[0] in members  # the loss has none
    ]


@pytest.mark.parametrize("streams", [1, 2])
def test_a_hundred_pricings_of_kernels_make_plans_whose_collectives_are_the_same(streams):
    graph, options = squares(Random(0)), CompileOptions("job", num_streams=streams)
    plans = [
        compile_graph(graph, priced(seed), options) for seed in range(tiers.size(100, merge=12))
    ]
    first = meetings(plans[0])
    assert len(first) > 4
    assert all(len(members) > 1 for *_, members in first[:-1])
    assert sum(len(members) for *_, members in first) == 10
    if streams > 1:
        assert len({len(plan.actors) for plan in plans}) > 1, "the pricings change nothing at all"
    for plan in plans:
        assert meetings(plan) == first


def comm_actors(plan):
    return [actor for actor in plan.actors if actor.kind is ActorKind.COMM]


@pytest.mark.parametrize("streams", [1, 2])
def test_an_edge_keeps_the_order_of_buckets_on_their_stream(streams):
    options = CompileOptions("job", num_streams=streams)
    plan = compile_graph(squares(Random(0)), priced(1), options)
    verify_plan(plan)
    actors = comm_actors(plan)
    orders = [dict(launch.attrs)["order"] for actor in actors for launch in actor.launches]
    assert orders == sorted(orders)
    for one, other in pairwise(actors):
        assert is_before(plan, one, other), "nothing but luck keeps the order"


def is_before(plan, one, other):
    """Whether edges lead from one actor to another."""
    seen, front = set(), [one]
    while front:
        actor = front.pop()
        if actor.id == other.id:
            return True
        made = {port.register for port in actor.outputs}
        for reader in plan.actors:
            if (
                reader.id > one.id
                and reader.id not in seen
                and made & {p.register for p in reader.inputs}
            ):
                seen.add(reader.id)
                front.append(reader)
    return False


@pytest.mark.parametrize("streams", [1, 2])
def test_a_collective_works_in_place_in_what_its_makers_have_written(streams):
    options = CompileOptions("job", num_streams=streams)
    plan = compile_graph(squares(Random(0)), priced(1), options)
    for actor in comm_actors(plan):
        for launch in actor.launches:
            is_bucket = launch.op == "all_reduce" and plan.views[launch.inputs[0]].type.rank
            assert not is_bucket or launch.inputs == launch.outputs
            assert launch.reads != launch.writes


def without(plan, registers):
    """Return a plan whose actors do not know some of its registers."""
    actors = [
        replace(
            actor,
            inputs=tuple([p for p in actor.inputs if p.register not in registers]),
            outputs=tuple([p for p in actor.outputs if p.register not in registers]),
        )
        for actor in plan.actors
    ]
    return replace(plan, actors=tuple(actors))


@pytest.mark.parametrize("streams", [1, 2])
def test_without_the_edge_that_updates_wait_by_the_race_check_names_both(streams):
    options = CompileOptions("job", num_streams=streams)
    plan = compile_graph(squares(Random(0)), priced(1), options)
    check_races(plan)
    update = next(a for a in plan.actors if any(x.op == "sgd_update" for x in a.launches))
    read = {port.register for port in update.inputs}
    comm = next(a for a in comm_actors(plan) if read & {port.register for port in a.outputs})
    edges = read & {port.register for port in comm.outputs}
    with raises(RaceError):
        check_races(without(plan, edges))
