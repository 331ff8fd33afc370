import numpy as np
import pytest

import actorflow as af
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, TensorType

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
Y = np.random.default_rng(1).uniform(0.5, 2, size=(3, 4)).astype(np.float32)

EXPRESSIONS = {
    "add": lambda x, y: x + y,
    "number on the left": lambda x, y: 2 - x,
    "division": lambda x, y: x / y,
    "number over tensor": lambda x, y: 1 / y,
    "power": lambda x, y: y**2.0,
    "number to a power": lambda x, y: 2.0**y,
    "matmul": lambda x, y: x @ y.T,
    "negate": lambda x, y: -x,
    "sum": lambda x, y: x.sum(),
    "mean over an axis": lambda x, y: x.mean(axis=1),
    "max": lambda x, y: x.max(),
    "all axes reversed": lambda x, y: x.transpose(),
    "argmax": lambda x, y: x.argmax(axis=1),
    "reshape": lambda x, y: x.reshape(2, 6),
    "reshape with -1": lambda x, y: x.reshape(-1, 2),
    "transpose": lambda x, y: x.transpose(1, 0),
    "slice": lambda x, y: x[1:, ::2],
    "integer index": lambda x, y: x[-1],
    "ellipsis": lambda x, y: x[..., 1],
    "array constant": lambda x, y: x + np.ones((4,), np.float32),
    "numpy array on the left": lambda x, y: np.ones((4,), np.float32) * x,
    "reshape by numpy integers": lambda x, y: x.reshape((np.int64(2), -1)),
    "reshape by an array of extents": lambda x, y: x.reshape(np.array([6, 2])),
    "index by a numpy integer": lambda x, y: x[np.int64(0)],
    "index by a scalar array": lambda x, y: x[np.array(-1), 1],
    "slice by numpy integers": lambda x, y: x[:, np.int32(1) : np.int64(4) : np.int8(2)],
    "sum over a numpy integer": lambda x, y: x.sum(np.int64(0)),
    "sum over an array of axes": lambda x, y: x.sum(tuple(np.arange(2))),
    "argmax over a numpy integer": lambda x, y: x.argmax(axis=np.int64(-1)),
    "transpose by numpy integers": lambda x, y: x.transpose(*np.array([1, 0])),
    "swapaxes by numpy integers": lambda x, y: x.swapaxes(np.int64(0), np.uint8(1)),
    "sqrt of log": lambda x, y: (y + 1).log() if hasattr(y, "log") else np.log(y + 1),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_operators_mean_what_numpy_means(name, traced, evaluate):
    function = EXPRESSIONS[name]
    graph = traced(function, x=(3, 4), y=(3, 4))
    got, expected = evaluate(graph, x=X, y=Y), function(X, Y)
    assert got.shape == np.shape(expected)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_comparisons_make_bool_tensors(traced, evaluate):
    graph = traced(lambda x, y: af.where(x > y, x, 0.0), x=(3, 4), y=(3, 4))
    np.testing.assert_array_equal(evaluate(graph, x=X, y=Y), np.where(X > Y, X, 0))
    for compare in (lambda x: x == 1.0, lambda x: x != 1.0, lambda x: x <= 1.0, lambda x: x < 1.0):
        graph = traced(compare, x=(2,))
        assert graph.types[graph.outputs[0].value].dtype is DType.BOOL


def test_every_node_carries_the_line_that_made_it(traced):
    def function(x):
        a = x + 1.0
        return a * 2.0

    graph = traced(function, x=(2,))
    lines = {n.op.name: n.source.line for n in graph.nodes}
    assert lines["mul"] == lines["add"] + 1
    assert lines["add"] == function.__code__.co_firstlineno + 1
    assert all(n.source.file.endswith("test_tensor.py") for n in graph.nodes[1:])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (bool, "truth value"),
        (float, "number"),
        (list, "iterator"),
        (np.asarray, "numpy array"),
        (lambda x: x + "a", "expected a tensor, a number or a numpy array, got str"),
        (lambda x: x[5], "index 5 of axis 0"),
        (lambda x: x[0, 0, 0], "too many indices"),
        (lambda x: x.sum(axis=2), "axis 2 is out of range"),
        (lambda x: x.reshape(-1, -1), "more than one -1"),
        (lambda x: x.reshape(5), "reshape"),
        (lambda x: x + np.zeros(4, "complex64"), "complex64"),
        (lambda x: x.to("uint64") + x.to("int8"), "no integer dtype holds all of uint64 and int8"),
        (lambda x: x.to("int32") ** -1, "the power of a whole number from 0 on, got -1"),
        (lambda x: x.to("complex64"), "dtype complex64 is not supported; use one of float64"),
        (lambda x: x.reshape("a", 12), "an extent must be an integer, got 'a' of type str"),
        (lambda x: x.reshape("12"), "an extent must be an integer, got '12' of type str"),
        (lambda x: x.reshape(2.0, 6), "an extent must be an integer, got 2.0 of type float"),
        (lambda x: x.reshape(np.array([2.0, 6.0])), "an extent must be an integer, got 2.0"),
        (lambda x: x.reshape(-2, -6), "extents of 0 or more"),
        (lambda x: x.broadcast_to(-3, 3, 4), "extents of 0 or more"),
        (lambda x: x.broadcast_to(None), "an extent must be an integer, got None"),
        (lambda x: x.transpose(1.0, 0), "an axis must be an integer, got 1.0 of type float"),
        (lambda x: x.permute(0), "each of the 2 axes once"),
        (lambda x: x.swapaxes(0, "b"), "an axis must be an integer, got 'b'"),
        (lambda x: x.sum(axis=1.5), "an axis must be an integer, got 1.5 of type float"),
        (lambda x: x.sum(axis=True), "an axis must be an integer, got True of type bool"),
        (lambda x: x.sum(axis=x), "cannot become an integer"),
        (lambda x: x.sum(axis=(0, 0)), "each axis once"),
        (lambda x: x[1.0], "index 1.0 of axis 0"),
        (lambda x: x[True], "index True of axis 0"),
        (lambda x: x[[0, 3]], r"index 3 is outside -3\.\.2"),
        (lambda x: af.embedding_bag([[1, 2], [3]], x), "the ids of embedding_bag"),
        (lambda x: x[[0.5]], "the index of axis 0 needs integers, got float64"),
        (lambda x: x[x > 0], "a mask of bools, which takes as many elements"),
        (lambda x: x[..., ...], "too many indices"),
        (lambda x: x[0, 0, ..., [0, 1]], "too many indices"),
        (lambda x: af.norm(x, np.arange(3)), "p of norm must be a number"),
        (lambda x: x.to(None), "dtype None is not supported"),
        (lambda x: x.max(x, keepdim=True), "keepdim goes with an axis"),
        (lambda x: x[0.0:2.0], "index slice.* of axis 0"),
        (lambda x: x[::"a"], "index slice.* of axis 0"),
        (lambda x: x[::0], "index slice.* of axis 0"),
        (lambda x: x[x], "the index of axis 0 needs integers, got float32"),
        (lambda x: [1, 2, 3][x], "cannot become an integer"),
        (lambda x: af.concat([x, x], axis=2), "axis 2 is out of range"),
        (lambda x: af.concat([x, x], axis=-3), "axis -3 is out of range"),
        (lambda x: af.concat([x, x], axis=0.0), "an axis must be an integer, got 0.0"),
        (lambda x: af.concat([x.sum(), x.sum()]), "axis 0 is out of range"),
        (lambda x: af.concat(x), "concat expected a list or tuple as tensors, got Tensor"),
        (lambda x: af.concat([x, "a"]), "expected a tensor.*got str"),
        (lambda x: af.split(x, 2, axis=2), "axis 2 is out of range"),
        (lambda x: af.split(x, 1.5), "the size of a part must be an integer, got 1.5"),
        (lambda x: af.split(x, 0), r"cannot split extent 3 of axis 0 into parts of \[0\]"),
        (lambda x: af.split(x, [1, 1]), r"extent 3 of axis 0 into parts of \[1, 1\]"),
        (lambda x: af.chunk(x, 0), "chunks must be 1 or more, got 0"),
        (lambda x: x.sum(0, axis=0), "sum got dim and axis, which are two names"),
        (lambda x: af.softmax(x, 0, causal=True), "causal softmax goes over the last axis, got 0"),
        (lambda x: af.softmax(x, scale="a"), "scale of softmax must be a number, got str"),
        (lambda x: af.softmax(x, scale=0), "a scale above 0"),
        (lambda x: af.layer_norm(x, x.shape[-1:], eps="a"), "eps of layer_norm must be a number"),
        (lambda x: af.layer_norm(x, x.shape[-1:], eps=10**400), "eps of layer_norm is too large"),
        (lambda x: af.dropout(x, "a"), "dropout probability must be a number, got str"),
        (lambda x: af.dropout(x, float("nan")), "dropout probability must be in"),
        (lambda x: af.embedding(x, x), "ids of an integer dtype"),
        (lambda x: af.embedding(1.0, x), "a float cannot be combined with int64"),
        (lambda x: af.linear(x, x.sum()), r"linear expects a weight \[out, in\]"),
        (lambda x: af.linear("a", x), "expected a tensor.*got str"),
        (lambda x: af.cross_entropy(x, [1, 2, 3]), "expected a tensor.*got list"),
        (lambda x: af.mse_loss([1.0], [2.0]), "expected a tensor.*got list"),
        (lambda x: af.where(x > 0, "a", 1.0), "expected a tensor.*got str"),
        (lambda x: af.where(x, x, 1.0), "needs a bool condition, got float32"),
        (lambda x: af.where(2, x, x), "the number 2 cannot be combined with bool"),
    ],
)
def test_what_cannot_be_traced_is_an_error_with_the_users_line(traced, function, words):
    with pytest.raises(CompileError, match=words) as caught:
        traced(function, x=(3, 4))
    assert "test_tensor.py:" in str(caught.value) or "conftest.py:" in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "function", "words"),
    [
        ("uint8", lambda x: x + 300, "number 300 .* uint8 .* hold 0 to 255;.*'int64'"),
        ("uint8", lambda x: x == -1, "number -1 .* uint8 .* hold 0 to 255"),
        ("uint8", lambda x: x < 300, "number 300 .* uint8"),
        ("uint8", lambda x: af.where(x == 1, x, -1), "number -1 .* uint8"),
        ("int32", lambda x: x + 2**31, "number 2147483648 .* int32"),
        ("int32", lambda x: x + 10**30, "number 10+ .* int32 .*'float64'"),
        ("int64", lambda x: x + 2**63, r"number 9223372036854775808 .* int64"),
        ("float32", lambda x: x + 1e300, r"number 1e\+300 .* float32 .*'float64'"),
        ("float32", lambda x: x + 10**400, "number 10+ .* float32"),
        ("float16", lambda x: x * 70000, "number 70000 .* float16"),
    ],
)
def test_a_number_that_its_partner_cannot_hold_is_an_error(traced, dtype, function, words):
    with pytest.raises(CompileError, match=rf"test_tensor.py:\d+: the {words}|: {words}"):
        traced(function, x=TensorType(DType(dtype), (2,)))


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("bool", True),
        ("bool", 1),
        ("uint8", 255),
        ("int8", -128),
        ("uint64", 2**64 - 1),
        ("int32", True),
        ("float32", 0.1),
        ("float32", 2**24 + 1),
        ("float32", 3.4028235e38),
        ("float16", float("-inf")),
        ("float64", float("nan")),
    ],
)
def test_a_number_that_its_partner_holds_or_rounds_becomes_that(traced, evaluate, dtype, number):
    graph = traced(lambda x: af.maximum(x, number), x=TensorType(DType(dtype), (1,)))
    low = np.zeros(1, dtype) if dtype == "bool" or dtype[0] == "u" else np.array([-100], dtype)
    expected = np.maximum(low, np.asarray(number).astype(dtype))
    np.testing.assert_array_equal(evaluate(graph, x=low), expected)


