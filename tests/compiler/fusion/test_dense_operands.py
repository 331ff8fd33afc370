"""Copies in front of products, and of ops that pick rows, whose operands lie apart."""

import numpy as np
import pytest

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.fusion.prepare import dense_operands
from compiler.graph.graph import GraphBuilder, Output
from compiler.ops.families.embedding import EMBEDDING, EMBEDDING_GRAD
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.shape import RESHAPE, TRANSPOSE
from compiler.ops.primitives.slicing import SLICE
from compiler.ops.primitives.sources import INPUT
from compiler.pipeline.rewrites import check
from compiler.storage.storage import assign_storage


@pytest.fixture
def b():
    return GraphBuilder()


def input_of(b, name, array):
    return b.emit_one(INPUT, name=name, dtype=array.dtype.name, shape=array.shape)


def turned(b, value, *perm):
    return b.emit_one(TRANSPOSE, value, perm=perm)


def made(b, evaluate, feeds, *values):
    """Return the names of the launches that compute values, which are those of before."""
    b.outputs = [Output(str(n), value) for n, value in enumerate(values)]
    graph = b.freeze()
    after = check(dense_operands(graph), "dense_operands")
    got, expected = evaluate(after, feeds)[0], evaluate(graph, feeds)[0]
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array)
    launches = assign_storage(after).is_launch
    names = [n.op.name for n, is_made in zip(after.nodes, launches, strict=True) if is_made]
    return names, after is graph


def random(*shape):
    return np.random.default_rng(0).integers(-4, 5, shape).astype(np.float32)


PERMUTATIONS = [
    ((0, 1, 2), 0), ((0, 2, 1), 0), ((1, 0, 2), 0), ((1, 2, 0), 0), ((2, 0, 1), 1), ((2, 1, 0), 1),
]  # fmt: skip
"""Of x [5, 3, 4], and how many copies a product of what they make needs."""


@pytest.mark.parametrize(("perm", "num_copies"), PERMUTATIONS)
@pytest.mark.parametrize("side", [0, 1])
def test_a_matrix_without_adjacent_elements_in_rows_or_columns_is_copied(
    b, evaluate, perm, num_copies, side
):
    x = random(5, 3, 4)
    shape = [x.shape[axis] for axis in perm]
    w = random(2, shape[1]) if side else random(shape[2], 2)
    matrices = [turned(b, input_of(b, "x", x), *perm), input_of(b, "w", w)]
    y = b.emit_one(MATMUL, *(matrices[::-1] if side else matrices))
    names, is_same = made(b, evaluate, {"x": x, "w": w}, y)
    assert names == [*["copy"] * num_copies, "matmul"]
    assert is_same == (not num_copies)


def test_products_of_one_value_and_of_it_turned_read_one_copy(b, evaluate):
    """As the gradients of products of pairs do."""
    x, z, other = random(9, 6), random(6, 3, 2), random(9, 6)
    square = turned(b, b.emit_one(RESHAPE, input_of(b, "x", x), shape=(3, 3, 6)), 2, 0, 1)
    second = turned(b, b.emit_one(RESHAPE, input_of(b, "v", other), shape=(3, 3, 6)), 2, 0, 1)
    features = input_of(b, "z", z)
    products = [
        b.emit_one(MATMUL, matrix, features)
        for matrix in (square, turned(b, square, 0, 2, 1), square, second)
    ]
    names, _ = made(b, evaluate, {"x": x, "z": z, "v": other}, *products)
    assert names == ["copy", *["matmul"] * 3, "copy", "matmul"]


def test_a_matrix_of_one_row_or_column_is_none_that_lies_apart(b, evaluate):
    x, w = random(4, 6, 1), random(4, 2)
    column = turned(b, input_of(b, "x", x), 1, 2, 0)  # [6, 1, 4], elements 6 apart
    y = b.emit_one(MATMUL, column, input_of(b, "w", w))
    assert made(b, evaluate, {"x": x, "w": w}, y) == (["matmul"], True)


@pytest.mark.parametrize(("num_ids", "num_copies"), [(300, 1), (80, 1), (70, 0)])
def test_rows_picked_of_a_turned_table_are_copied_unless_they_are_few(
    b, evaluate, num_ids, num_copies
):
    x, ids = random(5, 600), np.arange(num_ids) * 7 % 600
    table = turned(b, input_of(b, "x", x), 1, 0)
    y = b.emit_one(EMBEDDING, table, input_of(b, "ids", ids))
    names, _ = made(b, evaluate, {"x": x, "ids": ids}, y)
    assert names == [*["copy"] * num_copies, "embedding"]


def test_rows_that_are_added_up_are_copied_where_their_elements_are_apart(b, evaluate):
    dy, ids = random(5, 4), np.array([2, 0, 2, 1])
    number = input_of(b, "ids", ids)
    sums = [
        b.emit_one(EMBEDDING_GRAD, rows, number, rows=3)
        for rows in (turned(b, input_of(b, "dy", dy), 1, 0), input_of(b, "dx", dy.T.copy()))
    ]
    names, _ = made(b, evaluate, {"dy": dy, "dx": dy.T.copy(), "ids": ids}, *sums)
    assert names == ["copy", "embedding_grad", "embedding_grad"]


def test_one_row_of_one_id_is_copied_where_its_elements_are_apart(b, evaluate):
    x, number = random(4, 3), np.array(1)
    column = b.emit_one(SLICE, input_of(b, "x", x), starts=(0, 1), stops=(4, 2), steps=(1, 1))
    row = b.emit_one(RESHAPE, column, shape=(4,))
    y = b.emit_one(EMBEDDING_GRAD, row, input_of(b, "ids", number), rows=3)
    assert made(b, evaluate, {"x": x, "ids": number}, y)[0] == ["copy", "embedding_grad"]
