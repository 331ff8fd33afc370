import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from actors.kernels import catalogue
from actors.kernels.interpret import blocks

KINDS = ("dense", "transposed", "sliced", "windowed", "permuted", "broadcast")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x):
    c = math.sqrt(2 / math.pi)
    h = np.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * (1 + h) + 0.5 * x * (1 - h * h) * c * (1 + 3 * 0.044715 * x * x)


UNARY = {
    "neg": lambda x: -x,
    "abs": np.abs,
    "square": lambda x: x * x,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: x**-0.5,
    "reciprocal": lambda x: 1 / x,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "relu": lambda x: np.where(x > 0, x, 0),
    "gelu": gelu,
    "silu": lambda x: x * sigmoid(x),
}
POSITIVE = {"log", "sqrt", "rsqrt", "reciprocal"}

BINARY = {
    "relu_grad": lambda dy, y: np.where(y > 0, dy, 0),
    "gelu_grad": lambda dy, x: dy * gelu_slope(x),
    "tanh_grad": lambda dy, y: dy * (1 - y * y),
    "sigmoid_grad": lambda dy, y: dy * y * (1 - y),
    "silu_grad": lambda dy, x: dy * (sigmoid(x) + x * sigmoid(x) * (1 - sigmoid(x))),
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: np.abs(a) ** b,
    "maximum": lambda a, b: np.where(a > b, a, b),
    "minimum": lambda a, b: np.where(a < b, a, b),
}
COMPARISONS = {
    "equal": lambda a, b: a == b,
    "not_equal": lambda a, b: a != b,
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "greater": lambda a, b: a > b,
    "greater_equal": lambda a, b: a >= b,
}
TOLERANCE = {"float32": 4e-6, "float64": 1e-14}


