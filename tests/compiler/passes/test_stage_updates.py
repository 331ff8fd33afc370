"""Updates that are made of others: what they compute, and what the pass puts in their place."""

import numpy as np
import pytest
from error_texts import raises

from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.types import DType
from compiler.graph.graph import GraphBuilder, Output, Write
from compiler.graph.registry import cost, reference
from compiler.ops.families.updates import (
    ADAFACTOR_UPDATE,
    ADAFACTOR_VECTOR_UPDATE,
    LAMB_UPDATE,
    MUON_UPDATE,
)
from compiler.ops.language.define import stages
from compiler.ops.primitives.sources import INPUT, VARIABLE, scalar
from compiler.passes import autodiff
from compiler.pipeline.rewrites import check

RNG = np.random.default_rng(0)
P, G, M, V = RNG.normal(size=(4, 5, 3))
V = V * V
LR, STEP = np.array(0.1), np.array(3)
LAMB = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1}
FACTORS = {"beta2_decay": -0.8, "eps1": 1e-3, "eps2": 1e-2, "d": 1.0, "weight_decay": 0.1}
MUON = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "scale": 1.5,
        "a": 1.5, "b": -0.5, "c": 0.0, "ns_steps": 30, "eps": 1e-7}  # fmt: skip


def rms(x):
    return np.sqrt((x * x).mean())


def run(op, attrs, *arrays):
    return reference.get(op)(Attrs(attrs), *arrays)


def test_lamb_moves_by_the_rate_times_the_size_of_the_parameter():
    new, mean, square = run(LAMB_UPDATE, LAMB, P, G, M, V, LR, STEP)
    np.testing.assert_allclose(np.linalg.norm(new - P), 0.1 * np.linalg.norm(P), rtol=1e-12)
    np.testing.assert_allclose(mean, 0.8 * M + 0.2 * G)
    np.testing.assert_allclose(square, 0.9 * V + 0.1 * G * G)


@pytest.mark.parametrize("shape", [(5, 3), (), (0, 2)])
def test_lamb_without_a_norm_moves_as_without_trust(shape):
    zeros, ones = np.zeros(shape), np.ones(shape)
    new, *_ = run(
        LAMB_UPDATE, LAMB | {"eps": 0.0, "beta1": 0.0}, zeros, ones, zeros, zeros, LR, STEP * 0
    )
    np.testing.assert_allclose(new, -0.1 * ones)
    still, *_ = run(LAMB_UPDATE, LAMB | {"weight_decay": 0.0}, ones, zeros, zeros, zeros, LR, STEP)
    np.testing.assert_array_equal(still, ones)


def test_adafactor_divides_by_the_product_of_rows_and_columns_and_clips():
    rows, columns = (V.mean(axis, keepdims=True) for axis in (1, 0))
    new, r, c = run(ADAFACTOR_UPDATE, FACTORS, P, G, rows, columns, LR, STEP)
    share = 4**-0.8
    np.testing.assert_allclose(r, (1 - share) * rows + share * (G * G).mean(1, keepdims=True))
    np.testing.assert_allclose(c, (1 - share) * columns + share * (G * G).mean(0, keepdims=True))
    step = G / np.sqrt(r * c / r.mean())
    step /= max(1.0, rms(step))
    np.testing.assert_allclose(new, P * (1 - 0.1 * 0.1) - rms(P) * 0.1 * step)


def test_adafactor_keeps_the_squares_of_a_vector_whole():
    new, square = run(ADAFACTOR_VECTOR_UPDATE, FACTORS, P[0], G[0], V[0], LR * 9, STEP)
    share = 4**-0.8
    np.testing.assert_allclose(square, (1 - share) * V[0] + share * G[0] ** 2)
    step = G[0] / np.sqrt(square)
    step /= max(1.0, rms(step))
    np.testing.assert_allclose(new, P[0] * (1 - 0.9 * 0.1) - max(rms(P[0]), 1e-2) * 0.5 * step)


@pytest.mark.parametrize("turn", [False, True])
def test_muon_moves_along_the_nearest_orthogonal_matrix(turn):
    p, g, m = (x.T if turn else x for x in (P, G, M))
    new, buffer = run(MUON_UPDATE, MUON, p, g, m, LR)
    np.testing.assert_allclose(buffer, 0.9 * m + 0.1 * g)
    left, _, right = np.linalg.svd(0.1 * g + 0.9 * buffer, full_matrices=False)
    np.testing.assert_allclose(new, p * 0.99 - 0.15 * (left @ right), atol=1e-6)


def two_vectors():
    """Return a graph with Adafactor on two vectors, and what to feed it."""
    b = GraphBuilder()

    def variable(name, dtype="float64"):
        shape = () if name == "step" else (3,)
        own = {"role": "parameter", "init": (("kind", "zeros"),)}
        return b.emit_one(VARIABLE, name=name, dtype=dtype, shape=shape, **own)

    step, lr = variable("step", "int64"), scalar(b, 0.1, DType.FLOAT64)
    for name in "ab":
        old = [variable(name), variable(f"squares/{name}")]
        grad = b.emit_one(INPUT, name=f"d{name}", dtype="float64", shape=(3,))
        news = b.emit(ADAFACTOR_VECTOR_UPDATE, (old[0], grad, old[1], lr, step), FACTORS)
        b.writes += [Write(o, n) for o, n in zip(old, news, strict=True)]
    b.outputs = [Output("loss", b.emit_one(INPUT, name="loss", dtype="float64", shape=()))]
    feeds = {"a": P[0], "b": P[1], "squares/a": V[0], "squares/b": V[1], "da": G[0], "db": G[1]}
    return b.freeze(), feeds | {"step": STEP, "loss": np.array(1.0), "skipped": np.array(0)}


def test_the_pass_leaves_updates_by_programs_and_computes_what_is_shared_once(evaluate):
    graph, feeds = two_vectors()
    staged = check(autodiff.stage_updates(graph), "stage_updates")
    assert not [node for node in staged.nodes if stages.has(node.op)]
    shares = {node.inputs[-1] for node in staged.nodes if node.op.name == "approach"}
    assert len(shares) == 1
    (_, got), (_, want) = evaluate(staged, feeds), evaluate(graph, feeds)
    assert got.keys() == want.keys() == {"a", "b", "squares/a", "squares/b"}
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-12)


def test_all_parts_of_an_update_are_skipped_together(evaluate):
    graph, feeds = two_vectors()
    skipping = check(autodiff.stage_updates(autodiff.skip_updates(graph)), "stage_updates")
    _, made = evaluate(skipping, feeds | {"da": G[0] * np.nan})
    for name in ("a", "b", "squares/a", "squares/b"):
        np.testing.assert_array_equal(made[name], feeds[name])


def test_a_graph_without_them_is_left_alone():
    b = GraphBuilder()
    b.outputs = [Output("y", b.emit_one(INPUT, name="y", dtype="float64", shape=()))]
    graph = b.freeze()
    assert autodiff.stage_updates(graph) is graph


def test_wrong_operands_and_the_cost_are_told_before_it_is_taken_apart():
    b = GraphBuilder()
    x = [b.emit_one(INPUT, name=str(n), dtype="float32", shape=(n,)) for n in (2, 3)]
    with raises(CompileError):
        b.emit(MUON_UPDATE, (x[0], x[1], x[0], x[0]), MUON)
    graph, _ = two_vectors()
    node = next(node for node in graph.nodes if stages.has(node.op))
    types = [tuple([graph.types[v] for v in values]) for values in (node.inputs, node.outputs)]
    assert cost.get(node.op)(*types, node.attrs).flops > 30
