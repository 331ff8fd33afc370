"""Copies where bytes must outlive a write, proven by running graphs in the bytes they are given."""

import numpy as np
import pytest
import tiers
from graphs import descend
from hypothesis import given, settings
from hypothesis import strategies as st

import actorflow as af
from actorflow import nn
from actorflow.compile.hardware import hardware_for
from compiler.contract.placement import HOST
from compiler.graph.graph import GraphBuilder, Output, Write
from compiler.graph.registry import reference
from compiler.graph.target import CompileOptions
from compiler.ops.families.arithmetic import ADD, MUL, NEG
from compiler.ops.families.updates import INCREMENT, SGD_UPDATE
from compiler.ops.primitives.shape import COPY, TRANSPOSE
from compiler.ops.primitives.sources import INPUT, VARIABLE, constant
from compiler.passes import autodiff, batches, simplify
from compiler.pipeline.pipeline import compile_graph
from compiler.pipeline.rewrites import check
from compiler.storage import order
from compiler.storage.storage import assign_storage


def ops_of(graph):
    return [str(n.op) for n in graph.nodes]


def run_in_place(graph, feeds):
    """Execute the nodes in order in the storage they were assigned; return the final variables."""
    storage, memory, names = assign_storage(graph), {}, {}
    for index, node in enumerate(graph.nodes):
        if node.op in (INPUT, VARIABLE):
            memory[node.outputs[0]] = np.array(feeds[node.attrs["name"]])
            names[node.outputs[0]] = node.attrs["name"]
        if node.op in (INPUT, VARIABLE) or (node.inputs and not storage.is_launch[index]):
            continue
        arrays = [seen(graph, storage, memory, v) for v in node.inputs]
        made = reference.get(node.op)(node.attrs, *arrays)
        for value, array in zip(node.outputs, made, strict=True):
            root = storage.root[value]
            if root == value:
                memory[root] = np.array(array)
            else:
                memory[root][...] = array
    return {names[w.variable]: memory[w.variable] for w in graph.writes}


def seen(graph, storage, memory, value):
    type_, layout, root = graph.types[value], storage.layout[value], storage.root[value]
    view = np.ndarray(
        type_.shape, type_.dtype.value, memory[root].data, layout.offset_bytes, layout.strides_bytes
    )
    return view.copy()


def product_job(s, shape=()):
    """The loss a * b under SGD: the gradient of a is b itself, and that of b is a."""
    a, b = s.variable("a", shape), s.variable("b", shape)
    descend(s.b, s.b.emit_one(MUL, a, b), [a, b])
    return s.b.freeze()


def test_two_updates_that_read_each_others_variable_both_read_the_old_value(sketch):
    graph = simplify.simplify_graph(autodiff.differentiate(product_job(sketch)))
    graph = check(order.run(check(batches.copy_outputs(graph), "outputs")), "order")
    assert ops_of(graph).count("copy") == 1
    got = run_in_place(graph, {"a": 2.0, "b": 3.0})
    assert got == {"a": 2.0 - 0.1 * 3.0, "b": 3.0 - 0.1 * 2.0}


def test_a_job_with_such_updates_compiles(sketch, fake_target):
    plan = compile_graph(product_job(sketch), fake_target, CompileOptions("job", verify=True))
    assert [launch.op for a in plan.actors for launch in a.launches].count("copy") == 1


def test_an_update_that_can_wait_for_its_readers_costs_no_copy(sketch):
    step = sketch.variable("step", (), "int64", "counter")
    a, b = sketch.variable("a", (2,)), sketch.variable("b", (2,))
    rate = sketch.constant(np.float64(0.1))
    sketch.b.writes = [Write(step, sketch.b.emit_one(INCREMENT, step))]
    sketch.b.outputs = [Output("seen", sketch.b.emit_one(ADD, step, step))]
    for variable, grad in ((a, sketch.b.emit_one(NEG, b)), (b, a)):
        new = sketch.b.emit_one(SGD_UPDATE, variable, grad, rate, weight_decay=0.0)
        sketch.b.writes.append(Write(variable, new))
    assert "copy" not in ops_of(batches.copy_outputs(sketch.b.freeze()))


def test_an_update_never_reads_what_it_overwrites_through_another_input(sketch):
    w = sketch.variable("w", (2, 2))
    turned = sketch.b.emit_one(TRANSPOSE, w, perm=(1, 0))
    rate = sketch.constant(np.float64(0.1))
    new = sketch.b.emit_one(SGD_UPDATE, w, turned, rate, weight_decay=0.0)
    sketch.b.writes = [Write(w, new)]
    graph = check(order.run(batches.copy_outputs(sketch.b.freeze())), "order")
    update = next(n for n in graph.nodes if n.op is SGD_UPDATE)
    assert graph.nodes[graph.producers()[update.inputs[1]]].op is COPY
    assert update.inputs[0] == w


