import numpy as np
import pytest

import actorflow as af
from compiler.errors import CompileError
from compiler.types import DType, TensorType

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
Y = np.random.default_rng(1).uniform(0.5, 2, size=(3, 4)).astype(np.float32)

EXPRESSIONS = {
    "add": lambda x, y: x + y,
    "number on the left": lambda x, y: 2 - x,
    "division": lambda x, y: x / y,
    "number over tensor": lambda x, y: 1 / y,
    "power": lambda x, y: y**2.0,
    "matmul": lambda x, y: x @ y.T,
    "negate": lambda x, y: -x,
    "sum": lambda x, y: x.sum(),
    "mean over an axis": lambda x, y: x.mean(axis=1),
    "max keeping axes": lambda x, y: x.max(axis=0, keepdims=True),
    "argmax": lambda x, y: x.argmax(axis=1),
    "reshape": lambda x, y: x.reshape(2, 6),
    "reshape with -1": lambda x, y: x.reshape(-1, 2),
    "transpose": lambda x, y: x.transpose(1, 0),
    "slice": lambda x, y: x[1:, ::2],
    "integer index": lambda x, y: x[-1],
    "ellipsis": lambda x, y: x[..., 1],
    "array constant": lambda x, y: x + np.ones((4,), np.float32),
    "numpy array on the left": lambda x, y: np.ones((4,), np.float32) * x,
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
        (lambda x: x[::-1], "positive steps"),
        (lambda x: x[0, 0, 0], "too many indices"),
        (lambda x: x.sum(axis=2), "axis 2 is out of range"),
        (lambda x: x.reshape(-1, -1), "more than one -1"),
        (lambda x: x.reshape(5), "reshape"),
        (lambda x: x + np.zeros(4, "complex64"), "complex64"),
        (lambda x: x.to("int32") + 0.5, "a float cannot be combined with int32"),
        (lambda x: x + x.to("float64"), "equal dtypes"),
    ],
)
def test_what_cannot_be_traced_is_an_error_with_the_users_line(traced, function, words):
    with pytest.raises(CompileError, match=words) as caught:
        traced(function, x=(3, 4))
    assert "test_tensor.py:" in str(caught.value) or "conftest.py:" in str(caught.value)


def test_a_tensor_that_escaped_its_trace_names_both_places(traced):
    kept = []
    traced(lambda x: kept.append(x) or x + 1.0, x=(2,))
    with pytest.raises(CompileError, match=r"is used in another trace"):
        traced(lambda x: x + kept[0], x=(2,))
    with pytest.raises(CompileError, match=r"outside of a job"):
        _ = kept[0] + 1.0


def test_an_unknown_batch_entry_lists_the_ones_there_are(traced):
    from actorflow.batch import Batch
    from actorflow.trace import current_trace

    def function(x):
        return Batch(current_trace()).z

    with pytest.raises(CompileError, match=r"no 'z'.*'x': float32\[2\]"):
        traced(function, x=(2,))


def test_integer_tensors_take_integer_numbers(traced, evaluate):
    graph = traced(lambda x: x + 1, x=TensorType(DType.INT32, (2,)))
    assert evaluate(graph, x=np.array([1, 2], np.int32)).tolist() == [2, 3]
