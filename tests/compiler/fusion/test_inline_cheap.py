"""Kernels that compute a cheap operand again: the same bits, fewer tensors between kernels."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from graphs import Net, launches

from compiler.contract.types import DType
from compiler.fusion import fuse
from compiler.fusion.inline_cheap import inline_cheap
from compiler.graph.graph import Write, prune
from compiler.graph.target import TilingPolicy
from compiler.ops.families.arithmetic import ADD, EXP, MAXIMUM, MUL, NEG, RSQRT, SQUARE, SUB
from compiler.ops.families.updates import SGD_UPDATE
from compiler.ops.language.program_ops import FUSED
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import MEAN
from compiler.ops.primitives.shape import CAST, RESHAPE
from compiler.ops.primitives.slicing import SLICE
from compiler.pipeline.rewrites import check
from compiler.storage import order

ROWS, COLUMNS = 48, 40


def few(number):
    """Say of any device that so many instructions are few."""
    return lambda device: TilingPolicy(1 << 30, 512, 1, 1 << 30, cheap_instructions=number)


class Job(Net):
    def apply(self, op, *inputs):
        return self.b.emit_one(op, *inputs)

    def mean(self, x):
        """Return the mean of every column."""
        return self.b.emit_one(MEAN, x, axes=(0,), keepdims=True)

    def x(self):
        return self.input(ROWS, COLUMNS, dtype="float32")

    def norm(self, x):
        d = self.apply(SUB, x, self.mean(x))
        return self.apply(MUL, d, self.apply(RSQRT, self.mean(self.apply(SQUARE, d))))


@pytest.fixture
def job():
    return Job()


def whole(graph):
    """Return the tensors that kernels write, but for the job's outputs."""
    roots = set(graph.roots())
    return [
        v
        for node in launches(graph)
        for v in node.outputs
        if graph.types[v].num_elements == ROWS * COLUMNS and v not in roots
        if node.op in (FUSED, MATMUL)
    ]


def inlined(job, result, evaluate, number=6):
    """Return the graph before and after the pass, whose outputs must have the same bits."""
    before = fuse.run(job.done(y=result))
    after = check(inline_cheap(before, few(number)), "inline_cheap")
    (got, *_), (want, *_) = evaluate(after, job.feeds), evaluate(before, job.feeds)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
    assert len(prune(after).nodes) == len(after.nodes)
    check(order.run(after), "order")
    return before, after


def test_a_norm_over_rows_writes_nothing_but_its_result(job, evaluate):
    before, after = inlined(job, job.norm(job.x()), evaluate)
    assert len(whole(before)) == 1
    assert whole(after) == []


def test_a_tensor_is_read_in_its_own_type_in_place_of_its_cast(job, evaluate):
    low = job.b.emit_one(CAST, job.x(), dtype="float16")
    before, after = inlined(job, job.norm(job.b.emit_one(CAST, low, dtype="float32")), evaluate)
    assert DType.FLOAT32 in {before.types[v].dtype for v in whole(before)}
    assert {after.types[v].dtype for v in whole(after)} <= {DType.FLOAT16}


