"""What fusion makes of single ops at the edges; the rest is rows of shared/op_table.py."""

import numpy as np
import pytest
import tiers
from error_texts import raises
from graphs import launches
from hypothesis import given, settings
from hypothesis import strategies as st

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.fusion import fuse
from compiler.graph.graph import GraphBuilder, Output
from compiler.graph.registry import find_op
from compiler.ops.primitives.sources import INPUT
from compiler.pipeline.rewrites import check

ROWS = {"axes": (1,), "keepdims": False}
SEED, STEP = np.array(5), np.array(3)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def loss_operands(rows, classes, dtype=np.int64):
    labels = np.random.default_rng(7).integers(0, classes, rows).astype(dtype)
    return 3 * normal(rows, classes), labels


def graph_of(name, arrays, attrs):
    b = GraphBuilder()
    values = [
        b.emit_one(INPUT, name=str(i), dtype=str(a.dtype), shape=a.shape)
        for i, a in enumerate(arrays)
    ]
    made = b.emit(find_op(name), values, attrs)
    b.outputs = [Output(str(i), value) for i, value in enumerate(made)]
    return b.freeze(), {str(i): a for i, a in enumerate(arrays)}


def names(graph):
    return [n.op.name for n in launches(graph)]


def assert_same(evaluate, before, after, feeds, rtol=1e-11):
    for got, expected in zip(evaluate(after, feeds), evaluate(before, feeds), strict=True):
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            assert got[name].dtype == array.dtype, name
            assert got[name].shape == array.shape, name
            np.testing.assert_allclose(got[name], array, rtol, 1e-12, err_msg=name)


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
    graph, feeds = graph_of("cross_entropy_rows", (logits, labels), {})
    with raises(IndexError):
        evaluate(fuse.run(graph), feeds)


@pytest.mark.parametrize(
    ("name", "arrays", "attrs"),
    [
        ("sum", (normal(2, 3, 4),), {"axes": (1,), "keepdims": False}),
        ("sum", (np.ones((2, 1 << 15)),), {"axes": (0,), "keepdims": False}),
    ],
)
def test_reductions_that_no_group_takes_stay_as_they_are(name, arrays, attrs):
    graph, _ = graph_of(name, arrays, attrs)
    assert names(fuse.run(graph)) == [name]


@st.composite
def broadcast_pairs(draw):
    """Two shapes that stretch to one another."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))

    def narrowed():
        kept = [n if draw(st.booleans()) else 1 for n in shape]
        return tuple(kept[draw(st.integers(0, len(kept) - 1)) if draw(st.booleans()) else 0 :])

    return narrowed(), narrowed()


@settings(max_examples=tiers.examples(300), deadline=None)
@given(shapes=broadcast_pairs())
def test_any_broadcast_gives_what_numpy_gives(shapes, evaluate_graphs):
    a, b = shapes
    graph, feeds = graph_of("sub", (normal(*a), normal(*b, seed=1)), {})
    after = check(fuse.run(graph), "fuse")
    assert_same(evaluate_graphs, graph, after, feeds, rtol=0)
