"""Which values follow from one weighted mean, or from two of equal weights."""

import pytest
from error_texts import raises

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.contract.errors import CompileError
from compiler.graph.graph import GraphBuilder
from compiler.ops.families.arithmetic import ADD, MUL
from compiler.ops.families.weights import WEIGHTED_MEAN, weight_of
from compiler.ops.primitives.sources import INPUT


def two_means(depth, op, last=MUL):
    """Return a graph with the sum of two means by weights that are chains of `depth` ops each."""
    b = GraphBuilder()
    total, weight = (b.emit_one(INPUT, name=n, dtype="float32", shape=()) for n in ("t", "w"))
    means = []
    for final in (MUL, last):
        value = weight
        for _ in range(depth):
            value = b.emit_one(op, value, value)
        value = b.emit_one(final, value, weight)
        means.append(b.emit_one(WEIGHTED_MEAN, total, value, count=4))
    value = b.emit_one(ADD, *means)
    return b.freeze(), value


@pytest.mark.parametrize("depth", [1, 60, 3000])
def test_equal_weights_are_found_whatever_their_depth(depth):
    graph, value = two_means(depth, MUL)  # 2 to the power of the depth paths
    assert weight_of(graph, value).count == 4


def test_weights_that_differ_somewhere_are_refused():
    graph, value = two_means(60, MUL, last=ADD)
    with raises(CompileError):
        weight_of(graph, value)
