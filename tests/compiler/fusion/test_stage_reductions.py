import numpy as np
import pytest

import compiler.ops.standard  # noqa: F401  # registers the ops
from compiler.fusion.stage_reductions import stage_reductions
from compiler.graph import GraphBuilder, Output
from compiler.ops.reduce import MAX, MEAN, SUM
from compiler.ops.sources import INPUT
from compiler.passes.check import check


@pytest.fixture
def b():
    return GraphBuilder()


def input_of(b, name, shape, dtype="float64"):
    return b.one(INPUT, name=name, dtype=dtype, shape=shape)


def staged(b, evaluate, feeds, **results):
    b.outputs = [Output(name, value) for name, value in results.items()]
    graph = b.freeze()
    after = check(stage_reductions(graph), "stage_reductions")
    got, expected = evaluate(after, feeds)[0], evaluate(graph, feeds)[0]
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, 1e-12)
        assert got[name].shape == array.shape
    return [n.op.name for n in after.nodes if n.op is not INPUT]


@pytest.mark.parametrize("op", [SUM, MEAN, MAX], ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
def test_a_matrix_is_reduced_by_rows_first(b, op, keepdims, evaluate):
    x = np.random.default_rng(0).normal(size=(3, 4, 5))
    y = b.one(op, input_of(b, "x", x.shape), axes=(0, 1, 2), keepdims=keepdims)
    assert staged(b, evaluate, {"x": x}, y=y) == [op.name, op.name]


@pytest.mark.parametrize(("shape", "axes"), [((5,), (0,)), ((1, 5), (0, 1)), ((3, 5), (1,))])
def test_one_row_and_partial_reductions_stay(b, shape, axes, evaluate):
    y = b.one(SUM, input_of(b, "x", shape), axes=axes, keepdims=False)
    assert staged(b, evaluate, {"x": np.ones(shape)}, y=y) == ["sum"]
