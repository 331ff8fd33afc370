import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import bind_kernel, chosen

from compiler.fusion import fuse
from compiler.graph.graph import GraphBuilder, Output, Write
from compiler.graph.registry import find_op
from compiler.ops.families.arithmetic import ABS, ADD, MUL, NEG, SQUARE, SUB
from compiler.ops.families.updates import INCREMENT
from compiler.ops.primitives.shape import RESHAPE, TRANSPOSE
from compiler.ops.primitives.sources import CONSTANT, INPUT, constant_array
from compiler.passes import simplify
from compiler.pipeline.rewrites import check


def ops_of(graph):
    return [str(n.op) for n in graph.nodes]


def test_nodes_that_no_output_needs_are_dropped(sketch):
    x = sketch.input("x", (2,))
    sketch.b.emit_one(NEG, x)
    sketch.b.outputs = [Output("y", sketch.b.emit_one(SQUARE, x))]
    assert ops_of(simplify.simplify_graph(sketch.b.freeze())) == ["input", "square"]


def test_equal_nodes_are_merged_and_different_attributes_are_not(sketch):
    x = sketch.input("x", (2, 3))
    a, b = (sketch.b.emit_one(RESHAPE, x, shape=(3, 2)) for _ in range(2))
    c = sketch.b.emit_one(RESHAPE, x, shape=(6,))
    sketch.b.outputs = [Output("y", sketch.b.emit_one(ADD, a, b)), Output("z", c)]
    assert ops_of(simplify.simplify_graph(sketch.b.freeze())).count("reshape") == 2


def test_constant_expressions_are_folded_to_their_value(sketch, evaluate):
    a, b = sketch.constant(np.float64(3)), sketch.constant(np.float64(4))
    x = sketch.input("x", ())
    y = sketch.b.emit_one(MUL, x, sketch.b.emit_one(ADD, a, b))
    sketch.b.outputs = [Output("y", y)]
    graph = simplify.simplify_graph(sketch.b.freeze())
    assert ops_of(graph).count("add") == 0
    assert evaluate(graph, {"x": 2.0})[0]["y"] == 14.0


def test_large_constants_are_computed_at_run_time_instead_of_stored(sketch):
    big = sketch.constant(np.ones(simplify.FOLD_LIMIT_BYTES // 8 + 1))
    sketch.b.outputs = [Output("y", sketch.b.emit_one(SQUARE, big))]
    assert "square" in ops_of(simplify.simplify_graph(sketch.b.freeze()))


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("exp", {}),
        ("gelu", {}),
        ("silu", {}),
        ("pow", {}),
        ("softmax", {"scale": 1.0, "causal": False}),
        ("sum", {"axes": (1,), "keepdims": False}),
        ("matmul", {}),
    ],
)
def test_an_op_whose_bits_depend_on_the_kernel_is_computed_by_the_kernel(sketch, op, attrs):
    numbers = np.linspace(0.1, 2.0, 16).reshape(4, 4)
    count = 2 if op in ("pow", "matmul") else 1
    inputs = [sketch.constant(numbers.astype(np.float32)) for _ in range(count)]
    sketch.b.outputs = [Output("y", sketch.b.emit_one(find_op(op), *inputs, **attrs))]
    assert op in ops_of(simplify.simplify_graph(sketch.b.freeze()))


def exact_constants(call):
    """Return the graph of `call` on two constants, and its inputs."""
    rng = np.random.default_rng(len(call))
    a, b = (rng.normal(size=(3, 5)).astype(np.float32) for _ in range(2))
    g = GraphBuilder()
    values = [g.emit_one(CONSTANT, dtype="float32", shape=(3, 5), data=v.tobytes()) for v in (a, b)]
    if call == "where":
        inputs = [g.emit_one(find_op("less"), *values), *values]
    else:
        inputs = values if call in BINARY_NAMES else values[:1]
    attrs = {"dtype": "float64"} if call == "cast" else {}
    g.outputs = [Output("y", g.emit_one(find_op(call), *inputs, **attrs))]
    return g.freeze()


ARITHMETIC = ("add", "sub", "mul", "div", "maximum", "minimum")
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
BINARY_NAMES = (*ARITHMETIC, *COMPARISONS)


@pytest.mark.parametrize(
    "op", [*BINARY_NAMES, "where", "neg", "abs", "square", "sqrt", "cast", "copy"]
)
def test_a_folded_constant_has_the_bits_that_the_kernel_computes(op):
    graph = exact_constants(op)
    folded = simplify.simplify_graph(graph)
    assert ops_of(folded) == ["constant"]
    (made,) = folded.nodes
    if op != "copy":  # every op with a program runs as a fused kernel
        graph = fuse.run(graph)
    node = graph.nodes[-1]
    arrays = [constant_array(graph.nodes[graph.producers()[v]]) for v in node.inputs]
    out = np.empty_like(constant_array(made))
    kernel, _ = chosen(node.op.name, node.attrs, arrays, [out])
    with np.errstate(invalid="ignore"):
        bind_kernel(kernel, node.attrs, arrays, [out])[0]()
    assert out.tobytes() == constant_array(made).tobytes()


def test_updates_are_never_merged(sketch):
    step = sketch.variable("step", (), "int64", "counter")
    other = sketch.variable("other", (), "int64", "counter")
    writes = [Write(v, sketch.b.emit_one(INCREMENT, v)) for v in (step, other)]
    sketch.b.writes = writes
    assert ops_of(simplify.simplify_graph(sketch.b.freeze())).count("increment") == 2


UNARY = (NEG, ABS, SQUARE)
BINARY = (ADD, SUB, MUL)


@st.composite
def graphs(draw):
    """A random graph of exact integer-valued arithmetic over two inputs and a few constants."""
    b = GraphBuilder()
    values = [b.emit_one(INPUT, name=n, dtype="float64", shape=(2, 3)) for n in ("p", "q")]
    for number in (0.0, 1.0, 2.0):
        data = np.full((2, 3), number)
        values.append(b.emit_one(CONSTANT, dtype="float64", shape=(2, 3), data=data.tobytes()))
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.integers(0, 2))
        pick = st.sampled_from(values)
        if kind == 0:
            values.append(b.emit_one(draw(st.sampled_from(UNARY)), draw(pick)))
        elif kind == 1:
            values.append(b.emit_one(draw(st.sampled_from(BINARY)), draw(pick), draw(pick)))
        else:
            turned = b.emit_one(TRANSPOSE, draw(pick), perm=(1, 0))
            values.append(b.emit_one(TRANSPOSE, turned, perm=(1, 0)))
    b.outputs = [Output(f"o{i}", draw(st.sampled_from(values))) for i in range(3)]
    return b.freeze()


@given(graphs(), st.integers(0, 2**32 - 1))
@settings(max_examples=tiers.examples(60), deadline=None)
def test_every_rewrite_gives_bit_identical_outputs(evaluate_graphs, graph, seed):
    rng = np.random.default_rng(seed)
    feeds = {n: rng.integers(-3, 4, (2, 3)).astype(float) for n in ("p", "q")}
    smaller = check(simplify.simplify_graph(graph), "simplify")
    assert len(smaller.nodes) <= len(graph.nodes)
    before, after = evaluate_graphs(graph, feeds)[0], evaluate_graphs(smaller, feeds)[0]
    for name, array in before.items():
        assert array.tobytes() == after[name].tobytes()


@given(graphs())
@settings(max_examples=tiers.examples(30), deadline=None)
def test_a_second_run_changes_nothing(graph):
    once = simplify.simplify_graph(graph)
    assert simplify.simplify_graph(once) == once
