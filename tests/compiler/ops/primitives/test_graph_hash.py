from dataclasses import replace

import numpy as np
import pytest

from compiler.graph.graph import Output, SourceLocation
from compiler.ops.families.arithmetic import ADD, MUL
from compiler.ops.primitives.body import hash_graph
from compiler.ops.primitives.reduce import SUM


@pytest.fixture
def graph(sketch):
    x = sketch.input("x", (2, 3), "float32")
    y = sketch.b.emit_one(ADD, x, sketch.constant(np.float32(2)))
    sketch.b.outputs = [Output("y", sketch.b.emit_one(SUM, y, axes=(0,), keepdims=False))]
    return sketch.b.freeze()


def with_node(graph, index, **changes):
    nodes = list(graph.nodes)
    nodes[index] = replace(nodes[index], **changes)
    return replace(graph, nodes=tuple(nodes))


def test_equal_graphs_have_equal_hashes(graph):
    assert hash_graph(graph) == hash_graph(replace(graph))
    assert len(hash_graph(graph)) == 32


def test_what_a_graph_computes_is_in_its_hash(graph):
    attrs = graph.nodes[3].attrs
    others = [
        with_node(graph, 2, op=MUL),
        with_node(graph, 3, attrs=type(attrs)({**attrs, "keepdims": True})),
        replace(graph, outputs=(Output("z", graph.outputs[0].value),)),
        with_node(graph, 2, device=1),
    ]
    assert len({hash_graph(g) for g in (graph, *others)}) == 1 + len(others)


@pytest.mark.parametrize(
    "changes", [{"scope": "blocks.0"}, {"source": SourceLocation("job.py", 7)}]
)
def test_scopes_and_lines_count_where_they_are_asked_for(graph, changes):
    moved = with_node(graph, 2, **changes)
    assert hash_graph(moved) == hash_graph(graph)
    assert hash_graph(moved, with_sources=True) != hash_graph(graph, with_sources=True)


def test_the_line_of_an_output_counts_where_lines_are_asked_for(graph):
    moved = replace(graph, outputs=(replace(graph.outputs[0], source=SourceLocation("job.py", 7)),))
    assert hash_graph(moved) == hash_graph(graph)
    assert hash_graph(moved, with_sources=True) != hash_graph(graph, with_sources=True)
