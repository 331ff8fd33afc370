from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises

from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.graph.graph import Accumulation, Output, UpdateRule
from compiler.ops.families.arithmetic import ADD, SQUARE
from compiler.ops.families.embedding import EMBEDDING, EMBEDDING_GRAD, EMBEDDING_SGD_UPDATE
from compiler.ops.families.updates import MOMENTUM_UPDATE, SGD_UPDATE
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.sources import SCRATCH
from compiler.passes import autodiff, batches, simplify
from compiler.pipeline.rewrites import check
from compiler.storage import order

ROWS, WIDTH, BATCH = 50, 3, 12


def ops_of(graph):
    return [str(node.op) for node in graph.nodes]


class Job:
    """A job that picks rows of a table and descends on the sum of their squares."""

    def __init__(self, sketch):
        self.s, self.b = sketch, sketch.b
        rng = np.random.default_rng(1)
        self.feeds = {
            "table": rng.normal(size=(ROWS, WIDTH)),
            "other": rng.normal(size=(ROWS, WIDTH)),
            "ids": rng.integers(0, 8, BATCH),
            "more": rng.integers(0, 8, BATCH),
            "long": rng.integers(0, ROWS, ROWS),
            "batches": np.array(0),
            "v": np.zeros((ROWS, WIDTH)),
        }
        self.table = self.s.variable("table", (ROWS, WIDTH))

    def picked(self, name="ids"):
        ids = self.s.input(name, self.feeds[name].shape, "int64")
        rows = self.b.emit_one(EMBEDDING, self.table, ids)
        return self.b.emit_one(SUM, self.b.emit_one(SQUARE, rows), axes=(0, 1), keepdims=False)

    def graph(self, objective, decay=0.0, op=SGD_UPDATE, states=(), every=1):
        self.b.outputs = [Output("loss", objective)]
        attrs = {"weight_decay": decay}
        if op is MOMENTUM_UPDATE:
            attrs |= {"momentum": 0.9, "nesterov": False}
        rate = self.s.constant(np.float64(0.1))
        self.b.updates = [UpdateRule(op, self.table, states, (rate,), Attrs(attrs), objective)]
        if every > 1:
            batch = self.s.variable("batches", (), "int64", SCRATCH)
            self.b.accumulation = Accumulation(every, batch)
        return simplify.simplify_graph(autodiff.differentiate(self.b.freeze()))


@pytest.fixture
def job(sketch):
    return Job(sketch)


def test_plain_descent_reads_the_rows_of_the_batch_and_no_gradient_of_the_table(job, evaluate):
    before = job.graph(job.picked())
    after = check(autodiff.update_rows(before), "sparse_update")
    assert "embedding_grad" in ops_of(before)
    assert "sgd_update" not in ops_of(after)
    assert "embedding_grad" not in ops_of(after)
    (update,) = [node for node in after.nodes if node.op is EMBEDDING_SGD_UPDATE]
    assert update.inputs[0] == job.table
    assert update.scope == "optimizer"
    for old, new in zip(evaluate(before, job.feeds), evaluate(after, job.feeds), strict=True):
        for name in old:
            np.testing.assert_array_equal(new[name], old[name])


def test_the_rewritten_graph_goes_through_the_passes_behind(job, evaluate):
    before = job.graph(job.picked())
    graph = autodiff.update_rows(before)
    for step in (batches.split_rates, batches.copy_outputs, order.run):
        graph = check(step(graph), step.__name__)
    for old, new in zip(evaluate(before, job.feeds), evaluate(graph, job.feeds), strict=True):
        np.testing.assert_equal(new, old)


def kept(graph):
    after = autodiff.update_rows(graph)
    return "embedding_grad" in ops_of(graph) and ops_of(after) == ops_of(graph)


def test_a_table_with_no_more_rows_than_ids_keeps_its_update(job):
    assert kept(job.graph(job.picked("long")))


def test_decay_touches_every_row(job):
    assert kept(job.graph(job.picked(), decay=0.1))


def test_momentum_moves_every_row(job):
    states = (job.s.variable("v", (ROWS, WIDTH), role="optimizer"),)
    assert kept(job.graph(job.picked(), op=MOMENTUM_UPDATE, states=states))


def test_a_table_that_is_picked_from_twice_keeps_its_update(job):
    both = job.b.emit_one(ADD, job.picked(), job.picked("more"))
    assert kept(job.graph(both))


def test_gradients_that_are_summed_over_batches_keep_their_update(job):
    assert kept(job.graph(job.picked(), every=2))


def test_a_gradient_that_the_job_returns_is_kept(job):
    graph = job.graph(job.picked())
    (node,) = [node for node in graph.nodes if node.op is EMBEDDING_GRAD]
    read = replace(graph, outputs=(*graph.outputs, Output("gradient", node.outputs[0])))
    assert kept(read)


def test_operands_that_do_not_fit_are_refused_with_what_came(sketch):
    table = sketch.variable("table", (ROWS, WIDTH))
    ids = sketch.input("ids", (BATCH,), "int64")
    rate = sketch.constant(np.float64(0.1))
    dy = sketch.input("dy", (BATCH, WIDTH + 1))
    with raises(CompileError):
        sketch.b.emit(EMBEDDING_SGD_UPDATE, (table, dy, ids, rate))
    flat = sketch.variable("flat", (ROWS,))
    with raises(CompileError):
        sketch.b.emit(EMBEDDING_SGD_UPDATE, (flat, dy, ids, rate))


def test_a_bad_id_is_named(job, evaluate):
    graph = autodiff.update_rows(job.graph(job.picked()))
    job.feeds["ids"][3] = ROWS
    with raises(IndexError):
        evaluate(graph, job.feeds)
