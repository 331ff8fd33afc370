"""Which values of a graph have a range, and that the graph computes what it did."""

import numpy as np

from compiler.contract.probe import ProbeKind, ValueRange, read_probe
from compiler.graph.graph import GraphBuilder, Output
from compiler.graph.registry import find_op, reference
from compiler.ops.primitives.sources import INPUT
from compiler.passes.value_ranges import show_ranges

VALUE_RANGE = find_op("value_range")


def rows(graph):
    """Return the text of each range by its number, and the values of its outputs."""
    found = {}
    for output in graph.outputs:
        if output.name.startswith("debug/"):
            probe, operand = read_probe(output.name)
            assert probe.kind is ProbeKind.RANGE
            row, values = found.setdefault(probe.number, [None, []])
            found[probe.number] = [ValueRange.parse(probe.text) if not operand else row, values]
            values.append(output.value)
    return found


def sample():
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=(2, 3))
    ids = b.emit_one(INPUT, name="ids", dtype="int64", shape=(2,))
    y = b.emit_one(find_op("log"), b.emit_one(find_op("transpose"), x, perm=(1, 0)))
    b.outputs = [Output("y", y), Output("ids", ids)]
    return b.freeze()


def test_each_float_that_is_made_has_a_range_that_knows_what_was_read_through_views():
    graph = show_ranges(sample())
    found = rows(graph)
    assert [(row.phase, row.what, row.inputs) for row, _ in found.values()] == [
        ("", "batch['x']", ()),
        ("forward", "log", (1,)),
    ]
    assert [len(values) for _, values in found.values()] == [5, 5]


def test_outputs_and_nodes_of_before_are_there():
    before, after = sample(), show_ranges(sample())
    assert [o.name for o in after.outputs][:2] == [o.name for o in before.outputs]
    assert [n.op for n in before.nodes] == [
        n.op for n in after.nodes if n.op.name not in ("value_range", "reshape")
    ]


def test_a_range_tells_the_finite_numbers_and_counts_the_others():
    x = np.array([[1.0, np.nan, -2.0, np.inf, np.nan], [np.nan] * 5, [0.0, 5.0, -np.inf, 1.0, 1.0]])
    least, most, num_nan, num_inf, norm = reference.get(VALUE_RANGE)({}, x.astype(np.float32))
    np.testing.assert_array_equal(least, [-2.0, np.inf, 0.0])
    np.testing.assert_array_equal(most, [1.0, -np.inf, 5.0])
    np.testing.assert_array_equal(num_nan, [2, 5, 0])
    np.testing.assert_array_equal(num_inf, [1, 0, 1])
    np.testing.assert_allclose(norm, np.sqrt([5.0, 0.0, 27.0]), rtol=1e-6)


def test_ops_that_a_pattern_names_show_what_they_read_and_make_whole():
    for patterns in (["log"], ["l*"], ["log in*", "log"]):
        graph = show_ranges(sample(), patterns)
        of_x, of_log = [values for _, values in rows(graph).values()]
        assert graph.types[of_x[5]].shape == (2, 3)
        assert graph.types[of_log[5]].shape == (3, 2)
    assert [len(values) for _, values in rows(show_ranges(sample(), ["exp"])).values()] == [5, 5]
