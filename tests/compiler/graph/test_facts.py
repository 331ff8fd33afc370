from dataclasses import replace

from compiler.graph.graph import Output, cached_analysis, sole_readers
from compiler.ops.families.arithmetic import ABS, ADD, NEG


def test_a_fact_is_worked_out_once_for_a_version_of_a_graph(sketch):
    x = sketch.input("x", (2,))
    sketch.b.outputs = [Output("y", sketch.b.emit_one(NEG, x))]
    graph, asked = sketch.b.freeze(), []

    @cached_analysis
    def num_nodes(graph):
        asked.append(graph)
        return len(graph.nodes)

    assert [num_nodes(graph), num_nodes(graph)] == [2, 2]
    other = replace(graph, nodes=graph.nodes[:1])
    assert [num_nodes(other), num_nodes(graph)] == [1, 2]
    assert asked == [graph, other]


def test_what_is_known_of_a_graph_is_no_part_of_its_value(sketch):
    x = sketch.input("x", (2,))
    graph = sketch.b.freeze()
    other = replace(graph)
    graph.producers()
    assert graph == other
    assert repr(graph) == repr(other)
    assert x == 0


def test_a_sole_reader_is_the_only_node_and_no_root_is_read_beside_it(sketch):
    x = sketch.input("x", (2,))
    twice = sketch.b.emit_one(ADD, x, x)
    shared, root = sketch.b.emit_one(NEG, twice), sketch.b.emit_one(ABS, twice)
    end = sketch.b.emit_one(ADD, shared, sketch.b.emit_one(ADD, shared, root))
    sketch.b.outputs = [Output("y", end), Output("z", root)]
    found = sole_readers(sketch.b.freeze())
    assert found[x] == 1
    assert [found[v] for v in (twice, shared, root, end)] == [-1, -1, -1, -1]
