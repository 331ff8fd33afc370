"""Plans of ranks whose tensors are split: their collectives, and what they compute together."""

from itertools import product

import numpy as np
import pytest
from graphs import sims
from jobs import GPT
from lowered_ranks import graphs_of, laid_out, ordered, plan_of, plans_of
from rank_graphs import run_ranks
from rank_jobs import ALONE, drawn, part, sources_of, step_graph

import actorflow as af
from compiler.contract.placement import Mesh
from compiler.contract.plan_tables import ActorKind
from compiler.contract.sbp import BROADCAST, PARTIAL, Split
from compiler.contract.types import DType, TensorType
from compiler.graph.registry import is_comm
from compiler.ops.language.define import update
from compiler.ops.primitives.sources import INPUT, VARIABLE

SPEC = {name: TensorType(DType.INT64, (6, 4)) for name in ("x", "y")}
MESHES = [
    Mesh(("data",), (2,)),
    Mesh(("zero",), (3,)),
    Mesh(("model",), (3,)),
    Mesh(("data", "model"), (2, 2)),
    Mesh(("data", "zero"), (2, 2)),
    Mesh(("data", "model", "zero"), (2, 2, 2)),
]


@af.job(optimizer=af.optim.AdamW(1e-2), clip_norm=0.5)
def clipped(model, batch):
    return af.cross_entropy(model(batch.x).reshape(-1, 11), batch.y.reshape(-1))


@af.job(optimizer=af.optim.SGD(0.1, momentum=0.9), accumulate=2)
def accumulated(model, batch):
    return af.cross_entropy(model(batch.x).reshape(-1, 11), batch.y.reshape(-1))


JOBS = {"clipped": clipped, "accumulated": accumulated}


def weight_word(axis, name, shape):
    """Return how a parameter lies along an axis of the mesh."""
    if axis == "model" and (".qkv." in name or ".up." in name or name.startswith("head")):
        return Split(0)
    if axis == "model" and name.endswith((".proj.weight", ".down.weight")):
        return Split(1)
    return Split(0) if axis == "zero" and shape and shape[0] >= 6 else BROADCAST


def fixed_words(graph, axis):
    """Return the layouts of sources, updates and sums over batches."""
    fixed = {}
    for node in graph.nodes:
        (value, *_), shape = node.outputs, node.attrs.get("shape", ())
        if node.op is INPUT:
            fixed[value] = Split(0) if axis == "data" else BROADCAST
        elif node.op is VARIABLE and node.attrs["name"].startswith("gradient/"):
            name = node.attrs["name"].removeprefix("gradient/")
            word = weight_word(axis, name, shape)
            fixed[value] = PARTIAL if axis in ("data", "zero") else word
        elif node.op is VARIABLE:
            name = node.attrs["name"].removeprefix("optimizer/")
            fixed[value] = weight_word(axis, name, shape) if shape else BROADCAST
    for node in graph.nodes:
        if update.has(node.op) and node.inputs[0] in fixed:
            for _, over in node.writes:
                fixed[node.inputs[over]] = fixed[node.inputs[0]]
    return fixed | {w.value: fixed[w.variable] for w in graph.writes}


@pytest.fixture(scope="module", params=product(JOBS, MESHES), ids=lambda p: f"{p[0]}, {p[1]}")
def ranks(request):
    """The graph of a job, its layouts over a mesh, and the graphs of its ranks."""
    name, mesh = request.param
    graph = step_graph(JOBS[name], GPT(11, seq=4, width=8, layers=2), SPEC)
    layouts = laid_out(graph, mesh, fixed_words)
    return graph, layouts, graphs_of(graph, layouts)


def fed(graph, layouts, feeds, rank):
    """Return what a rank has of the sources, by name; of a sum, one rank of each axis has all."""
    found = {}
    at = layouts.mesh.coordinates(rank)
    for node in graph.nodes:
        if node.op in (INPUT, VARIABLE):
            (value,) = node.outputs
            shares = [i for i, word in enumerate(layouts.of(value)) if word == PARTIAL]
            own = feeds[value][part(graph, layouts, value, rank)]
            found[node.attrs["name"]] = own * (not any(at[i] for i in shares))
    return found


