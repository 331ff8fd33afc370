"""Placement by cost: what moves, what stays, and what a device may hold."""

from dataclasses import replace

import numpy as np
import pytest
import tiers
from error_texts import raises
from graphs import Net, Target, adam, sims
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import LAYERS, check_edges, check_same, layer

from compiler.contract.errors import CompileError
from compiler.contract.types import Phase
from compiler.graph.graph import UNPLACED, Output
from compiler.graph.target import Link
from compiler.ops.families.activation import GELU
from compiler.ops.families.arithmetic import ADD, EXP
from compiler.ops.families.updates import ADAMW_UPDATE
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.sources import VARIABLE
from compiler.ops.primitives.transfer import COPY_TO
from compiler.passes import autodiff, place, simplify
from compiler.pipeline.rewrites import check

FAST = Link(100.0, 100.0, 100.0)
SLOW = Link(100.0, 100.0, 1e9)


@pytest.fixture
def net():
    return Net()


def unplaced(graph):
    return replace(graph, nodes=tuple([replace(n, device=UNPLACED) for n in graph.nodes]))


def timed(link, *, per_launch_ns=1e5, without=()):
    """Return a device whose launches all take the same time."""

    class Costs(Target):
        message_ns = 2_000.0

        def query(self, call):
            if call.op in without:
                raise LookupError(f"no kernel for op {call.op}")
            return super().query(call)

    return Costs("timed", duration_ns=lambda call: per_launch_ns, link=link)


def branches(net, count=2, length=6):
    """Return some chains of one input whose ends are added."""
    b, x = net.b, net.input(8, 8)
    ends = []
    for _ in range(count):
        h = x
        for _ in range(length):
            h = b.emit_one(EXP, h)
        ends.append(b.emit_one(MATMUL, h, h))
    total = ends[0]
    for end in ends[1:]:
        total = b.emit_one(ADD, total, end)
    b.outputs = [Output("y", total)]
    return unplaced(b.freeze())


def training(net, layers=4, width=64):
    """Return the training of a chain of products, with AdamW."""
    b = net.b
    h = net.input(2, width, dtype="float32")
    weights = []
    for _ in range(layers):
        weights.append(net.variable(width, width, dtype="float32"))
        h = b.emit_one(GELU, b.emit_one(MATMUL, h, weights[-1]))
    adam(b, b.emit_one(SUM, h, axes=(0, 1), keepdims=False), weights)
    return unplaced(simplify.simplify_graph(autodiff.differentiate(b.freeze())))


def of_launches(graph):
    return {n.device for n in graph.nodes if n.inputs}


def test_branches_go_to_two_devices_where_the_link_is_fast_and_to_one_where_it_is_slow(net):
    graph = branches(net)
    fast = place.place_nodes(graph, sims(2, [timed(FAST)] * 2))
    assert sorted([n.device for n in fast.nodes if n.op is EXP]) == [0] * 6 + [1] * 6
    slow = place.place_nodes(graph, sims(2, [timed(SLOW)] * 2))
    assert of_launches(slow) == {0}


def test_the_faster_device_gets_the_longer_share(net):
    graph = branches(net, count=4)
    hardware = sims(2, [timed(FAST, per_launch_ns=3e5), timed(FAST)])
    devices = [n.device for n in place.place_nodes(graph, hardware).nodes if n.op is EXP]
    assert devices.count(1) > devices.count(0) > 0


def test_a_chain_stays_on_one_device(net):
    after = place.place_nodes(training(net), sims(3, [timed(FAST)] * 3))
    assert {n.device for n in after.nodes if n.phase is Phase.FORWARD and n.op is MATMUL} == {0}


def test_a_parameter_lies_with_its_readers_its_update_and_its_state(net):
    memory = 3 * 3 * 64 * 64 * 4  # three parameters of four with their state
    after = place.place_nodes(training(net), replace(sims(2), memory_bytes=memory))
    home = {n.outputs[0]: n.device for n in after.nodes if n.op is VARIABLE}
    assert {*home.values()} == {0, 1}
    parameters = {
        n.outputs[0] for n in after.nodes if n.op is VARIABLE and n.attrs["role"] == "parameter"
    }
    for node in after.nodes:
        for value in node.inputs:
            if value in parameters:
                assert home[value] == node.device
        if node.op is ADAMW_UPDATE:
            state = [node.inputs[position] for _, position in node.writes]
            assert {home[value] for value in state} == {node.device}


def test_each_device_has_what_its_own_target_says_where_plans_are_bounded(net):
    graph, weight = training(net, layers=6), 64 * 64 * 4
    small, large = timed(FAST, per_launch_ns=1e3), timed(FAST)
    small.memory_bytes, large.memory_bytes = 2 * 4 * weight, 100 * weight
    hardware = sims(2, [small, large])
    assert of_launches(place.place_nodes(graph, hardware)) == {0}
    after = place.place_nodes(graph, replace(hardware, is_bounded=True))
    lasting = [0, 0]
    for node in after.nodes:
        if node.op is VARIABLE:
            lasting[node.device] += after.types[node.outputs[0]].size_bytes
    assert lasting[0] <= small.memory_bytes < lasting[1]


