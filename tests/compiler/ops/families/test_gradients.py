"""Gradient rules: twice, of any shape, at ties and kinks; shared/op_table.py has each op once."""

import numpy as np
import op_table as table
import pytest
import tiers
from error_texts import raises
from graph_oracles import fed, pull, slopes, walked
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from compiler.contract.errors import CompileError
from compiler.contract.types import DType
from compiler.graph.graph import GraphBuilder, gradient
from compiler.graph.registry import all_ops, find_op, input_output_aliases
from compiler.ops.families.arithmetic import MUL
from compiler.ops.families.attention import ATTENTION
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM, sum_to
from compiler.ops.primitives.shape import STOP_GRADIENT, TRANSPOSE
from compiler.ops.primitives.sources import INPUT, constant, scalar
from compiler.ops.primitives.transfer import COPY_TO

RNG = np.random.default_rng(7)


def normal(*shape):
    return np.random.default_rng(sum(shape) + len(shape)).standard_normal(shape)


def positive(*shape):
    return np.random.default_rng(sum(shape) + len(shape)).uniform(0.5, 2.0, shape)


def feed(b, array):
    return b.emit_one(INPUT, name="x", dtype=str(array.dtype), shape=tuple(array.shape))


def emitting(name, **attrs):
    return lambda b, *inputs: b.emit(find_op(name), inputs, attrs)[0]


def gradients(b, output, seed, wanted):
    """Return the gradients of sum(seed * output), by the rules alone."""
    grads = pull(b, list(b.nodes), {output: seed})
    return [grads.get(v) for v in wanted]


def check(build, *arrays, tolerance=1e-6):
    """Compare every float input's gradient with central differences."""
    b = GraphBuilder()
    inputs = fed(b, arrays)
    output = build(b, *inputs)
    nodes = list(b.nodes)
    weights = np.random.default_rng(99).standard_normal(b.type_of(output).shape)
    seed = feed(b, weights)
    grads = gradients(b, output, seed, inputs)
    values = walked(b.nodes, {**dict(zip(inputs, arrays, strict=True)), seed: weights})

    def objective(moved):
        made = walked(nodes, dict(zip(inputs, moved, strict=True)))
        return np.sum(weights * made[output])

    assert {g for g, a in zip(grads, arrays, strict=True) if a.dtype.kind != "f"} <= {None}
    for index, expected in slopes(objective, arrays):
        got = np.zeros(expected.shape) if grads[index] is None else values[grads[index]]
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


LABELS = np.array([2, 0, 1, 2])
SOFT = {"scale": 0.7, "causal": False}
TWICE = (
    *("neg", "square", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh"),
    *("sigmoid", "abs", "relu", "div", "pow", "mean", "max", "transpose", "slice", "pad"),
    *("embedding", "dropout", "mul", "matmul"),
)


FULL = [
    row
    for row in table.ROWS_OF_OPS
    if row.op in TWICE and row.inputs[0].dtype == np.float64 and all(a.size for a in row.inputs)
]


@pytest.mark.parametrize("row", FULL, ids=lambda row: row.op)
def test_a_gradient_can_be_differentiated_again(row):
    build = emitting(row.op, **row.attrs)

    def first_gradient(b, *inputs):
        output = build(b, *inputs)
        seed = constant(b, positive(*b.type_of(output).shape))
        return gradients(b, output, seed, inputs[:1])[0]

    check(first_gradient, *row.inputs, tolerance=1e-5)


def test_every_op_that_is_differentiated_twice_has_a_row():
    assert {row.op for row in FULL} == {*TWICE}


def test_nothing_that_writes_is_differentiable():
    writers = [op for op in all_ops() if gradient.has(op) and input_output_aliases.get(op)]
    assert writers == [COPY_TO]  # which may write, and does in no graph that is differentiated


@settings(max_examples=tiers.examples(40), deadline=None)
@given(shapes=hnp.mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_side=3, max_dims=3))
def test_sums_undo_any_broadcast(shapes):
    first, second = (normal(*shape) for shape in shapes.input_shapes)
    check(emitting("mul"), first, second)


@settings(max_examples=tiers.examples(30), deadline=None)
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    data=st.data(),
    name=st.sampled_from(("sum", "mean", "max")),
)
def test_reductions_over_any_axes_spread_their_gradient(shape, data, name):
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1)))))
    x = (
        RNG.permutation(np.arange(float(np.prod(shape)))).reshape(shape)
        if name == "max"
        else normal(*shape)
    )
    check(emitting(name, axes=axes, keepdims=data.draw(st.booleans())), x, tolerance=1e-5)