def close(got, expected):
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(
        got, expected, rtol=8 * TOLERANCE[got.dtype.name], atol=TOLERANCE[got.dtype.name] * scale
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", UNARY)
def test_unary_ops_agree_with_float64_formulas(op, kind, harness, block_bytes):
    rng = np.random.default_rng(1)
    for shape in ((3, 5, 11), (), (0, 4), (1, 1), (130,)):
        for dtype in ("float32", "float64"):
            values = rng.standard_normal(shape) * 2
            if op in POSITIVE:
                values = np.abs(values) + 0.1
            x = harness.strided(rng, shape, dtype, kind, values)
            (y,) = harness.call(op, {}, (x,), ((shape, dtype),))
            close(y, UNARY[op](x.astype(np.float64)))


@pytest.mark.parametrize("op", BINARY)
def test_binary_ops_broadcast_and_agree_with_float64_formulas(op, harness, block_bytes):
    rng = np.random.default_rng(2)
    cases = [((3, 5, 11),) * 2, ((4, 1, 6), (1, 5, 1)), ((7, 9), (9,)), ((), (6,)), ((2, 0), (1,))]
    for (left, right), kind in zip(cases, KINDS, strict=False):
        for dtype in ("float32", "float64"):
            a = harness.strided(rng, left, dtype, kind)
            b = harness.strided(rng, right, dtype, kind)
            if op == "div":
                b = np.abs(b) + np.asarray(0.5, dtype)
            if op == "pow":
                a = np.abs(a)
            shape = np.broadcast_shapes(left, right)
            (y,) = harness.call(op, {}, (a, b), ((shape, dtype),))
            close(y, BINARY[op](a.astype(np.float64), b.astype(np.float64)))


@pytest.mark.parametrize("op", COMPARISONS)
def test_comparisons_give_booleans(op, harness, block_bytes):
    rng = np.random.default_rng(3)
    for dtype in ("float32", "int64", "uint8", "bool"):
        a = rng.integers(0, 3, (4, 1, 5)).astype(dtype)
        b = rng.integers(0, 3, (6, 1)).astype(dtype)
        (y,) = harness.call(op, {}, (a, b), (((4, 6, 5), "bool"),))
        np.testing.assert_array_equal(y, COMPARISONS[op](a.astype(int), b.astype(int)))


@settings(max_examples=60, deadline=None)
@given(
    shapes=hnp.mutually_broadcastable_shapes(num_shapes=3, max_dims=4, max_side=5, min_side=0),
    dtype=st.sampled_from(["float32", "float64", "int32", "int8", "uint16", "bool"]),
    block=st.sampled_from([16, 128, 1 << 17]),
    seed=st.integers(0, 99),
)
def test_where_selects_exactly_for_any_type_and_broadcast(harness, shapes, dtype, block, seed):
    rng = np.random.default_rng(seed)
    cond, a, b = [rng.integers(0, 2, shape).astype(bool) for shape in shapes.input_shapes]
    a, b = [(x * 5 + rng.integers(0, 2, x.shape)).astype(dtype) for x in (a, b)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", block)
        (y,) = harness.call("where", {}, (cond, a, b), ((shapes.result_shape, dtype),))
    np.testing.assert_array_equal(y, np.where(cond, a, b))


def test_selections_do_not_let_infinity_or_nan_through(harness):
    bad = np.array([np.inf, -np.inf, np.nan, 3], np.float32)
    y = np.array([0, -0.0, -1, 2], np.float32)
    (dx,) = harness.call("relu_grad", {}, (bad, y), (((4,), "float32"),))
    np.testing.assert_array_equal(dx, [0, 0, 0, 3])
    cond = np.array([False, False, False, True])
    zero = np.zeros(4, np.float32)
    (z,) = harness.call("where", {}, (cond, bad, zero), (((4,), "float32"),))
    np.testing.assert_array_equal(z, [0, 0, 0, 3])


@pytest.mark.parametrize("op", ["relu", "gelu", "silu", "sigmoid", "tanh", "maximum", "add"])
def test_nan_goes_through_arithmetic(op, harness):
    x = np.array([np.nan, 1], np.float32)
    inputs = (x, x * 0) if op in BINARY else (x,)
    (y,) = harness.call(op, {}, inputs, (((2,), "float32"),))
    assert np.isnan(y[0])
    assert np.isfinite(y[1])


@pytest.mark.parametrize("op", ["sigmoid", "silu", "gelu", "silu_grad", "gelu_grad"])
def test_large_arguments_saturate_and_do_not_overflow_to_nan(op, harness):
    x = np.array([-1e4, -100, 100, 1e4], np.float32)
    ones = np.ones_like(x)
    inputs = (ones, x) if op.endswith("_grad") else (x,)
    (y,) = harness.call(op, {}, inputs, (((4,), "float32"),))
    expected = x if op in ("silu", "gelu") else ones
    np.testing.assert_allclose(y, np.where(x > 0, expected, 0), atol=1e-6)


@pytest.mark.parametrize("dtype", ["int64", "int32", "int8", "float64"])
def test_signed_integers_have_neg_abs_square_relu(dtype, harness, block_bytes):
    x = np.arange(-6, 7).astype(dtype)
    for op, expected in (("neg", -x), ("abs", abs(x)), ("square", x * x), ("relu", x * (x > 0))):
        (y,) = harness.call(op, {}, (x,), ((x.shape, dtype),))
        np.testing.assert_array_equal(y, expected)


def test_float_ops_refuse_integers_by_name_of_op_and_type(harness):
    x = np.zeros(3, np.int64)
    with pytest.raises(LookupError, match=r"gelu\(int64\[3\]\)"):
        harness.call("gelu", {}, (x,), (((3,), "int64"),))


def test_cast_truncates_to_integers_and_tests_for_zero_to_booleans(harness):
    x = np.array([[-1.7, 0.0, 2.9]], np.float32).T
    for dtype, expected in (("int32", [-1, 0, 2]), ("bool", [1, 0, 1]), ("float64", x[:, 0])):
        (y,) = harness.call("cast", {"dtype": dtype}, (x,), (((3, 1), dtype),))
        np.testing.assert_array_equal(y[:, 0], np.array(expected).astype(dtype))


@pytest.mark.parametrize("op", [*UNARY, *BINARY, *COMPARISONS, "where"])
def test_an_output_laid_over_a_declared_input_gives_the_same_bytes(op, harness, block_bytes):
    rng = np.random.default_rng(4)
    shape = (7, 13)
    count = 1 if op in UNARY else 2
    inputs = [np.abs(rng.standard_normal(shape, dtype=np.float32)) + 0.1 for _ in range(count)]
    if op == "where":
        inputs.insert(0, inputs[0] > 0.5)
    dtype = "bool" if op in COMPARISONS else "float32"
    outputs = (harness.spoiled(shape, dtype),)
    (expected,) = harness.run(op, {}, inputs, outputs)
    _, needs, _ = harness.bind(op, {}, inputs, outputs)
    declared = {pair[1] for pair in needs.in_place}
    assert declared == {i for i, x in enumerate(inputs) if x.dtype == dtype}
    for _, index in needs.in_place:
        shared = [x.copy() for x in inputs]
        launch, _, _ = harness.bind(op, {}, shared, (shared[index],))
        launch()
        np.testing.assert_array_equal(shared[index], expected)


@pytest.mark.parametrize("op", ["mul", "gelu_grad", "relu_grad", "maximum"])
def test_an_output_may_lie_over_a_value_that_is_used_twice(op, harness, block_bytes):
    x = np.random.default_rng(5).standard_normal((9, 9), dtype=np.float32)
    (expected,) = harness.call(op, {}, (x, x), ((x.shape, "float32"),))
    launch, _, _ = harness.bind(op, {}, (x, x), (x,))
    launch()
    np.testing.assert_array_equal(x, expected)


def test_strided_inputs_are_not_offered_for_in_place(harness):
    x = np.zeros((4, 6), np.float32)
    _, needs, _ = harness.bind("gelu", {}, (x.T,), (np.zeros((6, 4), np.float32),))
    assert needs.in_place == ()


@pytest.mark.parametrize("op", ["gelu", "add", "where", "relu", "greater"])
def test_outputs_may_be_strided(op, harness, block_bytes):
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((2, 5, 8), dtype=np.float32)
    inputs = {"gelu": (a,), "relu": (a,), "where": (a > 0, a, b)}.get(op, (a, b))
    dtype = "bool" if op == "greater" else "float32"
    (expected,) = harness.call(op, {}, inputs, (((5, 8), dtype),))
    for out in (np.zeros((8, 5), dtype).T, np.zeros((5, 20), dtype)[:, 1:17:2]):
        harness.run(op, {}, inputs, (out,))
        np.testing.assert_array_equal(out, expected)


def test_every_recipe_writes_an_output_once_and_reads_no_input_behind_the_first():
    for kernel in catalogue.ELEMENTWISE_KERNELS:
        targets = [step[2].partition(":")[0] for step in getattr(kernel, "recipe", ())]
        written = [target for target in targets if target.startswith("out")]
        assert written == ["out", "out2"][: len(written)], kernel.op
        first = targets.index("out") if targets else 0
        assert len(targets) - first == len(written), kernel.op
        for _, operands, _ in getattr(kernel, "recipe", ())[first + 1 :]:
            assert not {"a", "b", "c"} & {str(x).partition(":")[0] for x in operands}, kernel.op
