"""Turns of collectives: what goes together, in which order, and what that does to memory."""

from dataclasses import replace
from itertools import pairwise

import pytest
from error_texts import raises
from graphs import descend, variable
from jobs import GPT
from lowered_ranks import graphs_of, laid_out, ordered, plan_of
from rank_jobs import step_graph

import actorflow as af
from compiler.contract.errors import CompileError
from compiler.contract.placement import Memory, Mesh
from compiler.contract.rank_plans import RankPlans
from compiler.contract.sbp import BROADCAST, Split
from compiler.contract.types import DType, Phase, TensorType
from compiler.fusion.fuse import fuse_launches
from compiler.graph.graph import GraphBuilder, Output
from compiler.graph.registry import is_comm
from compiler.ops.families.arithmetic import ADD, EXP, MUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.sources import INPUT, VARIABLE
from compiler.ops.primitives.transfer import (
    ALL_GATHER,
    ALL_REDUCE,
    BLOCKING,
    DEFERRED,
    PREFETCH,
    REDUCE_SCATTER,
)
from compiler.passes import autodiff
from compiler.sbp.collective_schedule import (
    first_buckets_after,
    last_buckets_before,
    schedule_collectives,
    sorted_by,
    with_schedule,
)
from compiler.verify.cross_rank import verify_ranks

ZERO = Mesh(("zero",), (2,))
SPEC = {name: TensorType(DType.INT64, (8, 16)) for name in ("x", "y")}


@af.job(optimizer=af.optim.AdamW(1e-2))
def words(model, batch):
    return af.cross_entropy(model(batch.x).reshape(-1, 64), batch.y.reshape(-1))


def state_in_parts(graph, axis):
    """Return layouts of ZeRO: each rank has rows of all state, and of each batch."""
    fixed = {}
    for node in graph.nodes:
        (value, *_), shape = node.outputs, node.attrs.get("shape", ())
        if node.op in (INPUT, VARIABLE):
            fixed[value] = Split(0) if shape else BROADCAST
    return fixed | {w.value: fixed[w.variable] for w in graph.writes}


def zero(layers):
    """Return the graph of the first of two ranks that have parts of all state."""
    graph = step_graph(words, GPT(64, seq=16, width=64, layers=layers), SPEC)
    return graphs_of(graph, laid_out(graph, ZERO, state_in_parts))[0]


def collectives(graph):
    return [node for node in graph.nodes if is_comm.get(node.op)]


@pytest.fixture(scope="module")
def local():
    return zero(4)


def test_gradients_are_late_and_parameters_ahead(local):
    found = {(node.op, node.attrs["when"]) for node in collectives(local)}
    assert (REDUCE_SCATTER, DEFERRED) in found
    assert (ALL_GATHER, PREFETCH) in found
    assert (REDUCE_SCATTER, BLOCKING) not in found


def test_parameters_are_gathered_once_more_for_the_way_back_but_for_the_last(local):
    makers = local.producers()
    gathered = {}
    for node in collectives(local):
        source = local.nodes[makers[node.inputs[0]]]
        if node.op is ALL_GATHER and source.op is VARIABLE:
            gathered.setdefault(source.attrs["name"], []).append(node.phase)
    both = [Phase.FORWARD, Phase.BACKWARD]
    assert gathered["blocks.0.mlp.up.weight"] == both
    assert gathered["blocks.3.mlp.up.weight"] == both
    assert gathered["head.weight"] == [Phase.FORWARD]


def test_what_is_ahead_waits_until_the_bucket_before_it_is_about_to_be_read(local):
    graph = ordered(local, ZERO)[0]
    buckets = {}
    for index, node in enumerate(graph.nodes):
        if is_comm.get(node.op) and node.attrs["when"] == PREFETCH:
            buckets.setdefault(node.attrs["bucket"], []).append(index)
    assert len(buckets) > 8
    waits = [any(graph.nodes[i].after for i in own) for own in buckets.values()]
    assert not waits[0]
    assert sum(waits) >= len(waits) - 3
    size = [sum(graph.types[graph.nodes[i].outputs[0]].size_bytes for i in own)
            for own in buckets.values()]  # fmt: skip
    assert max(size) <= sum(size) / 4


def test_memory_of_what_is_gathered_and_reduced_grows_little_with_the_layers():
    shared, whole = [], []
    for layers in (4, 12):
        plan = plan_of(zero(layers), ZERO)
        shared.append(sum(a.size_bytes for a in plan.arenas if a.place.memory is Memory.SHARED))
        parts = [plan.views[v.view].type.size_bytes for v in plan.variables]
        roles = [v.role for v in plan.variables]
        whole.append(2 * sum(n for n, r in zip(parts, roles, strict=True) if r == "parameter"))
    # Two buckets of parameters and two of gradients: a quarter of the gradients, and a layer.
    assert shared[1] - shared[0] <= 0.4 * (whole[1] - whole[0])