def test_three_tied_maxima_share_the_gradient():
    b = GraphBuilder()
    x = feed(b, np.zeros(4))
    y = emitting("max", axes=(0,), keepdims=False)(b, x)
    (grad,) = gradients(b, y, scalar(b, 6.0, DType.FLOAT64), [x])
    values = walked(b.nodes, {x: np.array([5.0, 1.0, 5.0, 5.0])})
    np.testing.assert_array_equal(values[grad], [2.0, 0.0, 2.0, 2.0])


def test_abs_and_relu_have_gradient_zero_at_zero():
    for name in ("abs", "relu"):
        b = GraphBuilder()
        x = feed(b, np.zeros(2))
        (grad,) = gradients(b, emitting(name)(b, x), constant(b, np.ones(2)), [x])
        np.testing.assert_array_equal(walked(b.nodes, {x: np.array([0.0, -0.0])})[grad], [0, 0])


def test_a_constant_exponent_zero_gives_gradient_zero_even_at_zero():
    b = GraphBuilder()
    x = feed(b, np.zeros(2))
    y = emitting("pow")(b, x, scalar(b, 0.0, DType.FLOAT64))
    (grad,) = gradients(b, y, constant(b, np.ones(2)), [x])
    with np.errstate(divide="ignore", invalid="ignore"):
        np.testing.assert_array_equal(walked(b.nodes, {x: np.array([0.0, 2.0])})[grad], [0, 0])


def test_powers_of_negative_numbers_with_a_constant_exponent_have_finite_gradients():
    check(lambda b, x: emitting("pow")(b, x, scalar(b, 3.0, DType.FLOAT64)), np.array([-1.5, 2.0]))


def test_nothing_flows_back_through_stop_gradient():
    b = GraphBuilder()
    x = feed(b, np.ones(2))
    y = b.emit_one(MUL, x, b.emit_one(STOP_GRADIENT, x))
    (grad,) = gradients(b, y, constant(b, np.ones(2)), [x])
    np.testing.assert_array_equal(walked(b.nodes, {x: np.array([3.0, 4.0])})[grad], [3.0, 4.0])


def test_integers_get_no_gradient_through_a_cast_and_floats_get_their_own_width():
    b = GraphBuilder()
    x = feed(b, np.ones(2, np.float32))
    y = emitting("cast", dtype="float64")(b, x)
    (grad,) = gradients(b, y, constant(b, np.ones(2)), [x])
    assert b.type_of(grad).dtype is DType.FLOAT32
    i = feed(b, np.ones(2, np.int64))
    assert gradients(b, emitting("cast", dtype="float64")(b, i), constant(b, np.ones(2)), [i]) == [
        None
    ]


def test_a_transposed_weight_gets_a_dense_gradient_without_a_copy():
    b = GraphBuilder()
    x, w = feed(b, normal(5, 2, 3)), feed(b, normal(4, 3))
    y = b.emit_one(MATMUL, x, b.emit_one(TRANSPOSE, w, perm=(1, 0)))
    seed = feed(b, normal(5, 2, 4))
    dx, dw = gradients(b, y, seed, [x, w])
    assert b.producer_of(dx).op is MATMUL
    assert b.producer_of(dx).inputs == (seed, w)
    last = b.producer_of(dw)
    assert last.op is TRANSPOSE
    assert b.producer_of(last.inputs[0]).op is TRANSPOSE
    assert b.producer_of(b.producer_of(last.inputs[0]).inputs[0]).op is MATMUL
    assert SUM not in [node.op for node in b.nodes]
    check(
        lambda b, x, w: b.emit_one(MATMUL, x, b.emit_one(TRANSPOSE, w, perm=(1, 0))),
        normal(5, 2, 3),
        normal(4, 3),
    )


def test_a_transposed_first_operand_gets_its_gradient_too():
    check(
        lambda b, x, w: b.emit_one(MATMUL, b.emit_one(TRANSPOSE, x, perm=(0, 2, 1)), w),
        normal(2, 3, 4),
        normal(2, 3, 5),
    )
    check(
        lambda b, x, w: b.emit_one(MATMUL, b.emit_one(TRANSPOSE, x, perm=(1, 0)), w),
        normal(3, 4),
        normal(2, 3, 5),
    )


def test_summing_to_the_same_shape_emits_nothing():
    b = GraphBuilder()
    x = feed(b, np.ones((2, 3)))
    assert sum_to(b, x, (2, 3)) == x
    assert len(b.nodes) == 1


@pytest.mark.parametrize(("op", "arrays", "attrs"), [(ATTENTION, [normal(2, 3)] * 3, SOFT)])
def test_saved_outputs_refuse_a_gradient_by_name(op, arrays, attrs):
    b = GraphBuilder()
    outputs = b.emit(op, [feed(b, a) for a in arrays], attrs)
    flowing = (None, *outputs[1:])
    with raises(CompileError):
        gradient.get(op)(b, b.nodes[-1], flowing)
