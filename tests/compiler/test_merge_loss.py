from dataclasses import replace

import numpy as np
import pytest

from compiler.attrs import Attrs
from compiler.graph import Accumulation, Output, UpdateRule
from compiler.ops.binary import ADD, MUL
from compiler.ops.elementwise import SQUARE
from compiler.ops.embedding import EMBEDDING
from compiler.ops.loss import CROSS_ENTROPY
from compiler.ops.matmul import MATMUL
from compiler.ops.shape import TRANSPOSE
from compiler.ops.sources import SCRATCH
from compiler.ops.update import SGD_UPDATE
from compiler.passes import autodiff, fuse_loss, merge_loss, order, outputs, rates, simplify
from compiler.passes.check import check

ROWS, WIDTH, CLASSES = 6, 3, 5
TRAIN, GRAD, LOSS = (
    "linear_cross_entropy_train",
    "linear_cross_entropy_grad",
    "linear_cross_entropy",
)


def ops_of(graph):
    return [str(node.op) for node in graph.nodes]


class Job:
    """A training job under construction: plain descent with rate 1 over some variables."""

    def __init__(self, sketch):
        self.s, self.b = sketch, sketch.b
        rng = np.random.default_rng(2)
        self.feeds = {
            "ids": rng.integers(0, CLASSES, ROWS),
            "y": rng.integers(0, CLASSES, ROWS),
            "x": rng.normal(size=(ROWS, WIDTH)),
        }
        self.trained = []

    def variable(self, name, *shape):
        rng = np.random.default_rng(len(self.feeds))
        self.feeds[name] = rng.normal(size=shape)
        value = self.s.variable(name, shape)
        self.trained.append(value)
        return value

    def hidden(self):
        x = self.s.input("x", (ROWS, WIDTH))
        return self.b.one(MATMUL, x, self.variable("body", WIDTH, WIDTH))

    def loss(self, x, weight, bias=None, name="y"):
        logits = self.b.one(MATMUL, x, self.b.one(TRANSPOSE, weight, perm=(1, 0)))
        if bias is not None:
            logits = self.b.one(ADD, logits, bias)
        labels = self.s.input(name, (ROWS,), "int64")
        return self.b.emit(CROSS_ENTROPY, (logits, labels))[0]

    def head(self):
        weight, bias = self.variable("weight", CLASSES, WIDTH), self.variable("bias", CLASSES)
        return self.loss(self.hidden(), weight, bias)

    def graph(self, objective, every=1):
        self.b.objective = objective
        self.b.outputs = [Output("loss", objective)]
        rate, attrs = self.s.constant(np.float64(1.0)), Attrs({"weight_decay": 0.0})
        self.b.updates = [UpdateRule(SGD_UPDATE, v, (), (rate,), attrs) for v in self.trained]
        if every > 1:
            batch = self.s.variable("batches", (), "int64", SCRATCH)
            self.feeds["batches"] = np.array(0)
            self.b.accumulation = Accumulation(every, batch)
        return self.b.freeze()


@pytest.fixture
def job(sketch):
    return Job(sketch)


def merged(graph):
    """Run the passes up to `merge_loss` without a limit on the logits."""
    graph = simplify.run(autodiff.run(fuse_loss.run(graph, 0, 4)))
    return check(merge_loss.run(graph), "merge_loss")


def assert_same(graph, after, job, evaluate):
    """Check loss and variables against the graph that has all logits."""
    feeds = dict(job.feeds)
    for node in after.nodes:
        if str(node.op) == "variable" and node.attrs["name"].startswith("gradient/"):
            feeds[node.attrs["name"]] = np.zeros(node.attrs["shape"])
    expected = evaluate(simplify.run(autodiff.run(graph)), feeds)
    for got, want in zip(evaluate(after, feeds), expected, strict=True):
        assert got.keys() == want.keys()
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-10, atol=1e-12, err_msg=name)


def test_loss_and_gradients_become_one_node(job, evaluate):
    graph = job.graph(job.head())
    after = merged(graph)
    assert [op for op in ops_of(after) if "cross_entropy" in op] == [TRAIN]
    (node,) = [n for n in after.nodes if str(n.op) == TRAIN]
    assert [node.attrs[name] for name in ("dx", "dweight", "dbias")] == [True, True, True]
    assert min(after.producers()) == 0  # no value is left without a node
    assert_same(graph, after, job, evaluate)


def test_the_node_belongs_to_the_backward_pass_so_that_it_never_runs_again(job):
    after = simplify.run(autodiff.run(fuse_loss.run(job.graph(job.head()), 0)))
    (backward,) = [n for n in after.nodes if str(n.op) == GRAD]
    (node,) = [n for n in merge_loss.run(after).nodes if str(n.op) == TRAIN]
    assert (node.phase, node.scope, node.source) == (
        backward.phase,
        backward.scope,
        backward.source,
    )
    assert node.phase is not after.nodes[0].phase


