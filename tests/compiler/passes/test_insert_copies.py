"""Copies between devices, held against a rule that looks at edges only."""

from dataclasses import replace

import numpy as np
import pytest
import tiers
from error_texts import raises
from graphs import Net, adam, descend, sims
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import LAYERS, check_edges, check_same, layer

from compiler.contract.errors import CompileError
from compiler.graph.graph import Output, SourceLocation
from compiler.ops.families.activation import GELU
from compiler.ops.families.arithmetic import ADD, EXP, MUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.shape import BROADCAST_TO, RESHAPE
from compiler.ops.primitives.sources import CONSTANT, VARIABLE
from compiler.ops.primitives.transfer import COPY_TO
from compiler.passes import autodiff, batches, place, simplify
from compiler.pipeline.rewrites import check
from compiler.storage.order import needed_per_step

HERE, THERE = SourceLocation("train.py", 10), SourceLocation("train.py", 20)


@pytest.fixture
def net():
    return Net()


@settings(max_examples=tiers.examples(60), deadline=None)
@given(layers=LAYERS, every=st.sampled_from((1, 2)), skips=st.booleans())
def test_any_split_of_a_training_has_one_copy_a_crossing_and_the_same_numbers(
    layers, every, skips, evaluate_graphs
):
    net, weights = Net(), []
    earlier = [net.input(4, 4, dtype="float32")]
    for kind, device, pick in [("product", 0, 0), *layers]:
        with net.b.at("", HERE, device=device):
            earlier.append(layer(net, kind, earlier, weights, pick))
    loss = net.b.emit_one(SUM, earlier[-1], axes=(0, 1), keepdims=False)
    adam(net.b, loss, weights, every)
    # State of the optimizer lies with its parameter, as the trace leaves it.
    homes = {n.outputs[0]: n.device for n in net.b.nodes}
    states = {s: homes[u.variable] for u in net.b.updates for s in u.state}
    net.b.nodes = [replace(n, device=states.get(n.outputs[0], n.device)) for n in net.b.nodes]
    graph = simplify.simplify_graph(autodiff.differentiate(net.b.freeze()))
    graph = autodiff.skip_updates(graph) if skips else graph
    zeros = {
        n.attrs["name"]: np.zeros(n.attrs["shape"], n.attrs["dtype"])
        for n in graph.nodes
        if n.op is VARIABLE
    }
    after = check(place.insert_copies(graph, sims(3)), "insert_copies")
    check_edges(after)
    check_same(graph, after, zeros | net.feeds, evaluate_graphs)
    split = check(batches.split_rates(after), "rates")
    check_edges_per_rate(split)


def check_edges_per_rate(graph):
    """Check that a copy is made at the rate at which it is read."""
    per_step = needed_per_step(graph)
    copies = {n.outputs[0]: per_step[i] for i, n in enumerate(graph.nodes) if n.op is COPY_TO}
    for index, node in enumerate(graph.nodes):
        for value in node.inputs:
            assert copies.get(value, per_step[index]) == per_step[index]


def test_readers_on_one_device_share_a_copy(net, evaluate):
    b = net.b
    x = net.input(4)
    h = b.emit_one(EXP, x)
    with b.at("", HERE, device=1):
        y, z = b.emit_one(GELU, h), b.emit_one(MUL, h, h)
    b.outputs = [Output("y", y), Output("z", z)]
    graph = b.freeze()
    after = place.insert_copies(graph, sims(2))
    check_edges(after)
    assert [n.attrs["to"] for n in after.nodes if n.op is COPY_TO] == [1]
    check_same(graph, after, net.feeds, evaluate)


def test_a_copy_to_where_a_value_lies_is_none(net):
    b = net.b
    h = b.emit_one(EXP, net.input(4))
    b.outputs = [Output("y", b.emit_one(EXP, b.emit_one(COPY_TO, h, to=0, bucket=0)))]
    after = place.insert_copies(b.freeze(), sims(2))
    assert [n for n in after.nodes if n.op is COPY_TO] == []


def test_a_users_copy_and_what_a_crossing_needs_are_one(net):
    b = net.b
    h = b.emit_one(EXP, net.input(4))
    with b.at("", HERE, device=1):
        y = b.emit_one(ADD, b.emit_one(COPY_TO, h, to=1, bucket=0), h)
    b.outputs = [Output("y", y)]
    after = place.insert_copies(b.freeze(), sims(2))
    check_edges(after)
    assert len([n for n in after.nodes if n.op is COPY_TO]) == 1


def test_a_broadcast_is_repeated_and_a_constant_made_again_instead_of_copied(net):
    b = net.b
    row = b.emit_one(EXP, net.input(1, 4))
    wide = b.emit_one(BROADCAST_TO, row, shape=(64, 4))
    half = b.emit_one(BROADCAST_TO, net.number(0.5), shape=(64, 4))
    with b.at("", HERE, device=1):
        y = b.emit_one(MUL, wide, half)
    b.outputs = [Output("y", y)]
    after = place.insert_copies(b.freeze(), sims(2))
    check_edges(after)
    (copy,) = [n for n in after.nodes if n.op is COPY_TO]
    assert after.types[copy.inputs[0]].shape == (1, 4)
    assert [n.device for n in after.nodes if n.op is CONSTANT] == [0, 1]


def used_twice(net, *, copied):
    b = net.b
    x, w = net.input(4), net.variable(4)
    with b.at("lower", HERE):
        near = b.emit_one(MUL, x, w)
    with b.at("upper", THERE, device=1):
        shown = b.emit_one(
            RESHAPE, b.emit_one(COPY_TO, w, to=1, bucket=0) if copied else w, shape=(4,)
        )
        far = b.emit_one(MUL, x, shown)
        loss = b.emit_one(SUM, b.emit_one(ADD, near, far), axes=(0,), keepdims=False)
    descend(b, loss, (w,))
    return simplify.simplify_graph(autodiff.differentiate(b.freeze()))


def test_a_parameter_on_two_devices_is_refused_with_both_lines_and_the_mend(net):
    with raises(CompileError):
        place.insert_copies(used_twice(net, copied=False), sims(2))


def test_a_copied_parameter_is_copied_each_step_and_its_gradient_comes_back(net, evaluate):
    graph = used_twice(net, copied=True)
    after = place.insert_copies(graph, sims(2))
    check_edges(after)
    there = {after.types[n.inputs[0]].shape for n in after.nodes if n.attrs.get("to") == 1}
    back = [n for n in after.nodes if n.attrs.get("to") == 0]
    assert there == {(4,)}
    assert len(back) == 1  # the gradient; it is added where the parameter lies
    readers = [n for n in after.nodes if back[0].outputs[0] in n.inputs]
    assert [(n.op, n.device) for n in readers] == [(ADD, 0)]
    check_same(graph, after, net.feeds, evaluate)


def test_a_graph_of_one_device_stays_the_object_that_it_is(net):
    b = net.b
    b.outputs = [Output("y", b.emit_one(EXP, net.input(4)))]
    graph = b.freeze()
    assert place.insert_copies(graph, sims(1)) is graph
