"""The choice of SBP against all choices there are, and against the nearest one at each node."""

import itertools

import numpy as np
import pytest

from compiler.errors import CompileError
from compiler.graph import GraphBuilder, Output, consumers
from compiler.ops.binary import ADD, MUL
from compiler.ops.elementwise import EXP
from compiler.ops.matmul import MATMUL
from compiler.ops.reduce import SUM
from compiler.ops.shape import TRANSPOSE
from compiler.ops.sources import INPUT, VARIABLE
from compiler.sbp import infer
from compiler.sbp.infer import MeshAxis, Speed, choose
from compiler.sbp.moves import MeshLink, ways_between
from compiler.sbp.words import BROADCAST, PARTIAL, Split

AXIS = MeshAxis(2, MeshLink(bytes_per_ns=1.0, latency_ns=10.0), Speed(50.0, 10.0))
N = 64


def random_graph(rng, nodes):
    """Return a graph of so many nodes on square matrices, and words of its sources."""
    b, fixed = GraphBuilder(), {}
    values = []
    for index in range(2):
        values.append(b.one(INPUT, name=f"x{index}", dtype="float32", shape=(N, N)))
        fixed[values[-1]] = [Split(0), BROADCAST, Split(1)][rng.integers(3)]
    for _ in range(nodes - 2):
        one, two = [values[i] for i in rng.integers(0, len(values), 2)]
        kind = rng.integers(6)
        if kind < 2:
            values.append(b.one(MATMUL, one, two))
        elif kind == 2:
            values.append(b.one(ADD, one, two))
        elif kind == 3:
            values.append(b.one(MUL, one, two))
        elif kind == 4:
            values.append(b.one(EXP, one))
        else:
            values.append(b.one(TRANSPOSE, one, perm=(1, 0)))
    b.outputs = [Output("y", values[-1])]
    return b.freeze(), fixed


def cost_of(graph, ways, own_ns):
    """Return the time of a choice, counted anew from what it says."""
    words = {}
    for node, way in zip(graph.nodes, ways, strict=True):
        words.update(zip(node.outputs, way.signature.outputs, strict=True))
    total = sum(own_ns)
    for value, word in words.items():
        needs = {BROADCAST} if value in [o.value for o in graph.outputs] else set()
        for reader in consumers(graph)[value]:
            pairs = zip(graph.nodes[reader].inputs, ways[reader].signature.inputs, strict=True)
            needs |= {need for read, need in pairs if read == value}
        for need in sorted(needs, key=str):
            type_ = graph.types[value]
            total += ways_between(type_, (word,), (need,), (AXIS.parts,), (AXIS.wire,))[0]
    return total


def all_choices(graph, fixed):
    """Return the least time of all choices there are."""
    problem = infer._Given(graph, graph.types, AXIS, fixed, ())
    infer._fill(problem)
    best = float("inf")
    for picked in itertools.product(*[range(len(ways)) for ways in problem.ways]):
        ways = [problem.ways[i][way] for i, way in enumerate(picked)]
        own = [problem.own_ns[i][way] for i, way in enumerate(picked)]
        best = min(best, cost_of(graph, ways, own))
    return best


def test_small_graphs_are_solved_to_the_best_there_is():
    rng = np.random.default_rng(0)
    for _ in range(60):
        graph, fixed = random_graph(rng, rng.integers(3, 6))
        found = choose(graph, (), AXIS, fixed)
        assert found.time_ns == pytest.approx(all_choices(graph, fixed), rel=0.05)


def test_no_choice_is_dearer_than_that_without_look_ahead():
    rng = np.random.default_rng(1)
    for _ in range(200):
        graph, fixed = random_graph(rng, rng.integers(4, 11))
        problem = infer._Given(graph, graph.types, AXIS, fixed, ())
        infer._fill(problem)
        greedy = infer._total(problem, infer._searched(problem, 1))
        assert choose(graph, (), AXIS, fixed).time_ns <= greedy * (1 + 1e-12)


def test_the_time_that_is_told_is_that_of_what_is_chosen():
    graph, fixed = random_graph(np.random.default_rng(2), 9)
    found = choose(graph, (), AXIS, fixed)
    problem = infer._Given(graph, graph.types, AXIS, fixed, ())
    infer._fill(problem)
    own = [problem.own_ns[i][problem.ways[i].index(way)] for i, way in enumerate(found.ways)]
    assert found.time_ns == pytest.approx(cost_of(graph, found.ways, own))


def test_batches_that_are_split_make_shares_of_gradients():
    b = GraphBuilder()
    x = b.one(INPUT, name="x", dtype="float32", shape=(N, N))
    w = b.one(VARIABLE, name="w", dtype="float32", shape=(N, N), role="parameter", init=())
    y = b.one(EXP, b.one(MATMUL, x, w))
    grad = b.one(MATMUL, b.one(TRANSPOSE, x, perm=(1, 0)), y)
    b.outputs = [Output("loss", b.one(SUM, grad, axes=(0, 1), keepdims=False))]
    found = choose(b.freeze(), (), AXIS, {x: Split(0), w: BROADCAST})
    assert (found.words[y], found.words[grad]) == (Split(0), PARTIAL)


def test_what_cannot_be_is_said_with_all_that_can():
    b = GraphBuilder()
    x = b.one(INPUT, name="x", dtype="float32", shape=(3, 1))
    b.outputs = [Output("y", x)]
    with pytest.raises(CompileError, match=r"input over 2 ranks cannot make S\(1\); it can: "):
        choose(b.freeze(), (), AXIS, {x: Split(1)})