def written(graph, values):
    """Return what a step returns and writes, by name."""
    makers = graph.producers()
    found = {o.name: values[o.value] for o in graph.outputs}
    for write in graph.writes:
        node = graph.nodes[makers[write.variable]]
        if node.attrs["role"] != "scratch":
            found[node.attrs["name"]] = values[write.value], write
    return found


def test_ranks_whose_collectives_go_by_the_bucket_do_the_step_of_one(ranks):
    graph, layouts, graphs = ranks
    feeds, mesh = drawn(graph), layouts.mesh
    counters = [n.outputs[0] for n in graph.nodes if n.attrs.get("role") == "counter"]
    feeds |= {value: np.ones_like(feeds[value]) for value in counters}  # the last batch of a step
    (whole,) = run_ranks([graph], [feeds], ALONE)
    after = [ordered(own, mesh)[0] for own in graphs]
    own = []
    for rank, local in enumerate(after):
        given = fed(graph, layouts, feeds, rank)
        makers = local.producers()
        names = {v: local.nodes[makers[v]].attrs["name"] for v in sources_of(local)}
        own.append({value: given[name] for value, name in names.items()})
    wanted = written(graph, whole)
    for rank, values in enumerate(run_ranks(after, own, mesh)):
        found = written(after[rank], values)
        assert found.keys() == wanted.keys()
        for name, want in wanted.items():
            came = found[name]
            if isinstance(want, tuple):
                want, write = want
                want, came = want[part(graph, layouts, write.variable, rank)], came[0]
            np.testing.assert_allclose(came, want, rtol=2e-5, atol=2e-6, err_msg=name)


WAYS = {
    "alone": {},
    "two streams": {"num_streams": 2},
    "in blocks": {"recompute": "blocks"},
    "bf16": {"precision": "bf16"},
    "state on the host": {"offload": "optimizer", "hardware": sims(1)},
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("way", WAYS)
def test_plans_of_all_ranks_are_proven_together_whatever_is_asked(ranks, way):
    graph, layouts, _ = ranks
    if way != "alone" and layouts.mesh.num_ranks > 4:
        pytest.skip("as of four ranks")
    found = plans_of(graph, layouts, **WAYS[way])
    for plan in found.plans:
        comm = [actor for actor in plan.actors if actor.kind is ActorKind.COMM]
        orders = [dict(x.attrs)["order"] for actor in comm for x in actor.launches]
        assert orders == sorted({*orders})
        assert orders
        for actor in comm:
            assert len({dict(x.attrs)["bucket"] for x in actor.launches}) == 1


def test_an_all_reduce_of_a_plan_works_in_place(ranks):
    _, layouts, graphs = ranks
    plan = plan_of(graphs[0], layouts.mesh)
    launches = [x for a in plan.actors if a.kind is ActorKind.COMM for x in a.launches]
    late = [x for x in launches if x.op == "all_reduce" and ("when", "late") in x.attrs]
    of_variables = {plan.views[v.view].register for v in plan.variables}
    left = [(x.inputs, x.outputs) for x in late if x.inputs == x.outputs]
    # What leaves the step has bytes of its own.
    sinks = [actor for actor in plan.actors if actor.kind is ActorKind.SINK]
    leaving = {port.register for actor in sinks for port in actor.inputs}
    late = [x for x in late if plan.views[x.outputs[0]].register not in leaving]
    for launch in late:
        # A sum over batches is kept for the next one; what one has left in place another one reads.
        is_sum = plan.views[launch.inputs[0]].register in of_variables
        assert launch.inputs == launch.outputs or is_sum or (launch.inputs, launch.inputs) in left
    assert all(x.inputs != x.outputs for x in launches if x.op != "all_reduce")


def test_attributes_of_turns_are_equal_on_all_ranks(ranks):
    *_, graphs = ranks
    rows = [
        [
            (n.op, *[n.attrs[k] for k in ("bucket", "order", "when", "group")])
            for n in graph.nodes
            if is_comm.get(n.op)
        ]
        for graph in graphs
    ]
    assert rows.count(rows[0]) == len(rows)
    orders = [row[2] for row in rows[0]]
    assert sorted(orders) == list(range(len(orders)))