@st.composite
def updates(draw):
    """Updates whose gradients are old values, views and results of old and new values."""
    b = GraphBuilder()
    init = (("kind", "zeros"),)
    names = "abcd"[: draw(st.integers(1, 4))]
    variables = [
        b.emit_one(VARIABLE, name=n, dtype="float64", shape=(2, 2), role="parameter", init=init)
        for n in names
    ]
    rate = constant(b, np.array(0.5))
    values = list(variables)
    for variable in draw(st.permutations(variables)):
        for _ in range(draw(st.integers(0, 3))):
            picked = draw(st.sampled_from(values))
            kind = draw(st.integers(0, 2))
            if kind == 0:
                values.append(b.emit_one(TRANSPOSE, picked, perm=(1, 0)))
            elif kind == 1:
                values.append(b.emit_one(NEG, picked))
            else:
                values.append(b.emit_one(ADD, picked, draw(st.sampled_from(values))))
        grad = draw(st.sampled_from(values))
        new = b.emit_one(SGD_UPDATE, variable, grad, rate, weight_decay=0.0)
        b.writes.append(Write(variable, new))
        values.append(new)
    b.outputs = [Output("o", draw(st.sampled_from(values)))]
    return b.freeze()


@given(updates())
@settings(max_examples=tiers.examples(150), deadline=None)
def test_any_updates_in_place_give_what_the_reference_semantics_give(evaluate_graphs, graph):
    rng = np.random.default_rng(0)
    feeds = {n: rng.integers(-8, 8, (2, 2)).astype(float) for n in "abcd"}
    expected = evaluate_graphs(graph, feeds)[1]
    ordered = check(order.run(batches.copy_outputs(graph)), "order")
    got = run_in_place(ordered, feeds)
    assert sorted(got) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


class Factors(nn.Module):
    def __init__(self, shape):
        self.a, self.b = (nn.Parameter(shape, (("kind", "ones"),)) for _ in range(2))

    def __call__(self):
        return (self.a * self.b).sum()


def sgd(state, param, grad, t):
    return param - np.float32(0.1) * grad


def adamw(state, param, grad, t):
    m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * grad
    v = state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * grad * grad
    m, v = m / (1 - 0.9**t), v / (1 - 0.999**t)
    return param - 0.1 * (0.01 * param + m / (np.sqrt(v) + 1e-8))


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize(
    ("optimizer", "rule"), [(af.optim.SGD(0.1), sgd), (af.optim.AdamW(0.1), adamw)]
)
def test_a_loss_that_is_a_product_of_parameters_trains_as_in_numpy(
    monkeypatch, shape, optimizer, rule
):
    monkeypatch.setenv("ACTORFLOW_CACHE", "off")

    @af.job(optimizer=optimizer)
    def train(model, batch):
        return model() + 0.0 * batch.x.sum()

    rng = np.random.default_rng(1)
    a, b = (np.asarray(rng.normal(size=shape), np.float32) for _ in range(2))
    model = Factors(shape)
    model.a.data, model.b.data = a, b
    states = {}, {}
    for t in range(1, 4):
        loss = train.step(model, {"x": np.zeros(1, np.float32)})["loss"]
        np.testing.assert_allclose(loss, (a * b).sum(), rtol=1e-5)
        a, b = rule(states[0], a, b, t), rule(states[1], b, a, t)
    train.close(model)
    np.testing.assert_allclose(model.a.data, a, rtol=1e-5)
    np.testing.assert_allclose(model.b.data, b, rtol=1e-5)


def test_a_gradient_that_is_the_transposed_variable_is_read_before_any_block_is_written(sketch):
    x = sketch.input("x", (), "float32")
    w = sketch.variable("w", (400, 400), "float32")
    turned, rate = sketch.b.emit_one(TRANSPOSE, w, perm=(1, 0)), sketch.constant(np.float32(0.1))
    new = sketch.b.emit_one(SGD_UPDATE, w, turned, rate, weight_decay=0.5)
    sketch.b.writes, sketch.b.outputs = [Write(w, new)], [Output("loss", sketch.b.emit_one(NEG, x))]
    plan = compile_graph(
        sketch.b.freeze(), hardware_for((HOST,)), CompileOptions("job", verify=True)
    )
    before = np.random.default_rng(2).normal(size=(400, 400)).astype(np.float32)
    runner = af.Runner(plan, values={"w": before})
    runner.step({"x": np.zeros((), np.float32)})
    runner.close()
    expected = before - 0.1 * (before.T + 0.5 * before)
    np.testing.assert_allclose(runner.variables()["w"], expected, rtol=1e-4, atol=1e-5)
