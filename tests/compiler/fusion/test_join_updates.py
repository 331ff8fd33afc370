"""Which updates become one launch, where it stands, and that the peak stays what it was."""

import numpy as np
import pytest
from graphs import Target

from compiler.fusion.join_updates import merge_updates, update_programs
from compiler.graph.graph import Output, Write
from compiler.graph.target import one_device
from compiler.ops.families.arithmetic import EXP, NEG
from compiler.ops.families.updates import INCREMENT, SGD_UPDATE
from compiler.ops.primitives.reduce import SUM
from compiler.pipeline.rewrites import check
from compiler.storage.order import run as ordered

DECAY = {"weight_decay": 0.0}


class Joining(Target):
    """Joins so many updates."""

    def __init__(self, most=100):
        super().__init__("joining")
        self.most = most

    def max_merged_updates(self, num_full):
        return self.most


@pytest.fixture
def trained(sketch):
    """Return a function that makes a chain of exponentials, and an update of each stage."""

    def make(sizes, decay=lambda stage: 0.0, head=0):
        rate = sketch.variable("lr", (), "float32")
        if head:  # what makes the peak, and is over before the first gradient
            big = sketch.b.emit_one(EXP, sketch.input("x", (head,), "float32"))
            sketch.b.outputs.append(
                Output("loss", sketch.b.emit_one(SUM, big, axes=(0,), keepdims=False))
            )
        grads = []
        for stage, size in enumerate(sizes):
            w = sketch.variable(f"w{stage}", (size,), "float32")
            grads.append((w, sketch.b.emit_one(NEG, sketch.b.emit_one(EXP, w)), decay(stage)))
        for w, grad, weight_decay in grads:
            made = sketch.b.emit_one(SGD_UPDATE, w, grad, rate, weight_decay=weight_decay)
            sketch.b.writes.append(Write(w, made))
        return sketch

    return make


def joined(graph, most=100):
    """Return the graph with programs, ordered and joined; the verifier has seen it."""
    made = merge_updates(ordered(update_programs(graph)), one_device(Joining(most)))
    check(made, "join_updates")
    return made


def counts(graph):
    return [node.attrs.int_("count") for node in graph.nodes if str(node.op) == "joined_updates"]


def values_of(evaluate, graph, seed=0):
    rng = np.random.default_rng(seed)
    feeds = {
        node.attrs["name"]: rng.normal(size=graph.types[node.outputs[0]].shape).astype("float32")
        for node in graph.nodes
        if str(node.op) in ("input", "variable")
    }
    return evaluate(graph, feeds)


def peak(graph):
    """Return the live bytes of the fullest node: each value from its maker to its last reader."""
    last = {v: index for index, node in enumerate(graph.nodes) for v in node.inputs}
    written = {node.outputs[o] for node in graph.nodes for o, _ in node.writes}
    kept = [str(node.op) in ("input", "variable") for node in graph.nodes]
    spans = [
        (index, last.get(v, index), graph.types[v].size_bytes)
        for index, node in enumerate(graph.nodes)
        for v in node.outputs
        if not kept[index] and v not in written
    ]
    return max([sum([n for a, b, n in spans if a <= at <= b]) for at in range(len(graph.nodes))])


def test_the_updates_of_a_kind_are_one_launch_with_the_same_numbers(trained, evaluate):
    graph = trained([3, 1, 7, 130], head=1000).b.freeze()
    made = joined(graph)
    assert counts(made) == [4]
    for name, expected in values_of(evaluate, graph)[1].items():
        np.testing.assert_array_equal(values_of(evaluate, made)[1][name], expected)
    (node,) = [node for node in made.nodes if str(node.op) == "joined_updates"]
    assert sorted(node.attrs.texts("variables")) == ["w0", "w1", "w2", "w3"]


def test_other_attributes_or_numbers_are_another_kind(trained):
    graph = trained([4] * 6, decay=lambda stage: 0.1 * (stage % 2), head=1000).b.freeze()
    assert counts(joined(graph)) == [3, 3]


def test_a_device_that_joins_none_gets_the_graph_itself(trained):
    graph = ordered(update_programs(trained([4] * 3).b.freeze()))
    assert merge_updates(graph, one_device(Joining(1))) is graph


def test_so_many_as_a_launch_may_do_are_one(trained):
    assert counts(joined(trained([4] * 7, head=1000).b.freeze(), most=3)) == [3, 3]


@pytest.mark.parametrize("head", [0, 40, 150, 1000])
@pytest.mark.parametrize("sizes", [[100, 90, 80, 70], [10, 1000, 10, 10], [64] * 5, [1, 50, 7, 9]])
def test_no_launch_has_more_live_bytes_than_the_fullest_had(sizes, head, trained):
    graph = ordered(update_programs(trained(sizes, head=head).b.freeze()))
    assert peak(merge_updates(graph, one_device(Joining()))) <= peak(graph)


def test_updates_stand_before_what_reads_them_and_before_who_writes_what_they_read(sketch):
    step = sketch.variable("step", (), "int64")
    rate = sketch.b.emit_one(EXP, sketch.input("lr", (), "float32"))
    big = sketch.b.emit_one(EXP, sketch.input("x", (10_000,), "float32"))
    news = []
    for name in ("a", "b", "c"):
        w = sketch.variable(name, (5,), "float32")
        news.append(sketch.b.emit_one(SGD_UPDATE, w, sketch.b.emit_one(NEG, w), rate, **DECAY))
        sketch.b.writes.append(Write(w, news[-1]))
        if name == "b":
            total = sketch.b.emit_one(EXP, news[0])
    sketch.b.writes.append(Write(step, sketch.b.emit_one(INCREMENT, step)))
    for value in (total, big):
        sketch.b.outputs.append(Output(f"o{value}", value))
    graph = update_programs(sketch.b.freeze())
    made = merge_updates(graph, one_device(Joining()))
    check(made, "join_updates")
    place = {v: index for index, node in enumerate(made.nodes) for v in node.outputs}
    assert place[news[0]] < place[total]
    assert counts(made) == [2]
