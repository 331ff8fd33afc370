import numpy as np
import pytest
from graphs import Net

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.fusion.prepare import narrow_broadcasts
from compiler.graph.graph import Output
from compiler.graph.registry import find_op
from compiler.ops.families.arithmetic import ADD, EXP, MUL
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.shape import BROADCAST_TO, RESHAPE
from compiler.ops.primitives.sources import CONSTANT
from compiler.pipeline.rewrites import check

R, C = 4, 6


def wide(net, value):
    return net.b.emit_one(BROADCAST_TO, value, shape=(R, C))


@pytest.fixture
def net():
    return Net()


def narrowed(net, evaluate, result):
    net.b.outputs = [Output("y", result)]
    graph = net.b.freeze()
    after = check(narrow_broadcasts(graph), "narrow_broadcasts")
    got, expected = evaluate(after, net.feeds)[0], evaluate(graph, net.feeds)[0]
    np.testing.assert_array_equal(got["y"], expected["y"])
    return after


def shapes_of(graph, op):
    return [graph.types[n.outputs[0]].shape for n in graph.nodes if n.op is op]


def test_what_is_computed_of_broadcasts_alone_is_computed_before_them(net, evaluate):
    row, column = net.input(R, 1), net.input(R, 1)
    h = net.b.emit_one(MUL, wide(net, row), wide(net, column))
    after = narrowed(net, evaluate, net.b.emit_one(ADD, net.input(R, C), net.b.emit_one(EXP, h)))
    assert shapes_of(after, MUL) == [(R, 1)]
    assert shapes_of(after, EXP) == [(R, 1)]
    assert shapes_of(after, ADD) == [(R, C)]


def test_numbers_of_constants_become_constants(net, evaluate):
    share = net.b.emit_one(RESHAPE, net.number(0.25), shape=(1, 1))
    h = net.b.emit_one(MUL, wide(net, share), net.number(2.0))
    after = narrowed(net, evaluate, net.b.emit_one(MUL, net.input(R, C), h))
    assert shapes_of(after, MUL) == [(R, C)]
    assert shapes_of(after, CONSTANT)[-1] == (1, 1)


def test_what_only_an_approximation_computes_is_left_to_the_kernel(net, evaluate):
    h = net.b.emit_one(EXP, wide(net, net.number(2.0)))
    after = narrowed(net, evaluate, net.b.emit_one(MUL, net.input(R, C), h))
    assert shapes_of(after, EXP) == [()]


def test_what_other_kernels_read_stays_wide(net, evaluate):
    h = net.b.emit_one(EXP, wide(net, net.input(R, 1)))
    after = narrowed(net, evaluate, net.b.emit_one(MATMUL, h, net.input(C, R)))
    assert shapes_of(after, EXP) == [(R, C)]


def test_an_output_of_the_job_stays_wide(net, evaluate):
    after = narrowed(net, evaluate, net.b.emit_one(EXP, wide(net, net.input(R, 1))))
    assert shapes_of(after, EXP) == [(R, C)]


def test_a_gradient_that_is_one_number_everywhere_is_computed_before_it_is_wide(net, evaluate):
    one, column = net.input(1, 1), net.input(R, 1)
    grads = net.b.emit_one(find_op("floor_divide_grad"), wide(net, one), column, wanted=(0,))
    after = narrowed(net, evaluate, net.b.emit_one(EXP, grads))
    assert shapes_of(after, find_op("floor_divide_grad")) == [(R, 1)]
