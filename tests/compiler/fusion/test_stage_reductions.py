import numpy as np
import pytest

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.fusion.prepare import stage_reductions
from compiler.graph.graph import GraphBuilder, Output
from compiler.ops.primitives.reduce import ARGMAX, MAX, MEAN, SUM
from compiler.ops.primitives.shape import TRANSPOSE
from compiler.ops.primitives.sources import INPUT
from compiler.pipeline.rewrites import check


@pytest.fixture
def b():
    return GraphBuilder()


def input_of(b, name, shape, dtype="float64"):
    return b.emit_one(INPUT, name=name, dtype=dtype, shape=shape)


def staged(b, evaluate, feeds, **results):
    b.outputs = [Output(name, value) for name, value in results.items()]
    graph = b.freeze()
    after = check(stage_reductions(graph), "stage_reductions")
    got, expected = evaluate(after, feeds)[0], evaluate(graph, feeds)[0]
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, 1e-12)
        assert got[name].shape == array.shape
    return [n.op.name for n in after.nodes if n.op is not INPUT]


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_an_argmax_over_another_axis_is_the_last_node_for_it_may_be_an_output(
    b, evaluate, axis, keepdims
):
    x = input_of(b, "x", (3, 4, 5))
    places = b.emit_one(ARGMAX, x, axis=axis, keepdims=keepdims)
    feeds = {"x": np.random.default_rng(0).normal(size=(3, 4, 5))}
    assert staged(b, evaluate, feeds, y=places)[-1] == "argmax"


CASES = [
    ((3, 4, 5), (0, 1, 2), 2), ((5,), (0,), 1), ((1, 5), (0, 1), 1), ((3, 5), (1,), 1),
    ((3, 4, 5), (0, 2), 2), ((3, 4, 5), (1,), 1), ((3, 1, 5, 2), (0, 1), 1),
    ((3, 4, 5, 2, 3), (1, 3), 2), ((3, 4, 5, 2, 3), (0, 2, 4), 3), ((3, 4, 5, 2), (1, 2), 1),
]  # fmt: skip
"""Shapes, the axes that are reduced, and in how many nodes."""


@pytest.mark.parametrize("op", [SUM, MEAN, MAX], ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(("shape", "axes", "count"), CASES)
def test_what_no_kernel_walks_at_once_goes_in_stages(b, op, keepdims, shape, axes, count, evaluate):
    x = np.random.default_rng(0).normal(size=shape)
    y = b.emit_one(op, input_of(b, "x", shape), axes=axes, keepdims=keepdims)
    assert staged(b, evaluate, {"x": x}, y=y) == [op.name] * count


@pytest.mark.parametrize("axes", [(0, 2), (0, 1, 2)])
def test_short_floats_are_rounded_once_behind_all_stages(b, axes, evaluate):
    x = np.full((3, 4, 5), 3e4, np.float16)
    x[1:] = [[[-3e4]], [[0.0]]]  # sums over the last axis are 150,000
    y = b.emit_one(SUM, input_of(b, "x", x.shape, "float16"), axes=axes, keepdims=False)
    assert staged(b, evaluate, {"x": x}, y=y) == ["cast", "sum", "sum", "cast"]


@pytest.mark.parametrize(
    ("perm", "axes", "is_seen_through"),
    [((1, 0, 2), (0,), True), ((2, 0, 1), (0,), True), ((2, 1, 0), (0,), False)],
)
def test_a_reduction_reads_what_lies_before_a_transpose(b, perm, axes, is_seen_through, evaluate):
    x = np.random.default_rng(2).normal(size=(3, 4, 5))
    turned = b.emit_one(TRANSPOSE, input_of(b, "x", x.shape), perm=perm)
    y = b.emit_one(MEAN, turned, axes=axes, keepdims=False)
    staged(b, evaluate, {"x": x}, y=y)
    (made,) = [n for n in stage_reductions(b.freeze()).nodes if n.op is MEAN]
    assert (made.inputs[0] != turned) == is_seen_through