def test_what_is_shown_in_another_shape_is_computed_again_too(job, evaluate):
    x = job.x()
    d = job.apply(SUB, x, job.mean(x))
    shown = job.b.emit_one(RESHAPE, d, shape=(ROWS // 2, 2, COLUMNS))
    back = job.b.emit_one(RESHAPE, shown, shape=(ROWS, COLUMNS))
    before, after = inlined(job, job.apply(SUB, d, job.mean(job.apply(SQUARE, back))), evaluate)
    assert len(whole(after)) < len(whole(before))


def read_by_a_product(job, d):
    return job.b.emit_one(MATMUL, d, job.input(COLUMNS, COLUMNS, dtype="float32"))


def heavy(job, d):
    """More instructions than are few."""
    for _ in range(4):
        d = job.apply(EXP, job.apply(NEG, d))
    return d


@pytest.mark.parametrize("of", [read_by_a_product, heavy])
def test_what_is_dear_or_read_by_others_than_kernels_is_written(job, evaluate, of):
    x = job.x()
    d = job.apply(SUB, x, job.mean(x))
    result = of(job, d) if of is read_by_a_product else job.norm(of(job, d))
    other = job.apply(ADD, result, job.mean(job.apply(SQUARE, d)))
    before, after = inlined(job, other, evaluate)
    assert len(whole(after)) >= 1
    assert len(whole(after)) <= len(whole(before))


def test_two_tensors_are_not_read_in_place_of_one(job, evaluate):
    d = job.apply(ADD, job.x(), job.x())
    before, after = inlined(job, job.norm(d), evaluate)
    sums = [v for v in whole(after) if v in whole(before)]
    assert sums, "the sum of two tensors is written once"


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_variable_is_not_read_later_than_before(job, evaluate, is_shown):
    w = job.variable(*((ROWS * COLUMNS,) if is_shown else (ROWS, COLUMNS)), dtype="float32")
    w = job.b.emit_one(RESHAPE, w, shape=(ROWS, COLUMNS)) if is_shown else w
    before, after = inlined(job, job.norm(w), evaluate)
    assert len(whole(after)) == len(whole(before))


def test_a_part_of_a_variable_is_read_before_what_is_written_over_it(job):
    w = job.variable(ROWS, 2 * COLUMNS, dtype="float32")
    part = job.b.emit_one(SLICE, w, starts=(0, 0), stops=(ROWS, COLUMNS), steps=(1, 1))
    d = job.apply(NEG, part)
    rate = job.b.emit_one(MEAN, job.mean(job.apply(SQUARE, d)), axes=(0, 1), keepdims=False)
    new = job.b.emit_one(SGD_UPDATE, w, w, rate, weight_decay=0.0)
    y = job.apply(MUL, d, job.b.emit_one(MEAN, new, axes=(0, 1), keepdims=False))
    graph = job.done(y=y)
    graph = replace(graph, writes=(*graph.writes, Write(w, new)))
    check(order.run(inline_cheap(fuse.run(graph), few(6))), "order")


def test_where_no_instructions_are_few_the_graph_stays_as_it_is(job):
    graph = fuse.run(job.done(y=job.norm(job.x())))
    assert inline_cheap(graph, few(0)) is graph


@pytest.mark.parametrize("seed", range(12))
def test_random_chains_of_sums_over_rows_have_the_same_bits(job, evaluate, seed):
    rng = np.random.default_rng(seed)
    values = [job.x() for _ in range(2)]
    for _ in range(8):
        a, b = [values[i] for i in rng.integers(0, len(values), 2)]
        match rng.integers(0, 5):
            case 0:
                made = job.apply(SUB, a, job.mean(b))
            case 1:
                made = job.apply(MAXIMUM, a, job.mean(job.apply(SQUARE, b)))
            case 2:
                made = job.apply(ADD, a, b)
            case 3:
                made = job.apply(NEG, a)
            case _:
                made = job.apply(MUL, a, job.mean(a))
        values.append(made)
    before, after = inlined(job, job.norm(values[-1]), evaluate, number=int(rng.integers(1, 9)))
    assert len(whole(after)) <= len(whole(before))


@pytest.mark.parametrize("is_read_by_a_product", [False, True])
def test_what_is_made_in_16_bits_is_written_before_its_cast(job, evaluate, is_read_by_a_product):
    """The sum of two tensors is stored once, in 2 bytes an element, for a product as well."""
    low = job.b.emit_one(CAST, job.apply(ADD, job.x(), job.x()), dtype="float16")
    d = job.b.emit_one(CAST, low, dtype="float32")
    result = job.apply(SUB, d, job.mean(d))
    if is_read_by_a_product:
        weight = job.input(COLUMNS, COLUMNS, dtype="float16")
        product = job.b.emit_one(MATMUL, low, weight, out_dtype="float32")
        result = job.apply(ADD, result, product)
    before, after = inlined(job, result, evaluate)
    stored = [Counter([g.types[v].dtype for v in whole(g)]) for g in (before, after)]
    assert stored[0][DType.FLOAT32] > stored[1][DType.FLOAT32] == is_read_by_a_product
    assert stored[0][DType.FLOAT16] == is_read_by_a_product
    assert stored[1][DType.FLOAT16] == 1


def test_what_others_than_kernels_read_as_a_cast_is_written_so(job, evaluate):
    low = job.b.emit_one(CAST, job.apply(ADD, job.x(), job.x()), dtype="float16")
    d = job.b.emit_one(CAST, low, dtype="float32")
    result = job.apply(ADD, read_by_a_product(job, d), job.mean(d))
    before, after = inlined(job, result, evaluate)
    assert [after.types[v].dtype for v in whole(after)].count(DType.FLOAT16) == 0
    assert len(whole(after)) == len(whole(before))
