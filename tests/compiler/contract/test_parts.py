"""Which part of a whole a rank has, from what its plan says and its number."""

from dataclasses import replace
from itertools import product

import numpy as np
from graphs import made_up
from hypothesis import given
from hypothesis import strategies as st

from compiler.contract.placement import AxisLinks, Mesh, MeshLink, joined
from compiler.contract.sbp import BROADCAST, Split, is_part, local_slices, shard_slices, splits_of
from compiler.contract.types import ShardingSpec
from compiler.graph.graph import GraphBuilder, Output
from compiler.graph.target import CompileOptions
from compiler.ops.families.arithmetic import EXP
from compiler.ops.primitives.sources import INPUT, VARIABLE
from compiler.pipeline.pipeline import compile_graph
from compiler.sbp.distribute import SbpAssignment, distribute
from compiler.sbp.infer import MeshAxis, Speed, choose


@st.composite
def laid_out(draw):
    """Return a mesh, the shape of a tensor, and a word for each axis of the mesh."""
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    extents = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh = Mesh(tuple("abc"[: len(extents)]), tuple(extents))
    word = st.sampled_from([BROADCAST, *[Split(axis) for axis in range(len(shape))]])
    return mesh, tuple(shape), tuple([draw(word) for _ in extents])


@given(laid_out())
def test_parts_lie_where_the_words_of_the_layout_say(case):
    mesh, shape, words = case
    part = ShardingSpec(shape, splits_of(words, mesh))
    for rank in range(mesh.num_ranks):
        want = local_slices(shape, words, mesh.shape, mesh.coordinates(rank))
        assert shard_slices(part, mesh, rank) == want


@given(laid_out())
def test_parts_cover_the_whole_once_for_each_set_of_replicas(case):
    mesh, shape, words = case
    part, seen = ShardingSpec(shape, splits_of(words, mesh)), np.zeros(shape, int)
    for rank in range(mesh.num_ranks):
        seen[shard_slices(part, mesh, rank)] += 1
    named = {name for name, _ in part.splits}
    replicas = [n for name, n in zip(mesh.names, mesh.shape, strict=True) if name not in named]
    assert (seen == np.prod(replicas, dtype=int)).all()


@given(laid_out())
def test_shapes_of_parts_are_those_that_some_rank_has(case):
    mesh, shape, words = case
    part = ShardingSpec(shape, splits_of(words, mesh))
    found = set()
    for rank in range(mesh.num_ranks):
        found.add(tuple([rows.stop - rows.start for rows in shard_slices(part, mesh, rank)]))
    for tried in product(*[range(extent + 1) for extent in shape]):
        assert is_part(part, mesh, tried) == (bool(part.splits) and tried in found)


def test_nested_splits_of_one_axis_are_outermost_first():
    mesh = Mesh(("a", "b"), (2, 3))
    part = ShardingSpec((8,), (("b", 0), ("a", 0)))
    found = [shard_slices(part, mesh, rank)[0] for rank in range(6)]
    assert [(own.start, own.stop) for own in found] == [
        (0, 2), (3, 5), (6, 7), (2, 3), (5, 6), (7, 8),
    ]  # fmt: skip


def graph_of(rows):
    """Return y = exp(x) * w of whole tensors."""
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=(rows, 4))
    init = (("kind", "ones"),)
    w = b.emit_one(VARIABLE, name="w", dtype="float32", shape=(6, 4), role="parameter", init=init,
              sbp=(("model", Split(1)),))  # fmt: skip
    b.outputs = [Output("y", b.emit_one(EXP, x)), Output("w", b.emit_one(EXP, w))]
    return b.freeze()


def graphs_of(rows, mesh, words):
    """Return the graph of each rank, its variable and batch lying as said."""
    graph, choices = graph_of(rows), []
    for axis, own_words in enumerate(words):
        fixed = {node.outputs[0]: own_words[node.op.name] for node in graph.nodes[:2]}
        earlier = list(zip(mesh.shape, choices, strict=False))
        own = MeshAxis(mesh.shape[axis], AxisLinks.alike(MeshLink()), Speed())
        choices.append(choose(graph, earlier, own, fixed))
    layouts = SbpAssignment(mesh, (AxisLinks.alike(MeshLink()),) * len(mesh.shape), tuple(choices))
    return [distribute(graph, layouts, rank) for rank in range(mesh.num_ranks)]


WORDS = (
    {"input": Split(0), "variable": BROADCAST},
    {"input": BROADCAST, "variable": Split(1)},
)


def test_ranks_whose_parts_are_as_large_have_equal_graphs():
    mesh = Mesh(("data", "model"), (2, 2))
    graphs = graphs_of(6, mesh, WORDS)
    sources = [[n for n in graph.nodes if n.op in (INPUT, VARIABLE)] for graph in graphs]
    assert all(own == sources[0] for own in sources)
    x, w = sources[0]
    assert x.attrs["shape"] == (3, 4)
    assert (x.attrs["whole"], x.attrs["splits"]) == ((6, 4), (("data", 0),))
    assert w.attrs["shape"] == (6, 2)
    assert (w.attrs["whole"], w.attrs["splits"]) == ((6, 4), (("model", 1),))
    assert "sbp" not in w.attrs


def test_ranks_of_uneven_parts_say_the_same_of_wholes_of_other_shapes():
    graphs = graphs_of(5, Mesh(("data",), (2,)), WORDS[:1])
    x = [next(n for n in graph.nodes if n.op is INPUT) for graph in graphs]
    assert [n.attrs["shape"] for n in x] == [(3, 4), (2, 4)]
    assert {(n.attrs["whole"], n.attrs["splits"]) for n in x} == {((5, 4), (("data", 0),))}
    whole = [next(n for n in graph.nodes if n.op is VARIABLE) for graph in graphs]
    assert all("whole" not in n.attrs for n in whole)


def test_a_plan_says_what_its_graph_says_of_parts():
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=(8, 4))
    init = (("kind", "ones"),)
    said = (("data", Split(0)),)
    w = b.emit_one(VARIABLE, name="w", dtype="float32", shape=(8, 4), role="parameter", init=init,
              sbp=said)  # fmt: skip
    v = b.emit_one(VARIABLE, name="v", dtype="float32", shape=(4, 4), role="parameter", init=init)
    b.outputs = [
        Output(name, b.emit_one(EXP, value)) for name, value in zip("xwv", (x, w, v), strict=True)
    ]
    hardware = replace(made_up("a target"), ranks=joined(Mesh(("data",), (2,)), MeshLink()))
    plan = compile_graph(b.freeze(), hardware, CompileOptions("job", is_training=False))
    want = ShardingSpec((8, 4), (("data", 0),))
    assert {v.name: v.sharding for v in plan.variables} == {"w": want, "v": None}
    assert {(f.name, f.sharding) for f in plan.fields if f.sharding is not None} == {("x", want)}
    assert plan.mesh == Mesh(("data",), (2,))
