"""Every op with an `expand` cell, against its own reference in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compiler.ops.standard  # noqa: F401  # registers the ops
from compiler.attrs import Attrs
from compiler.fusion import fuse as fuse
from compiler.fusion.expansion import expand
from compiler.graph import GraphBuilder, Output
from compiler.lowering.storage import assign_storage
from compiler.ops.sources import INPUT
from compiler.passes.check import check
from compiler.registry import all_ops, find_op, reference

ROWS = {"axes": (1,), "keepdims": False}
SEED, STEP = np.array(5), np.array(3)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def positive(*shape):
    return np.abs(normal(*shape)) + 0.1


def layer_norm_operands(*shape):
    x, gamma = normal(*shape), normal(shape[-1], seed=1)
    _, mean, rstd = reference.get(find_op("layer_norm"))(
        Attrs({"eps": 1e-5}), x, gamma, np.zeros(shape[-1])
    )
    return normal(*shape, seed=2), x, gamma, mean, rstd


def loss_operands(rows, classes, dtype=np.int64):
    labels = np.random.default_rng(7).integers(0, classes, rows).astype(dtype)
    return 3 * normal(rows, classes), labels


def loss_grad_operands(rows, classes):
    logits, labels = loss_operands(rows, classes)
    return np.array(0.7), logits, labels, np.log(np.exp(logits).sum(axis=1))


UNARY = ("neg", "abs", "square", "exp", "sin", "cos", "tanh", "sigmoid", "relu", "gelu", "silu")
OF_POSITIVE = ("log", "sqrt", "rsqrt", "reciprocal")
BINARY = (
    *("add", "sub", "mul", "div", "maximum", "minimum"),
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    *("tanh_grad", "sigmoid_grad", "relu_grad", "gelu_grad", "silu_grad"),
    *("gelu_grad_output", "silu_grad_output"),
)
CASES = [
    *[(op, (normal(2, 3, 5),), {}) for op in UNARY],
    *[(op, (positive(2, 3, 5),), {}) for op in OF_POSITIVE],
    *[(op, (normal(6, 5), normal(6, 5, seed=1)), {}) for op in BINARY],
    ("pow", (positive(4, 5), normal(4, 5)), {}),
    ("maximum", (normal(3, 4) > 0, normal(3, 4, seed=1) > 0), {}),
    ("minimum", (normal(3, 4) > 0, normal(3, 4, seed=1) > 0), {}),
    ("where", (normal(4, 5) > 0, normal(4, 5), normal(5)), {}),
    ("relu", (np.arange(-3, 3),), {}),
    ("cast", (normal(4, 5),), {"dtype": "float32"}),
    ("cast", (normal(4, 5) > 0,), {"dtype": "float64"}),
    ("cast", (np.arange(6, dtype=np.int16).reshape(2, 3),), {"dtype": "int64"}),
    ("dropout", (normal(3, 4, 6), SEED, STEP), {"p": 0.4, "key": 2}),
    ("sum", (normal(6, 5),), ROWS),
    ("sum", (normal(6, 2, 5),), {"axes": (1, 2), "keepdims": True}),
    ("sum", (normal(3, 4, 5),), {"axes": (0, 1), "keepdims": False}),
    ("sum", (normal(3, 4, 5),), {"axes": (0,), "keepdims": True}),
    ("sum", (normal(3, 4),), {"axes": (0, 1), "keepdims": False}),
    ("sum", (normal(7),), {"axes": (0,), "keepdims": False}),
    ("mean", (normal(6, 5),), ROWS),
    ("mean", (normal(6, 5),), {"axes": (0,), "keepdims": False}),
    ("mean", (normal(2, 3, 5),), {"axes": (0, 1, 2), "keepdims": True}),
    ("max", (normal(6, 5),), ROWS),
    ("max", (normal(2, 3, 5),), {"axes": (0, 1, 2), "keepdims": False}),
    ("softmax", (normal(2, 3, 5),), {"scale": 0.5, "causal": False}),
    ("softmax", (normal(2, 3, 5),), {"scale": 0.5, "causal": True}),
    ("softmax_grad", (normal(2, 3, 5), positive(2, 3, 5)), {"scale": 0.5}),
    ("layer_norm", (normal(2, 3, 5), normal(5), normal(5, seed=4)), {"eps": 1e-5}),
    ("layer_norm", (normal(1, 5), normal(5), normal(5, seed=4)), {"eps": 1e-5}),
    ("layer_norm_grad", layer_norm_operands(2, 3, 5), {}),
    ("cross_entropy", loss_operands(6, 5), {}),
    ("cross_entropy", loss_operands(6, 5, np.uint8), {}),
    ("cross_entropy_rows", loss_operands(6, 5), {}),
    ("cross_entropy_grad", loss_grad_operands(6, 5), {}),
]


def graph_of(name, arrays, attrs):
    b = GraphBuilder()
    values = [
        b.one(INPUT, name=str(i), dtype=str(a.dtype), shape=a.shape) for i, a in enumerate(arrays)
    ]
    made = b.emit(find_op(name), values, attrs)
    b.outputs = [Output(str(i), value) for i, value in enumerate(made)]
    return b.freeze(), {str(i): a for i, a in enumerate(arrays)}


def launches(graph):
    storage = assign_storage(graph)
    return [n.op.name for n, is_one in zip(graph.nodes, storage.is_launch, strict=True) if is_one]


def assert_same(evaluate, before, after, feeds, rtol=1e-11):
    for got, expected in zip(evaluate(after, feeds), evaluate(before, feeds), strict=True):
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            assert got[name].dtype == array.dtype, name
            assert got[name].shape == array.shape, name
            np.testing.assert_allclose(got[name], array, rtol, 1e-12, err_msg=name)


@pytest.mark.parametrize(("name", "arrays", "attrs"), CASES)
def test_an_op_alone_becomes_a_group_that_computes_what_its_reference_does(
    name, arrays, attrs, evaluate
):
    graph, feeds = graph_of(name, arrays, attrs)
    after = check(fuse.run(graph), "fuse")
    assert set(launches(after)) == {"fused"}
    assert_same(evaluate, graph, after, feeds)


def test_every_expansion_has_a_case():
    covered = {name for name, _, _ in CASES}
    ours = [op.name for op in all_ops() if expand.has(op) and not op.name.startswith("test.")]
    assert [name for name in ours if name not in covered] == []


EXTREMES = np.array([0.0, -0.0, 1e-300, 700.0, -700.0, 750.0, -750.0, 1e200, -1e200, np.nan])


@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu", "relu", "tanh", "exp"])
def test_extreme_numbers_come_out_as_from_the_reference(name, evaluate):
    graph, feeds = graph_of(name, (EXTREMES,), {})
    with np.errstate(all="ignore"):
        assert_same(evaluate, graph, fuse.run(graph), feeds)


def test_dropped_nans_and_infinities_stay_nan(evaluate):
    x = np.array([np.nan, np.inf, 1.0, -np.inf] * 8)
    graph, feeds = graph_of("dropout", (x, SEED, STEP), {"p": 0.5, "key": 1})
    with np.errstate(all="ignore"):
        assert_same(evaluate, graph, fuse.run(graph), feeds)


@pytest.mark.parametrize("label", [-1, 5])
def test_a_label_out_of_range_fails_in_a_group_too(label, evaluate):
    logits, labels = loss_operands(6, 5)
    labels[3] = label
    graph, feeds = graph_of("cross_entropy", (logits, labels), {})
    with pytest.raises(IndexError, match=f"label {label} at position \\(3,\\) is outside 0..4"):
        evaluate(fuse.run(graph), feeds)


@pytest.mark.parametrize(
    ("name", "arrays", "attrs"),
    [
        ("cast", (normal(3, 4),), {"dtype": "int64"}),
        ("cast", (normal(3, 4),), {"dtype": "bool"}),
        ("neg", (normal(3, 4).astype(np.float16),), {}),
        ("sum", (np.ones((3, 4), np.int64),), ROWS),
        ("sum", (normal(2, 3, 4),), {"axes": (1,), "keepdims": False}),
        ("sum", (np.ones((2, 1 << 15)),), {"axes": (0,), "keepdims": False}),
        ("neg", (np.ones((0, 4)),), {}),
        ("add", (normal(2, 3, 4, 5), normal(2, 1, 4, 1)), {}),
        ("argmax", (normal(3, 4),), {"axis": 1, "keepdims": False}),
    ],
)
def test_what_a_group_cannot_compute_stays_as_it_is(name, arrays, attrs):
    graph, _ = graph_of(name, arrays, attrs)
    assert launches(fuse.run(graph)) == [name]


@st.composite
def broadcast_pairs(draw):
    """Two shapes that stretch to one another."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))

    def narrowed():
        kept = [n if draw(st.booleans()) else 1 for n in shape]
        return tuple(kept[draw(st.integers(0, len(kept) - 1)) if draw(st.booleans()) else 0 :])

    return narrowed(), narrowed()


@settings(max_examples=300, deadline=None)
@given(shapes=broadcast_pairs())
def test_any_broadcast_gives_what_numpy_gives(shapes, evaluate_graphs):
    a, b = shapes
    graph, feeds = graph_of("sub", (normal(*a), normal(*b, seed=1)), {})
    after = check(fuse.run(graph), "fuse")
    assert_same(evaluate_graphs, graph, after, feeds, rtol=0)
