"""Functions and layers refuse what they cannot take, with the user's line: found by fuzzing."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.tensor.arguments import validate_arguments
from compiler.contract.types import DType, TensorType

REFUSED = {
    "hstack of a number": lambda x: af.hstack(3),
    "no tensor at all": lambda x: af.rand_like("x"),
    "None for a tensor": lambda x: af.softmin(None),
    "an array for a bool": lambda x: x.sum(keepdim=np.zeros(2)),
    "an array for a text": lambda x: af.mse_loss(x, x, np.zeros(2)),
    "a text for a layer": lambda x: nn.BatchNorm1d(4)("x"),
    "ranks of attention": lambda x: nn.Attention(4, heads=1)(x),
    "one axis to turn in": lambda x: af.rot90(x, 1, 1),
    "ragged indices": lambda x: af.take_along_dim(x, [[1, 2], [3]]),
    "whole numbers to norm": lambda x: af.rms_norm(x.to("int32"), 4),
    "or of floats": lambda x: x | x,
    "shifts of bools": lambda x: (x > 0) << (x > 0),
    "bounds of bools": lambda x: (x > 0).clamp(max=x > 0),
    "an extent below 0": lambda x: af.rand(-1, 3),
    "too large": lambda x: af.zeros(10**9, 10**9),
    "too many constants": lambda x: af.arange(1e30),
    "too many windows": lambda x: af.adaptive_max_pool1d(x, 10**6),
    "a dict for a dtype": lambda x: af.zeros(2, dtype=np.zeros((2, 0))),
    "too few arguments": lambda x: af.scan(lambda c: c, x, x),
    "no function": lambda x: af.map(3, x),
    "modules of none": lambda x: nn.ModuleList(3),
    "modules by none": lambda x: nn.ModuleDict("a"),
    "a constant no dtype holds": lambda x: af.linspace(1e30, 0, 4, dtype="int8"),
    "decimals": lambda x: x.round(decimals=-(2**63)),
    "a window of nothing": lambda x: af.avg_pool1d(x, 10**9, ceil_mode=True),
    "p of another kind": lambda x: af.normalize(x, np.zeros(2)),
    "no width": lambda x: nn.MLP(4, ratio=int),
    "layers without end": lambda x: nn.TransformerEncoder(nn.Linear(4, 4), 2**40),
    "layers of none": lambda x: nn.TransformerEncoder("a", 2),
    "a norm of none": lambda x: nn.TransformerEncoder(nn.Linear(4, 4), 2, np.zeros(2)),
    "no first value": lambda x: nn.PReLU(init=np.inf),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_the_users_line(name, traced):
    function = REFUSED[name]
    with raises(af.CompileError):
        traced(function, x=(3, 4))


def test_arrays_come_in_as_tensors_and_so_does_a_first_number(traced, evaluate):
    graph = traced(lambda x: af.rand_like(1.0) * 0 + af.relu(np.float32([-1, 2])), x=(2,))
    np.testing.assert_array_equal(evaluate(graph, x=np.ones(2), seed=0, step=0), [0, 2])


def test_a_function_without_tensors_has_no_door():
    def plain(count: int) -> int:
        return count

    assert validate_arguments(plain) is plain


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: af.softshrink(x), [np.nan, 1.5, np.inf, 0.0]),
        (lambda x: af.hardshrink(x), [np.nan, 2.0, np.inf, 0.0]),
        (lambda x: af.threshold(x, 0.5, 7.0), [np.nan, 2.0, np.inf, 7.0]),
    ],
)
def test_nan_goes_through_what_cuts_off(traced, evaluate, function, expected):
    x = np.float32([np.nan, 2.0, np.inf, 0.25])
    np.testing.assert_array_equal(evaluate(traced(function, x=(4,)), x=x), expected)


def test_a_product_that_begins_infinite_stays_infinite(traced, evaluate):
    x = np.float32([np.inf, 2.0, 3.0])
    np.testing.assert_array_equal(evaluate(traced(lambda x: x.cumprod(0), x=(3,)), x=x), np.inf)


def test_small_indices_count_from_the_end_of_long_axes(traced, evaluate):
    x = np.arange(300, dtype=np.float32)
    np.testing.assert_array_equal(
        evaluate(traced(lambda x: x.take(np.int8([-1])), x=(300,)), x=x), [299]
    )


def test_one_bound_of_another_dtype_bounds_nothing_else(traced, evaluate):
    graph = traced(lambda x, y: x.clamp(y), x=TensorType(DType.UINT16, (2,)), y=(2,))
    got = evaluate(graph, x=np.uint16([1, 2]), y=np.float32([1e30, -1.0]))
    np.testing.assert_array_equal(got, np.float32([1e30, 2.0]))


def test_triangles_of_bools_are_bools(traced):
    graph = traced(lambda x: (x > 0).tril(), x=(2, 2))
    assert graph.types[graph.outputs[0].value].dtype is DType.BOOL


def test_a_divergence_of_what_is_no_probability_is_nan(traced, evaluate):
    graph = traced(lambda x, y: af.kl_div(x, y, reduction="none"), x=(2,), y=(2,))
    got = evaluate(graph, x=np.float32([0.5, 0.5]), y=np.float32([-0.1, 0.0]))
    np.testing.assert_array_equal(np.isnan(got), [True, False])


def test_a_constant_may_start_below_zero():
    model = nn.PReLU(init=-0.5)
    job = af.job(train=False)(lambda model, batch: model(batch.x))
    try:
        got = job.step(model, {"x": np.float32([-2.0, 3.0])})["output"]
    finally:
        job.close(model)
    np.testing.assert_array_equal(got, [1.0, 3.0])


def test_what_no_machine_holds_says_which_tensor_and_where():
    job = af.job(train=False)(lambda model, batch: af.rand(10**5, 10**6) + batch.x[0])
    with pytest.raises(af.OutOfMemory, match=r"its largest tensor is of .*GiB, .*test_doors.py"):
        job.step(nn.Module(), {"x": np.ones(2, np.float32)})