def test_negative_axes_join_and_cut_as_in_numpy(traced, evaluate):
    graph = traced(lambda x: af.concat([x, x], axis=np.int64(-1)), x=(3, 4))
    np.testing.assert_array_equal(evaluate(graph, x=X), np.concatenate([X, X], -1))
    graph = traced(lambda x: af.chunk(x, np.int64(2), axis=-1)[1], x=(3, 4))
    np.testing.assert_array_equal(evaluate(graph, x=X), X[:, 2:])


TORCHS = {
    "amax over an axis": (lambda x: x.amax(-1, keepdim=True), X.max(-1, keepdims=True)),
    "max along an axis": (lambda x: x.max(1).values, X.max(1)),
    "where the maximum is": (lambda x: x.max(dim=0).indices, X.argmax(0)),
    "max of two": (lambda x: x.max(0 * x), np.maximum(X, 0)),
    "argmax of all": (lambda x: x.argmax(), X.argmax()),
    "transpose exchanges": (lambda x: x.reshape(3, 2, 2).transpose(0, 2), None),
    "permute": (lambda x: x.reshape(3, 2, 2).permute(2, 0, 1), None),
    "parts of a size": (lambda x: af.concat(af.split(x, 3, dim=1)[::-1], dim=1), None),
    "parts of some sizes": (lambda x: af.concat(x.split([1, 0, 3], 1)[::-1], 1), None),
    "fewer chunks than asked": (lambda x: af.cat(x.chunk(3, dim=1)[::-1], dim=1), None),
    "softmax over another axis": (lambda x: x.softmax(0), np.exp(X) / np.exp(X).sum(0)),
}
EXPECTED = {
    "transpose exchanges": X.reshape(3, 2, 2).transpose(2, 1, 0),
    "permute": X.reshape(3, 2, 2).transpose(2, 0, 1),
    "parts of a size": X[:, [3, 0, 1, 2]],
    "parts of some sizes": X[:, [1, 2, 3, 0]],
    "fewer chunks than asked": X[:, [2, 3, 0, 1]],
}


