import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.contract.types import DType
from compiler.graph.graph import GraphBuilder, Output, SourceLocation
from compiler.ops.families.arithmetic import ADD, DIV, MUL
from compiler.ops.families.attention import ATTENTION
from compiler.ops.families.gradients import emit_gradients
from compiler.ops.families.normalisation import SOFTMAX
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.shape import TRANSPOSE
from compiler.ops.primitives.sources import DROPOUT, INPUT, scalar
from compiler.passes import simplify
from compiler.pipeline.rewrites import check

BATCH, ROWS, COLUMNS, WIDTH, OUT = (2, 3), 4, 5, 6, 7
SHAPES = {"q": (*BATCH, ROWS, WIDTH), "k": (*BATCH, COLUMNS, WIDTH), "v": (*BATCH, COLUMNS, OUT)}
HERE = SourceLocation("model.py", 12)


def fused(graph):
    return simplify.prune(check(simplify.fuse_attention(graph), "fuse_attention"))


def ops_of(graph):
    return [str(node.op) for node in graph.nodes if node.op is not INPUT]


def feeds(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


def swapped(s, value):
    rank = s.b.type_of(value).rank
    return s.b.emit_one(TRANSPOSE, value, perm=(*range(rank - 2), rank - 1, rank - 2))


def operands(s, make="input"):
    """Return q, k, v as inputs or, to be differentiated, as variables."""
    return tuple(getattr(s, make)(name, shape) for name, shape in SHAPES.items())


def attend(s, q, k, v, between=lambda scores: scores, after=lambda p: p, causal=False, scale=0.5):
    scores = s.b.emit_one(MATMUL, q, swapped(s, k))
    with s.b.at("blocks.0.attn", HERE):
        p = s.b.emit_one(SOFTMAX, between(scores), scale=scale, causal=causal)
    return s.b.emit_one(MATMUL, after(p), v)


def test_products_around_a_softmax_become_one_node_at_the_line_of_the_softmax(sketch):
    q, k, v = operands(sketch)
    sketch.b.outputs = [Output("y", attend(sketch, q, k, v, causal=True))]
    graph = fused(sketch.b.freeze())
    assert ops_of(graph) == ["attention"]
    (node,) = [node for node in graph.nodes if node.op is ATTENTION]
    assert dict(node.attrs) == {"scale": 0.5, "causal": True}
    assert (node.scope, node.source) == ("blocks.0.attn", HERE)


def test_keys_that_come_transposed_are_turned_by_a_view(sketch, evaluate):
    q, _, v = operands(sketch)
    turned = sketch.input("turned", (*BATCH, WIDTH, COLUMNS))
    p = sketch.b.emit_one(SOFTMAX, sketch.b.emit_one(MATMUL, q, turned), scale=0.5, causal=False)
    sketch.b.outputs = [Output("y", sketch.b.emit_one(MATMUL, p, v))]
    graph = sketch.b.freeze()
    smaller = fused(graph)
    assert ops_of(smaller) == ["transpose", "attention"]
    values = feeds()
    values["turned"] = values["k"].swapaxes(-1, -2)
    before, after = (evaluate(g, values)[0]["y"] for g in (graph, smaller))
    np.testing.assert_allclose(after, before, rtol=1e-12)


FACTORS = {
    "times a constant": lambda s, x: s.b.emit_one(MUL, x, s.constant(0.25)),
    "a constant times": lambda s, x: s.b.emit_one(MUL, s.constant(np.full((1, 1), 0.25)), x),
    "over a constant": lambda s, x: s.b.emit_one(DIV, x, s.constant(8.0)),
    "twice": lambda s, x: s.b.emit_one(
        DIV, s.b.emit_one(MUL, x, s.constant(0.25)), s.constant(4.0)
    ),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_constant_factor_of_the_scores_becomes_part_of_the_scale(name, sketch, evaluate):
    y = attend(sketch, *operands(sketch), between=lambda x: FACTORS[name](sketch, x))
    sketch.b.outputs = [Output("y", y)]
    graph = sketch.b.freeze()
    smaller = fused(graph)
    assert ops_of(smaller) == ["attention"]
    before, after = (evaluate(g, feeds())[0]["y"] for g in (graph, smaller))
    np.testing.assert_allclose(after, before, rtol=1e-12)


LEFT_ALONE = {
    "a factor below zero": lambda s, x: s.b.emit_one(MUL, x, s.constant(-1.0)),
    "a factor of zero": lambda s, x: s.b.emit_one(MUL, x, s.constant(0.0)),
    "a factor that is no number": lambda s, x: s.b.emit_one(MUL, x, s.constant(np.nan)),
    "a divisor of zero": lambda s, x: s.b.emit_one(DIV, x, s.constant(0.0)),
    "a constant divided by the scores": lambda s, x: s.b.emit_one(DIV, s.constant(2.0), x),
    "a factor per column": lambda s, x: s.b.emit_one(MUL, x, s.constant(np.ones(COLUMNS))),
    "a factor of the batch": lambda s, x: s.b.emit_one(MUL, x, s.input("temperature", ())),
    "a factor that widens": lambda s, x: s.b.emit_one(MUL, x, s.constant(np.ones((1, 1, 1, 1, 1)))),
    "a bias": lambda s, x: s.b.emit_one(ADD, x, s.input("bias", (ROWS, COLUMNS))),
    "scores that are scored again": lambda s, x: s.b.emit_one(MUL, x, x),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_no_positive_constant_between_product_and_softmax_is_left_alone(name, sketch):
    q, k, _ = operands(sketch)
    wide = name == "a factor that widens"
    v = sketch.input("wide", ((1, *SHAPES["v"]) if wide else SHAPES["v"]))
    sketch.b.outputs = [Output("y", attend(sketch, q, k, v, lambda x: LEFT_ALONE[name](sketch, x)))]
    graph = sketch.b.freeze()
    assert simplify.fuse_attention(graph) is graph


def test_dropped_out_probabilities_are_left_alone(sketch):
    seed, step = (sketch.input(n, (), "int64") for n in ("seed", "step"))
    y = attend(
        sketch,
        *operands(sketch),
        after=lambda p: sketch.b.emit_one(DROPOUT, p, seed, step, p=0.1, key=1),
    )
    sketch.b.outputs = [Output("y", y)]
    graph = sketch.b.freeze()
    assert simplify.fuse_attention(graph) is graph


@pytest.mark.parametrize("which", ["scores", "probabilities"])
@pytest.mark.parametrize("how", ["returned", "read"])
def test_scores_and_probabilities_that_are_wanted_elsewhere_stay(which, how, sketch):
    kept = []

    def keep(name):
        def watch(value):
            if name == which:
                whole = {"axes": (0, 1, 2, 3), "keepdims": False}
                kept.append(value if how == "returned" else sketch.b.emit_one(SUM, value, **whole))
            return value

        return watch

    y = attend(sketch, *operands(sketch), between=keep("scores"), after=keep("probabilities"))
    sketch.b.outputs = [Output("y", y), Output("kept", kept[0])]
    graph = sketch.b.freeze()
    assert simplify.fuse_attention(graph) is graph


def test_probabilities_on_the_right_of_a_product_are_left_alone(sketch):
    q, k, _ = operands(sketch)
    p = sketch.b.emit_one(
        SOFTMAX, sketch.b.emit_one(MATMUL, q, swapped(sketch, k)), scale=1.0, causal=False
    )
    left = sketch.input("left", (*BATCH, 2, ROWS))
    sketch.b.outputs = [Output("y", sketch.b.emit_one(MATMUL, left, p))]
    graph = sketch.b.freeze()
    assert simplify.fuse_attention(graph) is graph


def test_probabilities_times_themselves_are_left_alone(sketch):
    q = sketch.input("q", (4, 3))
    p = sketch.b.emit_one(
        SOFTMAX, sketch.b.emit_one(MATMUL, q, swapped(sketch, q)), scale=1.0, causal=False
    )
    sketch.b.outputs = [Output("y", sketch.b.emit_one(MATMUL, p, p))]
    graph = sketch.b.freeze()
    assert simplify.fuse_attention(graph) is graph


@pytest.mark.parametrize("name", ["k", "v"])
def test_operands_shared_by_all_heads_are_left_alone(name, sketch):
    made = {n: sketch.input(n, s[1:] if n == name else s) for n, s in SHAPES.items()}
    sketch.b.outputs = [Output("y", attend(sketch, **made))]
    graph = sketch.b.freeze()
    assert simplify.fuse_attention(graph) is graph


def test_no_keys_at_all_are_left_alone(sketch):
    q, k, v = (sketch.input(n, shape) for n, shape in (("q", (4, 3)), ("k", (0, 3)), ("v", (0, 2))))
    sketch.b.outputs = [Output("y", attend(sketch, q, k, v))]
    graph = sketch.b.freeze()
    assert simplify.fuse_attention(graph) is graph


def test_a_layer_on_top_of_another_is_rewritten_too(sketch, evaluate):
    q, k, v = operands(sketch)
    y = attend(sketch, q, k, v)
    again = attend(sketch, y, v, k, scale=2.0)
    sketch.b.outputs = [Output("y", again)]
    graph = sketch.b.freeze()
    smaller = fused(graph)
    assert ops_of(smaller) == ["attention", "attention"]
    before, after = (evaluate(g, feeds())[0]["y"] for g in (graph, smaller))
    np.testing.assert_allclose(after, before, rtol=1e-12)


def test_a_second_run_changes_nothing(sketch):
    sketch.b.outputs = [Output("y", attend(sketch, *operands(sketch)))]
    once = simplify.fuse_attention(sketch.b.freeze())
    assert simplify.fuse_attention(once) is once


@given(
    causal=st.booleans(),
    scale=st.sampled_from((0.3, 1.0, 2.0)),
    batch=st.lists(st.integers(1, 2), max_size=2),
    rows=st.integers(1, 4),
    more=st.integers(0, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=tiers.examples(30), deadline=None)
def test_value_and_gradients_are_those_of_the_chain(
    evaluate_graphs, causal, scale, batch, rows, more, seed
):
    rng = np.random.default_rng(seed)
    shapes = {"q": (*batch, rows, 3), "k": (*batch, rows + more, 3), "v": (*batch, rows + more, 2)}
    values = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    values["weights"] = rng.standard_normal((*batch, rows, 2))
    b = GraphBuilder()
    q, k, v, weights = (
        b.emit_one(INPUT, name=n, dtype="float64", shape=x.shape) for n, x in values.items()
    )
    kt = b.emit_one(TRANSPOSE, k, perm=(*range(len(batch)), len(batch) + 1, len(batch)))
    p = b.emit_one(SOFTMAX, b.emit_one(MATMUL, q, kt), scale=scale, causal=causal)
    weighted = b.emit_one(MUL, b.emit_one(MATMUL, p, v), weights)
    loss = b.emit_one(SUM, weighted, axes=tuple(range(len(batch) + 2)), keepdims=False)
    results = []
    b.outputs = [Output("loss", loss)]
    for graph in (b.freeze(), simplify.fuse_attention(b.freeze())):
        wanted = tuple(graph.nodes[i].outputs[0] for i in range(3))
        assert all(graph.nodes[i].op is INPUT for i in range(3))
        grown = GraphBuilder.continuing(graph)
        (out,) = graph.outputs
        gradients = emit_gradients(grown, {out.value: scalar(grown, 1.0, DType.FLOAT64)}, wanted)
        grown.outputs = [Output(n, gradients[w]) for n, w in zip("qkv", wanted, strict=True)]
        grown.outputs.append(out)
        results.append(evaluate_graphs(check(grown.freeze(), "autodiff"), values)[0])
    assert "attention_grad" in ops_of(grown.freeze())
    for name, expected in results[0].items():
        np.testing.assert_allclose(results[1][name], expected, rtol=1e-9, atol=1e-12)
