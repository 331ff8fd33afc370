"""The device of a node: who keeps it, and that no rewrite joins what runs on two."""

from dataclasses import replace

import numpy as np
import pytest
from graphs import Net, descend, sims

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.contract.types import Phase
from compiler.fusion import fuse
from compiler.graph.graph import UNKNOWN_SOURCE, GraphBuilder, Output, prune
from compiler.graph.target import CompileOptions
from compiler.ops.families.activation import GELU
from compiler.ops.families.arithmetic import ADD, EXP, MUL
from compiler.ops.families.normalisation import SOFTMAX
from compiler.ops.families.updates import SGD_UPDATE
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.sources import VARIABLE
from compiler.passes import autodiff, precision, simplify
from compiler.pipeline.pipeline import PASSES
from compiler.pipeline.printer import print_graph
from compiler.pipeline.rewrites import PassContext


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def halves(net):
    """The training of gelu(x @ w0) on device 0 and of gelu(h @ w1) + w0 of it on device 1."""
    b = net.b
    x, w0 = net.input(4, 6), net.variable(6, 5)
    h = b.emit_one(GELU, b.emit_one(MATMUL, x, w0))
    with b.at("upper", UNKNOWN_SOURCE, device=1):
        w1 = net.variable(5, 3)
        y = b.emit_one(GELU, b.emit_one(MATMUL, h, w1))
        loss = b.emit_one(SUM, y, axes=(0, 1), keepdims=False)
    descend(b, loss, (w0, w1))
    return b.freeze()


def devices_by_scope(graph, phase):
    return {(n.scope, n.device) for n in graph.nodes if n.phase is phase}


def test_a_gradient_runs_where_its_node_ran_and_an_update_where_its_variable_lies(halves):
    after = autodiff.differentiate(halves)
    assert devices_by_scope(after, Phase.BACKWARD) == {("", 0), ("upper", 1)}
    variables = {n.outputs[0]: n.device for n in after.nodes if n.op is VARIABLE}
    updates = {n.inputs[0]: n.device for n in after.nodes if n.op is SGD_UPDATE}
    assert updates == variables
    assert sorted(variables.values()) == [0, 1]


def test_gradients_of_one_value_are_added_where_it_was_made(net):
    b = net.b
    x, w = net.input(4), net.variable(4)
    with b.at("far", UNKNOWN_SOURCE, device=1):
        far = b.emit_one(MUL, w, x)
    loss = b.emit_one(SUM, b.emit_one(ADD, b.emit_one(EXP, w), far), axes=(0,), keepdims=False)
    descend(b, loss, (w,))
    after = autodiff.differentiate(b.freeze())
    (total,) = [n for n in after.nodes if n.op is ADD and n.phase is Phase.BACKWARD]
    assert total.device == 0


def test_equal_nodes_on_two_devices_stay_two(net):
    b = net.b
    x = net.input(4)
    one, same = b.emit_one(EXP, x), b.emit_one(EXP, x)
    with b.at("", UNKNOWN_SOURCE, device=1):
        other = b.emit_one(EXP, x)
    b.outputs = [Output(str(i), v) for i, v in enumerate((one, same, other))]
    after = simplify.simplify_graph(b.freeze())
    assert [n.device for n in after.nodes if n.op is EXP] == [0, 1]


def test_a_fused_kernel_is_of_one_device(net, evaluate):
    b = net.b
    x = net.input(4, 8)
    h = b.emit_one(EXP, b.emit_one(GELU, x))
    with b.at("", UNKNOWN_SOURCE, device=1):
        y = b.emit_one(EXP, b.emit_one(GELU, h))
        beside = b.emit_one(MUL, x, x)
    b.outputs = [Output("y", y), Output("beside", beside)]
    graph = b.freeze()
    after = fuse.run(graph)
    kernels = [(n.device, n.attrs["members"]) for n in after.nodes if n.op.name == "fused"]
    assert {device for device, _ in kernels} == {0, 1}
    assert (0, ("gelu", "exp")) in kernels
    (got, _), (wanted, _) = evaluate(after, net.feeds), evaluate(graph, net.feeds)
    np.testing.assert_allclose(got["y"], wanted["y"], rtol=1e-12)


@pytest.mark.parametrize("far", [(), (1,), (0, 1, 2)])
def test_attention_over_two_devices_stays_what_it_was(net, far):
    b = net.b
    q, k, v = net.input(2, 4, 8), net.input(2, 8, 4), net.input(2, 4, 8)
    value = q
    for index, (op, *others) in enumerate(((MATMUL, k), (SOFTMAX,), (MATMUL, v))):
        attrs = {"scale": 1.0, "causal": False} if op is SOFTMAX else {}
        with b.at("", UNKNOWN_SOURCE, device=int(index in far)):
            value = b.emit_one(op, value, *others, **attrs)
    b.outputs = [Output("y", value)]
    after = prune(simplify.fuse_attention(b.freeze()))
    attention = [n.device for n in after.nodes if n.op.name == "attention"]
    assert attention == {(): [0], (1,): [], (0, 1, 2): [1]}[far]


def test_a_search_for_nan_runs_where_the_gradient_lies(halves):
    after = autodiff.skip_updates(simplify.simplify_graph(autodiff.differentiate(halves)))
    made = {v: n.device for n in after.nodes for v in n.outputs}
    searches = [n for n in after.nodes if n.op.name == "non_finite"]
    assert [n.device for n in searches] == [made[n.inputs[0]] for n in searches]
    assert {n.device for n in searches} == {0, 1}


def test_a_value_is_rounded_where_it_lies(net):
    b = net.b
    x, w = net.input(4, 6, dtype="float32"), net.variable(6, 5, dtype="float32")
    with b.at("", UNKNOWN_SOURCE, device=1):
        y = b.emit_one(MATMUL, x, w)
    b.outputs = [Output("y", y)]
    after = precision.narrow_products(b.freeze())
    assert [n.device for n in after.nodes if n.op.name == "cast"] == [0, 0]


def test_a_device_is_printed_but_for_the_first(halves):
    lines = [line.partition(" on device ")[2][:1] for line in print_graph(halves)]
    assert {*lines} == {"", "1"}


def test_no_pass_moves_a_node_of_a_job_that_is_all_on_one_device(halves):
    nodes = tuple([replace(n, device=2) for n in halves.nodes])
    graph = replace(halves, nodes=nodes)
    context = PassContext(sims(3), CompileOptions("job"))
    for step in PASSES:
        if step.is_wanted(context.options):
            graph = step.run(graph, context)
            assert {n.device for n in graph.nodes} == {2}, step.name


def test_a_builder_gives_back_the_device_that_it_had():
    b = GraphBuilder()
    with b.at("", UNKNOWN_SOURCE, device=1):
        with b.on(2):
            b.emit_one(VARIABLE, name="a", dtype="float32", shape=(), role="parameter", init=())
        with b.like_node(b.nodes[0], Phase.BACKWARD):
            b.emit_one(VARIABLE, name="b", dtype="float32", shape=(), role="parameter", init=())
        b.emit_one(VARIABLE, name="c", dtype="float32", shape=(), role="parameter", init=())
    b.emit_one(VARIABLE, name="d", dtype="float32", shape=(), role="parameter", init=())
    assert [n.device for n in b.nodes] == [2, 2, 1, 0]
    assert b.nodes[1].phase is Phase.BACKWARD
