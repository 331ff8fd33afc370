from dataclasses import replace

import numpy as np
import pytest

from compiler.attrs import Attrs
from compiler.errors import CompileError
from compiler.graph import Output, UpdateRule
from compiler.ops.elementwise import SQUARE
from compiler.ops.embedding import EMBEDDING
from compiler.ops.embedding_concat import EMBEDDING_CONCAT
from compiler.ops.reduce import SUM
from compiler.ops.slicing import CONCAT
from compiler.ops.update import SGD_UPDATE
from compiler.passes import autodiff, fuse_lookups, order, outputs, rates, simplify
from compiler.passes.check import check

ROWS, WIDTH, BATCH = 30, 3, 8


def ops_of(graph):
    return [str(node.op) for node in graph.nodes]


class Job:
    """Two tables and a dense input, joined; descends on the sum of squares."""

    def __init__(self, sketch):
        self.s, self.b = sketch, sketch.b
        rng = np.random.default_rng(1)
        self.feeds = {
            "a": rng.normal(size=(ROWS, WIDTH)),
            "b": rng.normal(size=(ROWS, WIDTH)),
            "i": rng.integers(0, ROWS, BATCH),
            "j": rng.integers(0, ROWS, BATCH),
            "x": rng.normal(size=(BATCH, WIDTH)),
        }
        self.tables = [self.s.variable(name, (ROWS, WIDTH)) for name in "ab"]
        self.x = self.s.input("x", (BATCH, WIDTH))
        ids = [self.s.input(name, (BATCH,), "int64") for name in "ij"]
        pairs = zip(self.tables, ids, strict=True)
        self.rows = [self.b.one(EMBEDDING, table, own) for table, own in pairs]

    def graph(self, *parts, axis=1):
        joined = self.b.one(CONCAT, *parts, axis=axis)
        loss = self.b.one(SUM, self.b.one(SQUARE, joined), axes=(0, 1), keepdims=False)
        self.b.objective = loss
        self.b.outputs = [Output("loss", loss)]
        attrs, rate = Attrs({"weight_decay": 0.0}), self.s.constant(np.float64(0.1))
        self.b.updates = [UpdateRule(SGD_UPDATE, t, (), (rate,), attrs) for t in self.tables]
        return simplify.run(autodiff.run(self.b.freeze()))


@pytest.fixture
def job(sketch):
    return Job(sketch)


def test_rows_of_tables_are_joined_where_they_are_picked(job, evaluate):
    before = job.graph(job.rows[0], job.x, job.rows[1])
    graph = check(fuse_lookups.run(before), "fuse_lookups")
    assert "embedding" not in ops_of(graph)
    assert "concat" not in ops_of(graph)
    (node,) = [node for node in graph.nodes if node.op is EMBEDDING_CONCAT]
    assert node.attrs["picked"] == (1, 0, 1)
    for step in (rates, outputs, order):
        graph = check(step.run(graph), step.__name__)
    for old, new in zip(evaluate(before, job.feeds), evaluate(graph, job.feeds), strict=True):
        np.testing.assert_equal(new, old)


def test_rows_that_something_else_reads_stay_a_tensor(job, evaluate):
    before = job.graph(job.rows[0], job.rows[1], job.x)
    read = replace(before, outputs=(*before.outputs, Output("rows", job_rows(before))))
    graph = check(fuse_lookups.run(read), "fuse_lookups")
    assert ops_of(graph).count("embedding") == 1
    (node,) = [node for node in graph.nodes if node.op is EMBEDDING_CONCAT]
    assert node.attrs["picked"] == (0, 1, 0)
    for old, new in zip(evaluate(read, job.feeds), evaluate(graph, job.feeds), strict=True):
        np.testing.assert_equal(new, old)


def job_rows(graph):
    """The rows of the first table."""
    return next(node.outputs[0] for node in graph.nodes if node.op is EMBEDDING)


def test_rows_that_are_joined_along_another_axis_stay(job):
    graph = job.graph(job.rows[0], job.rows[1], axis=0)
    assert ops_of(fuse_lookups.run(graph)) == ops_of(graph)


def test_parts_that_do_not_fit_are_refused_with_what_came(job):
    with pytest.raises(CompileError, match=r"needs 3 inputs for picked=\(1, 0\), got 2"):
        job.b.emit(EMBEDDING_CONCAT, (job.tables[0], job.x), {"picked": (1, 0)})
    ids = job.s.input("k", (BATCH + 1,), "int64")
    with pytest.raises(CompileError, match="needs equal extents on all axes but 1"):
        job.b.emit(EMBEDDING_CONCAT, (job.tables[0], ids, job.x), {"picked": (1, 0)})
