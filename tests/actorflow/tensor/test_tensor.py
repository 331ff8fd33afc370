import numpy as np
import pytest
from error_texts import raises

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
    "function",
    [
        bool,
        float,
        list,
        np.asarray,
        lambda x: x + "a",
        lambda x: x[5],
        lambda x: x[0, 0, 0],
        lambda x: x.sum(axis=2),
        lambda x: x.reshape(-1, -1),
        lambda x: x.reshape(5),
        lambda x: x + np.zeros(4, "complex64"),
        lambda x: x.to("uint64") + x.to("int8"),
        lambda x: x.to("int32") ** -1,
        lambda x: x.to("complex64"),
        lambda x: x.reshape("a", 12),
        lambda x: x.reshape("12"),
        lambda x: x.reshape(2.0, 6),
        lambda x: x.reshape(np.array([2.0, 6.0])),
        lambda x: x.reshape(-2, -6),
        lambda x: x.broadcast_to(-3, 3, 4),
        lambda x: x.broadcast_to(None),
        lambda x: x.transpose(1.0, 0),
        lambda x: x.permute(0),
        lambda x: x.swapaxes(0, "b"),
        lambda x: x.sum(axis=1.5),
        lambda x: x.sum(axis=True),
        lambda x: x.sum(axis=x),
        lambda x: x.sum(axis=(0, 0)),
        lambda x: x[1.0],
        lambda x: x[True],
        lambda x: x[[0, 3]],
        lambda x: af.embedding_bag([[1, 2], [3]], x),
        lambda x: x[[0.5]],
        lambda x: x[x > 0],
        lambda x: x[..., ...],
        lambda x: x[0, 0, ..., [0, 1]],
        lambda x: af.norm(x, np.arange(3)),
        lambda x: x.to(None),
        lambda x: x.max(x, keepdim=True),
        lambda x: x[0.0:2.0],
        lambda x: x[::"a"],
        lambda x: x[::0],
        lambda x: x[x],
        lambda x: [1, 2, 3][x],
        lambda x: af.concat([x, x], axis=2),
        lambda x: af.concat([x, x], axis=-3),
        lambda x: af.concat([x, x], axis=0.0),
        lambda x: af.concat([x.sum(), x.sum()]),
        lambda x: af.concat(x),
        lambda x: af.concat([x, "a"]),
        lambda x: af.split(x, 2, axis=2),
        lambda x: af.split(x, 1.5),
        lambda x: af.split(x, 0),
        lambda x: af.split(x, [1, 1]),
        lambda x: af.chunk(x, 0),
        lambda x: x.sum(0, axis=0),
        lambda x: af.softmax(x, 0, causal=True),
        lambda x: af.softmax(x, scale="a"),
        lambda x: af.softmax(x, scale=0),
        lambda x: af.layer_norm(x, x.shape[-1:], eps="a"),
        lambda x: af.layer_norm(x, x.shape[-1:], eps=10**400),
        lambda x: af.dropout(x, "a"),
        lambda x: af.dropout(x, float("nan")),
        lambda x: af.embedding(x, x),
        lambda x: af.embedding(1.0, x),
        lambda x: af.linear(x, x.sum()),
        lambda x: af.linear("a", x),
        lambda x: af.cross_entropy(x, [1, 2, 3]),
        lambda x: af.mse_loss([1.0], [2.0]),
        lambda x: af.where(x > 0, "a", 1.0),
        lambda x: af.where(x, x, 1.0),
        lambda x: af.where(2, x, x),
    ],
)
def test_what_cannot_be_traced_is_an_error_with_the_users_line(traced, function):
    with raises(CompileError):
        traced(function, x=(3, 4))


@pytest.mark.parametrize(
    ("dtype", "function"),
    [
        ("uint8", lambda x: x + 300),
        ("uint8", lambda x: x == -1),
        ("uint8", lambda x: x < 300),
        ("uint8", lambda x: af.where(x == 1, x, -1)),
        ("int32", lambda x: x + 2**31),
        ("int32", lambda x: x + 10**30),
        ("int64", lambda x: x + 2**63),
        ("float32", lambda x: x + 1e300),
        ("float32", lambda x: x + 10**400),
        ("float16", lambda x: x * 70000),
    ],
)
def test_a_number_that_its_partner_cannot_hold_is_an_error(traced, dtype, function):
    with raises(CompileError):
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
    with raises(AttributeError):
        _ = tensor.exponent


def test_where_takes_numbers_on_both_sides_and_a_plain_condition(traced, evaluate):
    graph = traced(lambda x: x + af.where(x > 0, 1, 2.5), x=(3, 4))
    np.testing.assert_allclose(evaluate(graph, x=X), X + np.where(X > 0, 1, np.float32(2.5)))
    graph = traced(lambda x: af.where(True, x, 0.0), x=(3, 4))
    np.testing.assert_array_equal(evaluate(graph, x=X), X)


def test_a_tensor_that_escaped_its_trace_names_both_places(traced):
    kept = []
    traced(lambda x: kept.append(x) or x + 1.0, x=(2,))
    with raises(CompileError):
        traced(lambda x: x + kept[0], x=(2,))
    with raises(CompileError):
        _ = kept[0] + 1.0


def test_an_unknown_batch_entry_lists_the_ones_there_are(traced):
    from actorflow.tensor.tracer import current_trace
    from actorflow.trace.job_graph import Batch

    def function(x):
        return Batch(current_trace()).z

    with raises(CompileError):
        traced(function, x=(2,))


def test_integer_tensors_take_integer_numbers(traced, evaluate):
    graph = traced(lambda x: x + 1, x=TensorType(DType.INT32, (2,)))
    assert evaluate(graph, x=np.array([1, 2], np.int32)).tolist() == [2, 3]
