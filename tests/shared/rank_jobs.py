"""Training graphs of jobs on many ranks in one process: layouts, parts, and what each rank makes.

What `rank_graphs` does of single ops, of whole steps.
"""

from __future__ import annotations

import numpy as np
from rank_graphs import run_ranks

from compiler.contract.placement import AxisLinks, Mesh, MeshLink
from compiler.contract.sbp import BROADCAST, Split, local_slices, parse_sbp
from compiler.graph.target import CompileOptions
from compiler.ops.language.define import update
from compiler.ops.primitives.sources import INPUT, NUMBERS, VARIABLE
from compiler.passes import autodiff, batches, simplify
from compiler.sbp.distribute import SbpAssignment, distribute
from compiler.sbp.infer import MeshAxis, Speed, choose

_SPEED = Speed()
ALONE = Mesh(("ranks",), (1,))


def step_graph(job, model, spec, is_staged=True):
    """Return the training graph of a job with gradients and updates, as ranks are to share it."""
    graph = simplify.simplify_graph(
        autodiff.differentiate(
            batches.chain_buffers(simplify.fuse_attention(job.graph(model, spec)))
        )
    )
    clipped = job.options.clip_norm or 0.0
    graph = (
        autodiff.clip_gradients(graph, CompileOptions("job", clip_norm=clipped))
        if clipped
        else graph
    )
    return autodiff.stage_updates(graph) if is_staged else graph


def fixed_words(graph, axis, split_weights=lambda name: BROADCAST):
    """Return the layouts that a user states along an axis of the mesh, by its name.

    "data" splits batches, "zero" all state, "model" what `split_weights` says of a name; what a
    node's attribute `sbp` says counts before that.
    """
    fixed = {}
    for node in graph.nodes:
        (value, *_), shape = node.outputs, node.attrs.get("shape", ())
        if node.op is INPUT:
            fixed[value] = Split(0) if axis == "data" else BROADCAST
        elif node.op is VARIABLE:
            is_split = axis == "model" and len(shape) > 0
            fixed[value] = split_weights(node.attrs["name"]) if is_split else BROADCAST
            if axis == "zero" and shape and shape[0] >= 2 and node.attrs["role"] != "buffer":
                fixed[value] = Split(0)
        stated = dict(node.attrs.get("sbp", ()))
        if axis in stated:
            fixed[value] = parse_sbp(stated[axis])
    for node in graph.nodes:
        if update.has(node.op) and node.inputs[0] in fixed:
            for _, over in node.writes:
                if graph.types[node.inputs[over]].shape == graph.types[node.inputs[0]].shape:
                    fixed[node.inputs[over]] = fixed[node.inputs[0]]
    return fixed | {w.value: fixed[w.variable] for w in graph.writes}


def drawn(graph):
    """Return numbers for the sources of a graph."""
    rng, arrays = np.random.default_rng(5), {}
    for node in graph.nodes:
        if node.op in (INPUT, VARIABLE):
            shape, dtype = node.attrs["shape"], node.attrs["dtype"]
            if dtype.startswith("int"):
                array = rng.integers(0, 5, shape).astype(dtype)
            else:
                array = abs(rng.standard_normal(shape)).astype(dtype) * 0.3
            arrays[node.outputs[0]] = np.asarray(array)
    return arrays


def laid_out(graph, mesh, split_weights=lambda name: BROADCAST, speed=_SPEED):
    """Return what is chosen for a graph, axis by axis."""
    choices = []
    for axis, name in enumerate(mesh.names):
        earlier = list(zip(mesh.shape, choices, strict=False))
        mesh_axis = MeshAxis(mesh.shape[axis], AxisLinks.alike(MeshLink()), speed)
        choices.append(choose(graph, earlier, mesh_axis, fixed_words(graph, name, split_weights)))
    return SbpAssignment(mesh, (AxisLinks.alike(MeshLink()),) * len(mesh.shape), tuple(choices))


def part(graph, layouts, value, rank, of=None):
    """Return which elements a rank has of a value, as it or another one lies."""
    words = layouts.of(value if of is None else of)
    at = layouts.mesh.coordinates(rank)
    return local_slices(graph.types[value].shape, words, layouts.mesh.shape, at)


def sources_of(graph):
    """Return what a graph is fed, in order; a rank knows its numbers of rows itself."""
    fed = [n for n in graph.nodes if n.op in (INPUT, VARIABLE)]
    return [n.outputs[0] for n in fed if n.attrs.get("role") != NUMBERS]


def run_parts(graph, layouts, feeds):
    """Return the graph of each rank, and the values of each."""
    graphs = [distribute(graph, layouts, rank) for rank in range(layouts.mesh.num_ranks)]
    sources, rank_feeds = sources_of(graph), []
    for rank, local in enumerate(graphs):
        values = sources_of(local)
        pairs = zip(sources, values, strict=True)
        rank_feeds.append({v: feeds[s][part(graph, layouts, s, rank)] for s, v in pairs})
    return graphs, run_ranks(graphs, rank_feeds, layouts.mesh)


def check_step(graph, mesh, split_weights=lambda name: BROADCAST, near=1e-5, speed=_SPEED):
    """Compare what ranks make of one step with what one makes: outputs, and what is written."""
    feeds, layouts = drawn(graph), laid_out(graph, mesh, split_weights, speed)
    (whole,) = run_ranks([graph], [feeds], ALONE)
    graphs, values = run_parts(graph, layouts, feeds)
    for rank, (local, own_values) in enumerate(zip(graphs, values, strict=True)):
        for output, mine in zip(graph.outputs, local.outputs, strict=True):
            want = whole[output.value]
            np.testing.assert_allclose(own_values[mine.value], want, rtol=near, atol=near / 10)
        for write, mine in zip(graph.writes, local.writes, strict=True):
            want = whole[write.value][part(graph, layouts, write.value, rank, write.variable)]
            np.testing.assert_allclose(
                own_values[mine.value], want, rtol=2 * near, atol=near / 5, err_msg=str(write)
            )
    return layouts, graphs