def test_a_constant_factor_goes_into_the_node(job, evaluate):
    loss = job.b.one(MUL, job.head(), job.s.constant(np.float64(0.5)))
    graph = job.graph(loss)
    after = merged(graph)
    assert TRAIN in ops_of(after)
    assert ops_of(after).index(TRAIN) < ops_of(after).index("mul")
    assert_same(graph, after, job, evaluate)


def test_a_trained_factor_does_not_depend_on_the_loss(job, evaluate):
    graph = job.graph(job.b.one(MUL, job.head(), job.variable("temperature")))
    after = merged(graph)
    assert TRAIN in ops_of(after)
    assert_same(graph, after, job, evaluate)


def test_a_gradient_that_depends_on_the_loss_keeps_two_nodes(job, evaluate):
    graph = job.graph(job.b.one(SQUARE, job.head()))
    after = merged(graph)
    assert [op for op in ops_of(after) if "cross_entropy" in op] == [LOSS, GRAD]
    assert_same(graph, after, job, evaluate)


def test_a_log_of_sums_that_the_job_returns_keeps_two_nodes(job, evaluate):
    loss = job.head()
    graph = job.graph(loss)
    lse = graph.nodes[graph.producers()[loss]].outputs[1]
    graph = replace(graph, outputs=(*graph.outputs, Output("lse", lse)))
    after = merged(graph)
    assert [op for op in ops_of(after) if "cross_entropy" in op] == [LOSS, GRAD]
    assert_same(graph, after, job, evaluate)


def test_of_two_losses_that_scale_each_other_one_is_merged(job, evaluate):
    hidden = job.hidden()
    first = job.loss(hidden, job.variable("a", CLASSES, WIDTH))
    second = job.loss(hidden, job.variable("b", CLASSES, WIDTH))
    graph = job.graph(job.b.one(MUL, first, second))
    after = merged(graph)
    found = [op for op in ops_of(after) if "cross_entropy" in op]
    assert sorted(found) == [LOSS, GRAD, TRAIN]
    assert_same(graph, after, job, evaluate)


def test_two_losses_that_are_added_are_both_merged(job, evaluate):
    hidden = job.hidden()
    first = job.loss(hidden, job.variable("a", CLASSES, WIDTH))
    second = job.loss(hidden, job.variable("b", CLASSES, WIDTH))
    graph = job.graph(job.b.one(ADD, first, second))
    after = merged(graph)
    assert [op for op in ops_of(after) if "cross_entropy" in op] == [TRAIN, TRAIN]
    assert_same(graph, after, job, evaluate)


def test_the_gradient_of_a_batch_is_not_computed(job, evaluate):
    x = job.s.input("x", (ROWS, WIDTH))
    graph = job.graph(job.loss(x, job.variable("weight", CLASSES, WIDTH)))
    after = merged(graph)
    (node,) = [n for n in after.nodes if str(n.op) == TRAIN]
    assert [node.attrs[name] for name in ("dx", "dweight", "dbias")] == [False, True, False]
    assert_same(graph, after, job, evaluate)


def test_the_gradient_of_a_frozen_weight_is_not_computed(job, evaluate):
    weight = job.variable("weight", CLASSES, WIDTH)
    job.trained.clear()
    graph = job.graph(job.b.one(SQUARE, job.loss(job.hidden(), weight)))
    after = merged(graph)
    (node,) = [n for n in after.nodes if str(n.op) == GRAD]
    assert [node.attrs[name] for name in ("dx", "dweight", "dbias")] == [True, False, False]
    assert_same(graph, after, job, evaluate)


def test_a_weight_that_is_the_embedding_too_gets_both_gradients(job, evaluate):
    table = job.variable("table", CLASSES, WIDTH)
    x = job.b.one(EMBEDDING, table, job.s.input("ids", (ROWS,), "int64"))
    graph = job.graph(job.loss(x, table))
    after = merged(graph)
    assert {TRAIN, "embedding_grad", "add"} <= set(ops_of(after))
    assert_same(graph, after, job, evaluate)


def test_rows_that_are_the_weight_too_get_both_gradients(job, evaluate):
    table = job.variable("table", ROWS, WIDTH)
    graph = job.graph(job.loss(table, table))
    after = merged(graph)
    assert TRAIN in ops_of(after)
    assert_same(graph, after, job, evaluate)


def test_several_batches_share_the_gradient_of_the_loss(job, evaluate):
    graph = job.graph(job.head(), every=4)
    after = merged(graph)
    assert TRAIN in ops_of(after)
    assert_same(graph, after, job, evaluate)
    later = order.run(outputs.run(rates.run(after)))
    assert ops_of(check(later, "order")).count(TRAIN) == 1


def test_an_evaluation_has_the_loss_alone(job, evaluate):
    loss = job.head()
    job.b.outputs = [Output("loss", loss)]
    graph = job.b.freeze()
    after = merged(graph)
    assert [op for op in ops_of(after) if "cross_entropy" in op] == [LOSS]
    assert_same(graph, after, job, evaluate)


def test_a_graph_without_such_a_loss_is_returned_as_it_is(job):
    graph = simplify.run(autodiff.run(job.graph(job.head())))
    assert merge_loss.run(graph) is graph