@pytest.mark.parametrize("name", TORCHS)
def test_names_that_torch_has_mean_what_they_mean_there(name, traced, evaluate):
    function, expected = TORCHS[name]
    got = evaluate(traced(function, x=(3, 4)), x=X)
    np.testing.assert_allclose(got, EXPECTED.get(name, expected), rtol=1e-6)


def test_a_tensor_has_the_methods_that_torch_has_and_no_others():
    tensor = object.__new__(af.Tensor)
    assert {"exp", "softmax", "reshape"} <= {*dir(tensor)}
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'exponent'"):
        _ = tensor.exponent


def test_where_takes_numbers_on_both_sides_and_a_plain_condition(traced, evaluate):
    graph = traced(lambda x: x + af.where(x > 0, 1, 2.5), x=(3, 4))
    np.testing.assert_allclose(evaluate(graph, x=X), X + np.where(X > 0, 1, np.float32(2.5)))
    graph = traced(lambda x: af.where(True, x, 0.0), x=(3, 4))
    np.testing.assert_array_equal(evaluate(graph, x=X), X)


def test_a_tensor_that_escaped_its_trace_names_both_places(traced):
    kept = []
    traced(lambda x: kept.append(x) or x + 1.0, x=(2,))
    with pytest.raises(CompileError, match=r"is used in another trace"):
        traced(lambda x: x + kept[0], x=(2,))
    with pytest.raises(CompileError, match=r"outside of a job"):
        _ = kept[0] + 1.0


def test_an_unknown_batch_entry_lists_the_ones_there_are(traced):
    from actorflow.tensor.tracer import current_trace
    from actorflow.trace.job_graph import Batch

    def function(x):
        return Batch(current_trace()).z

    with pytest.raises(CompileError, match=r"no 'z'.*'x': float32\[2\]"):
        traced(function, x=(2,))


def test_integer_tensors_take_integer_numbers(traced, evaluate):
    graph = traced(lambda x: x + 1, x=TensorType(DType.INT32, (2,)))
    assert evaluate(graph, x=np.array([1, 2], np.int32)).tolist() == [2, 3]