def summed(b, value, order, **attrs):
    own = {"num_ranks": 2, "group": "data", "bucket": order, "order": order, "by": "sum"}
    return b.emit_one(ALL_REDUCE, value, **(own | attrs))


def chain(num_layers):
    """A graph whose layers end with a sum over ranks, as those of a model that is split."""
    b = GraphBuilder()
    value = b.emit_one(INPUT, name="x", dtype="float32", shape=(8, 8))
    weights = []
    for i in range(num_layers):
        weights.append(variable(b, f"w{i}", (8, 8)))
        value = summed(b, b.emit_one(EXP, b.emit_one(MUL, value, weights[-1])), i)
    descend(b, b.emit_one(SUM, value, axes=(0, 1), keepdims=False), weights)
    return b


def test_what_the_next_layer_reads_goes_alone_and_in_the_order_of_layers():
    b = chain(5)
    b.updates = []
    graph = b.freeze()
    turns = schedule_collectives(graph, {"data": 1e9})
    orders = [node.attrs["order"] for node in collectives(with_schedule(graph, turns))]
    assert orders == sorted(orders)
    assert len({turn["bucket"] for turn in turns.values()}) == 5
    assert {turns[i]["when"] for i in range(4)} == {BLOCKING}


def test_metrics_of_a_job_that_trains_wait_for_nobody():
    b = GraphBuilder()
    x, w = b.emit_one(INPUT, name="x", dtype="float32", shape=(8,)), variable(b, "w", (8,))
    loss = b.emit_one(SUM, b.emit_one(MUL, x, w), axes=(0,), keepdims=False)
    descend(b, loss, [w])
    b.outputs = [Output("loss", b.emit_one(ADD, *[summed(b, loss, 0)] * 2))]
    turns = schedule_collectives(autodiff.differentiate(b.freeze()), {})
    assert turns[0]["when"] == DEFERRED


@pytest.mark.parametrize("least", [0.0, 300.0, 1e9])
def test_buckets_are_numbered_in_the_order_and_as_large_as_the_links_ask(local, least):
    turns = sorted(
        schedule_collectives(local, {"zero": least}).values(), key=lambda turn: turn["order"]
    )
    assert [turn["order"] for turn in turns] == list(range(len(turns)))
    for one, other in pairwise(turns):
        assert other["bucket"] in (one["bucket"], one["bucket"] + 1)
    if least == 1e9:
        assert len({t["bucket"] for t in turns if t["when"] == PREFETCH}) == 1


def test_numbers_are_sorted_as_far_as_pairs_allow_it():
    assert sorted_by([(2.0,), (0.0,), (1.0,)], [(0, 1)]) == [2, 0, 1]
    assert sorted_by([(0.0,), (0.0,)], [(0, 1), (1, 0)]) is None


def test_fusion_joins_nothing_that_stands_on_both_sides_of_a_collective():
    """Else what a bucket needs would wait for a later one, by way of its neighbour in a kernel."""
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=(8, 8))
    first = b.emit_one(EXP, x)
    between = summed(b, first, 0)
    after = b.emit_one(ADD, b.emit_one(EXP, between), first)
    b.outputs = [Output("y", after), Output("z", summed(b, b.emit_one(MUL, first, first), 1))]
    graph = b.freeze()
    made = [node.outputs[0] for node in graph.nodes]
    eras = dict(zip(made, last_buckets_before(graph), strict=True))
    needed = dict(zip(made, first_buckets_after(graph), strict=True))
    assert (eras[first], eras[after]) == (-1, 0)
    assert (needed[first], needed[after]) == (0, 2)
    fused = fuse_launches(graph)
    for node, era, first_after in zip(
        fused.nodes, last_buckets_before(fused), first_buckets_after(fused), strict=True
    ):
        assert era < first_after or is_comm.get(node.op)
    checked = [node for node in fused.nodes if node.op.name == "fused"]
    assert len(checked) == 2


def test_ranks_whose_parts_differ_may_use_other_numbers_of_streams(local):
    plan = plan_of(local, ZERO)
    options = {**dict(plan.options), "streams": "1 of 2 used", "num_streams": 2}
    other = replace(plan, options=tuple(options.items()))
    assert verify_ranks(RankPlans(ZERO, (plan, other), (0, 1))).num_ranks == 2
    changed = replace(plan, options=tuple((options | {"accumulate": 3}).items()))
    with raises(CompileError):
        verify_ranks(RankPlans(ZERO, (plan, changed), (0, 1)))