def test_what_is_too_large_for_one_device_is_spread_so_that_each_has_room(net):
    graph = training(net, layers=6)
    weight = 64 * 64 * 4
    memory = 6 * 3 * weight * 6 // 10  # six tenths of what lasts
    far = timed(Link(1.0, 1.0, 1e6), per_launch_ns=1e4)
    after = place.place_nodes(graph, replace(sims(2, [far] * 2), memory_bytes=memory))
    lasting = [0, 0]
    for node in after.nodes:
        if node.op is VARIABLE:
            lasting[node.device] += after.types[node.outputs[0]].size_bytes
    assert 0 < max(lasting) <= memory
    split = place.insert_copies(after, sims(2))
    moved = [split.types[n.outputs[0]].size_bytes for n in split.nodes if n.op is COPY_TO]
    assert 0 < max(moved) < weight  # activations move, weights do not


def test_what_the_user_placed_stays_and_its_parameter_goes_with_it(net):
    graph = training(net)
    products = [i for i, n in enumerate(graph.nodes) if n.op is MATMUL][:4]
    nodes = list(graph.nodes)
    nodes[products[2]] = replace(nodes[products[2]], device=1)
    after = place.place_nodes(replace(graph, nodes=tuple(nodes)), sims(2, [timed(SLOW)] * 2))
    assert [after.nodes[i].device for i in products] == [1] * 4  # all comes to it
    home = {n.outputs[0]: n.device for n in after.nodes if n.op is VARIABLE}
    assert home[after.nodes[products[2]].inputs[1]] == 1


def test_a_device_without_a_kernel_is_passed_over(net):
    graph = branches(net)
    hardware = sims(2, [timed(FAST, without=("matmul",)), timed(FAST)])
    after = place.place_nodes(graph, hardware)
    assert {n.device for n in after.nodes if n.op is MATMUL} == {1}


def test_an_op_that_no_device_has_a_kernel_for_is_refused(net):
    hardware = sims(2, [timed(FAST, without=("matmul",))] * 2)
    with raises(CompileError):
        place.place_nodes(branches(net), hardware)


def test_an_evaluation_finds_the_variables_where_the_training_has_them(net):
    memory = 3 * 3 * 64 * 64 * 4
    hardware = replace(sims(2), memory_bytes=memory)
    trained = place.place_nodes(training(net), hardware)
    b, other = net.b, Net()
    other.b.outputs = []
    h = other.input(2, 64, dtype="float32")
    for node in [n for n in b.nodes if n.op is VARIABLE and n.attrs["role"] == "parameter"]:
        w = other.b.emit_one(VARIABLE, **node.attrs)
        h = other.b.emit_one(MATMUL, h, w)
    other.b.outputs = [Output("y", h)]
    graph = unplaced(other.b.freeze())
    after = place.place_nodes(place.with_variable_devices_of(graph, trained, hardware), hardware)
    home = {n.attrs["name"]: n.device for n in trained.nodes if n.op is VARIABLE}
    found = {n.attrs["name"]: n.device for n in after.nodes if n.op is VARIABLE}
    assert found == {name: home[name] for name in found}
    assert {*found.values()} == {0, 1}
    check_edges(place.insert_copies(after, hardware))


def test_an_evaluation_with_a_parameter_elsewhere_is_refused_with_both_devices(net):
    trained = place.place_nodes(training(net), sims(2))
    nodes = [replace(n, device=1) for n in trained.nodes if n.op is VARIABLE]
    with raises(CompileError):
        place.with_variable_devices_of(replace(trained, nodes=tuple(nodes)), trained, sims(2))


@settings(max_examples=tiers.examples(40), deadline=None)
@given(
    layers=LAYERS,
    memory=st.sampled_from((0, 300, 700, 2_000)),
    rates=st.lists(st.integers(1, 4), min_size=3, max_size=3),
)
def test_any_training_is_placed_without_a_copied_parameter_and_computes_the_same(
    layers, memory, rates, evaluate_graphs
):
    net, weights = Net(), []
    earlier = [net.input(4, 4, dtype="float32")]
    for kind, _, pick in [("product", 0, 0), *layers]:
        kind = "gelu" if kind == "reuse" else kind  # which names a device
        earlier.append(layer(net, kind, earlier, weights, pick))
    adam(net.b, net.b.emit_one(SUM, earlier[-1], axes=(0, 1), keepdims=False), weights)
    graph = unplaced(simplify.simplify_graph(autodiff.differentiate(net.b.freeze())))
    targets = [timed(FAST, per_launch_ns=1e4 * rate) for rate in rates]
    hardware = replace(sims(3, targets), memory_bytes=memory)
    placed = place.place_nodes(graph, hardware)
    assert placed == place.place_nodes(graph, hardware)
    after = check(place.insert_copies(placed, hardware), "insert_copies")
    check_edges(after)
    zeros = {
        n.attrs["name"]: np.zeros(n.attrs["shape"], n.attrs["dtype"])
        for n in graph.nodes
        if n.op is VARIABLE
    }
    check_same(graph, after, zeros | net.feeds, evaluate_graphs)


def test_a_graph_that_is_placed_stays_the_object_that_it_is(net):
    b = net.b
    b.outputs = [Output("y", b.emit_one(EXP, net.input(4)))]
    graph = b.freeze()
    assert place.place_nodes(graph, sims(2)) is graph
